package nvml_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/repeat"
)

// TestHiccupIsNoReset checks that a GPU that cannot be read once, just when all handles are new, does not count
// as reset.
func TestHiccupIsNoReset(t *testing.T) {
	pulled := func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(3)) }
	tests := []struct {
		name string
		// times are how often the GPU cannot be read.
		times     int
		meanwhile func(*testing.T, *simnode.Node)
	}{
		{"a GPU is pulled", 1, pulled},
		{"the GPUs cannot be listed", 1, unlisted},
		{"a GPU is pulled, and the GPUs cannot be listed", 2, func(t *testing.T, sim *simnode.Node) {
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
				must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
				after(25 * time.Second)
				_, err := sim.InjectGPUFault(2, "DeviceGetName", simnode.Fault{Return: nvml.Unknown, Times: test.times})
				must(t, err)
				test.meanwhile(t, sim)
				after(8 * time.Second)
				gpus, _ := w.Inventory()
				if fault := gpus[2].Health.Reason; fault != "XID 79, cannot be read" {
					t.Errorf("fault %q while it cannot be read", fault)
				}
				after(time.Minute)
				gpus, err = w.Inventory()
				must(t, err)
				if fault := gpus[2].Health.Reason; fault != "XID 79" {
					t.Errorf("fault %q, want XID 79", fault)
				}
			})
		})
	}
}

// TestLostForOnce checks a handle that once reports its GPU as lost. That is evidence of a reset if the GPU had
// to be looked up again, even with the same handle, and none if the handle works again by itself.
func TestLostForOnce(t *testing.T) {
	tests := []struct {
		name string
		// failures are how often the GPU cannot be looked up.
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
				must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
				// A probe asks, and then a whole reading.
				sim.InjectFault("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.GPUIsLost, Times: 2})
				if test.failures > 0 {
					sim.InjectFault("DeviceGetHandleByIndex", simnode.Fault{Return: nvml.Unknown, Times: test.failures})
				}
				after(time.Minute)
				w.expect("a minute later", test.want)
			})
		})
	}
}

// TestResetOfStuckGPU checks that a GPU with a hanging call is not looked up again: its handle is found dead only
// when the call returns.
func TestResetOfStuckGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, nvml.WithDeadlines(sim, nvml.Limits{}))
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		must(t, sim.Heal(0))
		sim.InjectFault("DeviceGetMemoryInfo", simnode.Fault{Delay: 70 * time.Second, Times: 1})
		after(time.Minute)
		w.expect("while it is stuck", map[string]string{"0": "XID 79, memory query: TIMEOUT"})
		after(2 * time.Minute)
		w.expect("when the call has returned", nil)
	})
}

// TestDriverReloadedSlowGPU checks that loading a driver counts as a reset of a GPU, even if it is the last to
// answer.
func TestDriverReloadedSlowGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		must(t, sim.XID(3, 79, nvml.WholeGPU, nvml.WholeGPU))
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded, Times: 2})
		_, err := sim.InjectGPUFault(3, "DeviceGetName", simnode.Fault{Delay: 40 * time.Second, Times: 1})
		must(t, err)
		after(2 * time.Minute)
		w.expect("with the new driver", nil)
	})
}

// TestReopenWithSlowGPU checks that a GPU that is slow when the driver is closed does not prevent reopening it.
func TestReopenWithSlowGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		end, err := sim.InjectGPUFault(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 3 * time.Second})
		must(t, err)
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		after(time.Minute)
		if opened := sim.Calls("Init"); opened != 2 {
			t.Errorf("the driver was opened %d times, want twice", opened)
		}
		must(t, sim.SetTemperature(0, 95))
		after(time.Minute)
		w.expect("with the driver again", map[string]string{"0": "temperature at which the board slows it down"})
		end()
		after(10 * time.Second)
	})
}

// TestSlowResetAtTheEnd checks that a reset is not lost if the look that sees it outlasts the session.
func TestSlowResetAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4+all-balanced")
		w := watch(t, sim)
		must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
		after(25 * time.Second)
		w.expect("before the reset", map[string]string{"2": "XID 79"})
		must(t, sim.Heal(2))
		_, err := sim.InjectGPUFault(2, "DeviceGetHandleByIndex", simnode.Fault{Delay: 20 * time.Second, Times: 1})
		must(t, err)
		after(8 * time.Second)
		w.expect("while its new handle is looked up", map[string]string{"2": "XID 79"})
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
		must(t, sim.XID(0, 94, 99, 0)) // Of an unknown partition: look again.
		after(time.Minute)
		w.expect("with the driver again", nil)
		if opened := sim.Calls("Init"); opened != 2 {
			t.Errorf("the driver was opened %d times, want twice", opened)
		}
	})
}

