package nvml_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestFormerHandleStuck holds that a call for a board's handle from before, which
// never returns, costs neither that board nor the one that has its index now.
func TestFormerHandleStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, nvml.WithDeadlines(sim, nvml.Limits{}))
		before, err := w.Inventory()
		must(t, err)
		must(t, sim.Heal(1))
		// The second memory query is that of the handle before the reset.
		_, err = sim.ScriptGPU(1, "DeviceGetMemoryInfo", simnode.Fault{Delay: time.Hour, Skip: 1, Times: 1})
		must(t, err)
		must(t, sim.Remove(0))
		for range 12 {
			after(10 * time.Second)
			gpus, err := w.Inventory()
			must(t, err)
			for _, gpu := range gpus {
				if gpu.UUID != before[0].UUID && gpu.Fault != "" {
					t.Errorf("GPU %d: fault %q", gpu.Index, gpu.Fault)
				}
			}
		}
		if calls := sim.Calls("DeviceGetMemoryInfo"); calls < 3*12 {
			t.Errorf("%d memory queries in two minutes, want those of three boards", calls)
		}
		after(time.Hour)
	})
}

// TestBoardMovesAway holds that a board which is stuck stays so at another index,
// and that the one which comes to its old index does not wait for it for ever.
func TestBoardMovesAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		boards := handles(t, lib)
		must(t, sim.Remove(0))
		for index, want := range boards[1:] {
			device, err := lib.DeviceGetHandleByIndex(index)
			if device != want || err != nil {
				t.Fatalf("GPU %d is now %v, %v, want %v", index, device, err, want)
			}
		}
		_, err := sim.ScriptGPU(1, "DeviceGetName", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)
		_, err = lib.DeviceGetName(boards[2])
		if err == nil {
			t.Fatal("the board is not stuck")
		}
		for index, stuck := range []bool{false, true, false} {
			if _, err := lib.DeviceGetHandleByIndex(index); (err != nil) != stuck {
				t.Errorf("look-up of GPU %d: %v", index, err)
			}
			if _, err := lib.DeviceGetUUID(boards[index+1]); (err != nil) != stuck {
				t.Errorf("UUID of GPU %d: %v", index, err)
			}
		}
		after(time.Hour)
	})
}

// TestStuckLookUp holds that a look-up which hangs is stuck with its index alone.
func TestStuckLookUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		boards := handles(t, lib)
		_, err := sim.ScriptGPU(1, "DeviceGetHandleByIndex", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)
		for range 2 {
			if _, err := lib.DeviceGetHandleByIndex(1); !errors.Is(err, nvml.Timeout) {
				t.Errorf("the look-up that hangs: %v", err)
			}
		}
		if calls := sim.Calls("DeviceGetHandleByIndex"); calls != 4+1 {
			t.Errorf("%d look-ups reached the driver, want one that hangs", calls-4)
		}
		_, err = lib.DeviceGetHandleByIndex(2)
		must(t, err)
		_, err = lib.DeviceGetUUID(boards[1])
		must(t, err)
		_, err = lib.DeviceGetCount()
		must(t, err)
		after(time.Hour)
	})
}
