package mps_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simmps"
	"github.com/virgate/virgate/sharing"
)

// patience is how long a test waits for what must come.
const patience = 2 * time.Minute

const (
	gpu   = "GPU-11111111-2222-3333-4444-555555555555"
	other = "GPU-66666666-2222-3333-4444-555555555555"
)

// TestMain is NVIDIA's program, too, when it is called by that name, and the supervisor of
// kill_test.go.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == mps.ProgramName {
		code := simmps.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
		// The race detector would wait for a second at a usual end.
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(code), 0, 0)
	}
	if len(os.Args) > 2 && os.Args[2] == mps.InDriverRoot {
		_, _ = fmt.Fprintln(os.Stderr, mps.EnterDriverRoot(os.Args[3:]))
		os.Exit(1) //nolint:forbidigo // This is a main.
	}
	if root := os.Getenv(killRoot); root != "" {
		supervise(root)
	}
	os.Exit(m.Run()) //nolint:forbidigo // This is a main.
}

// program is the stand-in as a program of its own.
func program(t *testing.T) mps.Program {
	t.Helper()
	path := filepath.Join(t.TempDir(), mps.ProgramName)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if os.Link(self, path) != nil {
		data, err := os.ReadFile(self)
		if err == nil {
			err = os.WriteFile(path, data, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return programAt(path, t.Output())
}

func programAt(path string, log interface{ Write([]byte) (int, error) }) mps.Program {
	return mps.Program{
		Find:   func() (string, string, error) { return "/", path, nil },
		Proc:   "/proc",
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	}
}

// modes are the compute modes of the GPUs, in a file for each, so that they outlast a process.
type modes string

func (m modes) get(_ context.Context, gpu string) (sharing.ComputeMode, error) {
	data, err := os.ReadFile(filepath.Join(string(m), gpu))
	if os.IsNotExist(err) {
		return sharing.DefaultComputeMode, nil
	}
	return sharing.ComputeMode(data), err
}

func (m modes) set(_ context.Context, gpu string, mode sharing.ComputeMode) error {
	return os.WriteFile(filepath.Join(string(m), gpu), []byte(mode), 0o600)
}

// node is a supervisor and a client of it.
type node struct {
	t       *testing.T
	root    string
	modes   modes
	client  *mps.Client
	options mps.Options

	mu  sync.Mutex
	log bytes.Buffer
}

func (n *node) Write(data []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.log.Write(data)
}

func newNode(t *testing.T, control mps.Control) *node {
	t.Helper()
	root, err := os.MkdirTemp("", "mps") //nolint:usetesting // A socket's path must be short.
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	n := &node{t: t, root: root, modes: modes(t.TempDir())}
	n.options = mps.Options{
		Root: root, Control: control, ComputeMode: n.modes.get, SetComputeMode: n.modes.set,
		Timing: mps.Timing{
			Ask: 10 * time.Millisecond, Answer: patience, Start: patience, Stop: patience,
			Pause: time.Millisecond, MaxPause: 10 * time.Millisecond, FirstWish: patience,
		},
		Logger: slog.New(slog.NewTextHandler(n, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(n.log.String())
		}
	})
	return n
}

// run runs until stop or the end of the test.
func run(t *testing.T, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return stop
}

func (n *node) supervise() (stop func()) {
	return run(n.t, func(ctx context.Context) error { return mps.Run(ctx, n.options) })
}

// connect starts a client.
func (n *node) connect() (stop func()) {
	n.client = mps.NewClient(filepath.Join(n.root, mps.SocketName), n.options.Logger)
	return run(n.t, n.client.Run)
}

// await waits until the states are as wanted: "<unit> <phase>", "+<reason>" with a part of it.
func (n *node) await(want ...string) {
	n.t.Helper()
	n.until(fmt.Sprintf("states %q", want), func() (bool, string) {
		states, connected := n.client.States()
		if !connected {
			return false, "not connected"
		}
		matches := func(s mps.State, want string) bool {
			want, reason, _ := strings.Cut(want, "+")
			return s.ID+" "+string(s.Phase) == want && strings.Contains(s.Reason, reason)
		}
		return slices.EqualFunc(states, want, matches), fmt.Sprint(states)
	})
}

func (n *node) until(what string, is func() (bool, string)) {
	n.t.Helper()
	tick, end := time.Tick(5*time.Millisecond), time.After(patience)
	for {
		ok, now := is()
		if ok {
			return
		}
		select {
		case <-tick:
		case <-end:
			n.t.Fatalf("waiting for %s: %s", what, now)
		}
	}
}

func (n *node) awaitMode(gpu string, want sharing.ComputeMode) {
	n.t.Helper()
	n.until(fmt.Sprintf("compute mode %s of %s", want, gpu), func() (bool, string) {
		mode, err := n.modes.get(context.Background(), gpu)
		return err == nil && mode == want, fmt.Sprint(mode, err)
	})
}

func (n *node) exists(path string) bool {
	_, err := os.Stat(filepath.Join(n.root, path))
	return err == nil
}

func (n *node) pipe(unit string) string { return filepath.Join(n.root, unit, "pipe") }

func (n *node) ask(unit, command string) string {
	n.t.Helper()
	env := mps.Environment{Device: unit, Pipe: n.pipe(unit), Log: filepath.Join(n.root, unit, "log")}
	answer, err := n.options.Control.Ask(context.Background(), env, command)
	if err != nil {
		n.t.Fatalf("%s: %v", command, err)
	}
	return strings.TrimSpace(answer)
}

func (n *node) fault(unit, fault string) {
	n.t.Helper()
	path := filepath.Join(n.root, unit, "log", "fault")
	err := os.WriteFile(path, []byte(fault), 0o600)
	if fault == "" {
		err = os.Remove(path)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

func unit(id string) nodereport.MPSUnit {
	return nodereport.MPSUnit{ID: id, GPU: id, ThreadPercentage: 25, PinnedMemory: 10 << 30}
}
