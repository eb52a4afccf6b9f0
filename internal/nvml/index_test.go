package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// knownGPUs is a Store of the GPUs that are known.
type knownGPUs struct {
	list  []nvml.KnownGPU
	saves int
}

func (k *knownGPUs) Load() ([]nvml.KnownGPU, error) { return slices.Clone(k.list), nil }

func (k *knownGPUs) Save(list []nvml.KnownGPU) error {
	k.list, k.saves = slices.Clone(list), k.saves+1
	return nil
}

// numbers lists the GPUs, A for the simulated node's first one, with index and, after a slash, the driver's index
// if that differs: "B=1/0".
func (w *watched) numbers() string {
	gpus, err := w.Inventory()
	must(w.t, err)
	return numbers(gpus)
}

func numbers(gpus []sharing.GPU) string {
	var list []string
	for _, gpu := range gpus {
		text := fmt.Sprintf("%c=%d", 'A'+gpu.PCIBusID[9]-'0', gpu.Index)
		if gpu.DriverIndex != "" {
			text += "/" + gpu.DriverIndex
		}
		list = append(list, text)
	}
	return strings.Join(list, " ")
}

func add(t *testing.T, sim *simnode.Node, model string) {
	t.Helper()
	_, err := sim.Add(model)
	must(t, err)
}

// TestIndexesStay checks that GPUs that come and go do not change another GPU's index, whatever the driver does.
func TestIndexesStay(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*testing.T, *simnode.Node)
		want   string
	}{
		{"one leaves", func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(0)) }, "A=0/none B=1/0 C=2/1 D=3/2"},
		{"the last one leaves", func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(3)) }, "A=0 B=1 C=2 D=3/none"},
		{"one falls off the bus", func(t *testing.T, sim *simnode.Node) { must(t, sim.Lose(1)) }, "A=0 B=1/lost C=2 D=3"},
		{"one leaves and comes back", func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Remove(0))
			after(enumerated)
			add(t, sim, "")
		}, "A=0 B=1 C=2 D=3"},
		{"another one comes", func(t *testing.T, sim *simnode.Node) { add(t, sim, "a30") }, "A=0 B=1 C=2 D=3 E=4"},
		{"another one has the driver's index of a known one", func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Remove(1))
			after(enumerated)
			add(t, sim, "a30")
		}, "A=0 B=1/none C=2/1 D=3/2 E=4/3"},
		{"the same in one moment", func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Change(func(now simnode.Change) error {
				must(t, now.Remove(1))
				_, err := now.Add("a30")
				return err
			}))
		}, "A=0 B=1/none C=2/1 D=3/2 E=4/3"},
		{"the same with a scan in between", func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Remove(1))
			synctest.Wait()
			add(t, sim, "a30")
		}, "A=0 B=1/none C=2/1 D=3/2 E=4/3"},
		{"all leave", func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Change(func(now simnode.Change) error {
				return errors.Join(now.Remove(0), now.Remove(0), now.Remove(0), now.Remove(0))
			}))
		}, "A=0/none B=1/none C=2/none D=3/none"},
		{"all leave, with a scan after each", func(t *testing.T, sim *simnode.Node) {
			for range 4 {
				must(t, sim.Remove(0))
				synctest.Wait()
			}
		}, "A=0/none B=1/none C=2/none D=3/none"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				w := watch(t, sim)
				test.change(t, sim)
				after(enumerated)
				if got := w.numbers(); got != test.want {
					t.Errorf("indexes %s, want %s", got, test.want)
				}
			})
		})
	}
}

