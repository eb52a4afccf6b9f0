package nvml_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// faults are by UUID, of the boards that have one.
func (w *watched) faults() map[string]string {
	gpus, err := w.Inventory()
	must(w.t, err)
	found := map[string]string{}
	for _, gpu := range gpus {
		if gpu.Fault != "" {
			found[gpu.UUID] = gpu.Fault
		}
	}
	return found
}

// TestUncountedIsNotLost lets a probe find a board that is back in the place of one
// that could not be read: nobody counted the boards, so the other one is not lost,
// and its error not over.
func TestUncountedIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		before, _ := w.Inventory()
		must(t, sim.XID(1, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		end, err := sim.ScriptGPU(1, "DeviceGetName", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		must(t, sim.Remove(0))
		after(5 * time.Second)
		end()
		_, err = sim.Add("")
		must(t, err)
		after(2 * time.Minute)
		if diff := cmp.Diff(map[string]string{before[1].UUID: "XID 79"}, w.faults()); diff != "" {
			t.Errorf("faults (-want +got):\n%s", diff)
		}
	})
}

// TestLateLookOfOldEnumeration holds that a look which began before the boards were
// enumerated anew says nothing about where they are.
func TestLateLookOfOldEnumeration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		before, _ := w.Inventory()
		_, err := sim.ScriptGPU(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 6 * time.Second, Times: 1})
		must(t, err)
		after(13 * time.Second)
		must(t, sim.Remove(0))
		after(4 * time.Second)
		gpus, err := w.Inventory()
		must(t, err)
		for _, gpu := range gpus {
			if gpu.UUID == before[3].UUID && gpu.Index != 2 {
				t.Errorf("GPU 3 has index %d, want 2", gpu.Index)
			}
		}
	})
}

// TestEnumerateAsksOnce holds that boards whose handles are as they were are not
// asked more for it.
func TestEnumerateAsksOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		_, err := sim.Add("t4")
		must(t, err)
		after(25 * time.Second)
		asked := sim.Calls("DeviceGetMemoryInfo")
		after(10 * time.Second)
		if got := sim.Calls("DeviceGetMemoryInfo") - asked; got != 5 {
			t.Errorf("%d memory queries, want one of each board", got)
		}
		w.expect("with another board", nil)
	})
}

// TestStuckBoardIsAskedOnce holds that a board is not looked at while it is being
// looked at.
func TestStuckBoardIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		asked := sim.Calls("DeviceGetMemoryInfo")
		sim.Script("DeviceGetMemoryInfo", simnode.Fault{Delay: time.Hour})
		after(10 * time.Minute)
		if got := sim.Calls("DeviceGetMemoryInfo") - asked; got != 1 {
			t.Errorf("%d memory queries while one is stuck, want that one", got)
		}
		_ = w.stop()
		after(2 * time.Hour)
	})
}

// TestExchangeSeenByProbe holds that boards which change places do not cost the
// driver, whoever sees it first.
func TestExchangeSeenByProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		sim.Script("DeviceGetSupportedEventTypes", simnode.Fault{Return: nvml.NotSupported})
		w := watch(t, sim)
		before, _ := w.Inventory()
		exchange(t, sim)
		after(15 * time.Second)
		if diff := cmp.Diff(map[string]string{before[0].UUID: "lost"}, w.faults()); diff != "" {
			t.Errorf("faults (-want +got):\n%s", diff)
		}
		if gpus, _ := w.Inventory(); len(gpus) != 5 {
			t.Errorf("%d GPUs, want 5 with the one that is gone", len(gpus))
		}
		if got := sim.Calls("Init"); got != 1 {
			t.Errorf("the driver was opened %d times, want once", got)
		}
	})
}

// reordered is a driver that can exchange the places of its first two boards.
type reordered struct {
	*simnode.Node
	now atomic.Bool
}

func (d *reordered) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	if d.now.Load() && index < 2 {
		index = 1 - index
	}
	return d.Node.DeviceGetHandleByIndex(index)
}

// TestResetAndReordered holds that of two boards that change places and are reset
// neither reset is lost, though one board is seen before the other.
func TestResetAndReordered(t *testing.T) {
	for _, delay := range []time.Duration{0, 3 * time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				driver := &reordered{Node: simulate(t, "a30x4")}
				w := watch(t, driver)
				for gpu := range 3 {
					must(t, driver.XID(gpu, 79, nvml.WholeBoard, nvml.WholeBoard))
				}
				synctest.Wait()
				for gpu := range 2 {
					must(t, driver.Heal(gpu))
				}
				driver.now.Store(true)
				_, err := driver.ScriptGPU(1, "DeviceGetMemoryInfo", simnode.Fault{Delay: delay, Times: 1})
				must(t, err)
				after(time.Minute)
				w.expect("a minute later", map[string]string{"2": "XID 79"})
			})
		})
	}
}
