package mps_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
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
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/shortdir"
)

// unlimited is for deadlines that no test should reach.
const unlimited = time.Hour

const (
	gpu   = "GPU-11111111-2222-3333-4444-555555555555"
	other = "GPU-66666666-2222-3333-4444-555555555555"
)

// TestMain is NVIDIA's program, too, when it is called by that name, and the supervisor of
// kill_test.go.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == mps.ProgramName {
		code := simmps.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
		// The race detector would wait a second at a normal end.
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(code), 0, 0)
	}
	if len(os.Args) > 2 && os.Args[2] == mps.InDriverRoot {
		_, _ = fmt.Fprintln(os.Stderr, mps.EnterDriverRoot(os.Args[3:]))
		os.Exit(1) //nolint:forbidigo // This is a main.
	}
	if mounts := os.Getenv(containerMounts); mounts != "" {
		beContainer(mounts)
	}
	if root := os.Getenv(killRoot); root != "" {
		supervise(root)
	}
	os.Exit(runTests(m)) //nolint:forbidigo // This is a main.
}

// programPath is the stand-in, built as a program.
var programPath string

// runTests makes the program first: a file that is being written cannot be executed, and a
// process that a parallel test starts would have it open for a moment.
func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "mps")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }()
		programPath = filepath.Join(dir, mps.ProgramName)
		err = linkSelf(programPath)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "make", mps.ProgramName+":", err)
		return 1
	}
	return m.Run()
}

func linkSelf(path string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if os.Link(self, path) == nil {
		return nil
	}
	data, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o700)
}

// program is the stand-in as a program.
func program(t *testing.T) mps.Program {
	t.Helper()
	return programAt(programPath, t.Output())
}

func programAt(path string, log interface{ Write([]byte) (int, error) }) mps.Program {
	return mps.Program{
		Find:   func() (string, string, error) { return "/", path, nil },
		Proc:   "/proc",
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	}
}

// modes are the GPUs' compute modes, in one file each, so that they survive a process.
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
	// changed is signalled when a state, a compute mode or anything else a test waits for may have changed.
	changed chan struct{}

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
	root := shortdir.New(t)
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, root: root, modes: modes(t.TempDir()), changed: make(chan struct{}, 1)}
	n.options = mps.Options{
		Root: root, Control: control, ComputeMode: n.modes.get,
		SetComputeMode: func(ctx context.Context, gpu string, mode sharing.ComputeMode) error {
			defer n.lookAgain()
			return n.modes.set(ctx, gpu, mode)
		},
		Timing: mps.Timing{
			Ask: 10 * time.Millisecond, Answer: unlimited, Start: unlimited, Stop: unlimited,
			Pause: time.Millisecond, MaxPause: 10 * time.Millisecond, FirstWish: unlimited,
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

// supervise starts a supervisor, and returns when clients can connect to it.
func (n *node) supervise() (stop func()) {
	n.t.Helper()
	stop = run(n.t, func(ctx context.Context) error { return mps.Run(ctx, n.options) })
	await.Until(n.t, "the supervisor's socket", n.dial)
	return stop
}

// dial connects to the supervisor and closes the connection.
func (n *node) dial() error {
	connection, err := net.Dial("unix", filepath.Join(n.root, mps.SocketName))
	if err != nil {
		return err
	}
	return connection.Close()
}

// connect starts a client.
func (n *node) connect() (stop func()) {
	client := mps.NewClient(filepath.Join(n.root, mps.SocketName), n.options.Logger)
	n.client = client
	return run(n.t, func(ctx context.Context) error {
		var watching sync.WaitGroup
		defer watching.Wait()
		watching.Go(func() { _ = client.Watch(ctx, n.lookAgain) })
		return client.Run(ctx)
	})
}

// lookAgain wakes until, and never blocks.
func (n *node) lookAgain() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
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

// until waits for a condition that lookAgain signals. It fails only after a hang.
func (n *node) until(what string, is func() (bool, string)) {
	n.t.Helper()
	limit := time.NewTimer(await.Patience)
	defer limit.Stop()
	for {
		ok, now := is()
		if ok {
			return
		}
		select {
		case <-n.changed:
		case <-limit.C:
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
