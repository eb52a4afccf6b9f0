package mps_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simmps"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

// noServers are servers and clients that are not observed.
type noServers struct{ pids *atomic.Int64 }

func (s noServers) Start(string) (int, error)  { return int(s.pids.Add(1)), nil }
func (noServers) Stop(string, int)             {}
func (noServers) AddClient(string, int) error  { return nil }
func (noServers) RemoveClient(_ string, _ int) {}

func inProcess() *simmps.InProcess { return &simmps.InProcess{Servers: noServers{&atomic.Int64{}}} }

// each runs the test with NVIDIA's program as a process and as a goroutine of the test.
func each(t *testing.T, test func(t *testing.T, n *node)) {
	t.Run("program", func(t *testing.T) {
		t.Parallel()
		test(t, newNode(t, program(t)))
	})
	t.Run("in process", func(t *testing.T) {
		t.Parallel()
		test(t, newNode(t, inProcess()))
	})
}

func TestLife(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, n *node) {
		n.supervise()
		n.connect()
		n.client.Want([]mps.Unit{unit(gpu), {ID: "MIG-1", GPU: other, ThreadPercentage: 14, PinnedMemory: 5000 << 20}})
		n.await(gpu+" ready", "MIG-1 ready")
		n.awaitMode(gpu, sharing.ExclusiveProcess)
		n.awaitMode(other, sharing.DefaultComputeMode) // It has partitions.
		await.True(t, ".ready", func() bool { return n.exists(".ready") })
		for _, test := range []struct{ unit, command, want string }{
			{gpu, "get_default_active_thread_percentage", "25.0"},
			{gpu, "get_default_device_pinned_mem_limit " + gpu, ""}, // It would take that, and ignore it.
			{gpu, "get_default_device_pinned_mem_limit 0", "10G"},
			{"MIG-1", "get_default_active_thread_percentage", "14.0"},
			{"MIG-1", "get_default_device_pinned_mem_limit 0", "4G"}, // As it shows 5000M.
			{"MIG-1", "set_default_device_pinned_mem_limit MIG-1 2G", ""},
			{"MIG-1", "get_default_device_pinned_mem_limit MIG-1", "2G"},
			{"MIG-1", "get_default_device_pinned_mem_limit 0", "4G"},
			{"MIG-1", "nonsense", `Unknown command "nonsense"`},
		} {
			if got := n.ask(test.unit, test.command); got != test.want {
				t.Errorf("%s of %s: %q, want %q", test.command, test.unit, got, test.want)
			}
		}
		for _, path := range []string{gpu, gpu + "/pipe", gpu + "/log"} {
			if info, err := os.Stat(filepath.Join(n.root, path)); err != nil || info.Mode().Perm() != 0o755 {
				t.Errorf("%s: %v, %v, want 0755: clients are of any user", path, info.Mode(), err)
			}
		}
		if info, err := os.Stat(filepath.Join(n.root, mps.SocketName)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("socket: %v, %v, want 0600", info.Mode(), err)
		}

		n.client.Want([]mps.Unit{{ID: "MIG-1", GPU: other, ThreadPercentage: 14, PinnedMemory: 5000 << 20}})
		n.await("MIG-1 ready")
		n.awaitMode(gpu, sharing.DefaultComputeMode)
		if n.exists(gpu) {
			t.Errorf("the directory of %s is there still", gpu)
		}
		n.client.Want(nil)
		n.await()
		if n.exists("MIG-1") {
			t.Error("the directory of MIG-1 is there still")
		}
	})
}

// TestModeOfOthers checks that a mode that was exclusive before stays, and that a mode set by another program
// meanwhile is not overwritten.
func TestModeOfOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	_ = n.modes.set(t.Context(), gpu, sharing.ExclusiveProcess)
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu), unit(other)})
	n.await(gpu+" ready", other+" ready")
	n.awaitMode(other, sharing.ExclusiveProcess)
	_ = n.modes.set(t.Context(), other, sharing.DefaultComputeMode)
	reset := unit(other)
	reset.Resets = 1
	n.client.Want([]mps.Unit{unit(gpu), reset})
	n.awaitMode(other, sharing.ExclusiveProcess) // It is set again after a reset.
	n.client.Want(nil)
	n.await()
	n.awaitMode(gpu, sharing.ExclusiveProcess)
	n.awaitMode(other, sharing.DefaultComputeMode)
}

