package nvml_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// busOf is the PCI bus ID of a GPU of a simulated node with up to 15 of them.
func busOf(gpu int) string { return "00000000:" + string("0123456789"[gpu]) + "7:00.0" }

// simulateLazy simulates a driver that opens a GPU only when it is looked up.
func simulateLazy(t *testing.T) *simnode.Node {
	t.Helper()
	sim := simulate(t, "a30x4")
	must(t, sim.SetWorld("lazy"))
	return sim
}

// isClosed reports whether no program has the GPU open. If so, it resets the GPU.
func isClosed(sim *simnode.Node, gpu int) bool { return sim.ResetGPU(busOf(gpu)) == nil }

// metering reads the GPUs' use every five seconds, like the program. At least this many are read; with 0, it may
// fail.
func metering(t *testing.T, w *watched, least int) {
	t.Helper()
	meter := nvml.NewMeter(w.Library())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.NewTicker(5 * time.Second); ; {
			if gpus, err := meter.Read(ctx); ctx.Err() == nil && least > 0 && (err != nil || len(gpus) < least) {
				t.Errorf("use of %d GPUs, %v", len(gpus), err)
			}
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
}

// TestRelease uses a driver that opens GPUs only when they are looked up. This program does not keep a released
// GPU open, its data stays, other GPUs are still watched, and its state is right once it is restored.
func TestRelease(t *testing.T) {
	for _, wasReset := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			sim, log := simulateLazy(t), &bytes.Buffer{}
			w := watchWith(t, sim, nvml.Options{Logger: slog.New(slog.NewTextHandler(log, nil))})
			metering(t, w, 2)
			gpu := sim.GPUs()[2].UUID
			must(t, sim.XID(2, 48, nvml.WholeGPU, nvml.WholeGPU))
			after(time.Second)
			if isClosed(sim, 2) {
				t.Fatal("it can be reset before it is released")
			}
			before := log.Len()
			index, err := w.Release(context.Background(), gpu)
			if err != nil || index != 2 {
				t.Fatalf("index %d, %v", index, err)
			}
			for range 40 {
				if !isClosed(sim, 2) {
					t.Fatal("something has it open")
				}
				after(1700 * time.Millisecond)
				w.expect("while it is released", map[string]string{"2": "XID 48"})
			}
			if isClosed(sim, 1) {
				t.Error("nobody has another GPU open")
			}
			must(t, sim.XID(1, 94, nvml.WholeGPU, nvml.WholeGPU))
			after(time.Second)
			w.expect("with an error of another GPU", map[string]string{"1": "XID 94", "2": "XID 48"})
			if text := log.String()[before:]; strings.Count(text, "level=WARN") != 3 || strings.Contains(text, "not every GPU") {
				t.Errorf("the log says more than that GPU 2 has no events and GPU 1 an error:\n%s", text)
			}
			must(t, w.Restore(context.Background(), gpu, wasReset))
			after(time.Minute)
			if wasReset {
				w.expect("after a reset", map[string]string{"1": "XID 94"})
			} else {
				w.expect("when it was not reset", map[string]string{"1": "XID 94", "2": "XID 48"})
			}
			if isClosed(sim, 2) {
				t.Error("nobody has looked the GPU up again")
			}
			must(t, sim.XID(2, 62, nvml.WholeGPU, nvml.WholeGPU))
			after(time.Second)
			if gpus, _ := w.Inventory(); !strings.Contains(gpus[2].Health.Reason, "XID 62") {
				t.Errorf("its events are not heard: %q", gpus[2].Health.Reason)
			}
		})
	}
}

