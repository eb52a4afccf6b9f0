package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
)

func TestInventoryBeforeWatch(t *testing.T) {
	gpus, err := nvml.NewNode(simulate(t, "t4"), nvml.Options{}).Inventory()
	if gpus != nil || !errors.Is(err, sharing.ErrNotRead) {
		t.Errorf("Inventory() = %v, %v, want none and ErrNotRead", gpus, err)
	}
}

// TestWatchChanged checks that changed is called once for the first look, also on a node without GPUs, and then
// only for differences.
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

// TestWatchDriverComesLate checks that a missing driver is waited for, with growing pauses, and that Inventory
// returns the error.
func TestWatchDriverComesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		sim.InjectFault("Init", simnode.Fault{Return: nvml.LibraryNotFound, Times: 3})
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
		// The next failure counts as a first one.
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		after(rescan + time.Second)
		w.expect("a second after a failure", nil)
	})
}

// TestWatchMustOpenAtFirst checks that FailOnInitError applies only to the start: a driver that fails later is
// waited for.
func TestWatchMustOpenAtFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watchWith(t, sim, nvml.Options{FailOnInitError: true})
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded, Times: 1})
		after(2 * rescan)
		w.expect("with the driver again", nil)
		must(t, w.stop())

		sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded, Times: 1})
		err := nvml.NewNode(sim, nvml.Options{FailOnInitError: true}).Watch(t.Context(), func() { t.Error("news of no driver") })
		if !errors.Is(err, nvml.DriverNotLoaded) {
			t.Errorf("Watch() = %v, want DRIVER_NOT_LOADED", err)
		}
	})
}

// TestWatchDriverGoes checks that the GPUs and their faults are kept while the driver does not answer, and that
// it is reopened.
func TestWatchDriverGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		end := sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized})
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

// TestWatchEventsFail checks a wait for events that fails at once. NVIDIA's plugin waits again at once and marks
// every GPU unhealthy; Virgate does neither.
func TestWatchEventsFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		end := sim.InjectFault("EventSetWait", simnode.Fault{Return: nvml.GPUIsLost})
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
		must(t, sim.XID(1, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("when waiting works again", map[string]string{"1": "XID 79"})
		// The next failure counts as a first one: a wait at once, then at 0, 1 and 3 s.
		end = sim.InjectFault("EventSetWait", simnode.Fault{Return: nvml.GPUIsLost})
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
		sim.InjectFault("EventSetCreate", simnode.Fault{Return: nvml.Unknown, Times: 2})
		w := watch(t, sim)
		must(t, sim.SetTemperature(0, 95))
		after(rescan)
		w.expect("without events", map[string]string{"0": "temperature at which the board slows it down"})
		must(t, sim.ECC(0, true))
		synctest.Wait()
		w.expect("with events", map[string]string{"0": "double-bit ECC error, temperature at which the board slows it down"})
	})
}

// TestWatchDeafGPU checks that a GPU without events loses only its events.
func TestWatchDeafGPU(t *testing.T) {
	for _, call := range []string{"DeviceGetSupportedEventTypes", "DeviceRegisterEvents"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				_, err := sim.InjectGPUFault(0, call, simnode.Fault{Return: nvml.NotSupported})
				must(t, err)
				w := watch(t, sim)
				must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
				must(t, sim.XID(1, 79, nvml.WholeGPU, nvml.WholeGPU))
				after(rescan)
				w.expect("after two XIDs", map[string]string{"1": "XID 79"})
				if got := sim.Calls(call); got > 4 {
					t.Errorf("%s was called %d times, want one a GPU", call, got)
				}
			})
		})
	}
}

// TestWatchSlowLookup checks that a GPU whose look-up takes ten seconds delays only once.
func TestWatchSlowLookup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		_, err := sim.InjectGPUFault(3, "DeviceGetHandleByIndex", simnode.Fault{Delay: 10 * time.Second})
		must(t, err)
		w := watch(t, sim)
		if _, err := w.Inventory(); !errors.Is(err, sharing.ErrNotRead) {
			t.Errorf("error %v before the first pass is over, want ErrNotRead", err)
		}
		after(10 * time.Second)
		w.expect("after the first pass", nil)
		after(10 * rescan)
		if got := sim.Calls("DeviceGetHandleByIndex"); got != 8 {
			t.Errorf("%d lookups, want one a GPU", got)
		}
	})
}