// asking counts the questions to daemons.
type asking struct {
	mps.Control
	asked atomic.Int64
	look  func()
}

func (a *asking) Ask(ctx context.Context, env mps.Environment, command string) (string, error) {
	a.asked.Add(1)
	a.look()
	return a.Control.Ask(ctx, env, command)
}

// TestOpensNoGPU checks that a GPU's mode is read when its daemon starts and not while it serves, and that a
// released GPU is not opened once the client has reported it as closed.
func TestOpensNoGPU(t *testing.T) {
	t.Parallel()
	control := &asking{Control: inProcess()}
	n := newNode(t, control)
	control.look = n.lookAgain
	var modes atomic.Int64
	get := n.options.ComputeMode
	n.options.ComputeMode = func(ctx context.Context, gpu string) (sharing.ComputeMode, error) {
		modes.Add(1)
		return get(ctx, gpu)
	}
	var closed atomic.Value
	goOn := make(chan struct{})
	n.options.KeepClosed = func(_ context.Context, released map[string]int) {
		if len(released) > 0 {
			<-goOn
		}
		closed.Store(fmt.Sprint(released))
	}
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	n.until("30 more questions", func() (bool, string) { return control.asked.Load() > 30, fmt.Sprint(control.asked.Load()) })
	if got := modes.Load(); got != 1 {
		t.Errorf("the compute mode was asked for %d times, want once", got)
	}
	released := map[string]int{other: 5}
	if n.client.KeepClosed(released) {
		t.Error("it is closed before the supervisor has heard of it")
	}
	n.client.Want([]mps.Unit{})
	if n.client.KeepClosed(released) {
		t.Error("it is closed before the supervisor has closed it")
	}
	close(goOn)
	n.until("the released GPU to be closed", func() (bool, string) { return n.client.KeepClosed(released), "" })
	if got := closed.Load(); got != "map["+other+":5]" {
		t.Errorf("closed are %v", got)
	}
	n.await()
	if !n.client.KeepClosed(nil) {
		t.Error("nothing is released, and that is waited for")
	}
	n.until("all to be open", func() (bool, string) { return closed.Load() == "map[]", fmt.Sprint(closed.Load()) })
}

// TestClosedBeforeAWish checks that a client that sends released GPUs before its first request, as when it starts
// in a pause, stops no daemon.
func TestClosedBeforeAWish(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	n.options.KeepClosed = func(context.Context, map[string]int) {}
	n.supervise()
	leave := n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	leave()
	n.connect()
	n.await(gpu + " ready")
	n.until("the other GPU to be closed", func() (bool, string) { return n.client.KeepClosed(map[string]int{other: 5}), "" })
	n.await(gpu + " ready")
	n.client.Want(nil)
	n.await()
}

func TestFaults(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ fault, reason string }{
		{"refuse", "the test wants it so"},
		{"die", "it ended"},
		{"hang", "does not answer to get_default_active_thread_percentage in time"},
	} {
		t.Run(test.fault, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, n *node) {
				if test.fault == "hang" { // It must be a deadline, and a slow machine no daemon that hangs.
					if _, started := n.options.Control.(mps.Program); started {
						t.Skip("a process may take any time to start")
					}
					n.options.Timing.Answer = time.Second
				}
				n.options.Timing.Stop = 10 * time.Millisecond
				n.supervise()
				n.connect()
				n.client.Want([]mps.Unit{unit(gpu)})
				n.await(gpu + " ready")
				n.fault(gpu, test.fault)
				if test.fault == "refuse" { // It has to be started for that.
					n.client.Want(nil)
					n.await()
					if err := os.MkdirAll(filepath.Join(n.root, gpu, "log"), 0o700); err != nil {
						t.Fatal(err)
					}
					n.fault(gpu, test.fault)
					n.client.Want([]mps.Unit{unit(gpu)})
				}
				n.await(gpu + " failed+" + test.reason)
				await.True(t, "the end of .ready", func() bool { return !n.exists(".ready") })
				n.awaitMode(gpu, sharing.ExclusiveProcess) // It is wanted.
				n.fault(gpu, "")
				n.await(gpu + " ready")
				n.fault(gpu, test.fault)
				if test.fault != "refuse" {
					n.await(gpu + " failed+" + test.reason)
				}
				n.client.Want(nil)
				n.await()
				n.awaitMode(gpu, sharing.DefaultComputeMode)
			})
		})
	}
}