// TestReleaseClosesAll uses a driver that opens all GPUs in Init. This program has no session while a GPU is
// released, keeps all GPUs' data, and reads them again afterwards.
func TestReleaseClosesAll(t *testing.T) {
	for _, wasReset := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			sim, log := simulate(t, "a30x4"), &bytes.Buffer{}
			w := watchWith(t, sim, nvml.Options{Kernel: sim, Logger: slog.New(slog.NewTextHandler(log, nil))})
			metering(t, w, 0)
			gpu := sim.GPUs()[2].UUID
			must(t, sim.XID(2, 48, nvml.WholeGPU, nvml.WholeGPU))
			after(time.Second)
			before := log.Len()
			index, err := w.Release(context.Background(), gpu)
			if err != nil || index != 2 {
				t.Fatalf("index %d, %v", index, err)
			}
			opened := sim.Calls("Init")
			for range 40 {
				if !isClosed(sim, 2) {
					t.Fatal("something has it open")
				}
				if w.Closed() {
					t.Fatal("it counts as a pause of the driver")
				}
				after(1700 * time.Millisecond)
				w.expect("while it is released", map[string]string{"2": "XID 48"})
			}
			if again := sim.Calls("Init") - opened; again > 0 {
				t.Errorf("opened %d times", again)
			}
			err = w.OpenAll(func() { t.Error("opened while it is released") })
			if err == nil || !strings.Contains(err.Error(), gpu) {
				t.Errorf("got %v, want that %s is released", err, gpu)
			}
			if text := log.String()[before:]; strings.Contains(text, "not every GPU") || !strings.Contains(text, "no GPU is watched") {
				t.Errorf("logged\n%s", text)
			}
			must(t, w.Restore(context.Background(), gpu, wasReset))
			if wasReset {
				w.expect("after a reset", map[string]string{})
			} else {
				w.expect("when it was not reset", map[string]string{"2": "XID 48"})
			}
			for i := range 4 {
				if isClosed(sim, i) {
					t.Errorf("GPU %d is not open again", i)
				}
			}
			must(t, sim.XID(1, 62, nvml.WholeGPU, nvml.WholeGPU))
			after(time.Second)
			if gpus, _ := w.Inventory(); !strings.Contains(gpus[1].Health.Reason, "XID 62") {
				t.Errorf("events are not heard: %q", gpus[1].Health.Reason)
			}
		})
	}
}

// TestRecoveryDelayDuringARelease checks that time without watching does not count as quiet: for the released GPU
// and, if the driver opens all GPUs in Init, for every GPU. The recovery delay is 5 minutes.
func TestRecoveryDelayDuringARelease(t *testing.T) {
	for world, faults := range map[string]map[string]string{
		"lazy": {"2": "XID 94"},
		"":     {"1": "XID 94", "2": "XID 94"},
	} {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			must(t, sim.SetWorld(world))
			w := watchWith(t, sim, nvml.Options{Kernel: sim})
			for _, gpu := range []int{1, 2} {
				must(t, sim.XID(gpu, 94, nvml.WholeGPU, nvml.WholeGPU))
			}
			after(3 * time.Minute)
			gpu := sim.GPUs()[2].UUID
			_, err := w.Release(context.Background(), gpu)
			must(t, err)
			after(time.Hour)
			must(t, w.Restore(context.Background(), gpu, false))
			after(90 * time.Second)
			w.expect("with 4.5 minutes of quiet in world "+world, faults)
			after(time.Minute)
			w.expect("with 5.5 minutes of quiet in world "+world, nil)
		})
	}
}

// TestTakeBackWhileAnotherIsReleased checks, with the same driver, that a GPU can be restored while another is
// released, which is then open for one scan only.
func TestTakeBackWhileAnotherIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		gpus := sim.GPUs()
		for _, gpu := range gpus[1:3] {
			_, err := w.Release(context.Background(), gpu.UUID)
			must(t, err)
		}
		after(time.Minute)
		must(t, w.Restore(context.Background(), gpus[1].UUID, true))
		for range 20 {
			after(time.Second)
			if !isClosed(sim, 2) || !isClosed(sim, 1) {
				t.Fatal("a session goes on")
			}
		}
		must(t, w.Restore(context.Background(), gpus[2].UUID, true))
		after(time.Second)
		if isClosed(sim, 1) || isClosed(sim, 2) {
			t.Error("the GPUs are not open again")
		}
		w.expect("taken back", map[string]string{})
	})
}

