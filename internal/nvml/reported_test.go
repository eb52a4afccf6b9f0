package nvml_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// Each test in this file is about a bug that users reported of another device plugin.

// TestXIDMarksItsUnits reproduces reports that an event marked one of several units, or the wrong one. A
// partition's XID marks that partition, and a GPU's XID the GPU.
func TestXIDMarksItsUnits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h200+all-1g.35gb")
		w := watch(t, sim)
		gpus, _ := w.Inventory()
		want := map[string]string{}
		for i, p := range gpus[0].Partitions {
			must(t, sim.XID(0, 94, uint32(p.GI), uint32(p.CI)))
			synctest.Wait()
			want[[]string{"0:0", "0:1", "0:2", "0:3"}[i]] = "XID 94"
			w.expect("after an XID of one more", want)
		}
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		want["0"] = "XID 79"
		w.expect("after one of the GPU", want)
	})
}

// TestGPUComesBack reproduces a report that a GPU never came back.
func TestGPUComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		must(t, sim.XID(0, 94, nvml.WholeGPU, nvml.WholeGPU))
		must(t, sim.ECC(1, true))
		synctest.Wait()
		w.expect("after both", map[string]string{"0": "XID 94", "1": "double-bit ECC error"})
		after(6 * time.Minute)
		w.expect("after the recovery delay", nil)
	})
}

// TestFailingWaitDoesNotSpin reproduces a report about a wait for events that failed at once. It must neither spin
// nor make GPUs unhealthy.
func TestFailingWaitDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		sim.InjectFault("EventSetWait", simnode.Fault{Return: nvml.GPUIsLost})
		waits, changes := sim.Calls("EventSetWait"), w.changes
		after(10 * time.Minute)
		w.expect("ten minutes later", nil)
		if got := sim.Calls("EventSetWait") - waits; got > 30 {
			t.Errorf("%d waits in ten minutes", got)
		}
		if w.changes != changes {
			t.Errorf("changed was called %d times", w.changes-changes)
		}
	})
}

// TestWatchClosesWhatItOpened checks that each of 20 programs closes everything it has opened, even with events
// left to handle.
func TestWatchClosesWhatItOpened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		for range 20 {
			w := watch(t, sim)
			for gpu := range 8 {
				must(t, sim.XID(gpu, 79, nvml.WholeGPU, nvml.WholeGPU))
			}
			must(t, w.stop())
		}
		for open, end := range map[string]string{"Init": "Shutdown", "EventSetCreate": "EventSetFree"} {
			if opened, closed := sim.Calls(open), sim.Calls(end); opened != 20 || closed != 20 {
				t.Errorf("%d times %s, %d times %s, want 20 of both", opened, open, closed, end)
			}
		}
	})
}

// TestHealthIsThereForWhoeverAsksNext checks that the inventory has a fault even if nothing acted on the notice.
func TestHealthIsThereForWhoeverAsksNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		node := nvml.NewNode(sim, nvml.Options{})
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		listening := true
		go func() {
			ended <- node.Watch(ctx, func() { listening = false })
		}()
		synctest.Wait()
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		gpus, err := node.Inventory()
		if listening || err != nil || gpus[0].Health.Reason != "XID 79" {
			t.Errorf("told %t, fault %q, %v", !listening, gpus[0].Health.Reason, err)
		}
		cancel()
		must(t, <-ended)
	})
}

// TestOneObservationOneChange checks that simultaneous changes are reported once.
func TestOneObservationOneChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100+all-1g.5gb")
		w := watch(t, sim)
		for _, step := range []struct {
			name string
			do   func() error
			wait time.Duration
		}{
			{"an XID of a GPU instance", func() error { return sim.XID(0, 94, 3, nvml.WholeGPU) }, 0},
			{"an XID of a GPU", func() error { return sim.XID(1, 79, nvml.WholeGPU, nvml.WholeGPU) }, 0},
			{"the same again", func() error { return nil }, 0},
			{"heat", func() error { return sim.SetTemperature(2, 99) }, 10 * time.Second},
			{"a reset", func() error { return sim.Heal(1) }, 10 * time.Second},
		} {
			changes := w.changes
			must(t, step.do())
			after(step.wait)
			want := 1
			if step.name == "the same again" {
				want = 0
			}
			if got := w.changes - changes; got != want {
				t.Errorf("%s: changed was called %d times, want %d", step.name, got, want)
			}
		}
	})
}