// TestNoQuit checks that a daemon that ignores quit is killed, with its server.
func TestNoQuit(t *testing.T) {
	t.Parallel()
	n := newNode(t, program(t))
	n.options.Timing.Stop = 10 * time.Millisecond
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	client, err := simmps.Connect(t.Context(), n.pipe(gpu), os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	if client.Percentage != 25 || client.Memory != "10240M" {
		t.Errorf("the client has %+v", client)
	}
	if syscall.Kill(client.Server, 0) != nil {
		t.Fatalf("no server %d", client.Server)
	}
	n.fault(gpu, "stay")
	n.client.Want(nil)
	n.await()
	n.awaitNoProcess(client.Server)
	n.awaitMode(gpu, sharing.DefaultComputeMode)
}

// awaitNoProcess waits until the process is gone or a zombie.
func (n *node) awaitNoProcess(pid int) {
	n.t.Helper()
	await.Until(n.t, fmt.Sprintf("the end of process %d", pid), func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z") {
			return nil
		}
		return errors.New(string(stat))
	})
}

// TestDeadDaemon checks that the server of a daemon that was killed is ended before the next daemon starts.
func TestDeadDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t, program(t))
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	client, err := simmps.Connect(t.Context(), n.pipe(gpu), os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	pid := n.daemon(gpu)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await.True(t, "another daemon", func() bool { now := n.daemon(gpu); return now != pid && now != 0 })
	n.await(gpu + " ready")
	n.awaitNoProcess(client.Server)
	if states, _ := n.client.States(); len(states) != 1 || states[0].Restarts != 1 {
		t.Errorf("%+v, want one restart", states)
	}
}

// daemon is the PID of the unit's daemon, 0 without one.
func (n *node) daemon(unit string) (pid int) {
	data, _ := os.ReadFile(filepath.Join(n.pipe(unit), "nvidia-cuda-mps-control.pid"))
	_, _ = fmt.Sscan(string(data), &pid)
	return pid
}

// TestServerKilled checks that the clients of a server that was killed end with it, and that the daemon starts
// another server with the same limits.
func TestServerKilled(t *testing.T) {
	t.Parallel()
	n := newNode(t, program(t))
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	client, err := simmps.Connect(t.Context(), n.pipe(gpu), os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	if err := syscall.Kill(client.Server, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(make([]byte, 1)); err == nil {
		t.Error("its client has no error")
	}
	next, err := simmps.Connect(t.Context(), n.pipe(gpu), os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = next.Close() }()
	if next.Server == client.Server || next.Percentage != 25 || next.Memory != "10240M" {
		t.Errorf("after server %d the next client has %+v", client.Server, next)
	}
	n.await(gpu + " ready")
	if states, _ := n.client.States(); states[0].Restarts != 0 {
		t.Errorf("%+v, want no restart", states)
	}
}

// TestQuitWaits checks that a daemon that is no longer wanted ends when its clients have ended.
func TestQuitWaits(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, n *node) {
		n.supervise()
		n.connect()
		n.client.Want([]mps.Unit{unit(gpu)})
		n.await(gpu + " ready")
		client, err := simmps.Connect(t.Context(), n.pipe(gpu), os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = client.Close() }()
		n.client.Want(nil)
		await.Until(t, "the daemon to refuse clients", func() error {
			another, err := simmps.Connect(t.Context(), n.pipe(gpu), os.Getpid())
			if err == nil {
				_ = another.Close()
				return errors.New("another client has connected")
			}
			return nil
		})
		n.await(gpu + " stopping")
		if got := n.ask(gpu, "get_server_list"); got != strconv.Itoa(client.Server) {
			t.Errorf("servers %q, want %d", got, client.Server)
		}
		_ = client.Close()
		n.await()
	})
}