// TestReleaseAfterASlowInit checks that the same driver is recognised even if two sessions opened it together.
func TestReleaseAfterASlowInit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		sim.InjectFault("Init", simnode.Fault{Delay: 3 * time.Second, Times: 2})
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		after(time.Second)
		_, _ = nvml.NewMeter(w.Library()).Read(context.Background())
		after(time.Minute)
		_, err := w.Release(context.Background(), sim.GPUs()[2].UUID)
		must(t, err)
		for range 20 {
			if !isClosed(sim, 2) {
				t.Fatal("something has it open")
			}
			after(time.Second)
		}
	})
}

// TestFailedRelease checks, with the same driver, that GPUs are still watched if a session does not end.
func TestFailedRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		hung := make(chan struct{})
		go func() { _ = w.OpenAll(func() { <-hung }) }()
		synctest.Wait()
		if _, err := w.Release(context.Background(), sim.GPUs()[2].UUID); err == nil || strings.Contains(err.Error(), "restart") {
			t.Errorf("while a session is slow: %v", err)
		}
		after(time.Second)
		must(t, sim.XID(1, 62, nvml.WholeGPU, nvml.WholeGPU))
		after(time.Second)
		if gpus, _ := w.Inventory(); !strings.Contains(gpus[1].Health.Reason, "XID 62") {
			t.Errorf("events are not heard: %q", gpus[1].Health.Reason)
		}
		close(hung)
	})
}

// TestClosedOverARestart checks, with the same driver, that a program that finds a GPU released by its last run
// reads the GPUs once, and then has no session until the GPU is restored.
func TestClosedOverARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, known := simulate(t, "a30x4"), &knownGPUs{}
		options := nvml.Options{Kernel: sim, Store: &memory{}, Known: known, Boot: "first"}
		before := watchWith(t, sim, options)
		must(t, before.RestoreHealth(context.Background()))
		after(time.Second)
		must(t, before.stop())
		gpu := sim.GPUs()[2].UUID
		node := nvml.NewNode(sim, options)
		node.KeepReleased(map[string]int{gpu: 2})
		w := watchNode(t, node)
		must(t, w.RestoreHealth(context.Background()))
		after(time.Second)
		for range 20 {
			if !isClosed(sim, 2) {
				t.Fatal("something has it open")
			}
			after(time.Second)
		}
		if got := w.numbers(); got != "A=0 B=1 C=2 D=3" {
			t.Errorf("indexes %s", got)
		}
		w.expect("while it is released", map[string]string{})
		must(t, w.Restore(context.Background(), gpu, false))
		w.expect("taken back", map[string]string{})
	})
}

// TestLateOverARestart checks, with the same driver, that such a program waits for a GPU that answers late before
// it closes the driver, but not forever.
func TestLateOverARestart(t *testing.T) {
	for _, late := range []simnode.Fault{{Delay: 45 * time.Second, Times: 1}, {Return: nvml.Unknown}} {
		synctest.Test(t, func(t *testing.T) {
			sim, known := simulate(t, "a30x4"), &knownGPUs{}
			node := nvml.NewNode(sim, nvml.Options{Kernel: sim, Store: &memory{}, Known: known, Boot: "first"})
			gpu := sim.GPUs()[2].UUID
			node.KeepReleased(map[string]int{gpu: 2})
			_, err := sim.InjectGPUFault(3, "DeviceGetName", late)
			must(t, err)
			w := watchNode(t, node)
			must(t, w.RestoreHealth(context.Background()))
			after(2 * time.Minute)
			if !isClosed(sim, 2) {
				t.Fatal("something has it open")
			}
			gpus, err := w.Inventory()
			must(t, err)
			if found := len(gpus) == 3; found != (late.Times == 1) { // The released one was never known.
				t.Errorf("%d GPUs are known", len(gpus))
			}
		})
	}
}

