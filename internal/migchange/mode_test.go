package migchange

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// neverWithheld checks at each new plan that at most so many GPUs are withheld, even in part. It returns all that
// ever were.
func (w *world) neverWithheld(r *Reconciler, but int) (ever map[string]bool) {
	ever = map[string]bool{}
	r.Plan = func(context.Context) {
		withheld := map[string]bool{}
		for _, gpu := range w.sim.GPUs() {
			units := []string{gpu.UUID}
			if gpu.MIG {
				units = nil
			}
			for _, p := range gpu.Partitions {
				units = append(units, p.UUID)
			}
			only, limited := r.offers.published.Load().only[gpu.UUID]
			if limited && slices.ContainsFunc(units, func(unit string) bool { return !only[unit] }) {
				withheld[gpu.UUID], ever[gpu.UUID] = true, true
			}
		}
		if len(withheld) > but {
			w.t.Errorf("withheld: %v", withheld)
		}
	}
	return ever
}

// TestMonitorOnly checks that a program that may monitor MIG but not change it takes no GPU out of service, and
// reports the right that it lacks. If only the driver can tell, Virgate withholds one GPU and tries to change it,
// and withholds no other GPU until another layout is requested.
func TestMonitorOnly(t *testing.T) {
	t.Parallel()
	for name, known := range map[string]bool{"known before": true, "told by the driver": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorldIn(t, "a100-40x3", "monitor-only")
			w.gpus = 3
			r := w.program()
			r.Partitioner.(*nvml.Partitioner).NotPermitted = func() bool { return known && !w.sim.MayChangeMIG() }
			tries := 1
			if known {
				tries = 0
			}
			withheld := w.neverWithheld(r, tries)
			for n, layout := range []string{"all-balanced", "all-1g.5gb"} {
				w.reconcileAll(r, layoutNamed(layout), 10)
				if calls := w.sim.Calls("DeviceSetMigMode"); calls != tries*(n+1) || len(withheld) != tries {
					t.Errorf("%s: the driver was asked for the mode %d times, and %d GPUs were withheld", layout, calls, len(withheld))
				}
				for _, got := range r.Status() {
					if got.State != nodereport.LayoutFailed || !strings.Contains(got.Reason, "mig.manage") || r.offers.published.Load().only[got.GPU] != nil {
						t.Errorf("%s: %s (%s), offered %v", layout, got.State, got.Reason, r.offers.published.Load().only)
					}
				}
			}
		})
	}
}

// TestNoSubscription checks a program with SYS_ADMIN in an unprivileged container, which could create GPU
// instances but no compute instances. It creates none and withholds no GPU. If it did not know, it restores the
// one GPU it tried.
func TestNoSubscription(t *testing.T) {
	t.Parallel()
	for name, known := range map[string]bool{"known before": true, "told by the driver": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorldIn(t, "a100-40x3", "no-subscription")
			w.gpus = 3
			r := w.program()
			r.Partitioner.(*nvml.Partitioner).NotPermitted = func() bool { return known && !w.sim.MayChangeMIG() }
			tries := 1
			if known {
				tries = 0
			}
			withheld := w.neverWithheld(r, tries)
			w.reconcileAll(r, layoutNamed("all-balanced"), 10)
			made := w.sim.Calls("DeviceCreateGpuInstanceWithPlacement")
			if len(withheld) != tries || (made == 0) != known || w.sim.Calls("GpuInstanceCreateComputeInstance") != tries {
				t.Errorf("%d GPUs were withheld, %d GPU instances made", len(withheld), made)
			}
			for _, got := range r.Status() {
				if got.State != nodereport.LayoutFailed || !strings.Contains(got.Reason, "mig.manage") {
					t.Errorf("%s (%s)", got.State, got.Reason)
				}
			}
			for _, gpu := range w.sim.GPUs() {
				if gpu.MIG || len(gpu.Partitions) > 0 {
					t.Errorf("GPU %d was left with MIG mode %t and %d partitions", gpu.Index, gpu.MIG, len(gpu.Partitions))
				}
			}
		})
	}
}

