package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/sharing"
)

// Commands of nvidia-cuda-mps-control, from NVIDIA's MPS documentation ("Legacy MPS v2 Interface").
// They name a device by its ordinal, and a daemon sees only one device. Limits set by UUID are
// accepted but not applied (k8s-device-plugin#572).
const (
	commandPing    = "get_default_active_thread_percentage"
	commandServers = "get_server_list"
	commandClients = "get_client_list %d"
	commandQuit    = "quit"

	commandPercentage       = "set_default_active_thread_percentage %d"
	commandMemory           = "set_default_device_pinned_mem_limit 0 %dM"
	commandReadMemory       = "get_default_device_pinned_mem_limit 0"
	commandServerPercentage = "set_active_thread_percentage %s %d"
	commandServerMemory     = "set_device_pinned_mem_limit %s 0 %dM"
	// Later clients of a server get the limits that the server has then.
	commandReadServerPercentage = "get_active_thread_percentage %s"
	commandReadServerMemory     = "get_device_pinned_mem_limit %s 0"
)

// startInterval is the time between two checks that a started daemon answers.
const startInterval = 100 * time.Millisecond

// unitRun manages a unit's daemon. One goroutine owns it.
type unitRun struct {
	*supervisor
	unit Unit
	// wishes receives the unit as it is wanted now; the zero Unit means that no daemon is wanted.
	wishes chan Unit
	log    *slog.Logger

	daemon Daemon
	wanted bool
	// starts counts how often the daemon was started.
	starts int
}

func (u *unitRun) dir() string { return filepath.Join(u.Root, u.unit.ID) }

func (u *unitRun) environment() Environment {
	return Environment{
		Device: u.unit.ID,
		Pipe:   filepath.Join(u.dir(), "pipe"),
		Log:    filepath.Join(u.dir(), "log"),
		Shm:    u.shm(),
	}
}

func (u *unitRun) tell(phase nodereport.MPSPhase, reason error) {
	state := State{
		ID:           u.unit.ID,
		Phase:        phase,
		Restarts:     max(0, u.starts-1),
		CommonMemory: u.OwnShm && u.onCommonShm(u.unit.ID),
	}
	if reason != nil {
		state.Reason = reason.Error()
	}
	if u.set(u.unit.ID, &state) {
		u.log.Info("MPS daemon", "state", state.Phase, "reason", state.Reason)
	}
}

// tellReady publishes that the daemon serves, and which programs still wait.
func (u *unitRun) tellReady(ctx context.Context) {
	var waits error
	if text := cmp.Or(u.waits(ctx), u.strangers()); text != "" {
		waits = errors.New(text)
	}
	u.tell(nodereport.MPSReady, waits)
}

// take applies a wish, and reports whether it changes the limits.
func (u *unitRun) take(wish Unit) (other bool) {
	u.wanted = wish.ID != ""
	if !u.wanted {
		return false
	}
	before := u.unit
	before.Vacant, before.MemoryParts = wish.Vacant, wish.MemoryParts
	other, u.unit = wish != before, wish
	return other
}

// run serves the unit until no daemon is wanted and everything of it is removed, or ctx ends.
func (u *unitRun) run(ctx context.Context) {
	u.wanted = true
	select {
	case wish := <-u.wishes:
		u.take(wish)
	default:
	}
	pauses := wake.Backoff(u.Timing.Pause, u.Timing.MaxPause)
	retry := pauses
	for {
		var err error
		if u.wanted {
			began := time.Now()
			err = u.serve(ctx)
			if time.Since(began) > u.Timing.MaxPause {
				retry = pauses
			}
		} else {
			u.tell(nodereport.MPSStopping, nil)
			err = u.remove(ctx)
			if err == nil {
				u.set(u.unit.ID, nil)
				u.log.Info("MPS daemon", "state", "stopped")
				return
			}
		}
		if ctx.Err() != nil {
			u.leave(ctx)
			return
		}
		if err == nil {
			continue
		}
		if u.wanted {
			u.tell(nodereport.MPSFailed, err)
		} else {
			u.tell(nodereport.MPSStopping, err)
		}
		select {
		case wish := <-u.wishes:
			u.take(wish)
		case <-time.After(retry.Step()):
		case <-ctx.Done():
		}
	}
}

