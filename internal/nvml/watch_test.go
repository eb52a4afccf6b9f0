package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// The tests of Node run in bubbles of virtual time: they use the intervals of
// the real program, wait for none of them, and fail when a goroutine is left.

// rescan is the default interval between two passes, and a little for the wait
// for events that has to end when the driver is closed.
const rescan = 30*time.Second + 300*time.Millisecond

// enumerated is the longest time until the driver has been asked for all its GPUs, even if a failed wait for
// events has moved the passes: a pass enumerates if the next one would be more than half a probe interval late.
const enumerated = rescan + 5*time.Second

// twiceTheDelay is the default recovery delay, 5 minutes, twice: a fault that lasts so long does not end by itself.
const twiceTheDelay = 10 * time.Minute

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
	if options.Known == nil {
		options.Known = &knownGPUs{}
	}
	return watchNode(t, nvml.NewNode(library, options))
}

func watchNode(t *testing.T, node *nvml.Node) *watched {
	t.Helper()
	w := &watched{Node: node, t: t}
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

// elapsed is the bubble's time since began.
func elapsed(began time.Time) time.Duration {
	return time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
}

// pass lets the bubble's time pass.
func pass(d time.Duration) {
	<-time.After(d) //nolint:forbidigo // in a synctest bubble: the time is simulated
}

// after lets time pass, and waits for its effects.
func after(passed time.Duration) {
	pass(passed)
	synctest.Wait()
}

// expect checks the faults by unit, "0" or "0:1"; units not named are healthy.
func (w *watched) expect(when string, want map[string]string) {
	w.t.Helper()
	gpus, err := w.Inventory()
	if err != nil {
		w.t.Fatalf("%s: %v", when, err)
	}
	got := map[string]string{}
	for _, gpu := range gpus {
		got[fmt.Sprint(gpu.Index)] = gpu.Health.Reason
		for _, p := range gpu.Partitions {
			got[fmt.Sprintf("%d:%d", gpu.Index, p.Index)] = p.Health.Reason
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

// TestWatchTwice repeats a fault after a reset: events of the GPU's new handle must be received like those of the
// old one.
func TestWatchTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		for range 3 {
			must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
			synctest.Wait()
			w.expect("after an XID", map[string]string{"2": "XID 79"})
			must(t, sim.Heal(2))
			after(rescan)
			w.expect("after a reset", nil)
		}
		if got := sim.Calls("DeviceGetHandleByIndex"); got != 8+3 {
			t.Errorf("%d handles were looked up, want one for each GPU and reset: 11", got)
		}
	})
}

// TestWatchCooling checks the hysteresis of the temperature.
func TestWatchCooling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		hot := map[string]string{"0": "temperature at which the board slows it down"}
		for _, step := range []struct {
			celsius int
			want    map[string]string
		}{{91, nil}, {92, nil}, {93, hot}, {97, hot}, {90, hot}, {89, hot}, {88, nil}, {92, nil}} {
			must(t, sim.SetTemperature(0, step.celsius))
			after(rescan)
			w.expect(fmt.Sprintf("at %d °C", step.celsius), step.want)
			explained := ""
			if step.want != nil {
				explained = fmt.Sprintf("ends at 88 °C, it has %d °C", step.celsius)
			}
			if got := w.Health().Units[0]; got.State == sharing.Unhealthy && got.Explanation != explained {
				t.Errorf("at %d °C: %q", step.celsius, got.Explanation)
			}
		}
	})
}

// TestWatchThermometer checks that an unreadable temperature changes nothing, and that the hysteresis ends with a
// reset.
func TestWatchThermometer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		hot := map[string]string{"0": "temperature at which the board slows it down"}
		must(t, sim.SetTemperature(0, 93))
		after(rescan)
		end := sim.InjectFault("DeviceGetTemperature", simnode.Fault{Return: nvml.Unknown})
		after(rescan)
		w.expect("hot, unreadable", hot)
		end()
		must(t, sim.SetTemperature(0, 89))
		after(rescan)
		w.expect("cooling", hot)
		must(t, sim.Heal(0))
		must(t, sim.SetTemperature(0, 89))
		after(rescan)
		w.expect("as warm after a reset", nil)
	})
}

