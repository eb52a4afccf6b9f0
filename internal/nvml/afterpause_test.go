package nvml_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestMismatchOverAPause checks that two short mismatches with a pause between them do not count as a lasting
// one.
func TestMismatchOverAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		mismatch := simnode.Fault{Return: nvml.LibRMVersionMismatch}
		end := sim.InjectFault("Init", mismatch)
		node := nvml.NewNode(sim, nvml.Options{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- node.Watch(ctx, func() {}) }()
		after(500 * time.Millisecond)
		node.Pause(nil)
		after(5 * time.Minute)
		node.Resume()
		after(time.Second)
		select {
		case err := <-ended:
			t.Errorf("ended 1 s after the pause: %v", err)
			cancel()
			return
		default:
		}
		end()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestHotWithoutMargin checks that once a GPU's margin cannot be read any more, its temperature decides.
func TestHotWithoutMargin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h100")
		w := watch(t, sim)
		must(t, sim.SetTemperature(0, 99))
		after(time.Minute)
		if f := w.faults(); len(f) == 0 {
			t.Fatal("99 °C, and healthy")
		}
		_, err := sim.InjectGPUFault(0, "DeviceGetMarginTemperature", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		must(t, sim.SetTemperature(0, 35))
		after(3 * time.Hour)
		if f := w.faults(); len(f) > 0 {
			t.Errorf("hours later at 35 °C: %v; %v", f, w.Health().Units[0].Explanation)
		}
	})
}

// TestNeverAMargin checks that the rules' limit applies to a board whose margin could never be read.
func TestNeverAMargin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-h100")
		w := watch(t, sim)
		_, err := sim.InjectGPUFault(0, "DeviceGetMarginTemperature", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		after(time.Minute)
		must(t, sim.SetTemperature(0, 105))
		after(time.Hour)
		if f := w.faults(); len(f) == 0 {
			t.Error("105 °C for an hour, and healthy")
		}
	})
}

// TestTwoMismatches checks that two mismatches an hour apart do not count as lasting, even if the driver is not
// opened in between, as by virgate mps without a daemon.
func TestTwoMismatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mismatches nvml.Mismatches
		bad := &nvml.Error{Call: "Init", Return: nvml.LibRMVersionMismatch}
		_, _ = mismatches.Lasting(bad)
		pass(time.Hour)
		if _, lasting := mismatches.Lasting(bad); lasting != nil {
			t.Error(lasting)
		}
	})
}

// TestFirstOpenAfterAPause checks that a program that starts in a pause waits for a driver after it:
// k8s-driver-manager restores its labels before the next driver is installed.
func TestFirstOpenAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		node := nvml.NewNode(sim, nvml.Options{FailOnInitError: true})
		node.Pause(nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- node.Watch(ctx, func() {}) }()
		after(time.Minute)
		sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
		node.Resume()
		after(time.Second)
		select {
		case err := <-ended:
			t.Errorf("ended: %v", err)
			cancel()
			return
		default:
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestSlowCounters checks that memory error counters that never answer are also asked for only once a minute.
func TestSlowCounters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		end := sim.InjectFault("DeviceGetMemoryErrorCounter", simnode.Fault{Delay: 31 * time.Second})
		ctx, cancel := context.WithCancel(context.Background())
		meter := nvml.NewMeter(w.Library())
		for range 20 * 12 {
			_, _ = meter.Read(ctx)
			pass(5 * time.Second)
		}
		if n := sim.Calls("DeviceGetMemoryErrorCounter"); n > 22 {
			t.Errorf("%d calls in 20 minutes, although one in a minute is wanted", n)
		}
		end()
		cancel()
		_, _ = meter.Read(ctx)
		after(time.Minute)
	})
}
