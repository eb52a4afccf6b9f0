package nvml_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestReopenWithSlowBoard holds that a board which is slow to answer when the
// driver is given up does not keep it from being opened again.
func TestReopenWithSlowBoard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		end, err := sim.ScriptGPU(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 3 * time.Second})
		must(t, err)
		sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		after(time.Minute)
		if opened := sim.Calls("Init"); opened != 2 {
			t.Errorf("the driver was opened %d times, want twice", opened)
		}
		must(t, sim.Temperature(0, 95))
		after(time.Minute)
		w.expect("with the driver again", map[string]string{"0": "temperature 95 °C above 90 °C"})
		end()
		after(10 * time.Second)
	})
}

// TestSlowResetAtTheEnd holds that a reset is not lost when the look that sees
// it takes longer than the driver is open.
func TestSlowResetAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4+all-balanced")
		w := watch(t, sim)
		must(t, sim.XID(2, 79, nvml.WholeBoard, nvml.WholeBoard))
		after(25 * time.Second)
		w.expect("before the reset", map[string]string{"2": "XID 79"})
		must(t, sim.Heal(2))
		_, err := sim.ScriptGPU(2, "DeviceGetHandleByIndex", simnode.Fault{Delay: 20 * time.Second, Times: 1})
		must(t, err)
		after(8 * time.Second)
		w.expect("while its new handle is looked up", map[string]string{"2": "XID 79"})
		sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		must(t, sim.XID(0, 94, 99, 0)) // Of an unknown partition: look again.
		after(time.Minute)
		w.expect("with the driver again", nil)
		if opened := sim.Calls("Init"); opened != 2 {
			t.Errorf("the driver was opened %d times, want twice", opened)
		}
	})
}

// TestResetWhileTheDriverCloses holds that a reset is seen which happens while a
// slow board keeps the driver from being closed.
func TestResetWhileTheDriverCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4+all-balanced")
		w := watch(t, sim)
		must(t, sim.XID(2, 79, nvml.WholeBoard, nvml.WholeBoard))
		_, err := sim.ScriptGPU(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 15 * time.Second, Times: 1})
		must(t, err)
		after(13 * time.Second)
		sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		must(t, sim.XID(0, 94, 99, 0)) // Of an unknown partition: look again.
		after(5 * time.Second)
		must(t, sim.Heal(2))
		if closed := sim.Calls("Shutdown"); closed != 0 {
			t.Error("the driver was closed before the reset")
		}
		after(time.Minute)
		w.expect("with the driver again", nil)
	})
}

// TestFarewellCondemnsNobody holds that a driver which fails altogether makes no
// board faulty on its way out.
func TestFarewellCondemnsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		after(25 * time.Second)
		sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
		end := sim.Script("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		after(5*time.Second + 500*time.Millisecond)
		end()
		gpus, err := w.Inventory()
		if err == nil {
			t.Error("the driver has not failed")
		}
		for _, gpu := range gpus {
			if gpu.Fault != "" {
				t.Errorf("GPU %d: fault %q", gpu.Index, gpu.Fault)
			}
		}
	})
}