// TestWatchHiccup checks that a call that fails once, and a new handle, are no evidence of a reset, even of a GPU
// that was reset before.
func TestWatchHiccup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		must(t, sim.Heal(0))
		after(rescan)
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		sim.InjectFault("DeviceGetMigMode", simnode.Fault{Return: nvml.Unknown, Times: 1})
		after(rescan)
		w.expect("after a hiccup", map[string]string{"0": "XID 79"})
		if got := sim.Calls("DeviceGetHandleByIndex"); got != 3 {
			t.Errorf("%d lookups, want 3: first, reset, hiccup", got)
		}
	})
}

// TestWatchMemoryStays checks that a unit's memory size stays known if its memory cannot be queried any more.
func TestWatchMemoryStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h200+all-1g.35gb")
		w := watch(t, sim)
		before, _ := w.Inventory()
		sim.InjectFault("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		after(rescan)
		fault := "memory query: UNKNOWN"
		w.expect("memory unknown", map[string]string{"0": fault, "0:0": fault, "0:1": fault, "0:2": fault, "0:3": fault})
		gpus, _ := w.Inventory()
		if gpus[0].Memory != before[0].Memory || gpus[0].Partitions[3].Memory != before[0].Partitions[3].Memory {
			t.Errorf("memory is now %d, and %d of a partition", gpus[0].Memory, gpus[0].Partitions[3].Memory)
		}
	})
}

// TestWatchLost checks that a lost GPU keeps its data, and that the other GPUs' events are still received.
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
		gpus[0].Health, gpus[0].DriverIndex = before[0].Health, ""
		if diff := cmp.Diff(before, gpus); diff != "" {
			t.Errorf("a lost GPU is known as (-before +after):\n%s", diff)
		}
		must(t, sim.XID(1, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		gpus, _ = w.Inventory()
		if gpus[1].Health.Reason != "XID 79" {
			t.Errorf("XID of another GPU was not heard: fault %q", gpus[1].Health.Reason)
		}
		waits := sim.Calls("EventSetWait")
		after(10 * time.Second)
		if got := sim.Calls("EventSetWait") - waits; got > 50 {
			t.Errorf("%d waits in 10 s with a lost GPU, want 4 a second", got)
		}
	})
}

// TestLostComesBack checks that the driver is reopened when a GPU stays lost, because only a new session finds
// it, and that the other GPUs only miss events for a moment.
func TestLostComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		w := watch(t, sim)
		metering(t, w, 0)
		must(t, sim.XID(1, 48, nvml.WholeGPU, nvml.WholeGPU))
		after(time.Second)
		_, err := sim.InjectGPUFault(2, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.GPUIsLost, Times: 2})
		must(t, err)
		opened := sim.Calls("EventSetCreate")
		after(time.Minute)
		w.expect("one that was lost for a moment", map[string]string{"1": "XID 48"})
		moment := sim.Calls("EventSetCreate") - opened
		others := func() (list []sharing.TransitionCount) {
			return slices.DeleteFunc(slices.Clone(w.Health().Transitions), func(c sharing.TransitionCount) bool { return c.GPU == sim.GPUs()[0].UUID })
		}
		before := others()
		must(t, sim.Lose(0))
		after(10 * time.Minute)
		w.expect("while it is lost", map[string]string{"0": "lost", "1": "XID 48"})
		if got := sim.Calls("SystemGetDriverVersion"); moment > 1 || got < 9 || got > 11 {
			t.Errorf("%d sessions in ten minutes with a lost GPU, and %d event sets after a moment", got-1, moment)
		}
		must(t, sim.Heal(0))
		after(9 * time.Second)
		w.expect("in the session in which it was lost", map[string]string{"0": "lost", "1": "XID 48"})
		after(time.Minute)
		w.expect("in a new session", map[string]string{"1": "XID 48"})
		if diff := cmp.Diff(before, others()); diff != "" {
			t.Errorf("health of other GPUs changed (-before +after):\n%s", diff)
		}
		for gpu := range 8 {
			must(t, sim.XID(gpu, 79, nvml.WholeGPU, nvml.WholeGPU))
		}
		after(time.Second)
		gpus, _ := w.Inventory()
		for _, gpu := range gpus {
			if !strings.Contains(gpu.Health.Reason, "XID 79") {
				t.Errorf("events of GPU %d are not heard: %q", gpu.Index, gpu.Health.Reason)
			}
		}
	})
}

