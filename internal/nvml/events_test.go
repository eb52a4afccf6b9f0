package nvml_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/nvmltest"
)

// deaf are the GPUs without events, by index, with the reason.
func (w *watched) deaf() map[int]string {
	index := map[string]int{}
	gpus, _ := w.Inventory()
	for _, gpu := range gpus {
		index[gpu.UUID] = gpu.Index
	}
	deaf := map[int]string{}
	for _, m := range w.Health().Monitors {
		if m.Degraded != "" {
			deaf[index[m.GPU]] = m.Degraded
		}
	}
	return deaf
}

func (w *watched) expectDeaf(when string, want map[int]string) {
	w.t.Helper()
	if want == nil {
		want = map[int]string{}
	}
	if diff := cmp.Diff(want, w.deaf()); diff != "" {
		w.t.Errorf("%s: GPUs that are not heard (-want +got):\n%s", when, diff)
	}
}

// TestMonitorDegraded checks that the report shows which GPUs get no events, and that they stay healthy.
func TestMonitorDegraded(t *testing.T) {
	const fails = "waiting for events fails"
	t.Run("the wait fails", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			w := watch(t, sim)
			w.expectDeaf("at first", nil)
			if n := len(w.Health().Monitors); n != 4 {
				t.Errorf("%d monitors, want 4", n)
			}
			end := sim.InjectFault("EventSetWait", simnode.Fault{Return: nvml.Unknown})
			after(20 * time.Second)
			w.expectDeaf("while the wait fails", map[int]string{0: fails, 1: fails, 2: fails, 3: fails})
			w.expect("while the wait fails", nil)
			// Probes find what events do not report.
			must(t, sim.SetTemperature(1, 95))
			after(11 * time.Second)
			w.expect("while one is hot", map[string]string{"1": "temperature at which the board slows it down"})
			end()
			after(time.Minute)
			w.expectDeaf("when it works again", nil)
		})
	})
	t.Run("a lost GPU", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			w := watch(t, sim)
			after(time.Minute)
			must(t, sim.Lose(2))
			after(time.Minute)
			w.expectDeaf("while it is lost", map[int]string{2: fails})
			must(t, sim.Heal(2))
			after(time.Minute)
			w.expectDeaf("when it is back", nil)
		})
	})
	t.Run("no event set", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "t4")
			sim.InjectFault("EventSetCreate", simnode.Fault{Return: nvml.Unknown})
			w := watch(t, sim)
			after(time.Minute)
			w.expectDeaf("a minute later", map[int]string{0: fails})
		})
	})
	t.Run("an old GPU", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			_, err := sim.InjectGPUFault(1, "DeviceGetSupportedEventTypes", simnode.Fault{Return: nvml.NotSupported})
			must(t, err)
			_, err = sim.InjectGPUFault(2, "DeviceRegisterEvents", simnode.Fault{Return: nvml.NoPermission, Times: 2})
			must(t, err)
			w := watch(t, sim)
			w.expectDeaf("at first", map[int]string{1: "the GPU has no events", 2: "not registered for events: NO_PERMISSION"})
			after(time.Minute)
			w.expectDeaf("a minute later", map[int]string{1: "the GPU has no events"})
			w.expect("a minute later", nil)
		})
	})
	t.Run("the driver goes", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "t4")
			w := watch(t, sim)
			end := sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized})
			after(time.Minute)
			w.expectDeaf("without a driver", map[int]string{0: fails})
			end()
			after(time.Minute)
			w.expectDeaf("with the driver", nil)
		})
	})
}

// TestRegisteringIsUnknown checks that an event set in an undefined state, because a GPU could not be registered,
// is replaced. The new set has the GPU if that happened once, and lacks it while it goes on. No set is leaked.
func TestRegisteringIsUnknown(t *testing.T) {
	for name, test := range map[string]struct {
		times int
		deaf  map[int]string
	}{
		"once": {1, nil}, "again and again": {0, map[int]string{2: "not registered for events: UNKNOWN"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				_, err := sim.InjectGPUFault(2, "DeviceRegisterEvents", simnode.Fault{Return: nvml.Unknown, Times: test.times})
				must(t, err)
				w := watch(t, sim)
				const fails = "waiting for events fails"
				after(time.Second / 2) // The wait for the set's events ends.
				w.expectDeaf("at first", map[int]string{0: fails, 1: fails, 2: "not registered for events: UNKNOWN", 3: fails})
				after(2 * time.Second)
				w.expectDeaf("2 s later", test.deaf)
				made := sim.Calls("EventSetCreate")
				for gpu := range 4 {
					must(t, sim.XID(gpu, 79, nvml.WholeGPU, nvml.WholeGPU))
				}
				after(time.Second)
				faults := map[string]string{"0": "XID 79", "1": "XID 79", "2": "XID 79", "3": "XID 79"}
				if test.deaf != nil {
					delete(faults, "2")
				}
				w.expect("after an XID of each", faults)
				after(5 * time.Minute)
				w.expectDeaf("minutes later", test.deaf)
				if now := sim.Calls("EventSetCreate"); test.deaf == nil && now != made {
					t.Errorf("%d event sets, 2 s after the start there were %d", now, made)
				}
				// The set that works is not replaced any more.
				for gpu := range 4 {
					must(t, sim.XID(gpu, 48, nvml.WholeGPU, nvml.WholeGPU))
				}
				after(time.Second)
				for unit := range faults {
					faults[unit] += ", XID 48"
				}
				w.expect("after another XID of each", faults)
				must(t, w.stop())
				if made, freed := sim.Calls("EventSetCreate"), sim.Calls("EventSetFree"); made != freed {
					t.Errorf("%d event sets made, %d freed", made, freed)
				}
			})
		})
	}
}

