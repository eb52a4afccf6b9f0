package agent

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

// fakeMPS replaces virgate mps. The test sets which daemons run; with auto, wanted daemons run at once.
type fakeMPS struct {
	mu        sync.Mutex
	auto, off bool
	// closed is what it was last asked to keep closed; slow: it does not do so yet.
	closed  map[string]int
	slow    bool
	states  map[string]nodereport.MPSState
	wanted  []nodereport.MPSUnit
	wishes  [][]string
	changed []func()
}

func newFakeMPS(auto bool) *fakeMPS {
	return &fakeMPS{auto: auto, states: map[string]nodereport.MPSState{}}
}

func (f *fakeMPS) Want(units []nodereport.MPSUnit) {
	f.mu.Lock()
	same := f.wishes != nil && slices.Equal(f.wanted, units)
	f.mu.Unlock()
	if same {
		return
	}
	f.change(func() {
		f.wanted = units
		f.wishes = append(f.wishes, f.ids())
		if f.auto {
			f.states = map[string]nodereport.MPSState{}
			for _, u := range units {
				f.states[u.ID] = nodereport.MPSState{ID: u.ID, Phase: nodereport.MPSReady}
			}
		}
	})
}

func (f *fakeMPS) KeepClosed(released map[string]int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = maps.Clone(released)
	return !f.slow
}

func (f *fakeMPS) keptClosed() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed
}

func (f *fakeMPS) ids() []string {
	ids := []string{}
	for _, u := range f.wanted {
		ids = append(ids, u.ID)
	}
	return ids
}

func (f *fakeMPS) States() (states []nodereport.MPSState, connected bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, state := range f.states {
		states = append(states, state)
	}
	if f.off {
		states = nil
	}
	return states, !f.off
}

func (f *fakeMPS) Run(context.Context) error { return nil }

func (f *fakeMPS) Watch(ctx context.Context, changed func()) error {
	f.mu.Lock()
	f.changed = append(f.changed, changed)
	f.mu.Unlock()
	changed()
	<-ctx.Done()
	return ctx.Err()
}

func (f *fakeMPS) change(do func()) {
	f.mu.Lock()
	do()
	changed := slices.Clone(f.changed)
	f.mu.Unlock()
	for _, tell := range changed {
		tell()
	}
}

// tell sets a daemon's phase; an empty phase removes the daemon.
func (f *fakeMPS) tell(unit string, phase nodereport.MPSPhase, reason string) {
	f.change(func() {
		if f.states[unit] = (nodereport.MPSState{ID: unit, Phase: phase, Reason: reason}); phase == "" {
			delete(f.states, unit)
		}
	})
}

// told lists all requests so far.
func (f *fakeMPS) told() [][]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.wishes)
}

// wants are the units that are wanted now.
func (f *fakeMPS) wants() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.ids(), " ")
}

func newMPSRig(t *testing.T, f *fakeMPS, p sharing.Profile, change func(*rig)) *rig {
	return newRig(t, func(r *rig) {
		r.options.Kubelet = r.sight
		if f != nil {
			r.options.MPS = f
		}
		r.startWith(p)
		if change != nil {
			change(r)
		}
	})
}

func mpsProfile(shares int) sharing.Profile {
	p := profile(shares)
	p.TimeSlicing[0].MPS = true
	return p
}

// reason is why the unit is not granted as planned; empty if it is.
func (r *rig) reason(unit string) string {
	for _, resource := range r.agent.state.Load().plan.Resources {
		for _, u := range resource.Units {
			if u.ID == unit {
				return u.Health.Reason
			}
		}
	}
	return "not planned"
}

func (r *rig) addPod(name string, devices int) {
	r.t.Helper()
	pod := simkubelet.Pod{Namespace: "ns", Name: name, Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{gpuResource: devices}}}}
	if _, err := r.kubelet.AddPod(r.ctx, pod); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) deletePod(name string) {
	r.t.Helper()
	if err := r.kubelet.DeletePod("ns", name); err != nil {
		r.t.Fatal(err)
	}
}