// TestResetWhileTheDriverCloses checks that a reset is seen even if it happens while a slow GPU delays closing
// the driver.
func TestResetWhileTheDriverCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4+all-balanced")
		w := watch(t, sim)
		must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
		_, err := sim.InjectGPUFault(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 15 * time.Second, Times: 1})
		must(t, err)
		after(13 * time.Second)
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
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

// TestLastProbeCondemnsNobody checks that a driver that fails altogether leaves all GPUs healthy.
func TestLastProbeCondemnsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		after(25 * time.Second)
		sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
		end := sim.InjectFault("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		after(5*time.Second + 500*time.Millisecond)
		end()
		gpus, err := w.Inventory()
		if err == nil {
			t.Error("the driver has not failed")
		}
		for _, gpu := range gpus {
			if !gpu.Health.Healthy() {
				t.Errorf("GPU %d: fault %q", gpu.Index, gpu.Health.Reason)
			}
		}
	})
}

// TestResetInStorm has every GPU report a fatal error, and resets some while anything may happen to the node. In
// the end a GPU is healthy if and only if it was reset.
func TestResetInStorm(t *testing.T) {
	for seed := range uint64(repeat.Times(7, 25)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4+all-balanced")
				s := &storm{T: t, sim: sim, w: watch(t, sim), random: rand.New(rand.NewPCG(seed, 0))}
				for range 5 {
					s.pass()
				}
			})
		})
	}
}

// storm is a sequence of events on a node of four GPUs.
type storm struct {
	*testing.T
	sim    *simnode.Node
	w      *watched
	random *rand.Rand
	// reset are the UUIDs of GPUs that were reset; log lists the events.
	reset map[string]bool
	log   []string
	// fails: the driver is or will be closed, so a reset may leave no trace.
	fails bool
}

func (s *storm) chance(longest time.Duration) time.Duration {
	return time.Duration(s.random.Int64N(int64(longest)))
}

func (s *storm) pass() {
	s.reset, s.log, s.fails = map[string]bool{}, nil, false
	for gpu := range 4 {
		must(s.T, s.sim.XID(gpu, 79, nvml.WholeGPU, nvml.WholeGPU))
	}
	after(s.chance(rescan))
	for index, gpu := range s.sim.GPUs() {
		if s.random.IntN(2) == 0 {
			must(s.T, s.sim.Heal(index))
			s.reset[gpu.UUID] = true
		}
	}
	began := time.Now()
	for range s.random.IntN(6) {
		s.log = append(s.log, fmt.Sprint(elapsed(began), " ", s.trouble()))
		after(s.chance(12 * time.Second))
	}
	for _, err := s.sim.Add(""); err == nil; {
		_, err = s.sim.Add("")
	}
	s.log = append(s.log, fmt.Sprint(elapsed(began), " all GPUs are there"))
	after(3 * time.Minute)
	s.judge()
	for gpu := range 4 {
		must(s.T, s.sim.Heal(gpu))
	}
	after(2 * time.Minute)
	s.w.expect("between two storms", nil)
}

