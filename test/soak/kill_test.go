package soak

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
)

// The program runs in the test's own process, so it cannot be killed. The test simulates the effect of
// SIGKILL on the node: each run reaches the device-plugins directory by its own link and the GPUs by its
// own driver. A kill redirects the link, makes the driver ignore all changes of GPUs, and breaks the
// kubelet's connections. So whatever the run still does at its end (save its state, remove its sockets,
// send a list, undo a MIG change) has no effect. When a process ends, the kernel closes its files; here the
// driver does, because the run gives up slow calls at its end, including Shutdown.

// environment is what a run of the program can reach of the site.
type environment struct {
	site
	driver *driverConnection
}

// reach returns the environment of the run of that number.
func (s site) reach(run int) (environment, error) {
	link := filepath.Join(filepath.Dir(s.dir), "r"+strconv.Itoa(run))
	if err := os.Symlink(s.dir, link); err != nil {
		return environment{}, err
	}
	s.dir = link
	return environment{s, &driverConnection{Node: s.node}}, nil
}

// sever cuts the run off.
func (r environment) sever() error {
	elsewhere := r.dir + "x"
	if err := os.Mkdir(elsewhere, 0o750); err != nil {
		return err
	}
	next := r.dir + "n"
	if err := os.Symlink(elsewhere, next); err != nil {
		return err
	}
	r.driver.severed.Store(true)
	return os.Rename(next, r.dir)
}

// driverConnection is the driver until it is severed; then it changes no GPU.
type driverConnection struct {
	*simnode.Node
	severed atomic.Bool

	mu sync.Mutex
	// sessions counts the calls of Init minus those of Shutdown; exited is true once the run has ended.
	sessions int
	exited   bool
}

func (t *driverConnection) Init() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.exited {
		return nvml.Unknown
	}
	err := t.Node.Init()
	if err == nil {
		t.sessions++
	}
	return err
}

func (t *driverConnection) Shutdown() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.exited {
		return nil
	}
	err := t.Node.Shutdown()
	if err == nil {
		t.sessions--
	}
	return err
}

// exit closes what the run has left open.
func (t *driverConnection) exit() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.exited = true
	for ; t.sessions > 0; t.sessions-- {
		_ = t.Node.Shutdown()
	}
}

func (t *driverConnection) DeviceSetMigMode(d nvml.Device, on bool) (nvml.Return, error) {
	if t.severed.Load() {
		return nvml.Unknown, nvml.Unknown
	}
	return t.Node.DeviceSetMigMode(d, on)
}

func (t *driverConnection) DeviceCreateGpuInstanceWithPlacement(d nvml.Device, profile int, at mig.Placement) (nvml.GPUInstance, error) {
	if t.severed.Load() {
		return 0, nvml.Unknown
	}
	return t.Node.DeviceCreateGpuInstanceWithPlacement(d, profile, at)
}

func (t *driverConnection) GpuInstanceCreateComputeInstance(gi nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	if t.severed.Load() {
		return 0, nvml.Unknown
	}
	return t.Node.GpuInstanceCreateComputeInstance(gi, profile)
}

func (t *driverConnection) ComputeInstanceDestroy(ci nvml.ComputeInstance) error {
	if t.severed.Load() {
		return nvml.Unknown
	}
	return t.Node.ComputeInstanceDestroy(ci)
}

func (t *driverConnection) GpuInstanceDestroy(gi nvml.GPUInstance) error {
	if t.severed.Load() {
		return nvml.Unknown
	}
	return t.Node.GpuInstanceDestroy(gi)
}

// kill ends the program as SIGKILL does, and starts it again.
func (w *world) kill() error {
	if err := w.program.reach.sever(); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	w.kubelet.CloseConnections()
	// Its result does not matter, because it can no longer do anything right.
	_, _ = w.program.stop()
	if err := leaked(); err != nil {
		return err
	}
	next, err := w.start()
	w.program = next
	return err
}

// TestExit checks that the end of a process closes the driver, however many sessions it had open. A lost
// GPU that was reset is then found again.
func TestExit(t *testing.T) {
	node, err := simnode.New("t4")
	if err != nil {
		t.Fatal(err)
	}
	ended := &driverConnection{Node: node}
	if err := ended.Init(); err != nil {
		t.Fatal(err)
	}
	for _, step := range []error{node.Lose(0), node.Heal(0), ended.Init(), ended.Shutdown()} {
		if step != nil {
			t.Fatal(step)
		}
	}
	ended.exit()
	if ended.Init() == nil {
		t.Error("a process that has ended opens the driver")
	}
	next := &driverConnection{Node: node}
	if err := next.Init(); err != nil {
		t.Fatal(err)
	}
	if _, err := next.DeviceGetHandleByIndex(0); err != nil {
		t.Errorf("the next process does not find the GPU: %v", err)
	}
}
