package nvml_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

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

// TestWatchEnd holds how fast Watch ends, and what it does about a driver that
// does not.
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
				t.Errorf("%d boards were asked once more", got-asked)
			}
			if took := time.Since(began); took > 250*time.Millisecond {
				t.Errorf("Watch took %v to end", took)
			}
		})
	})
	t.Run("without a driver", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "dgx-a100")
			sim.Script("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
			w := watch(t, sim)
			after(time.Hour)
			began := time.Now()
			if err := w.stop(); err != nil || time.Since(began) != 0 {
				t.Errorf("Watch ended with %v after %v", err, time.Since(began))
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
			sim.Script("DeviceGetTemperature", simnode.Fault{Delay: 400 * time.Millisecond})
			w := watch(t, sim)
			if err := w.stop(); err != nil {
				t.Errorf("Watch ended with %v after the first of eight slow calls", err)
			}
		})
	})
	t.Run("in a stuck call", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "dgx-a100")
			_, err := sim.ScriptGPU(6, "DeviceGetTemperature", simnode.Fault{Delay: time.Hour})
			must(t, err)
			w := watch(t, sim)
			began := time.Now()
			err = w.stop()
			if err == nil || !strings.Contains(err.Error(), "GPU 6") {
				t.Errorf("Watch ended with %v, want an error that names GPU 6", err)
			}
			if took := time.Since(began); took != 500*time.Millisecond {
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
