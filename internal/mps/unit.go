package mps

import (
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
	"github.com/virgate/virgate/sharing"
)

// Commands of nvidia-cuda-mps-control, as its manual has them.
const (
	commandPing       = "get_default_active_thread_percentage"
	commandPercentage = "set_default_active_thread_percentage %d"
	commandMemory     = "set_default_device_pinned_mem_limit %s %dM"
	commandServers    = "get_server_list"
	commandQuit       = "quit"
	// The next two change what later clients of a running server get.
	commandServerPercentage = "set_active_thread_percentage %s %d"
	commandServerMemory     = "set_device_pinned_mem_limit %s %s %dM"
)

// startInterval is the time between two questions whether a started daemon answers.
const startInterval = 100 * time.Millisecond

// unitRun is the life of a unit's daemon. One goroutine owns it.
type unitRun struct {
	*supervisor
	unit Unit
	// wishes has what is wanted now, the zero Unit for nothing.
	wishes chan Unit
	log    *slog.Logger

	daemon Daemon
	wanted bool
	// starts is how often it was started.
	starts int
}

func (u *unitRun) dir() string { return filepath.Join(u.Root, u.unit.ID) }

func (u *unitRun) environment() Environment {
	return Environment{Device: u.unit.ID, Pipe: filepath.Join(u.dir(), "pipe"), Log: filepath.Join(u.dir(), "log"), Shm: filepath.Join(u.Root, "shm")}
}

func (u *unitRun) tell(phase nodereport.MPSPhase, reason error) {
	state := State{ID: u.unit.ID, Phase: phase, Restarts: max(0, u.starts-1)}
	if reason != nil {
		state.Reason = reason.Error()
	}
	if u.set(u.unit.ID, &state) {
		u.log.Info("MPS daemon", "state", state.Phase, "reason", state.Reason)
	}
}

// take takes a wish, and says whether other limits are wanted than before.
func (u *unitRun) take(wish Unit) (other bool) {
	if u.wanted = wish.ID != ""; !u.wanted {
		return false
	}
	other, u.unit = wish != u.unit, wish
	return other
}

// run serves the unit until it is not wanted and all traces of it are gone, or ctx ends.
func (u *unitRun) run(ctx context.Context) {
	u.wanted = true
	select {
	case wish := <-u.wishes:
		u.take(wish)
	default:
	}
	pause := u.Timing.Pause
	for {
		var err error
		if u.wanted {
			began := time.Now()
			if err = u.serve(ctx); time.Since(began) > u.Timing.MaxPause {
				pause = u.Timing.Pause
			}
		} else {
			u.tell(nodereport.MPSStopping, nil)
			if err = u.remove(ctx); err == nil {
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
		case <-time.After(pause):
		case <-ctx.Done():
		}
		pause = min(2*pause, u.Timing.MaxPause)
	}
}

// serve has the daemon run until it fails, which is an error, it is not wanted any more, or
// ctx ends.
func (u *unitRun) serve(ctx context.Context) error {
	if u.daemon == nil {
		u.tell(nodereport.MPSStarting, nil)
	}
	if err := u.start(ctx); err != nil {
		return errors.Join(err, u.stop(ctx))
	}
	u.tell(nodereport.MPSReady, nil)
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
					return errors.Join(err, u.stop(ctx))
				}
			}
			if other {
				if err := u.limit(ctx, true); err != nil {
					return errors.Join(err, u.stop(ctx))
				}
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
				u.tell(nodereport.MPSReady, nil)
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

// start starts the daemon and waits until it serves with its limits.
func (u *unitRun) start(ctx context.Context) error {
	if err := u.driverReplaced(); err != nil {
		return err
	}
	env := u.environment()
	if err := u.Control.Clear(ctx, env); err != nil { // Of an earlier run.
		return err
	}
	if err := u.setMode(ctx); err != nil {
		return err
	}
	if err := makeDirs(u.dir(), env.Pipe, env.Log); err != nil {
		return err
	}
	u.starts++
	var err error
	if u.daemon, err = u.Control.Start(env); err != nil {
		return err
	}
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

// makeDirs makes the directories, which clients of any user enter, and empties that of the
// sockets. It is not replaced: pods may have it mounted.
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
	for _, path := range []string{dir, pipe, log} {
		if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // other users enter it
			return err
		}
		if err := os.Chmod(path, 0o755); err != nil { //nolint:gosec // whatever the umask is
			return err
		}
		if err := labelForContainers(path); err != nil {
			return err
		}
	}
	return nil
}

// limit sets the limits of clients; of those of a live daemon's servers, too. It asks what the
// daemon then has: an older one does not know every command, and says so in its answer only.
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
	var commands []string
	if percentage > 0 {
		commands = append(commands, fmt.Sprintf(commandPercentage, percentage))
		for _, pid := range servers {
			commands = append(commands, fmt.Sprintf(commandServerPercentage, pid, percentage))
		}
	}
	if mebibytes > 0 {
		commands = append(commands, fmt.Sprintf(commandMemory, u.unit.ID, mebibytes))
		for _, pid := range servers {
			commands = append(commands, fmt.Sprintf(commandServerMemory, pid, u.unit.ID, mebibytes))
		}
	}
	for _, command := range commands {
		answer, err := u.ask(ctx, command)
		if err != nil {
			return err
		}
		u.log.Info("MPS daemon told", "command", command, "answer", answer)
	}
	answer, err := u.ask(ctx, commandPing)
	if err != nil {
		return err
	}
	if has, err := strconv.ParseFloat(answer, 64); percentage > 0 && (err != nil || int(has) != percentage) {
		return fmt.Errorf("its active thread percentage is %q and not %d", answer, percentage)
	}
	return nil
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

// setMode has a whole GPU refuse processes that are no clients of the daemon. What the mode
// was before is kept first. To ask for the mode opens the GPU, so it is done only when a daemon starts and after a reset.
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
	if err := u.journal.keep(u.unit.GPU, now); err != nil {
		return err
	}
	if err := u.SetComputeMode(ctx, u.unit.GPU, sharing.ExclusiveProcess); err != nil {
		return fmt.Errorf("set compute mode %s: %w", sharing.ExclusiveProcess, err)
	}
	return nil
}

// restoreMode sets the mode to what it was. One that is not ours any more stays: somebody else
// has set it, or it was lost with a reset.
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

// stop ends the daemon and its servers: as it wants to, or else by force.
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

// remove undoes everything.
func (u *unitRun) remove(ctx context.Context) error {
	if err := u.stop(ctx); err != nil {
		return err
	}
	if err := u.restoreMode(ctx); err != nil {
		return err
	}
	return os.RemoveAll(u.dir())
}

// leave stops the daemon when this program ends. The directories stay.
func (u *unitRun) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), u.Timing.Answer+2*u.Timing.Stop)
	defer cancel()
	if err := errors.Join(u.stop(ctx), u.restoreMode(ctx)); err != nil {
		u.log.Error("MPS daemon not stopped", "error", err)
	}
}