// TestIndexesOutliveTheProgram checks that a restarted program gives known GPUs their old indexes. GPUs that the
// driver does not list are still reported after a restart, but not after a reboot.
func TestIndexesOutliveTheProgram(t *testing.T) {
	for _, test := range []struct {
		name string
		// before changes the node while the first program runs, between before the second does.
		before, between func(*testing.T, *simnode.Node)
		boot            string
		want            string
	}{
		{"nothing has changed", nil, nil, "first", "A=0 B=1 C=2 D=3"},
		{"restart after one has left", func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(0)) }, nil,
			"first", "A=0/none B=1/0 C=2/1 D=3/2"},
		{"restart while one is lost", func(t *testing.T, sim *simnode.Node) { must(t, sim.Lose(0)) }, nil,
			"first", "A=0/lost B=1 C=2 D=3"},
		{"one leaves while no program runs", nil, func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(0)) },
			"first", "A=0/none B=1/0 C=2/1 D=3/2"},
		{"reboot without it", nil, func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(0)) },
			"second", "B=1/0 C=2/1 D=3/2"},
		{"reboot with another in its place, at the driver's end", nil, func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Remove(0))
			add(t, sim, "a30")
		}, "second", "B=1/0 C=2/1 D=3/2 E=4/3"},
		{"reboot with others only", nil, func(t *testing.T, sim *simnode.Node) {
			for range 4 {
				must(t, sim.Remove(0))
				add(t, sim, "a30")
			}
		}, "second", "E=0 F=1 G=2 H=3"},
		{"reboot, of one of them later", nil, func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Remove(2))
			must(t, sim.Remove(2))
			add(t, sim, "a30")
			add(t, sim, "a30")
		}, "second", "A=0 B=1 E=2 F=3"},
		{"reboot with one that cannot be told from a known one", nil, func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Remove(3))
			add(t, sim, "a30")
			must(t, sim.Lose(1))
		}, "second", "A=0 C=2 E=4/3"},
		{"an unknown boot", nil, func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(0)) }, "", "B=1/0 C=2/1 D=3/2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			known := &knownGPUs{}
			change := func(t *testing.T, sim *simnode.Node, changes ...func(*testing.T, *simnode.Node)) {
				for _, change := range changes {
					if change != nil {
						change(t, sim)
					}
				}
			}
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				w := watchWith(t, sim, nvml.Options{Store: &memory{}, Known: known, Boot: "first"})
				must(t, w.RestoreHealth(context.Background()))
				change(t, sim, test.before)
				after(rescan)
				saved := known.saves
				after(20 * rescan)
				if known.saves != saved {
					t.Errorf("saved %d times without news", known.saves-saved)
				}
			})
			for _, standby := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					sim := simulate(t, "a30x4")
					change(t, sim, test.before, test.between)
					w := watchWith(t, sim, nvml.Options{Store: &memory{}, Known: &knownGPUs{list: known.list}, Boot: test.boot})
					if standby {
						after(2 * rescan)
					}
					must(t, w.RestoreHealth(context.Background()))
					for _, when := range []string{"when it has taken over", "later"} {
						if got := w.numbers(); got != test.want {
							t.Errorf("standing by before: %t: indexes %s %s, want %s", standby, got, when, test.want)
						}
						after(rescan)
					}
				})
			}
		})
	}
}

// TestInventoryIsComplete checks when the inventory is known to be complete: once a program that serves the node
// has identified all GPUs, or knows that they are lost.
func TestInventoryIsComplete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watchWith(t, sim, nvml.Options{Store: &memory{}, Boot: "first"})
		if w.Complete() {
			t.Error("complete before RestoreHealth")
		}
		must(t, w.RestoreHealth(context.Background()))
		if !w.Complete() {
			t.Error("not complete")
		}
	})
	for _, test := range []struct {
		answer   nvml.Return
		complete bool
	}{
		{nvml.Unknown, false},
		{nvml.GPUIsLost, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			end, err := sim.InjectGPUFault(1, "DeviceGetUUID", simnode.Fault{Return: test.answer})
			must(t, err)
			w := watchWith(t, sim, nvml.Options{Store: &memory{}, Boot: "first"})
			must(t, w.RestoreHealth(context.Background()))
			after(enumerated)
			if got := w.Complete(); got != test.complete {
				t.Errorf("%s: complete: %t", test.answer, got)
			}
			changes := w.changes
			end()
			after(enumerated)
			if !w.Complete() || w.changes == changes {
				t.Errorf("%s, then none: complete: %t, %d changes", test.answer, w.Complete(), w.changes-changes)
			}
			sim.InjectFault("DeviceGetUUID", simnode.Fault{Return: nvml.Unknown})
			add(t, sim, "a30")
			after(enumerated)
			if !w.Complete() {
				t.Errorf("%s: no longer complete with a GPU that cannot be identified", test.answer)
			}
		})
	}
}

// TestIndexUntilCertain checks that a new GPU gets another GPU's index only once that GPU is known to be gone,
// also after a restart.
func TestIndexUntilCertain(t *testing.T) {
	replace := func(t *testing.T) *simnode.Node {
		sim := simulate(t, "a30x4")
		must(t, sim.Remove(3))
		add(t, sim, "a30")
		must(t, sim.Lose(1))
		return sim
	}
	known := &knownGPUs{}
	synctest.Test(t, func(t *testing.T) {
		w := watchWith(t, simulate(t, "a30x4"), nvml.Options{Store: &memory{}, Known: known, Boot: "first"})
		must(t, w.RestoreHealth(context.Background()))
	})
	for n, restart := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			sim := replace(t)
			w := watchWith(t, sim, nvml.Options{Store: &memory{}, Known: known, Boot: "second"})
			must(t, w.RestoreHealth(context.Background()))
			if got := w.numbers(); got != "A=0 C=2 E=4/3" {
				t.Errorf("indexes %s at start %d", got, n)
			}
			if !restart {
				return
			}
			must(t, sim.Heal(1))
			after(rescan)
			if got := w.numbers(); got != "A=0 B=1 C=2 E=3" {
				t.Errorf("indexes %s when all can be read", got)
			}
			add(t, sim, "a30")
			after(rescan)
			if got := w.numbers(); got != "A=0 B=1 C=2 E=3 F=4" {
				t.Errorf("indexes %s with another one", got)
			}
		})
	}
}

