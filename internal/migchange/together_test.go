package migchange

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

// fleet is a node of several GPUs with a running Reconciler, a kubelet that takes time to release a unit, and a
// driver that takes time for each change.
type fleet struct {
	t       *testing.T
	sim     *simnode.Node
	profile sharing.Profile
	program *Reconciler
	// changed is signalled when the program's Status changes.
	changed chan struct{}

	mu sync.Mutex
	// withheld are units that are not offered, with the time since when; known are all that were ever offered.
	withheld map[string]time.Time
	known    map[string]bool
	held     map[string]bool
	// least is the least number of devices that a resource had in the plans.
	least map[string]int
	// most is the largest number of GPUs in the journal at once.
	most int
}

const (
	withdrawal = 150 * time.Millisecond
	stepTime   = time.Second
)

// changingCalls are the driver's calls that change a GPU's MIG mode or instances.
var changingCalls = []string{
	"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceDestroy",
	"GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy",
}

// startFleet starts the program in the bubble of synctest.
func startFleet(t *testing.T, node string, profile sharing.Profile) *fleet {
	t.Helper()
	sim, err := simnode.New(node)
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{
		t:        t,
		sim:      sim,
		profile:  profile,
		changed:  make(chan struct{}, 1),
		withheld: map[string]time.Time{},
		known:    map[string]bool{},
		held:     map[string]bool{},
		least:    map[string]int{},
	}
	for _, call := range changingCalls {
		sim.InjectFault(call, simnode.Fault{Return: nvml.Success, Delay: stepTime})
	}
	f.program = New(Options{
		Partitioner: nvml.NewPartitioner(sim, nil), Store: f, Devices: f, Logger: slog.New(slog.DiscardHandler),
		Holders: func(context.Context) ([]sharing.Allocation, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			held := slices.DeleteFunc(slices.Collect(maps.Keys(f.held)), func(unit string) bool { return !f.held[unit] })
			return []sharing.Allocation{{Namespace: "default", Pod: "pod", Devices: held}}, nil
		},
		Inputs:    func() ([]sharing.GPU, sharing.MIGConfig, error) { return f.gpus(), f.wanted().MIG, nil },
		Resources: func(gpus []sharing.GPU) []sharing.Resource { return sharing.NewPlan(gpus, f.wanted()).Resources },
		Plan:      f.plan,
		Changed: func() {
			select {
			case f.changed <- struct{}{}:
			default:
			}
		},
	})
	f.plan(t.Context())
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.program.Run(ctx)
	}()
	t.Cleanup(func() {
		end()
		<-ended
	})
	return f
}

func (f *fleet) wanted() sharing.Profile {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.profile
}

// gpus are the driver's GPUs, also while it is busy.
func (f *fleet) gpus() (gpus []sharing.GPU) {
	for _, g := range f.sim.GPUs() {
		gpu := sharing.GPU{UUID: g.UUID, Index: g.Index, Model: "H100", MIG: g.MIG, MIGPending: g.MIG}
		for i, p := range g.Partitions {
			profile, err := mig.ParseProfile(p.Profile)
			if err != nil {
				f.t.Error(err)
			}
			gpu.Partitions = append(gpu.Partitions, sharing.Partition{UUID: p.UUID, Index: i, Profile: profile})
		}
		gpus = append(gpus, gpu)
	}
	return gpus
}