// TestReleaseWhileOthersAreRead checks, with the same driver, that a GPU is not released while a session reads
// others.
func TestReleaseWhileOthersAreRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		gpus := sim.GPUs()
		_, err := w.Release(context.Background(), gpus[1].UUID)
		must(t, err)
		sim.InjectFault("DeviceGetName", simnode.Fault{Delay: 3 * time.Second, Times: 4})
		restored := make(chan error, 1)
		go func() { restored <- w.Restore(context.Background(), gpus[1].UUID, true) }()
		after(time.Second)
		_, err = w.Release(context.Background(), gpus[2].UUID)
		must(t, err)
		for range 20 {
			if !isClosed(sim, 2) {
				t.Fatal("something has it open")
			}
			after(time.Second)
		}
		must(t, <-restored)
	})
}

// TestSetReleasedOthers checks that a Node without a Kernel still reads the other GPUs, even if Init opens all of
// them: virgate mps must still end daemons and restore compute modes.
func TestSetReleasedOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		gpus, node := sim.GPUs(), nvml.NewNode(sim, nvml.Options{})
		for range 2 {
			_, _, err := node.ComputeMode(context.Background(), gpus[2].UUID)
			must(t, err)
			node.SetReleased(context.Background(), map[string]int{gpus[1].UUID: 1})
		}
		if _, _, err := node.ComputeMode(context.Background(), gpus[1].UUID); !errors.Is(err, sharing.ErrReleased) {
			t.Errorf("the released GPU: %v", err)
		}
	})
}

// TestSetReleased checks that a Node without Watch does not open a GPU that another program has released, even if
// the driver's index has changed.
func TestSetReleased(t *testing.T) {
	for _, index := range []int{1, -1, 3} {
		synctest.Test(t, func(t *testing.T) {
			sim := simulateLazy(t)
			gpus := sim.GPUs()
			node := nvml.NewNode(sim, nvml.Options{})
			must(t, node.Library().Init()) // It keeps GPUs open once they are looked up.
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				pass(time.Second)
				if err := node.Library().Shutdown(); err != nil {
					t.Error(err)
				}
			}()
			_, _, err := node.ComputeMode(context.Background(), gpus[2].UUID)
			must(t, err)
			if isClosed(sim, 1) {
				t.Fatal("a walk to GPU 2 does not open GPU 1")
			}
			node.SetReleased(context.Background(), map[string]int{gpus[1].UUID: index})
			<-ended
			for range 3 {
				_, _, err := node.ComputeMode(context.Background(), gpus[2].UUID)
				must(t, err)
			}
			must(t, node.Library().Init())
			_, _, err = node.ComputeMode(context.Background(), gpus[2].UUID)
			must(t, err)
			if !isClosed(sim, 1) {
				t.Errorf("index %d: the released GPU is open", index)
			}
			if _, _, err := node.ComputeMode(context.Background(), gpus[1].UUID); err == nil {
				t.Error("a released GPU is asked")
			}
			node.SetReleased(context.Background(), nil)
			_, _, err = node.ComputeMode(context.Background(), gpus[1].UUID)
			must(t, err)
			must(t, node.Library().Shutdown())
		})
	}
}

// TestReleaseAndAnotherGPUGoes checks that a released GPU stays closed when the driver renumbers its GPUs.
func TestReleaseAndAnotherGPUGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulateLazy(t)
		w := watch(t, sim)
		metering(t, w, 2)
		gpu := sim.GPUs()[2].UUID
		_, err := w.Release(context.Background(), gpu)
		must(t, err)
		after(time.Second) // Between two looks at the use.
		must(t, sim.Remove(0))
		after(time.Minute)
		for range 20 {
			if !isClosed(sim, 2) {
				t.Fatal("something has it open")
			}
			after(time.Second)
		}
		w.expect("a minute later", map[string]string{"0": "lost"})
		must(t, w.Restore(context.Background(), gpu, false))
		w.expect("taken back", map[string]string{"0": "lost"})
		if got := w.numbers(); got != "A=0/none B=1/0 C=2/1 D=3/2" {
			t.Errorf("indexes %s", got)
		}
	})
}