// serve runs the daemon until it fails, until no daemon is wanted, or until ctx ends. Only a
// failure returns an error.
func (u *unitRun) serve(ctx context.Context) error {
	if u.daemon == nil {
		u.tell(nodereport.MPSStarting, nil)
	}
	if err := u.start(ctx); err != nil {
		return errors.Join(err, u.stop(ctx))
	}
	u.tellReady(ctx)
	misses := 0
	for {
		select {
		case wish := <-u.wishes:
			resets := u.unit.Resets
			other := u.take(wish)
			if !u.wanted {
				return nil
			}
			if u.unit.Resets != resets {
				if err := u.setMode(ctx); err != nil {
					return u.fail(ctx, err)
				}
			}
			if other {
				if err := u.limit(ctx, true); err != nil {
					return u.fail(ctx, err)
				}
			}
			if left, err := u.leaveCommonShm(); left || err != nil {
				return errors.Join(err, u.stop(ctx))
			}
		case <-u.daemon.Ended():
			return errors.Join(fmt.Errorf("it ended: %w", u.daemon.Err()), u.stop(ctx))
		case <-time.After(u.Timing.Ask):
			_, err := u.ask(ctx, commandPing)
			switch {
			case ctx.Err() != nil:
				return nil
			case err == nil:
				misses = 0
				if left, err := u.leaveCommonShm(); left || err != nil {
					return errors.Join(err, u.stop(ctx))
				}
				u.tellReady(ctx)
				continue
			}
			u.tell(nodereport.MPSFailed, err)
			if misses++; misses >= u.Timing.Misses {
				return errors.Join(err, u.stop(ctx))
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// fail stops a daemon that serves. It tells first that it failed: the daemon waits for its clients,
// and takes no more.
func (u *unitRun) fail(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil // leave stops it.
	}
	u.tell(nodereport.MPSFailed, err)
	return errors.Join(err, u.stop(ctx))
}

// start starts the daemon and waits until it serves with its limits.
func (u *unitRun) start(ctx context.Context) error {
	if err := u.driverReplaced(); err != nil {
		return err
	}
	env := u.environment()
	if err := u.Control.Clear(ctx, env); err != nil { // Processes of an earlier run, or those that could not be ended.
		return err
	}
	if u.daemon != nil {
		u.daemon = nil
		u.count(-1)
	}
	if err := u.setMode(ctx); err != nil {
		return err
	}
	if err := u.prepareShm(); err != nil {
		return err
	}
	if err := makeDirs(u.dir(), env.Pipe, env.Log); err != nil {
		return err
	}
	for _, dir := range []string{env.Pipe, env.Log} {
		if err := CheckParents(dir); err != nil {
			return err
		}
	}
	u.starts++
	daemon, err := u.Control.Start(env)
	if err != nil {
		return err
	}
	u.daemon = daemon
	u.count(1)
	patience, cancel := context.WithTimeout(ctx, u.Timing.Start)
	defer cancel()
	for {
		_, err := u.ask(patience, commandPing)
		if err == nil {
			return u.limit(ctx, false)
		}
		select {
		case <-u.daemon.Ended():
			return fmt.Errorf("it ended: %w", u.daemon.Err())
		case <-patience.Done():
			return fmt.Errorf("it has not started in %s: %w", u.Timing.Start, err)
		case <-time.After(startInterval):
		}
	}
}

// makeDirs makes the directories so that clients of any user can enter them, and empties the one of
// the sockets. It does not replace that directory, because pods may have it mounted.
func makeDirs(dir, pipe, log string) error {
	entries, err := os.ReadDir(pipe)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(pipe, e.Name())); err != nil {
			return err
		}
	}
	for _, path := range []string{dir, log, pipe} {
		if err := makeDir(path); err != nil {
			return err
		}
	}
	return nil
}

func makeDir(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // other users enter it
		return err
	}
	if err := os.Chmod(path, 0o755); err != nil { //nolint:gosec // whatever the umask is
		return err
	}
	return labelForContainers(path)
}