// TestWatchEventDuringSlowPass checks that an event does not wait for a slow GPU.
func TestWatchEventDuringSlowPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		_, err := sim.InjectGPUFault(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 20 * time.Second, Times: 1})
		must(t, err)
		after(rescan)
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("during the pass", map[string]string{"0": "XID 79"})
		after(time.Minute)
		w.expect("after the pass", map[string]string{"0": "XID 79"})
	})
}

// TestVersionsStay checks that the driver's versions stay known if one GPU answers late, as rules use them.
func TestVersionsStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		want := w.Versions()
		if want == (nvml.Versions{}) {
			t.Fatal("no versions after the first pass")
		}
		_, err := sim.InjectGPUFault(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 20 * time.Second, Times: 1})
		must(t, err)
		for second := range 90 {
			after(time.Second)
			if got := w.Versions(); got != want {
				t.Fatalf("after %d s: %+v, want %+v", second+1, got, want)
			}
		}
		w.expect("after the late answer", nil)
	})
}

// TestPauseEvents checks that a GPU is in no event set from PauseEvents until it is resumed, and that the others
// get events again at once.
func TestPauseEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h100x2")
		w := watch(t, sim)
		gpus, err := w.Inventory()
		must(t, err)
		resume, err := w.PauseEvents(t.Context(), gpus[0].UUID)
		must(t, err)
		synctest.Wait()
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		must(t, sim.XID(1, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		gpus, err = w.Inventory()
		must(t, err)
		if !gpus[0].Health.Healthy() || gpus[1].Health.Healthy() {
			t.Errorf("faults %q and %q, want one of the second GPU alone", gpus[0].Health.Reason, gpus[1].Health.Reason)
		}
		resume()
		must(t, w.Refresh(t.Context()))
		synctest.Wait()
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		if gpus, _ = w.Inventory(); gpus[0].Health.Healthy() {
			t.Error("the first GPU is not heard after it was resumed")
		}
	})
}

// TestRefresh checks that the inventory then has partitions created before the call.
func TestRefresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h100+all-enabled")
		w := watch(t, sim)
		_, err := nvmltest.CreateGPUInstance(sim, 0, 19, 0)
		must(t, err)
		_, _, err = nvmltest.CreateComputeInstance(sim, 0, 1, 1)
		must(t, err)
		must(t, w.Refresh(t.Context()))
		gpus, err := w.Inventory()
		must(t, err)
		if len(gpus[0].Partitions) != 1 {
			t.Errorf("%d partitions, want the new one", len(gpus[0].Partitions))
		}
	})
	t.Run("a driver that fails once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "h100+all-enabled")
			w := watch(t, sim)
			sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
			_, err := nvmltest.CreateGPUInstance(sim, 0, 19, 0)
			must(t, err)
			_, _, err = nvmltest.CreateComputeInstance(sim, 0, 1, 1)
			must(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			must(t, w.Refresh(ctx))
			gpus, err := w.Inventory()
			must(t, err)
			if len(gpus[0].Partitions) != 1 {
				t.Errorf("%d partitions, want the new one", len(gpus[0].Partitions))
			}
		})
	})
	t.Run("without a driver", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "h100")
			sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
			w := watch(t, sim)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := w.Refresh(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("LookAgain: %v, want it to end with its context", err)
			}
			if _, err := w.PauseEvents(ctx, "GPU-1"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Quiet: %v, want it to end with its context", err)
			}
		})
	})
}

// TestLastEventCounts checks that an event is not lost if it occurs while the wait for events is ended.
func TestLastEventCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		gpus, err := w.Inventory()
		must(t, err)
		want := map[string]string{}
		for gpu := 1; gpu < 8; gpu++ {
			resumes := make(chan func(), 1)
			go func() {
				resume, _ := w.PauseEvents(t.Context(), gpus[0].UUID)
				resumes <- resume
			}()
			synctest.Wait()
			must(t, sim.XID(gpu, 79, nvml.WholeGPU, nvml.WholeGPU))
			(<-resumes)()
			after(time.Second)
			want[fmt.Sprint(gpu)] = "XID 79"
			w.expect("a second later", want)
		}
	})
}