// TestReleaseWhileACallHangs checks that a GPU is not released while a session with the driver goes on, and that
// nothing else waits forever.
func TestReleaseWhileACallHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulateLazy(t)
		w := watch(t, sim)
		meter := nvml.NewMeter(w.Library())
		_, err := sim.InjectGPUFault(1, "DeviceGetUtilizationRates", simnode.Fault{Delay: 25 * time.Second, Times: 1})
		must(t, err)
		_, err = meter.Read(context.Background())
		if err == nil {
			t.Fatal("the call did not hang")
		}
		gpu := sim.GPUs()[2].UUID
		_, err = w.Release(context.Background(), gpu)
		if err == nil || !strings.Contains(err.Error(), "still uses the driver") || isClosed(sim, 2) {
			t.Fatalf("while it hangs: %v", err)
		}
		after(time.Second)
		w.expect("while it hangs", nil)
		after(20 * time.Second)
		_, err = w.Release(context.Background(), gpu)
		if err != nil || !isClosed(sim, 2) {
			t.Fatalf("when it has returned: %v", err)
		}
		// A slow call is waited for as long as if no other GPU had just been released, and the driver is not opened
		// meanwhile.
		_, err = sim.InjectGPUFault(1, "DeviceGetUtilizationRates", simnode.Fault{Delay: 11 * time.Second, Times: 1})
		must(t, err)
		_, err = meter.Read(context.Background()) // The other call's answer.
		must(t, err)
		if _, err = meter.Read(context.Background()); err == nil {
			t.Fatal("the call is not slow")
		}
		if _, err := w.Release(context.Background(), sim.GPUs()[3].UUID); err != nil || !isClosed(sim, 3) {
			t.Errorf("while a call is slow: %v", err)
		}
		if _, err := w.Release(context.Background(), "GPU-none"); err == nil || !strings.Contains(err.Error(), "GPU-none") {
			t.Errorf("an unknown GPU: %v", err)
		}
	})
}

// TestReleaseWhileACallIsAbandoned checks that no session is ended for a release while an abandoned call hangs:
// other GPUs are still watched.
func TestReleaseWhileACallIsAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulateLazy(t)
		w := watch(t, sim)
		_, err := sim.InjectGPUFault(1, "DeviceGetMemoryInfo", simnode.Fault{Delay: 2 * time.Minute, Times: 1})
		must(t, err)
		after(time.Minute)
		began, sessions, gpu := time.Now(), sim.Calls("Shutdown"), sim.GPUs()[2].UUID
		_, err = w.Release(context.Background(), gpu)
		if err == nil || !strings.Contains(err.Error(), "DeviceGetMemoryInfo for GPU 1") || elapsed(began) > 0 || sim.Calls("Shutdown") != sessions {
			t.Errorf("while it hangs, after %s: %v", elapsed(began), err)
		}
		must(t, sim.XID(3, 94, nvml.WholeGPU, nvml.WholeGPU))
		after(time.Second)
		if gpus, _ := w.Inventory(); gpus[3].Health.Reason != "XID 94" {
			t.Errorf("an error of another GPU: %q", gpus[3].Health.Reason)
		}
		after(2 * time.Minute)
		if _, err = w.Release(context.Background(), gpu); err != nil || !isClosed(sim, 2) {
			t.Errorf("when it has returned: %v", err)
		}
	})
}

// TestCallThatHangsDuringARelease checks that a call abandoned during a release is named, and that no session is
// ended then.
func TestCallThatHangsDuringARelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		gpus := sim.GPUs()
		_, err := w.Release(context.Background(), gpus[1].UUID)
		must(t, err)
		_, err = sim.InjectGPUFault(1, "DeviceGetMemoryInfo", simnode.Fault{Delay: 2 * time.Minute, Times: 1})
		must(t, err)
		restored := make(chan error, 1)
		go func() { restored <- w.Restore(context.Background(), gpus[1].UUID, false) }()
		after(25 * time.Second)
		began, sessions := time.Now(), sim.Calls("Shutdown")
		_, err = w.Release(context.Background(), gpus[2].UUID)
		if err == nil || !strings.Contains(err.Error(), "DeviceGetMemoryInfo for GPU 1") || sim.Calls("Shutdown") != sessions {
			t.Errorf("after %s, with %d sessions ended: %v", elapsed(began), sim.Calls("Shutdown")-sessions, err)
		}
		must(t, <-restored)
		after(2 * time.Minute)
	})
}

