package nvml_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// unloads reports whether no program has the driver open. If so, it reloads the driver.
func unloads(sim *simnode.Node) bool { return sim.Reload() == nil }

// allGPUs are the UUIDs of all GPUs.
func allGPUs(sim *simnode.Node) (list []string) {
	for _, gpu := range sim.GPUs() {
		list = append(list, gpu.UUID)
	}
	return list
}

// TestPause checks that two seconds after the last GPU is released in a pause, the driver is closed and stays
// closed. The GPUs' data is kept, nothing is logged, and all GPUs are read again afterwards.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, log := simulate(t, "a30x4"), &bytes.Buffer{}
		w := watchWith(t, sim, nvml.Options{Kernel: sim, Logger: slog.New(slog.NewTextHandler(log, nil))})
		metering(t, w, 0)
		partitioner := nvml.NewPartitioner(w.Library(), nil)
		gpus := allGPUs(sim)
		must(t, sim.XID(2, 48, nvml.WholeGPU, nvml.WholeGPU))
		after(time.Second)
		before := log.Len()
		w.Pause(gpus)
		for i, gpu := range gpus {
			if unloads(sim) || w.Closed() {
				t.Fatalf("closed with %d GPUs released", i)
			}
			_, err := w.Release(context.Background(), gpu)
			must(t, err)
			after(2 * time.Second) // Each release ends all sessions, and others begin.
		}
		opened := sim.Calls("Init")
		for range 40 {
			if !unloads(sim) || !w.Closed() {
				t.Fatal("something has the driver open")
			}
			after(1700 * time.Millisecond)
			if _, err := partitioner.State(context.Background(), gpus[0]); err == nil {
				t.Error("partitions are read")
			}
			if err := w.OpenAll(func() { t.Error("opened") }); err == nil {
				t.Error("no error")
			}
		}
		if again := sim.Calls("Init") - opened; again > 0 {
			t.Errorf("opened %d times", again)
		}
		w.expect("in the pause", map[string]string{"2": "XID 48"})
		for line := range strings.Lines(log.String()[before:]) {
			if strings.Contains(line, "level=WARN") && !strings.Contains(line, "it is released") {
				t.Errorf("logged %s", line)
			}
		}
		w.Resume()
		for _, gpu := range gpus {
			must(t, w.Restore(context.Background(), gpu, false))
		}
		after(time.Minute)
		w.expect("after it", map[string]string{})
		if unloads(sim) {
			t.Error("nobody has the driver open")
		}
	})
}

// TestReleaseOverAPause uses a driver that opens all GPUs in Init. GPUs are watched in a pause until the last one
// is released, and a GPU released before is closed again afterwards.
func TestReleaseOverAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		_, err := w.Release(context.Background(), allGPUs(sim)[2])
		must(t, err)
		w.Pause(allGPUs(sim))
		after(time.Second)
		must(t, sim.XID(1, 62, nvml.WholeGPU, nvml.WholeGPU))
		after(time.Second)
		w.expect("in the pause", map[string]string{"1": "XID 62"})
		w.Resume()
		for range 20 {
			after(time.Second)
			if !isClosed(sim, 2) {
				t.Fatal("the released GPU is open after the pause")
			}
		}
	})
}

// TestPauseAfterReleases checks that a pause closes the driver if all GPUs were already released, and that
// restoring one opens it.
func TestPauseAfterReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w, gpus := watch(t, sim), allGPUs(sim)
		for _, gpu := range gpus {
			_, err := w.Release(context.Background(), gpu)
			must(t, err)
		}
		after(time.Second)
		if unloads(sim) {
			t.Fatal("closed without a pause")
		}
		w.Pause(gpus)
		_, err := w.Release(context.Background(), gpus[0])
		must(t, err)
		if !unloads(sim) {
			t.Fatal("something has the driver open")
		}
		must(t, w.Restore(context.Background(), gpus[1], false))
		after(time.Second)
		if unloads(sim) {
			t.Error("nobody has a GPU open that was taken back")
		}
	})
}

// TestPauseFromTheStart checks that a program that starts in a pause does not open the driver, can release GPUs
// that it has not read, and reads them afterwards. It does not end, despite FailOnInitError.
func TestPauseFromTheStart(t *testing.T) {
	for _, known := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			gpus := allGPUs(sim)
			node := nvml.NewNode(sim, nvml.Options{FailOnInitError: true})
			if known {
				node.KeepReleased(map[string]int{gpus[0]: 0, gpus[1]: 1, gpus[2]: 2, gpus[3]: 3})
				node.Pause(gpus)
			} else {
				node.Pause(nil)
			}
			w := watchNode(t, node)
			after(time.Minute)
			if known {
				_, err := w.Release(context.Background(), gpus[0])
				must(t, err)
			}
			if stopped := nvml.NewNode(sim, nvml.Options{}); !known {
				stopped.Pause(nil)
				must(t, watchNode(t, stopped).stop())
			}
			if calls := sim.Calls("Init"); calls != 0 || !unloads(sim) {
				t.Fatalf("the driver was opened %d times", calls)
			}
			w.Resume()
			if known {
				for _, gpu := range gpus {
					must(t, w.Restore(context.Background(), gpu, false))
				}
			}
			after(time.Second)
			w.expect("after the pause", map[string]string{})
		})
	}
}
