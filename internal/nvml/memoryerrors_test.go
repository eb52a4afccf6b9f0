package nvml_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestUsageCostsNoHealth checks that a GPU is healthy while its probe succeeds, even if its memory error counters
// are slow, as under a storm of corrected errors, or its use cannot be read. Slow counters do not affect other
// values.
func TestUsageCostsNoHealth(t *testing.T) {
	for _, test := range []struct {
		name, call string
		hangs      bool
	}{
		{"counters that take 40 s", "DeviceGetMemoryErrorCounter", false},
		{"counters that hang", "DeviceGetMemoryErrorCounter", true},
		{"a query that hangs", "DeviceGetProcessUtilization", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a100-40x2")
				w := watch(t, sim)
				meter := nvml.NewMeter(w.Library())
				fault, answer := simnode.Fault{Delay: 40 * time.Second}, make(chan struct{})
				if test.hangs {
					fault = simnode.Fault{Until: answer}
				}
				end, err := sim.InjectGPUFault(0, test.call, fault)
				must(t, err)
				over := sync.OnceFunc(func() { end(); close(answer) })
				defer over()
				missing := 0
				for range 120 {
					gpus, _ := meter.Read(t.Context())
					missing += 2 - len(gpus)
					after(5 * time.Second)
					w.expect("while it is slow", nil)
				}
				if query := test.call == "DeviceGetProcessUtilization"; query != (missing > 100) || !query && missing > 0 {
					t.Errorf("a GPU was missing %d times", missing)
				}
				over()
				after(10 * time.Minute)
				gpus, err := meter.Read(t.Context())
				if err != nil || len(gpus) != 2 {
					t.Errorf("then %d GPUs, %v", len(gpus), err)
				}
			})
		})
	}
}

// TestMemoryErrorsEachMinute checks that the counters are read at the first reading and once a minute, and keep
// their values in between.
func TestMemoryErrorsEachMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a100-40")
		must(t, sim.Init())
		meter := nvml.NewMeter(sim)
		read := func(corrected float64) {
			t.Helper()
			gpus, err := meter.Read(t.Context())
			must(t, err)
			if len(gpus[0].MemoryErrors) != 8 || gpus[0].MemoryErrors[0].Count != corrected {
				t.Fatalf("memory errors %+v, want %v corrected", gpus[0].MemoryErrors, corrected)
			}
		}
		read(0)
		must(t, sim.ECC(0, false))
		for range 11 {
			pass(5 * time.Second)
			read(0)
		}
		if asked := sim.Calls("DeviceGetMemoryErrorCounter"); asked != 8 {
			t.Errorf("in 55 s, %d counters were asked for, want 8", asked)
		}
		pass(5 * time.Second)
		read(1)
		if asked := sim.Calls("DeviceGetMemoryErrorCounter"); asked != 16 {
			t.Errorf("in 60 s, %d counters were asked for, want 16", asked)
		}
	})
}