// TestEndDuringARelease checks that the program's end does not wait for a session that a release is closing.
func TestEndDuringARelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		hung, released := make(chan struct{}), make(chan error, 1)
		go func() { _ = w.OpenAll(func() { <-hung }) }()
		synctest.Wait()
		go func() {
			_, err := w.Release(context.Background(), sim.GPUs()[3].UUID)
			released <- err
		}()
		after(time.Second)
		began := time.Now()
		must(t, w.stop())
		if took := elapsed(began); took > time.Second {
			t.Errorf("the end took %s", took)
		}
		if err := <-released; err == nil {
			t.Error("released while a session is open")
		}
		close(hung)
	})
}

// TestReleasedOverARestart checks that a GPU released by an earlier run is never opened by the next run, and
// keeps its faults.
func TestReleasedOverARestart(t *testing.T) {
	for _, boot := range []string{"first", ""} {
		for _, slow := range []time.Duration{0, time.Second} {
			known, faults := &knownGPUs{}, &memory{}
			var gpu string
			synctest.Test(t, func(t *testing.T) {
				sim := simulateLazy(t)
				w := watchWith(t, sim, nvml.Options{Store: faults, Known: known, Boot: "first"})
				must(t, w.RestoreHealth(context.Background()))
				must(t, sim.XID(2, 48, nvml.WholeGPU, nvml.WholeGPU))
				after(time.Second)
				gpu = sim.GPUs()[2].UUID
			})
			synctest.Test(t, func(t *testing.T) {
				sim := simulateLazy(t)
				node := nvml.NewNode(sim, nvml.Options{Store: faults, Known: known, Boot: boot})
				node.KeepReleased(map[string]int{gpu: 2})
				sim.InjectFault("DeviceGetHandleByIndex", simnode.Fault{Delay: slow, Times: 3})
				w := watchNode(t, node)
				must(t, w.RestoreHealth(context.Background()))
				after(time.Minute)
				if calls := sim.Calls("DeviceGetUUID"); !isClosed(sim, 2) || calls == 0 {
					t.Fatal("something has it open")
				}
				w.expect("while it is released", map[string]string{"2": "XID 48"})
				if got := w.numbers(); got != "A=0 B=1 C=2 D=3" {
					t.Errorf("indexes %s", got)
				}
				must(t, w.Restore(context.Background(), gpu, false))
				after(time.Minute)
				w.expect("when it was not reset", map[string]string{"2": "XID 48"})
				must(t, w.stop())
				if len(faults.kept) != 1 {
					t.Errorf("kept are %+v", faults.kept)
				}
			})
		}
	}
}

// TestOpenAll checks that OpenAll fails while a GPU is released, and that a release waits until OpenAll returns.
func TestOpenAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		gpu := sim.GPUs()[2].UUID
		released := make(chan error, 1)
		began := time.Now()
		must(t, w.OpenAll(func() {
			go func() {
				_, err := w.Release(context.Background(), gpu)
				released <- err
			}()
			after(3 * time.Second)
			if len(released) > 0 {
				t.Error("released while it is open")
			}
		}))
		must(t, <-released)
		if took := elapsed(began); took > 4*time.Second {
			t.Errorf("it took %s to let go after 3 s of use", took)
		}
		if err := w.OpenAll(func() { t.Error("opened while it is released") }); err == nil || !strings.Contains(err.Error(), gpu) {
			t.Errorf("got %v, want that %s is released", err, gpu)
		}
		must(t, w.Restore(context.Background(), gpu, false))
		opened := false
		must(t, w.OpenAll(func() { opened = true }))
		if !opened {
			t.Error("not opened when it was taken back")
		}
	})
}