// checkUnitID returns an error for an ID that is not an NVML UUID ("GPU-" or "MIG-" and 36
// hexadecimal digits and dashes). The ID becomes the name of a directory.
func checkUnitID(id string) error {
	rest, gpu := strings.CutPrefix(id, "GPU-")
	rest, partition := strings.CutPrefix(rest, "MIG-")
	switch {
	case gpu == partition, rest == "":
		return fmt.Errorf("unit ID %q begins neither with GPU- nor with MIG-", id)
	case len(rest) > 36:
		return fmt.Errorf("unit ID %.60q has more than 40 characters", id)
	}
	for _, c := range rest {
		if !strings.ContainsRune("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-", c) {
			return fmt.Errorf("unit ID %q has %q, which no UUID has", id, c)
		}
	}
	return nil
}

// CheckParents returns an error if some user cannot enter the directory or one of its parents. A
// server switches to the user of its clients before it opens its files (bottlerocket#4673), and
// would end at once.
func CheckParents(dir string) error {
	for {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if mode := info.Mode().Perm(); mode&0o001 == 0 {
			return fmt.Errorf(
				"%s has mode %#o: an MPS server runs as the user of its clients, who cannot enter it; chmod o+x it",
				dir, mode)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}

// limit sets the clients' limits. With live it also sets them in the servers of the running daemon.
// It then reads them back: an older daemon does not know every command, and says so only in its
// answer.
func (u *unitRun) limit(ctx context.Context, live bool) error {
	percentage, mebibytes := u.unit.ThreadPercentage, u.unit.PinnedMemory>>20
	var servers []string
	if live {
		list, err := u.ask(ctx, commandServers)
		if err != nil {
			return err
		}
		servers = strings.Fields(list)
	}
	if percentage > 0 {
		set, read := fmt.Sprintf(commandPercentage, percentage), commandPing
		if err := u.apply(ctx, set, read, "its active thread percentage", percentageIs(percentage)); err != nil {
			return err
		}
		for _, pid := range servers {
			set, read := fmt.Sprintf(commandServerPercentage, pid, percentage),
				fmt.Sprintf(commandReadServerPercentage, pid)
			if err := u.apply(ctx, set, read, "the active thread percentage of its server "+pid,
				percentageIs(percentage)); err != nil {
				return err
			}
		}
	}
	if mebibytes > 0 {
		set := fmt.Sprintf(commandMemory, mebibytes)
		if err := u.apply(ctx, set, commandReadMemory, "its limit of pinned memory", memoryIs(mebibytes)); err != nil {
			return err
		}
		for _, pid := range servers {
			set, read := fmt.Sprintf(commandServerMemory, pid, mebibytes), fmt.Sprintf(commandReadServerMemory, pid)
			if err := u.apply(ctx, set, read, "the limit of pinned memory of its server "+pid,
				memoryIs(mebibytes)); err != nil {
				return err
			}
		}
	}
	return nil
}

// limitValue is the text of a limit, and a check that a daemon's answer shows this limit.
type limitValue struct {
	text string
	is   func(answer string) bool
}

func percentageIs(want int) limitValue {
	return limitValue{strconv.Itoa(want), func(answer string) bool {
		has, err := strconv.ParseFloat(answer, 64)
		return err == nil && int(has) == want
	}}
}

// memoryIs compares memory limits. From one gigabyte on a daemon shows whole gigabytes: 3840M is
// shown as 3G.
func memoryIs(mebibytes uint64) limitValue {
	return limitValue{fmt.Sprintf("%dM", mebibytes), func(answer string) bool {
		number, gigabytes := strings.CutSuffix(answer, "G")
		has, err := strconv.ParseUint(strings.TrimSuffix(number, "M"), 10, 64)
		if gigabytes {
			return err == nil && has == mebibytes>>10
		}
		return err == nil && has == mebibytes
	}}
}

// apply sets a limit and reads it back. If the two differ, the text of the error begins with what.
func (u *unitRun) apply(ctx context.Context, set, read, what string, value limitValue) error {
	answer, err := u.ask(ctx, set)
	if err != nil {
		return err
	}
	u.log.Info("MPS daemon told", "command", set, "answer", answer)
	has, err := u.ask(ctx, read)
	if err == nil && !value.is(has) {
		err = fmt.Errorf("%s is %q and not %s", what, has, value.text)
	}
	return err
}

// waits describes a program that waits for the programs of another user, "" for none. Only then
// does a daemon keep clients waiting for long.
func (u *unitRun) waits(ctx context.Context) string {
	queue := u.daemon.Queue()
	if queue.Server == 0 || len(queue.Waiting) == 0 {
		return ""
	}
	list, err := u.ask(ctx, fmt.Sprintf(commandClients, queue.Server))
	if err != nil {
		return ""
	}
	var served []string
	for text := range strings.FieldsSeq(list) {
		if pid, err := strconv.Atoi(text); err == nil && u.Who(pid) != "" {
			served = append(served, u.Who(pid))
		}
	}
	if len(served) == 0 {
		return ""
	}
	if rest := len(served) - 3; rest > 0 {
		served = append(served[:3], fmt.Sprintf("%d more", rest))
	}
	for _, client := range queue.Waiting {
		if who := u.Who(client.PID); who != "" && client.User != queue.User {
			return fmt.Sprintf(
				"%s, of user %d, waits until user %d has no program on it any more (%s): an MPS server serves one "+
					"user; the chart's mps.multiUser lets it serve all",
				who, client.User, queue.User, strings.Join(served, ", "))
		}
	}
	return ""
}

func (u *unitRun) ask(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, u.Timing.Answer)
	defer cancel()
	answer, err := u.Control.Ask(ctx, u.environment(), command)
	switch {
	case err != nil && ctx.Err() != nil:
		return "", fmt.Errorf("it does not answer to %s in time", command)
	case err != nil:
		return "", fmt.Errorf("it does not answer to %s: %w", command, err)
	}
	return strings.TrimSpace(answer), nil
}

// setMode makes a whole GPU refuse processes that are not clients of the daemon. It first records
// the previous mode. Reading the mode opens the GPU, so this is done only when a daemon starts and
// after a reset.
func (u *unitRun) setMode(ctx context.Context) error {
	if u.unit.ID != u.unit.GPU {
		return nil
	}
	now, err := u.ComputeMode(ctx, u.unit.GPU)
	if err != nil {
		return fmt.Errorf("read the compute mode: %w", err)
	}
	if now == sharing.ExclusiveProcess {
		return nil
	}
	if now != sharing.DefaultComputeMode {
		u.log.Warn("the compute mode was changed from the one that MPS needs", "gpu", u.unit.GPU, "mode", now, "set",
			sharing.ExclusiveProcess)
	}
	if err := u.journal.keep(u.unit.GPU, now); err != nil {
		return err
	}
	if err := u.SetComputeMode(ctx, u.unit.GPU, sharing.ExclusiveProcess); err != nil {
		return fmt.Errorf("set compute mode %s: %w", sharing.ExclusiveProcess, err)
	}
	return nil
}

// restoreMode sets the previous mode again, unless the current mode is not Virgate's: then another
// program has set it, or a reset has cleared Virgate's.
func (u *unitRun) restoreMode(ctx context.Context) error {
	before, changed := u.journal.gpus()[u.unit.ID]
	if !changed {
		return nil
	}
	now, err := u.ComputeMode(ctx, u.unit.ID)
	if err == nil && now == sharing.ExclusiveProcess {
		err = u.SetComputeMode(ctx, u.unit.ID, before)
	}
	if err != nil {
		return fmt.Errorf("restore compute mode %s: %w", before, err)
	}
	return u.journal.forget(u.unit.ID)
}

// stop ends the daemon and its servers, by the command quit or else by force.
func (u *unitRun) stop(ctx context.Context) error {
	if u.daemon != nil {
		if _, err := u.ask(ctx, commandQuit); err == nil {
			select {
			case <-u.daemon.Ended():
			case <-time.After(u.Timing.Stop):
			case <-ctx.Done():
			}
		}
	}
	if err := u.Control.Clear(ctx, u.environment()); err != nil {
		return err
	}
	if u.daemon != nil {
		u.daemon = nil
		u.count(-1)
	}
	return nil
}

// remove stops the daemon and removes everything that was made for the unit.
func (u *unitRun) remove(ctx context.Context) error {
	if err := u.stop(ctx); err != nil {
		return err
	}
	if err := u.restoreMode(ctx); err != nil {
		return err
	}
	if err := u.removeShm(); err != nil {
		return err
	}
	return os.RemoveAll(u.dir())
}

// leave stops the daemon when this program ends. Its directories stay.
func (u *unitRun) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), u.Timing.Answer+2*u.Timing.Stop)
	defer cancel()
	if err := errors.Join(u.stop(ctx), u.restoreMode(ctx)); err != nil {
		u.log.Error("MPS daemon not stopped", "error", err)
	}
}
