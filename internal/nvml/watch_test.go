package nvml_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// The tests of Node run in bubbles of virtual time: they use the intervals of
// the real program, wait for none of them, and fail when a goroutine is left.

// rescan is the default interval between two passes, and a little for the wait
// for events that has to end when the driver is closed.
const rescan = 30*time.Second + 300*time.Millisecond

// watched is a Node with Watch running on a simulated node.
type watched struct {
	*nvml.Node
	t *testing.T
	// changes counts the calls of changed.
	changes int
	// stop ends Watch and returns its error; the test's end calls it if the
	// test did not.
	stop func() error
}

// watch starts Watch and lets the first look happen.
func watch(t *testing.T, library nvml.Library) *watched {
	t.Helper()
	return watchWith(t, library, nvml.Options{})
}

func watchWith(t *testing.T, library nvml.Library, options nvml.Options) *watched {
	t.Helper()
	w := &watched{Node: nvml.NewNode(library, options), t: t}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Watch(ctx, func() { w.changes++ }) }()
	stopped := false
	w.stop = func() error {
		stopped = true
		cancel()
		return <-ended
	}
	t.Cleanup(func() {
		if !stopped {
			if err := w.stop(); err != nil {
				t.Errorf("Watch: %v", err)
			}
		}
	})
	synctest.Wait()
	return w
}

// after lets time pass, and what it brings happen.
func after(passed time.Duration) {
	<-time.After(passed)
	synctest.Wait()
}

// expect holds the faults by unit, "0" or "0:1"; units not named are healthy.
func (w *watched) expect(when string, want map[string]string) {
	w.t.Helper()
	gpus, err := w.Inventory()
	if err != nil {
		w.t.Fatalf("%s: %v", when, err)
	}
	got := map[string]string{}
	for _, gpu := range gpus {
		got[fmt.Sprint(gpu.Index)] = gpu.Fault
		for _, p := range gpu.Partitions {
			got[fmt.Sprintf("%d:%d", gpu.Index, p.Index)] = p.Fault
		}
	}
	maps.DeleteFunc(got, func(_, fault string) bool { return fault == "" })
	if want == nil {
		want = map[string]string{}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		w.t.Fatalf("%s: faults (-want +got):\n%s", when, diff)
	}
}

// must is for control of the simulated node that cannot fail.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestWatchTwice repeats a fault after a reset: the board's new handle must be
// listened to as its old one was.
func TestWatchTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		for range 3 {
			must(t, sim.XID(2, 79, nvml.WholeBoard, nvml.WholeBoard))
			synctest.Wait()
			w.expect("after an XID", map[string]string{"2": "XID 79"})
			must(t, sim.Heal(2))
			after(rescan)
			w.expect("after a reset", nil)
		}
		if got := sim.Calls("DeviceGetHandleByIndex"); got != 8+3 {
			t.Errorf("%d handles were looked up, want one for each board and reset: 11", got)
		}
	})
}

// TestWatchCooling holds the hysteresis of the temperature.
func TestWatchCooling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		hot := map[string]string{"0": "temperature 91 °C above 90 °C"}
		for _, step := range []struct {
			celsius int
			want    map[string]string
		}{{89, nil}, {90, nil}, {91, hot}, {97, hot}, {88, hot}, {86, hot}, {85, nil}, {90, nil}} {
			must(t, sim.Temperature(0, step.celsius))
			after(rescan)
			w.expect(fmt.Sprintf("at %d °C", step.celsius), step.want)
		}
	})
}

// TestWatchThermometer holds that a temperature that cannot be read says
// nothing, and that the hysteresis ends with a reset.
func TestWatchThermometer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		hot := map[string]string{"0": "temperature 91 °C above 90 °C"}
		must(t, sim.Temperature(0, 91))
		after(rescan)
		end := sim.Script("DeviceGetTemperature", simnode.Fault{Return: nvml.Unknown})
		after(rescan)
		w.expect("hot, unreadable", hot)
		end()
		must(t, sim.Temperature(0, 88))
		after(rescan)
		w.expect("cooling", hot)
		must(t, sim.Heal(0))
		must(t, sim.Temperature(0, 88))
		after(rescan)
		w.expect("as warm after a reset", nil)
	})
}

// TestWatchHiccup holds that a call that fails for once, and a new handle, are
// no evidence of a reset, even of a board that was reset before.
func TestWatchHiccup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		must(t, sim.Heal(0))
		after(rescan)
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		sim.Script("DeviceGetMigMode", simnode.Fault{Return: nvml.Unknown, Times: 1})
		after(rescan)
		w.expect("after a hiccup", map[string]string{"0": "XID 79"})
		if got := sim.Calls("DeviceGetHandleByIndex"); got != 3 {
			t.Errorf("%d lookups, want 3: first, reset, hiccup", got)
		}
	})
}

// TestWatchMemoryStays holds that the size of a unit is known though its memory
// cannot be queried any more.
func TestWatchMemoryStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h200+all-1g.35gb")
		w := watch(t, sim)
		before, _ := w.Inventory()
		sim.Script("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		after(rescan)
		fault := "memory query: UNKNOWN"
		w.expect("memory unknown", map[string]string{"0": fault, "0:0": fault, "0:1": fault, "0:2": fault, "0:3": fault})
		gpus, _ := w.Inventory()
		if gpus[0].Memory != before[0].Memory || gpus[0].Partitions[3].Memory != before[0].Partitions[3].Memory {
			t.Errorf("memory is now %d, and %d of a partition", gpus[0].Memory, gpus[0].Partitions[3].Memory)
		}
	})
}

// TestWatchLost holds that a lost board keeps what is known of it, and takes
// nothing from the others: their events are still heard.
func TestWatchLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100+all-balanced")
		w := watch(t, sim)
		before, _ := w.Inventory()
		// A set that has held for a while is replaced without a pause.
		after(10 * time.Second)
		must(t, sim.Lose(0))
		synctest.Wait()
		w.expect("lost", map[string]string{"0": "lost"})
		gpus, _ := w.Inventory()
		gpus = slices.Clone(gpus)
		gpus[0].Fault = ""
		if diff := cmp.Diff(before, gpus); diff != "" {
			t.Errorf("a lost board is known as (-before +after):\n%s", diff)
		}
		must(t, sim.XID(1, 79, nvml.WholeBoard, nvml.WholeBoard))
		synctest.Wait()
		gpus, _ = w.Inventory()
		if gpus[1].Fault != "XID 79" {
			t.Errorf("XID of another board was not heard: fault %q", gpus[1].Fault)
		}
		waits := sim.Calls("EventSetWait")
		after(10 * time.Second)
		if got := sim.Calls("EventSetWait") - waits; got > 50 {
			t.Errorf("%d waits in 10 s with a lost board, want 4 a second", got)
		}
	})
}