// TestClientRestart checks that the daemons stay while no client is connected, until another request arrives.
func TestClientRestart(t *testing.T) {
	t.Parallel()
	n := newNode(t, program(t))
	n.supervise()
	stop := n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	pid := n.daemon(gpu)
	stop()
	if states, connected := n.client.States(); connected || states != nil {
		t.Errorf("after Run: %v, %v", states, connected)
	}
	stop = n.connect()
	n.await(gpu + " ready")
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	if now := n.daemon(gpu); now != pid {
		t.Errorf("another daemon: %d, was %d", now, pid)
	}
	stop()
	n.connect()
	n.client.Want([]mps.Unit{unit(other)})
	n.await(other + " ready")
}

// TestOldWish checks that a request of a replaced client, read after its successor's request, changes nothing.
func TestOldWish(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(other)})
	n.await(other + " ready")
	replaced, err := net.Dial("unix", filepath.Join(n.root, mps.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	// The second line has the newest time; once it takes effect, the first has been read.
	const third = "GPU-77777777-2222-3333-4444-555555555555"
	lines := json.NewEncoder(replaced)
	for _, wish := range []map[string]any{
		{"at": 1, "units": []mps.Unit{unit(gpu)}},
		{"at": int64(math.MaxInt64), "units": []mps.Unit{unit(other), unit(third)}},
	} {
		if err := lines.Encode(wish); err != nil {
			t.Fatal(err)
		}
	}
	n.await(other+" ready", third+" ready")
	_ = replaced.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	if strings.Contains(n.log.String(), gpu) {
		t.Error("an old wish was taken")
	}
}

// TestSupervisorRestart checks that the supervisor restores the modes when it ends, and that the next supervisor
// serves again in the same directories, which pods have mounted.
func TestSupervisorRestart(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, n *node) {
		stop := n.supervise()
		n.connect()
		n.client.Want([]mps.Unit{unit(gpu)})
		n.await(gpu + " ready")
		before, err := os.Stat(n.pipe(gpu))
		if err != nil {
			t.Fatal(err)
		}
		stop()
		if mode, _ := n.modes.get(t.Context(), gpu); mode != sharing.DefaultComputeMode {
			t.Errorf("compute mode %s", mode)
		}
		if n.exists(".ready") {
			t.Error(".ready is there still")
		}
		n.until("the loss of the connection", func() (bool, string) {
			_, connected := n.client.States()
			return !connected, "connected"
		})
		n.supervise()
		n.await(gpu + " ready")
		after, err := os.Stat(n.pipe(gpu))
		if err != nil || !os.SameFile(before, after) {
			t.Errorf("another directory for the pods that have the pipe directory: %v", err)
		}
	})
}

// TestNobodyWishes checks that leftovers of an earlier run are removed even if no client connects.
func TestNobodyWishes(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	if err := os.WriteFile(filepath.Join(n.root, "compute-modes.json"), []byte(`{"`+gpu+`":"default"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_ = n.modes.set(t.Context(), gpu, sharing.ExclusiveProcess)
	if err := os.MkdirAll(n.pipe("MIG-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	n.options.Timing.FirstWish = time.Millisecond
	n.supervise()
	n.awaitMode(gpu, sharing.DefaultComputeMode)
	await.True(t, "the end of the directory", func() bool { return !n.exists("MIG-1") })
}

// TestLeftoversAreTold checks that a client gets the leftovers of an earlier run before they are removed, so that
// no GPU counts as free while it has the daemon's compute mode.
func TestLeftoversAreTold(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	if err := os.WriteFile(filepath.Join(n.root, "compute-modes.json"), []byte(`{"`+gpu+`":"default"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_ = n.modes.set(t.Context(), gpu, sharing.ExclusiveProcess)
	n.options.Timing.FirstWish = time.Hour
	n.supervise()
	n.connect()
	n.await(gpu + " stopping+left by an earlier run")
	n.client.Want([]mps.Unit{})
	n.await()
	if mode, err := n.modes.get(t.Context(), gpu); mode != sharing.DefaultComputeMode {
		t.Errorf("it is not told of any more in mode %s, %v", mode, err)
	}
}

// TestOtherLimits checks that changed limits are set on the running daemon and its server.
func TestOtherLimits(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, n *node) {
		n.supervise()
		n.connect()
		n.client.Want([]mps.Unit{unit(gpu)})
		n.await(gpu + " ready")
		pid := n.daemon(gpu)
		client, err := simmps.Connect(t.Context(), n.pipe(gpu), 1)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = client.Close() }()
		less := unit(gpu)
		less.ThreadPercentage, less.PinnedMemory = 10, 4<<30
		n.client.Want([]mps.Unit{less})
		await.Until(t, "other limits of the server", func() error {
			now := n.ask(gpu, fmt.Sprintf("get_active_thread_percentage %d", client.Server)) + n.ask(gpu, fmt.Sprintf("get_device_pinned_mem_limit %d 0", client.Server))
			if now != "10.04G" {
				return errors.New(now)
			}
			return nil
		})
		n.await(gpu + " ready")
		if now := n.daemon(gpu); now != pid {
			t.Errorf("another daemon: %d, was %d", now, pid)
		}
	})
}