// TestMPSSwitch switches between time-slicing and MPS under one name and with as many replicas: no daemon starts
// while a pod has a time slice, no share is given before the daemon is ready, and no time slice before it is
// gone. The simulated kubelet checks that no unit is held in two modes.
func TestMPSSwitch(t *testing.T) {
	t.Parallel()
	f := newFakeMPS(false)
	r := newMPSRig(t, f, profile(4), nil)
	a, b := gpus("", "")[0].UUID, gpus("", "")[1].UUID
	r.shows(8)
	r.addPod("slice", 1) // Of a.
	r.policy.set(mpsProfile(4), nil)
	r.await("wanted for the free GPU", func() bool { return f.wants() == b })
	r.await("withheld", func() bool {
		return r.reason(b) == "MPS daemon: it is not started yet" && r.agent.state.Load().plan.Health[b].Healthy()
	})
	f.tell(b, nodereport.MPSStarting, "")
	r.await("starting", func() bool { return r.reason(b) == "MPS daemon: starting" })
	f.tell(b, nodereport.MPSReady, "")
	r.shows(4) // Of b.
	if f.wants() != b {
		t.Errorf("while a pod has a time slice, daemons are wanted for %s", f.wants())
	}
	r.deletePod("slice")
	r.await("wanted for both", func() bool { return f.wants() == a+" "+b })
	f.tell(a, nodereport.MPSReady, "")
	r.shows(8)
	r.addPod("share", 1) // Of a.
	r.policy.set(profile(4), nil)
	r.await("no longer wanted", func() bool { return f.wants() == a })
	f.tell(b, nodereport.MPSStopping, "")
	r.await("withheld while it stops", func() bool { return r.reason(b) == "its MPS daemon is still running" })
	if k := r.kubelet.Snapshot().Resources[gpuResource].Allocatable; k != 0 {
		t.Errorf("while the daemon stops, %d devices are offered", k)
	}
	f.tell(b, "", "")
	r.shows(4) // Of b.
	if f.wants() != a {
		t.Errorf("while a pod has a share, daemons are wanted for %q", f.wants())
	}
	r.deletePod("share")
	r.await("no longer wanted for the other", func() bool { return f.wants() == "" })
	f.tell(a, "", "")
	r.shows(8)
	if diff := cmp.Diff([][]string{{}, {b}, {a, b}, {a}, {}}, f.told()); diff != "" {
		t.Errorf("wishes (-want +got):\n%s", diff)
	}
	if violations := r.kubelet.Snapshot().Violations; len(violations) > 0 {
		t.Error(violations)
	}
}

// TestMPSOtherShares checks that all shares of a unit have the same size.
func TestMPSOtherShares(t *testing.T) {
	t.Parallel()
	f := newFakeMPS(true)
	r := newMPSRig(t, f, mpsProfile(4), nil)
	a, b := gpus("", "")[0].UUID, gpus("", "")[1].UUID
	r.shows(8)
	r.addPod("old", 1) // Of a.
	r.policy.set(mpsProfile(10), nil)
	r.shows(10) // Of b.
	percentages := func() map[string]int {
		f.mu.Lock()
		defer f.mu.Unlock()
		of := map[string]int{}
		for _, u := range f.wanted {
			of[u.ID] = u.ThreadPercentage
		}
		return of
	}
	if diff := cmp.Diff(map[string]int{a: 25, b: 10}, percentages()); diff != "" {
		t.Error(diff)
	}
	r.deletePod("old")
	r.shows(20)
	r.await("other limits", func() bool { return cmp.Equal(map[string]int{a: 10, b: 10}, percentages()) })
	if wishes := f.told(); slices.ContainsFunc(wishes[slices.IndexFunc(wishes, func(wish []string) bool { return len(wish) == 2 }):], func(wish []string) bool { return len(wish) < 2 }) {
		t.Errorf("a daemon was stopped for other limits: %v", wishes)
	}
}

