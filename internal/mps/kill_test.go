package mps_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/sharing"
)

// Variables of the process that is killed: the root directory, that of the modes, the program, and
// the step: "before start", "after quit".
const (
	killRoot    = "VIRGATE_TEST_MPS_ROOT"
	killModes   = "VIRGATE_TEST_MPS_MODES"
	killProgram = "VIRGATE_TEST_MPS_PROGRAM"
	killStep    = "VIRGATE_TEST_MPS_STEP"
)

// steps are what the supervisor does to the world, in the order of a daemon's life.
var steps = []string{
	"mode", "set exclusive-process", "start", "get_default_active_thread_percentage", "set_default_active_thread_percentage",
	"set_default_device_pinned_mem_limit", "quit", "clear", "set default",
}

// supervise supervises until a step kills the process.
func supervise(root string) {
	at := func(when, step string) {
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
		Timing: mps.Timing{Answer: patience, Start: patience, Stop: patience, FirstWish: patience},
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
				t.Run(name, func(t *testing.T) { testKill(t, when+" "+step, again) })
			}
		}
	}
}

func testKill(t *testing.T, step string, again bool) {
	p := program(t)
	_, path, _ := p.Find()
	n := newNode(t, p)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(self)
	command.Env = append(os.Environ(), killRoot+"="+n.root, killModes+"="+string(n.modes), killProgram+"="+path, killStep+"="+step)
	command.Stderr = n
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	dead := make(chan struct{})
	go func() {
		defer close(dead)
		_ = command.Wait()
	}()
	t.Cleanup(func() {
		_ = command.Process.Kill()
		<-dead
		_ = p.Clear(context.Background(), mps.Environment{Pipe: n.pipe(gpu)})
	})
	isDead := func() bool {
		select {
		case <-dead:
			return true
		default:
			return false
		}
	}
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.until("a daemon that serves, or the end", func() (bool, string) {
		states, _ := n.client.States()
		return isDead() || len(states) == 1 && states[0].Phase == "ready", "neither"
	})
	n.client.Want([]mps.Unit{})
	n.until("the end at "+step, func() (bool, string) { return isDead(), "alive" })

	if again {
		n.client.Want([]mps.Unit{unit(gpu)})
	}
	n.supervise()
	if again {
		n.await(gpu + " ready")
		n.awaitMode(gpu, sharing.ExclusiveProcess)
		n.client.Want([]mps.Unit{})
	}
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