// TestResetRequired checks that if only a reboot activates the mode, the mode is requested and reported, while
// the GPU stays offered and no other GPU is touched. The layout is made after the reboot, by the same program or
// another.
func TestResetRequired(t *testing.T) {
	t.Parallel()
	for name, restarts := range map[string]bool{"the same program": false, "another program": true} {
		t.Run(name, func(t *testing.T) {
			w, wanted := newWorldIn(t, "a100-40x2", "passthrough"), layoutNamed("all-balanced")
			r := w.program()
			w.neverWithheld(r, 0)
			w.run(r, wanted, false, 5)
			got := w.state(r)
			if got.State != nodereport.LayoutResetRequired || got.Resettable || w.writes != 1 || len(w.kept.Underway) != 0 {
				t.Errorf("%s (%s) after %d writes, want reset-required after 1; journal %+v", got.State, got.Reason, w.writes, w.kept)
			}
			gpus, err := nvml.Scan(w.sim)
			if err != nil || gpus[1].MIGPending || !gpus[0].MIGPending || gpus[0].MIG {
				t.Errorf("GPUs %+v (%v), want the mode of the first one pending", gpus, err)
			}
			if restarts {
				r = w.program()
				w.neverWithheld(r, 0)
				w.run(r, wanted, true, 5)
				if got := w.state(r); got.State != nodereport.LayoutResetRequired || w.writes != 1 {
					t.Errorf("after a restart: %s (%s) after %d writes", got.State, got.Reason, w.writes)
				}
			}
			w.sim.Reboot()
			if restarts {
				r = w.program()
			}
			w.neverWithheld(r, 1)
			w.run(r, wanted, restarts, 5)
			if got := w.state(r); got.State != nodereport.LayoutApplied || r.offers.published.Load().only[got.GPU] != nil {
				t.Errorf("after the reboot: %s (%s), offered %v, want all", got.State, got.Reason, r.offers.published.Load().only)
			}
			// And back: the partitions stay in service until the next reboot.
			w.neverWithheld(r, 0)
			w.run(r, layoutNamed("all-disabled"), false, 5)
			if got := w.state(r); got.State != nodereport.LayoutResetRequired || len(w.layout().Partitions) != 4 {
				t.Errorf("back: %s (%s), GPU %v", got.State, got.Reason, w.layout())
			}
			w.sim.Reboot()
			w.run(r, layoutNamed("all-disabled"), false, 5)
			if got := w.state(r); got.State != nodereport.LayoutApplied || w.layout().MIG {
				t.Errorf("back, after the reboot: %s (%s), GPU %v", got.State, got.Reason, w.layout())
			}
		})
	}
}

// TestResetRequiredUnexpectedly checks that a GPU whose driver unexpectedly asks for a reset is withheld once,
// and not again before the reset. Partitions destroyed for the mode are created again until then.
func TestResetRequiredUnexpectedly(t *testing.T) {
	t.Parallel()
	for node, layout := range map[string]string{"a100-40x2": "all-balanced", "a100-40x2+all-balanced": "all-disabled"} {
		t.Run(layout, func(t *testing.T) {
			w, wanted := newWorldIn(t, node, "passthrough"), layoutNamed(layout)
			w.gpus = 2
			w.sim.InjectFault("DeviceGetVirtualizationMode", simnode.Fault{Return: nvml.Unknown})
			before := w.layouts()
			r := w.program()
			w.neverWithheld(r, 1)
			w.run(r, wanted, false, 10)
			w.neverWithheld(r, 0)
			calls := w.sim.Calls("DeviceSetMigMode")
			w.run(r, wanted, false, 10)
			for _, got := range r.Status() {
				if got.State != nodereport.LayoutResetRequired || calls != 2 || r.offers.published.Load().only[got.GPU] != nil {
					t.Errorf("%s (%s), the mode set %d times, offered %v", got.State, got.Reason, calls, r.offers.published.Load().only)
				}
			}
			if diff := cmp.Diff(before, w.layouts()); diff != "" || w.sim.Calls("DeviceSetMigMode") != calls || len(w.kept.Underway) != 0 {
				t.Errorf("journal %+v, the mode set %d times; before the reset (-before +now):\n%s", w.kept, w.sim.Calls("DeviceSetMigMode"), diff)
			}
			w.enter("")
			for gpu := range 2 {
				if err := w.sim.Heal(gpu); err != nil {
					t.Fatal(err)
				}
			}
			w.neverWithheld(r, 2)
			w.run(r, wanted, false, 20)
			for _, got := range r.Status() {
				if got.State != nodereport.LayoutApplied {
					t.Errorf("after the reset: %s (%s)", got.State, got.Reason)
				}
			}
		})
	}
}

