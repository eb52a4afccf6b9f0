package soak

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
)

// A run of the program cannot be killed: it is in the test's own process. What
// SIGKILL does to the world can be had all the same. Each run reaches the
// device-plugins directory by a link of its own, and the boards by a driver of
// its own. At a kill the link is led elsewhere, the driver cuts nothing any more,
// and the kubelet's connections break: what the run still does on its way out,
// such as to save its state, to remove its sockets, to send a list and to undo a
// cut, comes to nothing.

// reach is what a run of the program has of the site.
type reach struct {
	site
	driver *tether
}

// reach is the site for the run of that number.
func (s site) reach(run int) (reach, error) {
	link := filepath.Join(filepath.Dir(s.dir), "r"+strconv.Itoa(run))
	if err := os.Symlink(s.dir, link); err != nil {
		return reach{}, err
	}
	s.dir = link
	return reach{s, &tether{Node: s.node}}, nil
}

// sever takes the run's reach away.
func (r reach) sever() error {
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

// tether is the driver until it is severed; then it changes no board.
type tether struct {
	*simnode.Node
	severed atomic.Bool
}

func (t *tether) DeviceSetMigMode(d nvml.Device, on bool) (nvml.Return, error) {
	if t.severed.Load() {
		return nvml.Unknown, nvml.Unknown
	}
	return t.Node.DeviceSetMigMode(d, on)
}

func (t *tether) DeviceCreateGpuInstanceWithPlacement(d nvml.Device, profile int, at mig.Placement) (nvml.GPUInstance, error) {
	if t.severed.Load() {
		return 0, nvml.Unknown
	}
	return t.Node.DeviceCreateGpuInstanceWithPlacement(d, profile, at)
}

func (t *tether) GpuInstanceCreateComputeInstance(gi nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	if t.severed.Load() {
		return 0, nvml.Unknown
	}
	return t.Node.GpuInstanceCreateComputeInstance(gi, profile)
}

func (t *tether) ComputeInstanceDestroy(ci nvml.ComputeInstance) error {
	if t.severed.Load() {
		return nvml.Unknown
	}
	return t.Node.ComputeInstanceDestroy(ci)
}

func (t *tether) GpuInstanceDestroy(gi nvml.GPUInstance) error {
	if t.severed.Load() {
		return nvml.Unknown
	}
	return t.Node.GpuInstanceDestroy(gi)
}

// start starts a run of the program beside those that there are.
func (w *world) start() (*program, error) {
	w.runs++
	at, err := w.site.reach(w.runs)
	if err != nil {
		return nil, err
	}
	w.mayMissResets()
	return start(at), nil
}

// kill ends the program as SIGKILL does, and starts it again.
func (w *world) kill() error {
	if err := w.program.reach.sever(); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	w.kubelet.CutConnections()
	// How it ends is of no interest: it can do nothing right any more.
	_, _ = w.program.stop()
	if err := leaked(); err != nil {
		return err
	}
	next, err := w.start()
	w.program = next
	return err
}
