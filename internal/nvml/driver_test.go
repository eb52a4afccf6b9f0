package nvml_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

func TestInventoryBeforeWatch(t *testing.T) {
	gpus, err := nvml.NewNode(simulate(t, "t4"), nvml.Options{}).Inventory()
	if gpus != nil || !errors.Is(err, nvml.ErrNotReady) {
		t.Errorf("Inventory() = %v, %v, want none and ErrNotReady", gpus, err)
	}
}

// TestWatchChanged holds that changed is called once for the first look, also
// at a node without GPUs, and then for differences only.
func TestWatchChanged(t *testing.T) {
	for _, name := range []string{"empty", "dgx-a100"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, name)
				w := watch(t, sim)
				after(10 * rescan)
				if w.changes != 1 {
					t.Errorf("changed was called %d times for a node that never changes, want 1", w.changes)
				}
				if _, err := sim.Add("t4"); err != nil {
					t.Fatal(err)
				}
				after(10 * rescan)
				if w.changes != 2 {
					t.Errorf("changed was called %d times after one change, want 2", w.changes)
				}
			})
		})
	}
}

// TestWatchDriverComesLate holds that a missing driver is waited for, with
// growing pauses, and that Inventory says what is the matter.
func TestWatchDriverComesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		sim.Script("Init", simnode.Fault{Return: nvml.LibraryNotFound, Times: 3})
		w := watch(t, sim)
		gpus, err := w.Inventory()
		if gpus != nil || !errors.Is(err, nvml.LibraryNotFound) {
			t.Fatalf("Inventory() = %v, %v, want none and LIBRARY_NOT_FOUND", gpus, err)
		}
		after(6 * time.Second)
		if got := sim.Calls("Init"); got != 3 {
			t.Errorf("%d tries in 6 s, want 3: at 0 s, 1 s and 3 s", got)
		}
		after(time.Second)
		w.expect("with the driver", nil)
		if gpus, _ := w.Inventory(); len(gpus) != 8 {
			t.Errorf("%d GPUs, want 8", len(gpus))
		}
		if w.changes != 2 {
			t.Errorf("changed was called %d times, want 2: no driver, driver", w.changes)
		}
		// The next failure is a first one again.
		sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		after(rescan + time.Second)
		w.expect("a second after a failure", nil)
	})
}

// TestWatchDriverGoes holds that the GPUs and their faults stay known while the
// driver does not answer, and that it is opened anew.
func TestWatchDriverGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		end := sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized})
		after(rescan)
		gpus, err := w.Inventory()
		if len(gpus) != 8 || !errors.Is(err, nvml.Uninitialized) {
			t.Fatalf("Inventory() = %d GPUs, %v, want 8 and UNINITIALIZED", len(gpus), err)
		}
		end()
		after(rescan)
		w.expect("with the driver again", map[string]string{"0": "XID 79"})
		must(t, w.stop())
		if opened, closed := sim.Calls("Init"), sim.Calls("Shutdown"); opened < 2 || opened != closed {
			t.Errorf("%d times Init, %d times Shutdown, want the same and more than one", opened, closed)
		}
		if made, freed := sim.Calls("EventSetCreate"), sim.Calls("EventSetFree"); made < 2 || made != freed {
			t.Errorf("%d event sets made, %d freed, want the same and more than one", made, freed)
		}
	})
}

// TestWatchEventsFail: NVIDIA's plugin, when a wait for events fails at once,
// waits again at once and condemns every GPU. Here neither happens.
func TestWatchEventsFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		end := sim.Script("EventSetWait", simnode.Fault{Return: nvml.GPUIsLost})
		w := watch(t, sim)
		after(time.Minute)
		w.expect("while waiting fails", nil)
		// At 0, 1, 3, 7, 15 and 31 s, where the pause reaches its limit.
		if got := sim.Calls("EventSetWait"); got != 6 {
			t.Errorf("%d waits in a minute, want 6", got)
		}
		if got := sim.Calls("DeviceGetCount"); got > 20 {
			t.Errorf("%d passes in a minute, want few", got)
		}
		end()
		after(time.Minute)
		must(t, sim.XID(1, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		w.expect("when waiting works again", map[string]string{"1": "XID 79"})
		// The next failure is a first one again: a wait at once, then at 0, 1 and
		// 3 s.
		end = sim.Script("EventSetWait", simnode.Fault{Return: nvml.GPUIsLost})
		waits := sim.Calls("EventSetWait")
		after(5 * time.Second)
		if got := sim.Calls("EventSetWait") - waits; got != 4 {
			t.Errorf("%d waits in 5 s after a new failure, want 4", got)
		}
		end()
		after(time.Minute)
		if made, freed := sim.Calls("EventSetCreate"), sim.Calls("EventSetFree"); made != freed+1 {
			t.Errorf("%d event sets made, %d freed, want one left", made, freed)
		}
	})
}

func TestWatchNoEventSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		sim.Script("EventSetCreate", simnode.Fault{Return: nvml.Unknown, Times: 2})
		w := watch(t, sim)
		must(t, sim.Temperature(0, 95))
		after(rescan)
		w.expect("without events", map[string]string{"0": "temperature 95 °C above 90 °C"})
		must(t, sim.ECC(0, true))
		synctest.Wait()
		w.expect("with events", map[string]string{"0": "double-bit ECC error, temperature 95 °C above 90 °C"})
	})
}

// TestWatchDeafBoard holds that a board without events has only none.
func TestWatchDeafBoard(t *testing.T) {
	for _, call := range []string{"DeviceGetSupportedEventTypes", "DeviceRegisterEvents"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				_, err := sim.ScriptGPU(0, call, simnode.Fault{Return: nvml.NotSupported})
				must(t, err)
				w := watch(t, sim)
				must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
				must(t, sim.XID(1, 79, nvml.WholeBoard, nvml.WholeBoard))
				after(rescan)
				w.expect("after two XIDs", map[string]string{"1": "XID 79"})
				if got := sim.Calls(call); got > 4 {
					t.Errorf("%s was called %d times, want one a board", call, got)
				}
			})
		})
	}
}

// TestWatchSlowLookup holds that a board whose handle takes ten seconds costs
// them once.
func TestWatchSlowLookup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		_, err := sim.ScriptGPU(3, "DeviceGetHandleByIndex", simnode.Fault{Delay: 10 * time.Second})
		must(t, err)
		w := watch(t, sim)
		if _, err := w.Inventory(); !errors.Is(err, nvml.ErrNotReady) {
			t.Errorf("error %v before the first pass is over, want ErrNotReady", err)
		}
		after(10 * time.Second)
		w.expect("after the first pass", nil)
		after(10 * rescan)
		if got := sim.Calls("DeviceGetHandleByIndex"); got != 8 {
			t.Errorf("%d lookups, want one a board", got)
		}
	})
}

// TestWatchEventDuringSlowPass holds that an event does not wait for a board
// that answers slowly.
func TestWatchEventDuringSlowPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		_, err := sim.ScriptGPU(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 20 * time.Second, Times: 1})
		must(t, err)
		after(rescan)
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		w.expect("during the pass", map[string]string{"0": "XID 79"})
		after(time.Minute)
		w.expect("after the pass", map[string]string{"0": "XID 79"})
	})
}