// TestWatchTrouble checks the inventory after one event: within a moment if the driver reports it, else after the
// next pass. A further pass changes nothing, and the unit is healthy with the first pass after a reset, not
// sooner.
func TestWatchTrouble(t *testing.T) {
	const whole = nvml.WholeGPU
	tests := []struct {
		name string
		node string
		do   func(*simnode.Node) error
		soon bool
		want map[string]string
	}{
		{
			"XID of a whole GPU", "dgx-a100",
			func(n *simnode.Node) error { return n.XID(3, 79, whole, whole) },
			true, map[string]string{"3": "XID 79"},
		},
		{
			"XID that is the application's", "dgx-a100",
			func(n *simnode.Node) error { return n.XID(3, 31, whole, whole) },
			true, nil,
		},
		{
			"XID of one partition", "dgx-a100+all-1g.5gb",
			func(n *simnode.Node) error { return n.XID(0, 94, 3, 0) },
			true, map[string]string{"0:2": "XID 94"},
		},
		{
			"XID of a compute instance beside another", "mixed+all-1c.2g.10gb",
			func(n *simnode.Node) error { return n.XID(1, 94, 2, 1) },
			true, map[string]string{"1:3": "XID 94"},
		},
		{
			"XID of a GPU instance with two partitions", "mixed+all-1c.2g.10gb",
			func(n *simnode.Node) error { return n.XID(1, 94, 2, whole) },
			true, map[string]string{"1:2": "XID 94", "1:3": "XID 94"},
		},
		{
			"XID of a whole GPU with partitions", "dgx-a100+all-balanced",
			func(n *simnode.Node) error { return n.XID(7, 79, whole, whole) },
			true, map[string]string{"7": "XID 79"},
		},
		{
			"XID of a partition that there is not", "dgx-a100+all-balanced",
			func(n *simnode.Node) error { return n.XID(7, 94, 99, 0) },
			true, nil,
		},
		{
			"uncontained memory error of one partition", "dgx-a100+all-balanced",
			func(n *simnode.Node) error { return n.XID(7, 95, 1, 0) },
			true, map[string]string{"7": "XID 95"},
		},
		{
			"error of a link, of a partition that there is not", "dgx-a100+all-balanced",
			func(n *simnode.Node) error { return n.XID(7, 74, 99, 0) },
			true, map[string]string{"7": "XID 74"},
		},
		{
			"XID of a partition of a GPU without MIG", "t4",
			func(n *simnode.Node) error { return n.XID(0, 79, 0, 0) },
			true, map[string]string{"0": "XID 79"},
		},
		{
			"memory error that could not be corrected", "a30x4",
			func(n *simnode.Node) error { return n.ECC(1, true) },
			true, map[string]string{"1": "double-bit ECC error"},
		},
		{
			"memory error that could be corrected", "a30x4",
			func(n *simnode.Node) error { return n.ECC(1, false) },
			true, nil,
		},
		{
			"lost", "dgx-h100",
			func(n *simnode.Node) error { return n.Lose(5) },
			true, map[string]string{"5": "lost"},
		},
		{
			"too hot", "dgx-h100",
			func(n *simnode.Node) error { return n.SetTemperature(5, 95) },
			false, map[string]string{"5": "temperature at which the board slows it down"},
		},
		{
			"just not too hot", "dgx-h100",
			func(n *simnode.Node) error { return n.SetTemperature(5, 86) },
			false, nil,
		},
		{
			"memory query fails", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(5, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			false, map[string]string{"5": "memory query: UNKNOWN"},
		},
		{
			"MIG mode does not tell", "a30x4+all-balanced",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(1, "DeviceGetMigMode", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			false, map[string]string{"1": "cannot be read: UNKNOWN"},
		},
		{
			"the same fault again", "t4",
			func(n *simnode.Node) error { return errors.Join(n.ECC(0, true), n.ECC(0, true)) },
			true, map[string]string{"0": "double-bit ECC error"},
		},
		{
			"memory query says lost", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(5, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"temperature query says lost", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(5, "DeviceGetTemperature", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"walk of the partitions says lost", "dgx-a100+all-balanced",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(5, "DeviceGetGpuInstanceById", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"no memory of its own", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(5, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.NotSupported})
				return err
			},
			false, nil,
		},
		{
			"memory row that waits for a reset", "a30x4",
			func(n *simnode.Node) error { return n.Repair(2) },
			false, nil,
		},
		{
			"memory page that waits for a reset", "t4",
			func(n *simnode.Node) error { return n.Repair(0) },
			false, map[string]string{"0": "page retirement waits for a reset"},
		},
		{
			"repairs say lost", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(5, "DeviceGetRemappedRows", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"repairs do not tell", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(5, "DeviceGetRemappedRows", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			false, nil,
		},
		{
			"two faults", "t4",
			func(n *simnode.Node) error { return errors.Join(n.XID(0, 79, whole, whole), n.ECC(0, true)) },
			true, map[string]string{"0": "XID 79, double-bit ECC error"},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, test.node)
				w := watch(t, sim)
				w.expect("at first", nil)
				must(t, test.do(sim))
				after(time.Second)
				if test.soon {
					w.expect("soon", test.want)
				}
				after(rescan)
				w.expect("after a pass", test.want)
				after(rescan)
				w.expect("after another pass", test.want)
				for unit := range test.want {
					must(t, sim.Heal(int(unit[0]-'0')))
				}
				synctest.Wait()
				w.expect("right after the reset", test.want)
				after(rescan)
				w.expect("a pass after the reset", nil)
			})
		})
	}
}

// brittle is a driver that must not lose an event set that is waited on.
type brittle struct {
	*simnode.Node
	t       *testing.T
	waiting atomic.Bool
}

func (d *brittle) EventSetWait(set nvml.EventSet, timeout time.Duration) (nvml.Event, error) {
	d.waiting.Store(true)
	defer d.waiting.Store(false)
	return d.Node.EventSetWait(set, timeout)
}

func (d *brittle) EventSetFree(set nvml.EventSet) error {
	if d.waiting.Load() {
		d.t.Error("an event set was freed while it was waited on")
	}
	return d.Node.EventSetFree(set)
}

// TestWatchEnd checks how fast Watch ends, also with a driver that hangs.
func TestWatchEnd(t *testing.T) {
	t.Run("in a wait for events", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "dgx-a100")
			w := watch(t, sim)
			began, asked := time.Now(), sim.Calls("DeviceGetMemoryInfo")
			if err := w.stop(); err != nil {
				t.Error(err)
			}
			if got := sim.Calls("DeviceGetMemoryInfo"); got != asked {
				t.Errorf("%d GPUs were asked once more", got-asked)
			}
			if took := elapsed(began); took > 250*time.Millisecond {
				t.Errorf("Watch took %v to end", took)
			}
		})
	})
	t.Run("without a driver", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "dgx-a100")
			sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
			w := watch(t, sim)
			after(time.Hour)
			began := time.Now()
			if err := w.stop(); err != nil || elapsed(began) != 0 {
				t.Errorf("Watch ended with %v after %v", err, elapsed(began))
			}
		})
	})
	t.Run("in the right order", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			must(t, watch(t, &brittle{Node: simulate(t, "dgx-a100"), t: t}).stop())
		})
	})
	t.Run("between slow calls", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "dgx-a100")
			sim.InjectFault("DeviceGetTemperature", simnode.Fault{Delay: 400 * time.Millisecond})
			w := watch(t, sim)
			if err := w.stop(); err != nil {
				t.Errorf("Watch ended with %v after the first of eight slow calls", err)
			}
		})
	})
	t.Run("in a stuck call", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "dgx-a100")
			_, err := sim.InjectGPUFault(6, "DeviceGetTemperature", simnode.Fault{Delay: time.Hour})
			must(t, err)
			w := watch(t, sim)
			began := time.Now()
			err = w.stop()
			if err == nil || !strings.Contains(err.Error(), "GPU 6") {
				t.Errorf("Watch ended with %v, want an error that names GPU 6", err)
			}
			if took := elapsed(began); took != 500*time.Millisecond {
				t.Errorf("Watch took %v to give up a stuck call", took)
			}
			// The call comes back in the end, and so does its goroutine.
			after(2 * time.Hour)
		})
	})
	t.Run("before it began", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			node := nvml.NewNode(simulate(t, "dgx-a100"), nvml.Options{})
			if err := node.Watch(ctx, func() {}); err != nil {
				t.Error(err)
			}
		})
	})
}