// TestAnotherProgramHasTheGPUs checks a mode change blocked by an unlisted program: one GPU is tried at a time,
// less and less often, each is offered as before between the tries, the reason is reported, and all get the
// layout when the program has ended.
func TestAnotherProgramHasTheGPUs(t *testing.T) {
	t.Parallel()
	for node, layout := range map[string]string{"a100-40x3": "all-balanced", "h100x3": "all-balanced", "h100x3+all-1g.10gb": "all-3g.40gb"} {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			w, wanted := newWorldIn(t, node, "client=dcgm"), layoutNamed(layout)
			w.gpus = 3
			before := w.layouts()
			r := w.program()
			if node != "h100x3+all-1g.10gb" {
				w.neverWithheld(r, 1)
			}
			begun := w.clock
			for w.clock.Before(begun.Add(24 * time.Hour)) {
				gpus, err := nvml.Scan(w.sim)
				if err != nil {
					t.Fatal(err)
				}
				w.clock = w.clock.Add(max(time.Second, r.reconcileAndWait(t.Context(), gpus, wanted, false)))
			}
			if tries := w.sim.Calls("DeviceSetMigMode") + w.sim.Calls("ComputeInstanceDestroy"); tries < 6 || tries > 3*60 {
				t.Errorf("%d tries of three GPUs in a day", tries)
			}
			for _, got := range r.Status() {
				if got.State != nodereport.LayoutBlocked || !strings.Contains(got.Reason, "in no list of the driver") || r.offers.published.Load().only[got.GPU] != nil {
					t.Errorf("%s (%s), offered %v", got.State, got.Reason, r.offers.published.Load().only)
				}
			}
			if diff := cmp.Diff(before, w.layouts()); diff != "" || len(w.kept.Underway) != 0 {
				t.Errorf("journal %+v, GPUs (-before +now):\n%s", w.kept, diff)
			}
			w.enter("")
			r.Plan = func(context.Context) {}
			w.run(r, wanted, false, 20)
			for _, got := range r.Status() {
				if got.State != nodereport.LayoutApplied {
					t.Errorf("in the end: %s (%s)", got.State, got.Reason)
				}
			}
		})
	}
}

// reconcileAll inspects the GPUs so many times without advancing the clock.
func (w *world) reconcileAll(r *Reconciler, wanted sharing.MIGConfig, times int) {
	w.t.Helper()
	for range times {
		gpus, err := nvml.Scan(w.sim)
		if err != nil {
			w.t.Fatal(err)
		}
		r.reconcileAndWait(w.t.Context(), gpus[:max(1, w.gpus)], wanted, false)
	}
}

// TestProgramComesLater checks that one GPU is tried at a time even after earlier changes of the mode succeeded.
func TestProgramComesLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100x3+all-enabled")
	w.gpus = 3
	r := w.program()
	w.run(r, layoutNamed("all-disabled"), false, 10)
	w.enter("client=dcgm")
	w.reconcileAll(r, layoutNamed("all-balanced"), 10)
	w.clock = w.clock.Add(2 * time.Hour)
	w.neverWithheld(r, 1)
	calls := w.sim.Calls("DeviceSetMigMode")
	w.reconcileAll(r, layoutNamed("all-balanced"), 10)
	if tries := w.sim.Calls("DeviceSetMigMode") - calls; tries != 3 {
		t.Errorf("%d tries of three GPUs", tries)
	}
}