// TestLimitsNotApplied checks that a daemon that does not apply its limits is never ready, and that one whose
// server does not apply them fails.
func TestLimitsNotApplied(t *testing.T) {
	t.Parallel()
	for name, limited := range map[string]struct {
		unit   mps.Unit
		reason string
	}{
		"percentage": {mps.Unit{ID: gpu, GPU: gpu, ThreadPercentage: 25}, `its active thread percentage is "100.0" and not 25`},
		"memory":     {mps.Unit{ID: gpu, GPU: gpu, PinnedMemory: 10 << 30}, `its limit of pinned memory is "" and not 10240M`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, inProcess())
			if err := os.MkdirAll(filepath.Join(n.root, gpu, "log"), 0o700); err != nil {
				t.Fatal(err)
			}
			n.fault(gpu, "deaf")
			var phases sync.Map
			n.supervise()
			n.connect()
			run(t, func(ctx context.Context) error {
				_ = n.client.Watch(ctx, func() {
					states, _ := n.client.States()
					for _, state := range states {
						phases.Store(state.Phase, true)
					}
				})
				return nil
			})
			n.client.Want([]mps.Unit{limited.unit})
			n.await(gpu + " failed+" + limited.reason)
			if _, ready := phases.Load(nodereport.MPSReady); ready {
				t.Error("it was ready")
			}
			n.fault(gpu, "")
			n.await(gpu + " ready")

			// A server whose limits differ from the daemon's, as set by an operator.
			client, err := simmps.Connect(t.Context(), n.pipe(gpu), 1)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = client.Close() }()
			n.fault(gpu, "deaf")
			less := limited.unit
			less.ThreadPercentage /= 2
			less.PinnedMemory /= 2
			n.client.Want([]mps.Unit{less})
			n.await(gpu + " failed+and not")
		})
	}
}

// TestUsers checks that a server serves one user and that the state shows which users wait for which. With
// MultiUser no client waits.
func TestUsers(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, n *node) {
		n.options.Who = func(pid int) string {
			if pid == 12 {
				return "" // It has ended.
			}
			return fmt.Sprintf("python3 (PID %d)", pid)
		}
		n.supervise()
		n.connect()
		n.client.Want([]mps.Unit{unit(gpu)})
		n.await(gpu + " ready")
		client := func(pid, user int) (connected chan *simmps.Client) {
			connected = make(chan *simmps.Client, 1)
			go func() {
				c, err := simmps.ConnectAs(t.Context(), n.pipe(gpu), pid, user)
				if err != nil && t.Context().Err() == nil {
					t.Errorf("process %d of user %d: %v", pid, user, err)
				}
				connected <- c
			}()
			return connected
		}
		first := <-client(10, 1000)
		second, third := client(11, 0), client(12, 0)
		n.await(gpu + " ready+python3 (PID 11), of user 0, waits until user 1000 has no program on it any more (python3 (PID 10)): an MPS server serves one user; the chart's mps.multiUser lets it serve all")
		_ = first.Close()
		for _, c := range []*simmps.Client{<-second, <-third} {
			if c.Server == first.Server {
				t.Errorf("%+v has the server of another user", c)
			}
			if c.Percentage != 25 || c.Memory != "10240M" {
				t.Errorf("the client of the second server has %+v", c)
			}
			defer func() { _ = c.Close() }()
		}
		n.until("nobody to wait", func() (bool, string) {
			states, _ := n.client.States()
			return len(states) == 1 && states[0].Reason == "", fmt.Sprint(states)
		})
	})
}

