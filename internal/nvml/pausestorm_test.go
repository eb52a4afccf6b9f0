package nvml_test

import (
	"context"
	"math/rand"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/repeat"
)

// TestPauseStorm plays random releases and pauses beside concurrent readers: a pause closes the driver, and
// afterwards all GPUs are read again.
func TestPauseStorm(t *testing.T) {
	for seed := range int64(repeat.Times(10, 40)) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewSource(seed))
			sim := simulate(t, "a30x4")
			w := watch(t, sim)
			gpus := allGPUs(sim)
			meter := nvml.NewMeter(w.Library())
			partitioner := nvml.NewPartitioner(w.Library(), nil)
			ctx, cancel := context.WithCancel(context.Background())
			var beside sync.WaitGroup
			defer func() { cancel(); beside.Wait(); after(time.Minute) }()
			beside.Go(func() {
				for ctx.Err() == nil {
					_, _ = meter.Read(ctx)
					pass(700 * time.Millisecond)
				}
			})
			beside.Go(func() {
				for ctx.Err() == nil {
					_, _ = partitioner.State(ctx, gpus[0])
					_ = w.OpenAll(func() { pass(300 * time.Millisecond) })
					pass(900 * time.Millisecond)
				}
			})
			if r.Intn(2) == 0 {
				sim.InjectFault("DeviceGetUtilizationRates", simnode.Fault{Delay: time.Duration(r.Intn(3000)) * time.Millisecond})
			}
			for range 6 {
				var ops sync.WaitGroup
				for range r.Intn(12) {
					gpu, op := gpus[r.Intn(4)], r.Intn(5)
					short, end := context.WithTimeout(ctx, time.Duration(r.Intn(5000))*time.Millisecond)
					ops.Go(func() {
						defer end()
						switch op {
						case 0:
							w.Pause(gpus)
						case 1:
							w.Resume()
						case 2:
							_, _ = w.Release(short, gpu)
						case 3:
							_ = w.Restore(short, gpu, false)
						case 4:
							w.Pause(nil)
						}
					})
					pass(time.Duration(r.Intn(800)) * time.Millisecond)
				}
				ops.Wait()
				w.Pause(gpus)
				for _, gpu := range gpus {
					for try := 0; ; try++ {
						_, err := w.Release(ctx, gpu)
						if err == nil {
							break
						}
						if try > 20 {
							t.Fatalf("seed %d: %v", seed, err)
						}
						pass(500 * time.Millisecond)
					}
				}
				after(4 * time.Second)
				if !w.Closed() || !unloads(sim) {
					t.Fatalf("seed %d: open in a pause (closed %v)", seed, w.Closed())
				}
				w.Resume()
				var restoring sync.WaitGroup
				for _, gpu := range gpus {
					restoring.Go(func() { _ = w.Restore(ctx, gpu, false) })
				}
				restoring.Wait()
				after(30 * time.Second)
				if list, err := w.Inventory(); err != nil || len(list) != 4 {
					t.Fatalf("seed %d: after it %d, %v", seed, len(list), err)
				}
				if unloads(sim) {
					t.Fatalf("seed %d: nobody has it open after the pause", seed)
				}
			}
		})
	}
}