// TestResetDuringAPause checks that a reset is seen before the next try would be due.
func TestResetDuringAPause(t *testing.T) {
	t.Parallel()
	w, wanted := newWorldIn(t, "a100-40", "passthrough"), layoutNamed("all-balanced")
	w.sim.InjectFault("DeviceGetVirtualizationMode", simnode.Fault{Return: nvml.Unknown})
	r := w.program()
	w.reconcileAll(r, wanted, 5)
	if got := w.state(r); got.State != nodereport.LayoutResetRequired {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
	w.enter("")
	if err := w.sim.Heal(0); err != nil {
		t.Fatal(err)
	}
	w.reconcileAll(r, wanted, 5)
	if got := w.state(r); got.State != nodereport.LayoutApplied {
		t.Errorf("after the reset: %s (%s)", got.State, got.Reason)
	}
}

// TestPauses checks that there is a pause after RESET_REQUIRED, even if the driver does not show the mode as
// pending, and after a later IN_USE.
func TestPauses(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	for n, code := range []nvml.Return{nvml.ResetRequired, nvml.InUse} {
		end := w.sim.InjectFault("DeviceSetMigMode", simnode.Fault{Return: code})
		w.reconcileAll(r, wanted, 10)
		state := []nodereport.LayoutState{nodereport.LayoutResetRequired, nodereport.LayoutBlocked}[n]
		if got := w.state(r); w.sim.Calls("DeviceSetMigMode") != n+1 || got.State != state || !got.Resettable || r.offers.published.Load().only[got.GPU] != nil {
			t.Errorf("%s: asked %d times, %s (%s), offered %v", code, w.sim.Calls("DeviceSetMigMode"), got.State, got.Reason, r.offers.published.Load().only)
		}
		w.clock = w.clock.Add(2 * time.Hour)
		end()
	}
	w.run(r, wanted, false, 5)
	if got := w.state(r); got.State != nodereport.LayoutApplied {
		t.Errorf("in the end: %s (%s)", got.State, got.Reason)
	}
}

// busyKubelet never has anything withdrawn.
type busyKubelet struct{ *world }

func (busyKubelet) Withdrawn(...string) bool { return false }

// TestNotListedAnyMore checks that a GPU is offered unchanged at once if the driver no longer lists it exactly
// while its devices are being withdrawn.
func TestNotListedAnyMore(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	r.Devices = busyKubelet{w}
	w.reconcileAll(r, wanted, 1)
	if only := r.offers.published.Load().only[w.gpu()]; only == nil {
		t.Error("nothing is withheld for the change")
	}
	w.sim.InjectFault("DeviceGetGpuInstancePossiblePlacements", simnode.Fault{Return: nvml.Unknown})
	w.clock = w.clock.Add(recheckInterval)
	w.reconcileAll(r, wanted, 1)
	if got := w.state(r); got.State != nodereport.LayoutFailed || r.offers.published.Load().only[got.GPU] != nil {
		t.Errorf("%s (%s), offered %v, want all", got.State, got.Reason, r.offers.published.Load().only)
	}
}

// TestListedClient checks that IN_USE names the processes that the driver lists.
func TestListedClient(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100")
	r := w.program()
	r.Partitioner = &watched{r.Partitioner, func() { _ = w.sim.AddProcess(0, simnode.WholeGPU, 4711, 0) }}
	w.run(r, layoutNamed("all-balanced"), false, 1)
	if got := w.state(r); !strings.Contains(got.Reason, "by the processes [4711]") {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
}

// TestNotReadAgain checks that a GPU whose MIG mode has changed is offered only once it was read again, as its
// device node may now be another GPU's.
func TestNotReadAgain(t *testing.T) {
	t.Parallel()
	w, wanted := newWorldIn(t, "a100-40", "moving-minors"), layoutNamed("all-balanced")
	r := w.program()
	r.Refresh = func(context.Context) error { return errors.New("not read") }
	w.run(r, wanted, false, 5)
	got := w.state(r)
	if only, limited := r.offers.published.Load().only[got.GPU]; !limited || len(only) != 0 || got.State != nodereport.LayoutFailed {
		t.Errorf("%s (%s), offered %v", got.State, got.Reason, only)
	}
	r.Refresh = noRefresh(func() {})
	w.run(r, wanted, false, 5)
	if got := w.state(r); got.State != nodereport.LayoutApplied || r.offers.published.Load().only[got.GPU] != nil {
		t.Errorf("%s (%s), offered %v", got.State, got.Reason, r.offers.published.Load().only)
	}
}

// interposed has calls of a Partitioner answered otherwise.
type interposed struct {
	Partitioner
	state func()
	apply func(gpu string) error
}

func (i interposed) State(ctx context.Context, gpu string) (sharing.MIGState, error) {
	state, err := i.Partitioner.State(ctx, gpu)
	i.state()
	return state, err
}

func (i interposed) Apply(ctx context.Context, gpu string, step mig.Step) error {
	if err := i.apply(gpu); err != nil {
		return err
	}
	return i.Partitioner.Apply(ctx, gpu, step)
}

// TestPodEndsMeanwhile checks that a pod which ends while a GPU is looked at is not taken
// for a program without one: the GPU would be offered again, and given to the next pod.
func TestPodEndsMeanwhile(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	must(t, w.sim.AddProcess(0, simnode.WholeGPU, 4711, 1<<20))
	w.held = []string{w.gpu()}
	r := w.program()
	looked := false
	end := func() { // When the first of two questions was answered.
		if !looked {
			looked, w.held = true, nil
			must(t, w.sim.RemoveProcess(0, simnode.WholeGPU, 4711))
		}
	}
	r.Partitioner = interposed{r.Partitioner, end, func(string) error { return nil }}
	holders := r.Holders
	r.Holders = func(ctx context.Context) ([]sharing.Allocation, error) {
		defer end()
		return holders(ctx)
	}
	w.reconcileAll(r, wanted, 1)
	if got := w.state(r); !strings.Contains(got.Reason, "default/pod") || r.offers.published.Load().only[got.GPU] == nil {
		t.Errorf("%s (%s), offered %v, want held back for the pod", got.State, got.Reason, r.offers.published.Load().only)
	}
	w.clock = w.clock.Add(recheckInterval)
	w.run(r, wanted, false, 5)
	if got := w.state(r); got.State != nodereport.LayoutApplied {
		t.Errorf("in the end: %s (%s)", got.State, got.Reason)
	}
}

// sluggish withdraws units only once they have not been offered for a while.
type sluggish struct {
	*world
	since map[string]time.Time
	takes time.Duration
}

func (s sluggish) Withdrawn(units ...string) bool {
	return !slices.ContainsFunc(units, func(unit string) bool {
		since, withheld := s.since[unit]
		return !withheld || s.clock.Before(since.Add(s.takes))
	})
}

// TestFailingGPUTakesNoTurns checks that a GPU whose mode never changes does not delay another one whose devices
// are still being withdrawn when it is tried again.
func TestFailingGPUTakesNoTurns(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100x2"), layoutNamed("all-balanced")
	w.gpus = 2
	gpus, err := nvml.Scan(w.sim)
	must(t, err)
	r := w.program()
	tries := 0
	r.Partitioner = interposed{r.Partitioner, func() {}, func(gpu string) error {
		if gpu != gpus[0].UUID {
			return nil
		}
		tries++
		return mig.ErrInUse
	}}
	devices := sluggish{w, map[string]time.Time{}, 30 * time.Second}
	r.Devices = devices
	r.Plan = func(context.Context) {
		for _, gpu := range gpus {
			if only, limited := r.offers.published.Load().only[gpu.UUID]; !limited || only[gpu.UUID] {
				delete(devices.since, gpu.UUID)
			} else if _, known := devices.since[gpu.UUID]; !known {
				devices.since[gpu.UUID] = w.clock
			}
		}
	}
	for begun := w.clock; w.clock.Before(begun.Add(10*time.Minute)) && !r.executor.modeChanges.Load(); w.clock = w.clock.Add(time.Second) {
		w.reconcileAll(r, wanted, 1)
	}
	if !r.executor.modeChanges.Load() || tries != 1 {
		t.Errorf("the other GPU has the mode: %v, after %d tries of the one that fails", r.executor.modeChanges.Load(), tries)
	}
}