func TestMultiUser(t *testing.T) {
	t.Parallel()
	for name, control := range map[string]func(t *testing.T) mps.Control{
		"program": func(t *testing.T) mps.Control {
			t.Helper()
			p := program(t)
			p.MultiUser = true
			return p
		},
		"in process": func(*testing.T) mps.Control {
			p := inProcess()
			p.MultiUser = true
			return p
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, control(t))
			n.supervise()
			n.connect()
			n.client.Want([]mps.Unit{unit(gpu)})
			n.await(gpu + " ready")
			for _, user := range []int{1000, 0, 1001} {
				c, err := simmps.ConnectAs(t.Context(), n.pipe(gpu), 10+user, user)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = c.Close() }()
			}
		})
	}
}

// TestFolders checks that a folder that the users of clients cannot enter is named, and that no daemon is started.
func TestFolders(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	parent := n.root
	n.root = filepath.Join(parent, "m")
	n.options.Root = n.root
	if err := errors.Join(os.Mkdir(n.root, 0o755), os.Chmod(parent, 0o750)); err != nil {
		t.Fatal(err)
	}
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " failed+" + parent + " has mode 0750")
	if n.exists(gpu + "/pipe/control") {
		t.Error("a daemon was started")
	}
	if err := os.Chmod(parent, 0o711); err != nil {
		t.Fatal(err)
	}
	n.await(gpu + " ready")
	c, err := simmps.ConnectAs(t.Context(), n.pipe(gpu), 1, 1000)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// TestModeProhibited checks that if a GPU's compute mode is prohibited, the log says so before the GPU is shared,
// and the mode is restored afterwards.
func TestModeProhibited(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	_ = n.modes.set(t.Context(), gpu, sharing.ProhibitedCompute)
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	n.mu.Lock()
	if !strings.Contains(n.log.String(), "mode=prohibited") {
		t.Error("the log does not say that the GPU had compute mode prohibited")
	}
	n.mu.Unlock()
	n.client.Want(nil)
	n.await()
	n.awaitMode(gpu, sharing.ProhibitedCompute)
}

// TestModeNotSet checks that no daemon is started and no compute mode is set without the journal, or without the
// right to set the mode.
func TestModeNotSet(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		breaks func(n *node)
		mend   func(n *node)
		reason string
	}{
		"journal": {
			func(n *node) { _ = os.Mkdir(filepath.Join(n.root, "compute-modes.json.next"), 0o700) },
			func(n *node) { _ = os.Remove(filepath.Join(n.root, "compute-modes.json.next")) },
			"keep the compute mode",
		},
		"right": {
			func(n *node) {
				_ = os.Chmod(string(n.modes), 0)
				_ = os.Mkdir(filepath.Join(string(n.modes), gpu), 0o700)
			},
			func(n *node) { _ = os.Remove(filepath.Join(string(n.modes), gpu)) },
			"compute mode",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, inProcess())
			test.breaks(n)
			n.supervise()
			n.connect()
			n.client.Want([]mps.Unit{unit(gpu)})
			n.await(gpu + " failed+" + test.reason)
			if n.exists(gpu) {
				t.Error("a daemon was started")
			}
			test.mend(n)
			n.await(gpu + " ready")
		})
	}
}

// TestModeNotRestored checks that the unit stays listed until its mode is restored, and serves again when it is
// wanted before that.
func TestModeNotRestored(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	var broken atomic.Bool
	set := n.options.SetComputeMode
	n.options.SetComputeMode = func(ctx context.Context, gpu string, mode sharing.ComputeMode) error {
		if broken.Load() {
			return errors.New("GPU is lost")
		}
		return set(ctx, gpu, mode)
	}
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	broken.Store(true)
	n.client.Want([]mps.Unit{})
	n.await(gpu + " stopping+GPU is lost")
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	n.client.Want([]mps.Unit{})
	n.await(gpu + " stopping+GPU is lost")
	broken.Store(false)
	n.await()
	n.awaitMode(gpu, sharing.DefaultComputeMode)
}