// trouble happens to the node, and is returned in words.
func (s *storm) trouble() string {
	gpus := slices.DeleteFunc(s.sim.GPUs(), func(b simnode.GPU) bool { return b.Index < 0 })
	gpu := s.random.IntN(len(gpus))
	calls := []string{
		"DeviceGetUUID", "DeviceGetName", "DeviceGetMemoryInfo", "DeviceGetTemperature",
		"DeviceGetHandleByIndex", "DeviceGetMigMode", "DeviceGetGpuInstanceId",
	}
	call := calls[s.random.IntN(len(calls))]
	var err error
	switch s.random.IntN(6) {
	case 0:
		s.fails = true
		times := 1 + s.random.IntN(3)
		s.sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: times})
		return fmt.Sprint("the next lists fail: ", times)
	case 1:
		if s.fails || len(gpus) == 1 {
			return "nothing"
		}
		s.reset[gpus[gpu].UUID] = true
		must(s.T, s.sim.Remove(gpu))
		return fmt.Sprint("pulled: ", gpu)
	case 2:
		_, err = s.sim.Add("")
		return fmt.Sprint("put back, unless: ", err)
	case 3:
		fault := simnode.Fault{Delay: s.chance(20 * time.Second), Times: 1 + s.random.IntN(2)}
		_, err = s.sim.InjectGPUFault(gpu, call, fault)
		must(s.T, err)
		return fmt.Sprint("slow: ", gpu, call, fault)
	case 4:
		_, err = s.sim.InjectGPUFault(gpu, call, simnode.Fault{Return: nvml.Unknown, Times: 1})
		must(s.T, err)
		return fmt.Sprint("fails once: ", gpu, call)
	}
	must(s.T, s.sim.XID(gpu, 94, 99, 0)) // Of a partition that there is not.
	return "another look"
}

func (s *storm) judge() {
	gpus, err := s.w.Inventory()
	must(s.T, err)
	for _, gpu := range gpus {
		healed := gpu.Health.Healthy() || strings.HasPrefix(gpu.Health.Reason, "recovering from cannot be read")
		if healed != s.reset[gpu.UUID] || !healed && gpu.Health.Reason != "XID 79" {
			s.Errorf("GPU %d: fault %q, reset: %v, after\n%s", gpu.Index, gpu.Health.Reason, s.reset[gpu.UUID], strings.Join(s.log, "\n"))
		}
	}
}

// TestWatchResetBetweenLooks resets a GPU after its last look, and then has the next look get new handles of all
// GPUs. The old handle is the only trace of the reset.
func TestWatchResetBetweenLooks(t *testing.T) {
	tests := []struct {
		name string
		// meanwhile runs after the reset of GPU 2, if there is one.
		meanwhile func(*testing.T, *simnode.Node)
		reset     bool
		// want are the faults at last, by the number that the GPU had.
		want map[string]string
	}{
		{"nothing", func(*testing.T, *simnode.Node) {}, true, map[string]string{}},
		{"a GPU is pulled", func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(3)) }, true, map[string]string{"3": "lost"}},
		{"a GPU is pulled, without a reset", func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(3)) }, false,
			map[string]string{"2": "XID 79", "3": "lost"}},
		{"a GPU is plugged in", func(t *testing.T, sim *simnode.Node) {
			_, err := sim.Add("t4")
			must(t, err)
		}, true, map[string]string{}},
		{"a GPU is exchanged", exchange, true, map[string]string{"0": "lost"}},
		{"a GPU is exchanged, without a reset", exchange, false, map[string]string{"0": "lost", "2": "XID 79"}},
		{"the GPUs cannot be listed", unlisted, true, map[string]string{}},
		{"the GPUs could not be listed before it", func(t *testing.T, sim *simnode.Node) {
			unlisted(t, sim)
			end := sim.InjectFault("EventSetWait", simnode.Fault{Delay: time.Second})
			after(5*time.Second + 100*time.Millisecond) // The driver is being closed.
			end()
			must(t, sim.Heal(2))
		}, false, map[string]string{}},
		{"the GPUs cannot be listed, without a reset", unlisted, false, map[string]string{"2": "XID 79"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				w := watch(t, sim)
				before, _ := w.Inventory()
				must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
				after(25 * time.Second)
				w.expect("before", map[string]string{"2": "XID 79"})
				if test.reset {
					must(t, sim.Heal(2))
				}
				test.meanwhile(t, sim)
				after(time.Minute)
				gpus, err := w.Inventory()
				must(t, err)
				got := map[string]string{}
				for ordinal, uuid := range uuids(before) {
					for _, gpu := range gpus {
						if gpu.UUID == uuid && !gpu.Health.Healthy() {
							got[fmt.Sprint(ordinal)] = gpu.Health.Reason
						}
					}
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("faults (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func unlisted(_ *testing.T, sim *simnode.Node) {
	sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
}

// exchange leaves the number of GPUs as it was.
func exchange(t *testing.T, sim *simnode.Node) {
	must(t, sim.Remove(0))
	_, err := sim.Add("t4")
	must(t, err)
}
