package nvml_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestHiccupIsNoReset holds that a board which cannot be read for once, just when
// all handles are new, was not reset for that.
func TestHiccupIsNoReset(t *testing.T) {
	pulled := func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(3)) }
	tests := []struct {
		name string
		// times are how often the board cannot be read.
		times     int
		meanwhile func(*testing.T, *simnode.Node)
	}{
		{"a board is pulled", 1, pulled},
		{"the boards cannot be listed", 1, unlisted},
		{"a board is pulled, and the boards cannot be listed", 2, func(t *testing.T, sim *simnode.Node) {
			pulled(t, sim)
			synctest.Wait()
			unlisted(t, sim)
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				w := watch(t, sim)
				must(t, sim.XID(2, 79, nvml.WholeBoard, nvml.WholeBoard))
				after(25 * time.Second)
				_, err := sim.ScriptGPU(2, "DeviceGetName", simnode.Fault{Return: nvml.Unknown, Times: test.times})
				must(t, err)
				test.meanwhile(t, sim)
				after(8 * time.Second)
				gpus, _ := w.Inventory()
				if fault := gpus[2].Fault; fault != "XID 79, cannot be read" {
					t.Errorf("fault %q while it cannot be read", fault)
				}
				after(time.Minute)
				gpus, err = w.Inventory()
				must(t, err)
				if fault := gpus[2].Fault; fault != "XID 79" {
					t.Errorf("fault %q, want XID 79", fault)
				}
			})
		})
	}
}

// TestLostForOnce holds that a handle which says for once that its board is lost is
// evidence of a reset when the board had to be looked up anew, which may give the
// same handle, and none when the handle works again by itself.
func TestLostForOnce(t *testing.T) {
	tests := []struct {
		name string
		// failures are how often the board cannot be looked up.
		failures int
		want     map[string]string
	}{
		{"it is looked up anew", 0, nil},
		{"it works again", 1, map[string]string{"0": "XID 79"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "t4")
				w := watch(t, sim)
				must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
				// A probe asks, and then a whole reading.
				sim.Script("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.GPUIsLost, Times: 2})
				if test.failures > 0 {
					sim.Script("DeviceGetHandleByIndex", simnode.Fault{Return: nvml.Unknown, Times: test.failures})
				}
				after(time.Minute)
				w.expect("a minute later", test.want)
			})
		})
	}
}

// TestResetOfStuckBoard holds that a board with a call that hangs is not looked up
// anew: that its handle is dead shows only when the call returns.
func TestResetOfStuckBoard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, nvml.WithDeadlines(sim, nvml.Limits{}))
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		must(t, sim.Heal(0))
		sim.Script("DeviceGetMemoryInfo", simnode.Fault{Delay: 70 * time.Second, Times: 1})
		after(time.Minute)
		w.expect("while it is stuck", map[string]string{"0": "XID 79, memory query: TIMEOUT"})
		after(2 * time.Minute)
		w.expect("when the call has returned", nil)
	})
}

// TestDriverReloadedSlowBoard holds that loading a driver resets a board also
// when it is the last to answer the new one.
func TestDriverReloadedSlowBoard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		must(t, sim.XID(3, 79, nvml.WholeBoard, nvml.WholeBoard))
		sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		sim.Script("Init", simnode.Fault{Return: nvml.DriverNotLoaded, Times: 2})
		_, err := sim.ScriptGPU(3, "DeviceGetName", simnode.Fault{Delay: 40 * time.Second, Times: 1})
		must(t, err)
		after(2 * time.Minute)
		w.expect("with the new driver", nil)
	})
}