// TestIndexComesBack checks that a GPU that comes back gets its old index, over any number of reboots, if no
// other GPU has it.
func TestIndexComesBack(t *testing.T) {
	known := &knownGPUs{}
	for boot, test := range []struct {
		without []int // from the last to the first
		added   int
		want    string
	}{
		{nil, 0, "A=0 B=1 C=2 D=3"},
		{[]int{1}, 0, "A=0 C=2/1 D=3/2"},
		{[]int{1}, 0, "A=0 C=2/1 D=3/2"},
		{nil, 0, "A=0 B=1 C=2 D=3"},
		{[]int{3}, 1, "A=0 B=1 C=2 E=3"}, // As where a spare part takes its place.
		{nil, 1, "A=0 B=1 C=2 E=3/4 D=4/3"},
	} {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			for _, gpu := range test.without {
				must(t, sim.Remove(gpu))
			}
			for range test.added {
				add(t, sim, "a30")
			}
			w := watchWith(t, sim, nvml.Options{Store: &memory{}, Known: known, Boot: fmt.Sprint(boot)})
			must(t, w.RestoreHealth(context.Background()))
			synctest.Wait()
			if got := w.numbers(); got != test.want {
				t.Errorf("boot %d: indexes %s, want %s", boot, got, test.want)
			}
		})
	}
}

// TestOneIndexOneGPU checks that a selector by index names one GPU, and the one that had the index.
func TestOneIndexOneGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		gpus, err := w.Inventory()
		must(t, err)
		must(t, sim.Remove(0))
		after(rescan)
		for _, gpu := range gpus[1:] {
			selector, err := sharing.ParseSelector(fmt.Sprint(gpu.Index))
			must(t, err)
			units, err := w.ClearHealth(context.Background(), selector)
			must(t, err)
			if len(units) != 1 || units[0].Unit != gpu.UUID || units[0].Index != fmt.Sprint(gpu.Index) {
				t.Errorf("GPU %d was %s and is %+v", gpu.Index, gpu.UUID, units)
			}
		}
	})
}

// TestMissingGPUIsForgotten checks that an operator can clear a GPU that was taken out, but not one that may
// still be there.
func TestMissingGPUIsForgotten(t *testing.T) {
	first, err := sharing.ParseSelector("0")
	must(t, err)
	synctest.Test(t, func(t *testing.T) {
		sim, known := simulate(t, "a30x4"), &knownGPUs{}
		w := watchWith(t, sim, nvml.Options{Store: &memory{}, Known: known, Boot: "first"})
		must(t, w.RestoreHealth(context.Background()))
		must(t, sim.Lose(0))
		after(rescan)
		_, err = w.ClearHealth(context.Background(), first)
		must(t, err)
		if got := w.numbers(); got != "A=0/lost B=1 C=2 D=3" {
			t.Errorf("indexes %s after a lost GPU was cleared", got)
		}
		must(t, sim.Remove(0))
		after(rescan)
		_, err = w.ClearHealth(context.Background(), first)
		must(t, err)
		after(rescan)
		if got := w.numbers(); got != "B=1/0 C=2/1 D=3/2" || len(known.list) != 3 {
			t.Errorf("indexes %s after a missing GPU was cleared, known %+v", got, known.list)
		}
		add(t, sim, "")
		after(rescan)
		if got := w.numbers(); got != "A=0 B=1 C=2 D=3" {
			t.Errorf("indexes %s when it is back", got)
		}
	})
}

// TestIndexStaysWhenItsOwnerIsForgotten checks that a GPU keeps the index that it got because of a missing one,
// even if the missing one is forgotten.
func TestIndexStaysWhenItsOwnerIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		must(t, sim.Remove(3))
		after(rescan)
		add(t, sim, "a30")
		after(rescan)
		missing, err := sharing.ParseSelector("3")
		must(t, err)
		_, err = w.ClearHealth(context.Background(), missing)
		must(t, err)
		after(rescan)
		if got := w.numbers(); got != "A=0 B=1 C=2 E=4/3" {
			t.Errorf("indexes %s", got)
		}
	})
}

// TestScanKnows checks that a single scan uses the indexes of the serving program.
func TestScanKnows(t *testing.T) {
	sim := simulate(t, "a30x4")
	gpus, err := nvml.Scan(sim)
	must(t, err)
	var known []nvml.KnownGPU
	for _, gpu := range gpus {
		known = append(known, nvml.KnownGPU{GPU: gpu})
	}
	must(t, sim.Remove(0))
	gpus, err = nvml.Scan(sim, known...)
	must(t, err)
	if got := numbers(gpus); got != "B=1/0 C=2/1 D=3/2" {
		t.Errorf("indexes %s", got)
	}
}