// plan stands in for the agent's loop, and wakes the program when the kubelet has released units.
func (f *fleet) plan(context.Context) {
	everything := sharing.NewPlan(f.gpus(), f.wanted())
	offered := map[string]bool{}
	counts := map[string]int{}
	var all []units.Unit
	for _, gpu := range f.gpus() {
		all = append(all, units.Unit{UUID: gpu.UUID, GPU: gpu.UUID})
		for _, p := range gpu.Partitions {
			all = append(all, units.Unit{UUID: p.UUID, GPU: gpu.UUID})
		}
	}
	owners := units.Owners(all, f.program.Reservations())
	for _, r := range everything.Drop(func(u sharing.Unit) bool { return owners[u.ID].ReservedFor(units.MIGChange) }).Resources {
		counts[r.Name] = len(r.Devices)
		for _, unit := range r.Units {
			offered[unit.ID] = true
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range everything.Resources {
		if least, known := f.least[r.Name]; !known || counts[r.Name] < least {
			f.least[r.Name] = counts[r.Name]
		}
		for _, unit := range r.Units {
			f.known[unit.ID] = f.known[unit.ID] || offered[unit.ID]
			if _, since := f.withheld[unit.ID]; offered[unit.ID] {
				delete(f.withheld, unit.ID)
			} else if !since {
				f.withheld[unit.ID] = time.Now()
				time.AfterFunc(withdrawal, f.program.WakeIfWaiting)
			}
		}
	}
	f.program.Wake()
}

func (f *fleet) Withdrawn(units ...string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, unit := range units {
		since, withheld := f.withheld[unit]
		waited := time.Since(since) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if f.held[unit] || f.known[unit] && (!withheld || waited < withdrawal) {
			return false
		}
	}
	return true
}

func (*fleet) SetRefusals(map[string]string)  {}
func (*fleet) RefreshHolders(...string)       {}
func (*fleet) Read(string, any) (bool, error) { return false, nil }

func (f *fleet) WriteOrForget(_ string, value any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.most = max(f.most, len(value.(Journal).Underway))
	return nil
}

func (f *fleet) leastOf(resource string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.least[resource]
}

func (f *fleet) hold(unit string, held bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held[unit] = held
}

// driverTime is the driver's time so far. Each GPU instance is still in use at the first try to destroy it, and
// free 5 ms later.
func (f *fleet) driverTime() time.Duration {
	calls := 0
	for _, call := range changingCalls {
		calls += f.sim.Calls(call)
	}
	return time.Duration(calls)*stepTime + time.Duration(f.sim.Calls("GpuInstanceDestroy")/2)*5*time.Millisecond
}

// want requests a layout, waits until so many GPUs have it, and returns the time it took.
func (f *fleet) want(layout string, count int) time.Duration {
	f.t.Helper()
	began := time.Now()
	f.mu.Lock()
	f.profile.MIG = layoutNamed(layout)
	f.mu.Unlock()
	f.program.Wake()
	f.await(count)
	return time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
}

func (f *fleet) await(count int) {
	f.t.Helper()
	limit := time.NewTimer(time.Hour)
	defer limit.Stop()
	for {
		synctest.Wait()
		applied := 0
		for _, gpu := range f.program.Status() {
			if gpu.Wanted == f.wanted().MIG.Name && gpu.State == nodereport.LayoutApplied {
				applied++
			}
		}
		if applied == count {
			return
		}
		select {
		case <-f.changed:
		case <-limit.C:
			f.t.Fatalf("%d GPUs have the layout, want %d: %+v", applied, count, f.program.Status())
		}
	}
}

func fleetProfile(names ...sharing.NamingRule) sharing.Profile {
	return sharing.Profile{MIGStrategy: sharing.MIGMixed, GPUNames: []sharing.NamingRule{{Pattern: "*", Name: "gpu"}}, MIGNames: names}
}

// TestWaitsForNothingButTheDriver changes eight free GPUs on a driver that makes one change at a time. Their
// units are withdrawn concurrently, and then the driver is always busy.
func TestWaitsForNothingButTheDriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := startFleet(t, "dgx-h100", fleetProfile())
		for _, layout := range []string{"all-3g.40gb", "all-1g.10gb", "all-disabled"} {
			before := f.driverTime()
			took := f.want(layout, 8)
			if driver := f.driverTime() - before; took < driver || took > driver+withdrawal+time.Millisecond {
				t.Errorf("%s took %s, of which %s for the driver and %s for the kubelet", layout, took, driver, withdrawal)
			}
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.most != mostChanges {
			t.Errorf("%d GPUs were in the journal at a time, want one at the driver and one ready for it", f.most)
		}
	})
}

// TestHeldGPUDelaysNoOther checks that a GPU in use delays no free one, and that it changes when the program is
// woken after its pod's end.
func TestHeldGPUDelaysNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := startFleet(t, "h100x4", fleetProfile())
		holder := f.gpus()[0].UUID
		f.hold(holder, true)
		took := f.want("all-3g.40gb", 3)
		if driver := f.driverTime(); took > driver+withdrawal+time.Millisecond {
			t.Errorf("the free GPUs took %s, of which %s for the driver", took, driver)
		}
		if only := f.program.offers.published.Load().only[holder]; only == nil || len(only) != 0 {
			t.Errorf("of the held GPU %v may be offered, want nothing: another pod would take it", only)
		}
		before := f.driverTime()
		f.hold(holder, false)
		began := time.Now()
		f.program.WakeIfWaiting()
		f.await(4)
		took = time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if driver := f.driverTime() - before; took > driver+withdrawal+time.Millisecond {
			t.Errorf("after its pod's end the GPU took %s, of which %s for the driver", took, driver)
		}
	})
}