// TestSlowGPU checks that a GPU that answers slowly or not at all stays healthy, and delays neither the probes of
// other GPUs nor their discovery.
func TestSlowGPU(t *testing.T) {
	for _, delay := range []time.Duration{3 * time.Second, time.Hour} {
		t.Run(delay.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "dgx-a100")
				w := watch(t, sim)
				end, err := sim.InjectGPUFault(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: delay})
				must(t, err)
				after(11 * time.Second)
				must(t, sim.SetTemperature(5, 95))
				_, err = sim.Add("t4")
				must(t, err)
				// A probe each 10 s, and 2 s for the slow one.
				after(rescan + 6*time.Second)
				w.expect("with a slow GPU", map[string]string{"5": "temperature at which the board slows it down"})
				gpus, _ := w.Inventory()
				if len(gpus) != 9 {
					t.Errorf("%d GPUs, want 9", len(gpus))
				}
				if calls := sim.Calls("DeviceGetMemoryInfo"); calls < 3*8 {
					t.Errorf("%d memory queries, want those of the other GPUs", calls)
				}
				end()
				must(t, sim.SetTemperature(3, 95))
				after(delay + time.Minute)
				w.expect("when it answers again", map[string]string{
					"3": "temperature at which the board slows it down", "5": "temperature at which the board slows it down",
				})
				if err := w.stop(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestSlowGPUIsHeard checks that a slow GPU's late answer counts when it arrives, not with the next probe.
func TestSlowGPUIsHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		end, err := sim.InjectGPUFault(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 3 * time.Second})
		must(t, err)
		must(t, sim.SetTemperature(3, 95))
		after(14 * time.Second)
		w.expect("4 s after the probe began", map[string]string{"3": "temperature at which the board slows it down"})
		end()
		after(20 * time.Second)
	})
}

// TestSlowDriver checks that a driver that takes 3 s for every call still gives an inventory, and that all GPUs
// stay healthy.
func TestSlowDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		for _, call := range []string{"DeviceGetUUID", "DeviceGetMemoryInfo", "DeviceGetTemperature", "DeviceGetMigMode"} {
			sim.InjectFault(call, simnode.Fault{Delay: 3 * time.Second})
		}
		w := watch(t, sim)
		after(time.Minute)
		w.expect("a minute later", nil)
		if gpus, _ := w.Inventory(); len(gpus) != 4 {
			t.Errorf("%d GPUs, want 4", len(gpus))
		}
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("right after an XID", map[string]string{"0": "XID 79"})
		_ = w.stop()
		after(time.Minute)
	})
}

// TestDriverReloaded checks that reloading the driver counts as a reset of the GPUs.
func TestDriverReloaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded, Times: 2})
		after(40 * time.Second)
		w.expect("with the new driver", map[string]string{"0": "recovering from XID 79"})
		after(11 * time.Second)
		w.expect("a probe later", nil)
	})
}

// TestProbePartition checks that a probe sees a partition fail, and another one vanish, between two passes.
func TestProbePartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4+all-balanced")
		w := watch(t, sim)
		must(t, nvmltest.DestroyComputeInstance(sim, 0, 2, 0))
		must(t, nvmltest.DestroyGPUInstance(sim, 0, 2))
		_, err := sim.InjectGPUFault(1, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		after(11 * time.Second)
		gpus, _ := w.Inventory()
		if len(gpus[0].Partitions) != 2 {
			t.Errorf("%d partitions after one was destroyed, want 2", len(gpus[0].Partitions))
		}
		w.expect("after a probe", map[string]string{
			"1": "memory query: UNKNOWN", "1:0": "memory query: UNKNOWN", "1:1": "memory query: UNKNOWN", "1:2": "memory query: UNKNOWN",
		})
	})
}
