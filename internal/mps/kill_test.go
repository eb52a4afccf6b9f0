package mps_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

// Variables of the process that is killed: the root directory, the directory of modes, the program, and the step,
// as "before start" or "after quit". It reports each step on reportPipe.
const (
	killRoot    = "VIRGATE_TEST_MPS_ROOT"
	killModes   = "VIRGATE_TEST_MPS_MODES"
	killProgram = "VIRGATE_TEST_MPS_PROGRAM"
	killStep    = "VIRGATE_TEST_MPS_STEP"

	reportPipe = 3 // the first of exec.Cmd.ExtraFiles
)

// steps are the supervisor's actions, in the order of a daemon's life.
var steps = []string{
	"mode", "set exclusive-process", "start", "get_default_active_thread_percentage", "set_default_active_thread_percentage",
	"set_default_device_pinned_mem_limit", "quit", "clear", "set default",
}

// supervise supervises until a step kills the process.
func supervise(root string) {
	syscall.CloseOnExec(reportPipe) // Daemons must not inherit it, so that the pipe ends with this process.
	report := os.NewFile(reportPipe, "report")
	at := func(when, step string) {
		_, _ = fmt.Fprintln(report, when, step)
		if when+" "+step == os.Getenv(killStep) {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	}
	modes := modes(os.Getenv(killModes))
	o := (&node{root: root, modes: modes}).killed(at)
	o.Control = killing{programAt(os.Getenv(killProgram), os.Stderr), at}
	_ = mps.Run(context.Background(), o)
	os.Exit(1) //nolint:forbidigo // It is the whole program.
}

func (n *node) killed(at func(when, step string)) mps.Options {
	return mps.Options{
		Root: n.root,
		ComputeMode: func(ctx context.Context, gpu string) (sharing.ComputeMode, error) {
			at("before", "mode")
			defer at("after", "mode")
			return n.modes.get(ctx, gpu)
		},
		SetComputeMode: func(ctx context.Context, gpu string, mode sharing.ComputeMode) error {
			at("before", "set "+string(mode))
			defer at("after", "set "+string(mode))
			return n.modes.set(ctx, gpu, mode)
		},
		Timing: mps.Timing{Answer: unlimited, Start: unlimited, Stop: unlimited, FirstWish: unlimited},
		Logger: programAt("", os.Stderr).Logger,
	}
}

type killing struct {
	mps.Program
	at func(when, step string)
}

func (k killing) Start(env mps.Environment) (mps.Daemon, error) {
	k.at("before", "start")
	defer k.at("after", "start")
	return k.Program.Start(env)
}

func (k killing) Ask(ctx context.Context, env mps.Environment, command string) (string, error) {
	name, _, _ := strings.Cut(command, " ")
	k.at("before", name)
	defer k.at("after", name)
	return k.Program.Ask(ctx, env, command)
}

func (k killing) Clear(ctx context.Context, env mps.Environment) error {
	k.at("before", "clear")
	defer k.at("after", "clear")
	return k.Program.Clear(ctx, env)
}

// TestKill kills the supervisor at every step. The next one restores the mode, and leaves no
// process and no directory, whether or not the daemon was wanted again in between.
func TestKill(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts some hundred processes")
	}
	for _, step := range steps {
		for _, when := range []string{"before", "after"} {
			for _, again := range []bool{false, true} {
				name := when + " " + step
				if again {
					name += ", and on"
				}
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					testKill(t, when+" "+step, again)
				})
			}
		}
	}
}

// killed is the process that a step kills.
type killed struct {
	command *exec.Cmd
	dead    chan struct{}
	// steps are the reported steps; read them when it is dead.
	steps []string
}

// startKilled starts a supervisor that the step kills.
func (n *node) startKilled(program, step string) *killed {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	reports, report, err := os.Pipe()
	if err != nil {
		n.t.Fatal(err)
	}
	k := &killed{command: exec.Command(self), dead: make(chan struct{})}
	k.command.Env = append(os.Environ(), killRoot+"="+n.root, killModes+"="+string(n.modes), killProgram+"="+program, killStep+"="+step)
	k.command.Stderr, k.command.ExtraFiles = n, []*os.File{report}
	err = k.command.Start()
	_ = report.Close()
	if err != nil {
		n.t.Fatal(err)
	}
	go func() {
		defer n.lookAgain()
		defer close(k.dead)
		for lines := bufio.NewScanner(reports); lines.Scan(); {
			k.steps = append(k.steps, lines.Text())
		}
		_ = reports.Close()
		_ = k.command.Wait()
	}()
	return k
}

func (k *killed) kill() {
	_ = k.command.Process.Kill()
	<-k.dead
}

func (k *killed) ended() bool {
	select {
	case <-k.dead:
		return true
	default:
		return false
	}
}

// lastStep is the last reported step, "" without one.
func (k *killed) lastStep() string {
	if len(k.steps) == 0 {
		return ""
	}
	return k.steps[len(k.steps)-1]
}

func testKill(t *testing.T, step string, again bool) {
	p := program(t)
	_, path, _ := p.Find()
	n := newNode(t, p)
	n.options.Timing.Ask = unlimited // No daemon fails.
	child := n.startKilled(path, step)
	t.Cleanup(func() { _ = p.Clear(context.Background(), mps.Environment{Pipe: n.pipe(gpu)}) })
	t.Cleanup(child.kill)
	await.Until(t, "the socket of the child, or its end", func() error {
		if child.ended() {
			return nil
		}
		return n.dial()
	})
	stop := n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.until("a daemon that serves, or the end", func() (bool, string) {
		states, _ := n.client.States()
		return child.ended() || len(states) == 1 && states[0].Phase == "ready", fmt.Sprint(states)
	})
	n.client.Want([]mps.Unit{})
	n.until("the end at "+step, func() (bool, string) {
		states, connected := n.client.States()
		if !child.ended() && connected && len(states) == 0 {
			t.Fatalf("the daemon's life is over, and the child has not come to %s", step)
		}
		return child.ended(), fmt.Sprint(states)
	})
	if last := child.lastStep(); last != step {
		t.Fatalf("the child ended at %q, want %q", last, step)
	}
	stop() // The next client need not wait until it connects again.
	n.supervise()
	n.connect()
	if again {
		n.client.Want([]mps.Unit{unit(gpu)})
		n.await(gpu + " ready")
		n.awaitMode(gpu, sharing.ExclusiveProcess)
	}
	n.client.Want([]mps.Unit{})
	n.await()
	if mode, err := n.modes.get(t.Context(), gpu); mode != sharing.DefaultComputeMode {
		t.Errorf("compute mode %s, %v", mode, err)
	}
	if n.exists(gpu) {
		t.Error("the directory is there still")
	}
	if data, err := os.ReadFile(filepath.Join(n.root, "compute-modes.json")); err == nil && string(data) != "{}" {
		t.Errorf("compute modes to restore: %s", data)
	}
	env := mps.Environment{Device: gpu, Pipe: n.pipe(gpu)}
	if _, err := p.Ask(t.Context(), env, "get_server_list"); err == nil {
		t.Error("a daemon answers")
	}
}
