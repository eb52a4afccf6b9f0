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
)

// TestQuiet holds that a board is in no event set from Quiet on until it is
// resumed, and that the others are heard again at once.
func TestQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h100x2")
		w := watch(t, sim)
		gpus, err := w.Inventory()
		must(t, err)
		resume, err := w.Quiet(t.Context(), gpus[0].UUID)
		must(t, err)
		synctest.Wait()
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		must(t, sim.XID(1, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		gpus, err = w.Inventory()
		must(t, err)
		if gpus[0].Fault != "" || gpus[1].Fault == "" {
			t.Errorf("faults %q and %q, want one of the second GPU alone", gpus[0].Fault, gpus[1].Fault)
		}
		resume()
		must(t, w.LookAgain(t.Context()))
		synctest.Wait()
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		if gpus, _ = w.Inventory(); gpus[0].Fault == "" {
			t.Error("the first GPU is not heard after it was resumed")
		}
	})
}

// TestLookAgain holds that the inventory shows what was made before the call.
func TestLookAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h100+all-enabled")
		w := watch(t, sim)
		_, err := sim.CreateGPUInstance(0, 19, 0)
		must(t, err)
		_, _, err = sim.CreateComputeInstance(0, 1, 1)
		must(t, err)
		must(t, w.LookAgain(t.Context()))
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
			sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
			_, err := sim.CreateGPUInstance(0, 19, 0)
			must(t, err)
			_, _, err = sim.CreateComputeInstance(0, 1, 1)
			must(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			must(t, w.LookAgain(ctx))
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
			sim.Script("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
			w := watch(t, sim)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := w.LookAgain(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("LookAgain: %v, want it to end with its context", err)
			}
			if _, err := w.Quiet(ctx, "GPU-1"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Quiet: %v, want it to end with its context", err)
			}
		})
	})
}

// TestLastEventCounts holds that what a board reports while the wait for events is
// being ended is not lost.
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
				resume, _ := w.Quiet(t.Context(), gpus[0].UUID)
				resumes <- resume
			}()
			synctest.Wait()
			must(t, sim.XID(gpu, 79, nvml.WholeBoard, nvml.WholeBoard))
			(<-resumes)()
			after(time.Second)
			want[fmt.Sprint(gpu)] = "XID 79"
			w.expect("a second later", want)
		}
	})
}