// TestStrangeServer checks that the client disconnects from a supervisor that sends unreadable lines.
func TestStrangeServer(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	listener, err := net.Listen("unix", filepath.Join(n.root, mps.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	n.connect()
	connection, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = connection.Write([]byte(`{"units":[{"id":"GPU-1","phase":"ready"}]}` + "\n"))
	n.await("GPU-1 starting+virgate mps is older") // Its clients' containers would not start.
	_, _ = connection.Write([]byte(`{"unitMemory":true,"units":[{"id":"GPU-1","phase":"ready"}]}` + "\n"))
	n.await("GPU-1 ready")
	_, _ = connection.Write([]byte("no JSON\n"))
	n.until("no connection", func() (bool, string) {
		states, connected := n.client.States()
		return !connected && states == nil, fmt.Sprint(states)
	})
	_ = listener.Close()
	n.supervise()
	n.await()
}

// TestLongRoot checks that a root directory whose daemons could not listen is refused by name.
func TestLongRoot(t *testing.T) {
	root := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	err := mps.Run(t.Context(), mps.Options{Root: root})
	if err == nil || !strings.Contains(err.Error(), root) || !strings.Contains(err.Error(), "at most 53") {
		t.Errorf("answers %v", err)
	}
	if _, err := os.Stat(root); err == nil {
		t.Error("the directory was made")
	}
}

// TestUnitIDs checks that an invalid unit ID gets neither directory nor daemon, and is reported.
func TestUnitIDs(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	outside := filepath.Join(filepath.Dir(n.root), "GPU-outside")
	n.supervise()
	n.connect()
	bad := []string{"GPU-../../GPU-outside", "../GPU-outside", "GPU-", "MIG-GPU-1/3/0", "GPU-" + strings.Repeat("1", 37), "GPU-1\n", ".shm"}
	wish, want := []mps.Unit{unit(gpu), {ID: other, GPU: "../x"}}, []string{gpu + " ready", other + ` failed+unit ID "../x"`}
	for _, id := range bad {
		wish = append(wish, mps.Unit{ID: id, GPU: gpu})
		want = append(want, id+" failed+"+fmt.Sprintf("unit ID %.30q", id)[:12])
	}
	slices.Sort(want)
	n.client.Want(wish)
	n.await(want...)
	entries, err := os.ReadDir(n.root)
	if err != nil {
		t.Fatal(err)
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, e.Name())
		}
	}
	if !slices.Equal(dirs, []string{gpu}) {
		t.Errorf("directories %q", dirs)
	}
	if _, err := os.Stat(outside); err == nil {
		t.Errorf("%s was made", outside)
	}
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
}

// TestDriverReplaced checks that once the node's driver is no longer this container's, no more daemons are started,
// and Run ends with the last one. Running daemons have clients, whose GPUs the old driver still serves.
func TestDriverReplaced(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess())
	replaced, ended := make(chan struct{}), make(chan error, 1)
	failure := errors.New("another driver is mounted")
	n.options.DriverReplaced = func(ctx context.Context) error {
		select {
		case <-replaced:
			return failure
		case <-ctx.Done():
			return nil
		}
	}
	go func() { ended <- mps.Run(t.Context(), n.options) }()
	await.Until(t, "the supervisor's socket", n.dial)
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	close(replaced)
	await.True(t, "a line of the log", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return strings.Contains(n.log.String(), "no MPS daemon is started any more")
	})
	n.client.Want([]mps.Unit{unit(gpu), unit(other)})
	n.await(gpu+" ready", other+" failed+"+failure.Error())
	select {
	case err := <-ended:
		t.Errorf("ended under a daemon: %v", err)
	default:
	}
	n.client.Want([]mps.Unit{unit(other)})
	if err := <-ended; !errors.Is(err, failure) {
		t.Errorf("ended with %v", err)
	}
	n.awaitMode(gpu, sharing.DefaultComputeMode)
	if err := mps.Run(t.Context(), n.options); !errors.Is(err, failure) {
		t.Errorf("without a daemon: %v", err)
	}
}