// TestMPSDaemonFails checks that if a daemon does not answer, its shares are Unhealthy with the reason until it
// does, and the other daemon's are not.
func TestMPSDaemonFails(t *testing.T) {
	t.Parallel()
	f := newFakeMPS(true)
	r := newMPSRig(t, f, mpsProfile(4), nil)
	a := gpus("", "")[0].UUID
	r.shows(8)
	f.tell(a, nodereport.MPSFailed, "it does not answer")
	r.shows(4)
	r.await("told", func() bool {
		status := r.agent.view.status(r.ctx)
		return r.reason(a) == "MPS daemon: it does not answer" &&
			slices.Contains(status.Warnings, "GPU 0 ("+a+"): MPS daemon: it does not answer") &&
			cmp.Equal(status.GPUs[0].MPS, []nodereport.MPSState{{ID: a, Phase: nodereport.MPSFailed, Reason: "it does not answer"}})
	})
	f.tell(a, nodereport.MPSReady, "")
	r.shows(8)
	f.change(func() { f.off = true })
	r.shows(0)
	r.await("a warning", func() bool {
		return slices.Contains(r.agent.view.status(r.ctx).Warnings, decide.MPSUnanswered) && r.reason(a) == "MPS daemon: "+decide.MPSUnanswered
	})
	// It is not known whether the daemon has ended.
	r.policy.set(profile(4), nil)
	r.await("withheld", func() bool { return r.reason(a) == "its MPS daemon is still running" })
	r.shows(0)
	f.change(func() { f.off = false })
	r.shows(8)
}

// TestMPSWithout checks that the plan names the missing virgate mps.
func TestMPSWithout(t *testing.T) {
	t.Parallel()
	r := newMPSRig(t, nil, mpsProfile(4), nil)
	r.await("a warning", func() bool {
		return slices.Contains(r.agent.view.status(r.ctx).Warnings, decide.MPSUnanswered) && r.reason(gpus("")[0].UUID) == "MPS daemon: "+decide.MPSUnanswered
	})
	r.shows(0)
}

// TestMPSWaitsForTheGPU checks that no daemon starts while another process uses the GPU, or before the compute
// mode of the previous profile is restored.
func TestMPSWaitsForTheGPU(t *testing.T) {
	t.Parallel()
	f, settings := newFakeMPS(true), newFakeSettings()
	a, b := gpus("", "")[0].UUID, gpus("", "")[1].UUID
	var mu sync.Mutex
	busy := []int{42}
	settings.modes[a] = sharing.ExclusiveProcess
	settings.kept = []gpusettings.ChangedGPU{{GPU: a, ComputeMode: sharing.ExclusiveProcess, Before: sharing.DefaultComputeMode}}
	settings.fail["mode"] = context.DeadlineExceeded
	r := newMPSRig(t, f, mpsProfile(4), func(r *rig) {
		r.options.DriverSettings = settings.settings()
		r.options.Processes = func(_ context.Context, gpu string) ([]int, error) {
			mu.Lock()
			defer mu.Unlock()
			if gpu == b {
				return busy, nil
			}
			return nil, nil
		}
	})
	r.await("waiting", func() bool {
		return r.reason(a) == "MPS daemon: it is not started yet: its compute mode is being set back"
	})
	r.await("waiting", func() bool { return r.reason(b) == "MPS daemon: it is not started yet: in use by process 42" })
	if f.wants() != "" {
		t.Errorf("wanted: %s", f.wants())
	}
	mu.Lock()
	busy = nil
	mu.Unlock()
	r.await("wanted", func() bool { return f.wants() == b })
}

// TestMPSRestart checks that a restart leaves daemons and shares alone: the first request has the same daemons as
// before, and no share is Unhealthy for a moment.
func TestMPSRestart(t *testing.T) {
	t.Parallel()
	f := newFakeMPS(true)
	a, b := gpus("", "")[0].UUID, gpus("", "")[1].UUID
	f.states[a] = nodereport.MPSState{ID: a, Phase: nodereport.MPSReady}
	f.states[b] = nodereport.MPSState{ID: b, Phase: nodereport.MPSReady}
	r := newMPSRig(t, f, mpsProfile(4), nil)
	r.shows(8)
	r.await("wanted", func() bool { return f.wants() != "" })
	if diff := cmp.Diff([][]string{{a, b}}, f.told()); diff != "" {
		t.Error(diff)
	}
}