// TestHeldPartitionDelaysNoOther checks that a GPU with one held partition delays no other GPU, even if that
// partition is all that the wanted layout leaves of its resource. The GPU is first looked at while the other one
// is being changed.
func TestHeldPartitionDelaysNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := startFleet(t, "h100x2+all-balanced", fleetProfile())
		f.want("all-balanced", 2)
		small := slices.IndexFunc(f.gpus()[1].Partitions, func(p sharing.Partition) bool { return p.Profile.String() == "1g.10gb" })
		f.hold(f.gpus()[1].Partitions[small].UUID, true)
		if err := f.sim.Heal(0); err != nil { // Its partitions are to be made again.
			t.Fatal(err)
		}
		f.program.Wake()
		synctest.Wait()
		f.want("all-3g.40gb", 1)
	})
}

// TestAnotherLayoutWhileAGPUWaits checks that a decision for one layout is not kept for the next one while
// another GPU waits.
func TestAnotherLayoutWhileAGPUWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := startFleet(t, "h100x2", fleetProfile())
		f.hold(f.gpus()[0].UUID, true)
		f.want("all-3g.40gb", 1)
		synctest.Wait()
		before := f.driverTime()
		took := f.want("all-1g.10gb", 1)
		if driver := f.driverTime() - before; took > driver+withdrawal+time.Millisecond {
			t.Errorf("the free GPU took %s, of which %s for the driver", took, driver)
		}
		if got := len(f.gpus()[1].Partitions); got != 7 {
			t.Errorf("the free GPU is said to have the layout, with %d partitions", got)
		}
	})
}

// TestKeepsCapacity checks that a resource that keeps its name always has devices while several free GPUs change,
// and that one whose name goes is not protected.
func TestKeepsCapacity(t *testing.T) {
	t.Parallel()
	for _, gpus := range []int{2, 3, 8} {
		t.Run(fmt.Sprint(gpus, " GPUs"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := startFleet(t, fmt.Sprintf("h100x%d+all-3g.40gb", gpus), fleetProfile(sharing.NamingRule{Pattern: "*", Name: "slice"}))
				before := f.driverTime()
				took := f.want("all-2g.20gb", gpus)
				if f.leastOf("slice") == 0 {
					t.Error("there was nothing to allocate")
				}
				if driver := f.driverTime() - before; took > driver+2*withdrawal+time.Millisecond {
					t.Errorf("it took %s, of which %s for the driver", took, driver)
				}
				f.want("all-disabled", gpus)
				if least := f.leastOf("slice"); least != 0 {
					t.Errorf("%d devices of a name that goes were spared", least)
				}
			})
		})
	}
}

// TestKilledWithSeveralUnderWay ends the program at each write while two GPUs are being changed. The next start
// gives each the old or the wanted layout before it registers, and partitions in use survive.
func TestKilledWithSeveralUnderWay(t *testing.T) {
	t.Parallel()
	step := repeat.Times(3, 1)
	if few() {
		step *= 3
	}
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprint("late ", late), func(t *testing.T) {
			t.Parallel()
			// On a starved machine one change may be over before the next begins, so other writes are tried then.
			several := 0
			for first := 1; several == 0 && first <= 10; first++ {
				several = killAtEach(t, late, first, step)
			}
			if several == 0 {
				t.Error("never were several changes under way")
			}
		})
	}
}

// killAtEach kills the program at one write in each run: at first, then step writes later, until a run has fewer
// writes. It returns how often several changes were under way.
func killAtEach(t *testing.T, late bool, first, step int) (several int) {
	t.Helper()
	for dies := first; ; dies += step { // It is killed at this write.
		w, wanted := newWorld(t, "h100x3+all-1g.10gb"), layoutNamed("all-balanced")
		w.gpus = 3
		w.use([]int{0}, 5)
		busy, before := w.inUse(), w.layouts()
		w.dies, w.late = dies, late
		if w.run(w.program(), wanted, false, 20) {
			return several
		}
		w.dies = 0
		if len(w.kept.Underway) > 1 {
			several++
		}
		r := w.program()
		w.run(r, sharing.MIGConfig{}, true, 20)
		if len(w.kept.Underway) != 0 {
			t.Fatalf("killed at write %d: journal %v after a start", dies, w.kept)
		}
		now := w.layouts()
		w.run(r, wanted, false, 20)
		after := w.layouts()
		for i := range now {
			if !contains([]mig.PlacedLayout{before[i], after[i]}, now[i]) {
				t.Errorf("killed at write %d: GPU %d has %v, neither the old nor the wanted layout", dies, i, now[i])
			}
		}
		w.survive(busy)
	}
}
