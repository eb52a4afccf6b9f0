package nvml_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
)

// handles opens the library and looks up its GPUs.
func handles(t *testing.T, lib nvml.Library) []nvml.Device {
	t.Helper()
	must(t, lib.Init())
	count, err := lib.DeviceGetCount()
	must(t, err)
	var devices []nvml.Device
	for index := range count {
		device, err := lib.DeviceGetHandleByIndex(index)
		must(t, err)
		devices = append(devices, device)
	}
	return devices
}

// TestDeadlines checks that a call without an answer is abandoned after its limit, that only its GPU is then
// unreachable, at once, and that it is back when the call returns.
func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100+all-balanced")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		gpus := handles(t, lib)
		partition, err := lib.DeviceGetMigDeviceHandleByIndex(gpus[0], 0)
		must(t, err)
		instance, err := lib.DeviceGetGpuInstanceById(gpus[0], 1)
		must(t, err)
		compute, err := lib.GpuInstanceGetComputeInstanceById(instance, 0)
		must(t, err)
		_, err = sim.InjectGPUFault(0, "DeviceGetMemoryInfo", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)

		start := time.Now()
		_, err = lib.DeviceGetMemoryInfo(partition)
		if took := elapsed(start); took != 30*time.Second {
			t.Errorf("abandoned after %s, want 30 s", took)
		}
		if want := "nvml: DeviceGetMemoryInfo: TIMEOUT: abandoned after 30s, the driver does not answer"; err == nil || err.Error() != want {
			t.Errorf("error %v, want %q", err, want)
		}
		if _, ok := errors.AsType[*nvml.Error](err); !ok || !errors.Is(err, nvml.Timeout) {
			t.Errorf("error %v is no *Error with TIMEOUT", err)
		}

		first := err
		start = time.Now()
		for call, ask := range map[string]func() error{
			"GPU":         func() error { _, err := lib.DeviceGetUUID(gpus[0]); return err },
			"partition":   func() error { _, err := lib.DeviceGetUUID(partition); return err },
			"GI":          func() error { _, err := lib.GpuInstanceGetInfo(instance); return err },
			"CI":          func() error { _, err := lib.ComputeInstanceGetInfo(compute); return err },
			"index":       func() error { _, err := lib.DeviceGetHandleByIndex(0); return err },
			"second of 2": func() error { _, err := lib.DeviceGetTopologyCommonAncestor(gpus[1], gpus[0]); return err },
		} {
			if err := ask(); err == nil || err.Error() != first.Error() {
				t.Errorf("%s: error %v while stuck, want that of the stuck call", call, err)
			}
		}
		_, err = lib.DeviceGetUUID(gpus[1])
		must(t, err)
		_, err = lib.DeviceGetHandleByIndex(1)
		must(t, err)
		_, err = lib.DeviceGetCount()
		must(t, err)
		if took := elapsed(start); took != 0 {
			t.Errorf("the answers took %s, want none to wait", took)
		}
		if got := sim.Calls("DeviceGetUUID"); got != 1 {
			t.Errorf("%d calls reached the driver, want that for the other GPU", got)
		}

		after(time.Hour)
		_, err = lib.DeviceGetUUID(gpus[0])
		must(t, err)
	})
}

// TestDeadlineLimits checks how long each kind of call may take.
func TestDeadlineLimits(t *testing.T) {
	tests := []struct {
		call  string
		ask   func(nvml.Library) error
		limit time.Duration
	}{
		{"Init", nvml.Library.Init, time.Minute},
		{"Shutdown", nvml.Library.Shutdown, 30 * time.Second},
		{"DeviceGetCount", func(l nvml.Library) error { _, err := l.DeviceGetCount(); return err }, 30 * time.Second},
		{"DeviceGetHandleByIndex", func(l nvml.Library) error { _, err := l.DeviceGetHandleByIndex(0); return err }, time.Minute},
		{"EventSetCreate", func(l nvml.Library) error { _, err := l.EventSetCreate(); return err }, 30 * time.Second},
	}
	for _, test := range tests {
		t.Run(test.call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "t4")
				lib := nvml.WithDeadlines(sim, nvml.Limits{})
				must(t, lib.Init())
				sim.InjectFault(test.call, simnode.Fault{Delay: test.limit - 1, Times: 1})
				must(t, test.ask(lib))
				must(t, lib.Init())
				sim.InjectFault(test.call, simnode.Fault{Delay: test.limit + 1, Times: 1})
				start := time.Now()
				err := test.ask(lib)
				if took := elapsed(start); took != test.limit || !errors.Is(err, nvml.Timeout) {
					t.Errorf("error %v after %s, want TIMEOUT after %s", err, took, test.limit)
				}
				after(time.Second)
				if _, err := lib.DeviceGetCount(); errors.Is(err, nvml.Timeout) {
					t.Errorf("when it has returned: %v", err)
				}
			})
		})
	}
}

// TestDeadlineLate checks that anything an abandoned call has opened after all is closed again.
func TestDeadlineLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{Call: time.Second, Lookup: time.Second})
		must(t, lib.Init())
		sim.InjectFault("EventSetCreate", simnode.Fault{Delay: time.Minute, Times: 1})
		if _, err := lib.EventSetCreate(); !errors.Is(err, nvml.Timeout) {
			t.Errorf("EventSetCreate: %v, want TIMEOUT", err)
		}
		after(time.Minute)
		sim.InjectFault("Init", simnode.Fault{Delay: time.Minute, Times: 1})
		if err := lib.Init(); !errors.Is(err, nvml.Timeout) {
			t.Errorf("Init: %v, want TIMEOUT", err)
		}
		after(time.Minute)
		if freed, closed := sim.Calls("EventSetFree"), sim.Calls("Shutdown"); freed != 1 || closed != 1 {
			t.Errorf("%d sets freed, %d times Shutdown, want 1 each", freed, closed)
		}
		must(t, lib.Shutdown())
		if _, err := lib.DeviceGetCount(); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("after as many Shutdown as Init: %v, want UNINITIALIZED", err)
		}
	})
}

// TestDeadlineTurns checks that calls for one GPU are serialised, so that only one goroutine hangs, however many
// call.
func TestDeadlineTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{Call: time.Second})
		gpu := handles(t, lib)[0]
		sim.InjectFault("DeviceGetUUID", simnode.Fault{Delay: time.Minute})
		const callers = 10
		errs := make(chan error, callers)
		for range callers {
			go func() { _, err := lib.DeviceGetUUID(gpu); errs <- err }()
		}
		for range callers {
			if err := <-errs; !errors.Is(err, nvml.Timeout) || !strings.Contains(err.Error(), "abandoned after 1s") {
				t.Errorf("error %v, want that the call was abandoned", err)
			}
		}
		if got := sim.Calls("DeviceGetUUID"); got != 1 {
			t.Errorf("%d calls reached the driver, want 1", got)
		}
		after(time.Minute)
	})
}

// TestDeadlineEvents checks that a wait for events may outlast any limit.
func TestDeadlineEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := nvml.WithDeadlines(simulate(t, "t4"), nvml.Limits{Call: time.Second})
		handles(t, lib)
		set, err := lib.EventSetCreate()
		must(t, err)
		start := time.Now()
		_, err = lib.EventSetWait(set, time.Minute)
		if _, abandoned := errors.AsType[*nvml.AbandonedError](err); abandoned || elapsed(start) != time.Minute {
			t.Errorf("error %v after %s, want TIMEOUT of the wait itself after a minute", err, elapsed(start))
		}
	})
}

// TestScanStuckGPU checks that a GPU without an answer hides no other, and is back when it answers.
func TestScanStuckGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		_, err := sim.InjectGPUFault(3, "DeviceGetUUID", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)
		start := time.Now()
		gpus, err := nvml.Scan(lib)
		if len(gpus) != 7 || !errors.Is(err, nvml.Timeout) {
			t.Errorf("%d GPUs, error %v, want 7 and TIMEOUT", len(gpus), err)
		}
		if took := elapsed(start); took != 30*time.Second {
			t.Errorf("a scan took %s, want one limit", took)
		}
		after(time.Hour)
		gpus, err = nvml.Scan(lib)
		if len(gpus) != 8 || err != nil {
			t.Errorf("%d GPUs, error %v after it let go, want 8", len(gpus), err)
		}
	})
}

func BenchmarkDeadline(b *testing.B) {
	sim, err := simnode.New("t4")
	if err != nil {
		b.Fatal(err)
	}
	for name, lib := range map[string]nvml.Library{"bare": sim, "deadline": nvml.WithDeadlines(sim, nvml.Limits{})} {
		b.Run(name, func(b *testing.B) {
			if err := lib.Init(); err != nil {
				b.Fatal(err)
			}
			device, err := lib.DeviceGetHandleByIndex(0)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := lib.DeviceGetUUID(device); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestFormerHandleStuck checks that a hanging call for a GPU's old handle blocks neither that GPU nor the one
// that now has its index.
func TestFormerHandleStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, nvml.WithDeadlines(sim, nvml.Limits{}))
		before, err := w.Inventory()
		must(t, err)
		must(t, sim.Heal(1))
		// The second memory query uses the handle from before the reset.
		_, err = sim.InjectGPUFault(1, "DeviceGetMemoryInfo", simnode.Fault{Delay: time.Hour, Skip: 1, Times: 1})
		must(t, err)
		must(t, sim.Remove(0))
		for range 12 {
			after(10 * time.Second)
			gpus, err := w.Inventory()
			must(t, err)
			for _, gpu := range gpus {
				if gpu.UUID != before[0].UUID && !gpu.Health.Healthy() {
					t.Errorf("GPU %d: fault %q", gpu.Index, gpu.Health.Reason)
				}
			}
		}
		if calls := sim.Calls("DeviceGetMemoryInfo"); calls < 3*12 {
			t.Errorf("%d memory queries in two minutes, want those of three GPUs", calls)
		}
		after(time.Hour)
	})
}

// TestGPUMovesAway checks that a stuck GPU stays stuck at another index, and that the GPU now at its old index is
// not.
func TestGPUMovesAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		gpus := handles(t, lib)
		must(t, sim.Remove(0))
		for index, want := range gpus[1:] {
			device, err := lib.DeviceGetHandleByIndex(index)
			if device != want || err != nil {
				t.Fatalf("GPU %d is now %v, %v, want %v", index, device, err, want)
			}
		}
		_, err := sim.InjectGPUFault(1, "DeviceGetName", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)
		_, err = lib.DeviceGetName(gpus[2])
		if err == nil {
			t.Fatal("the GPU is not stuck")
		}
		for index, stuck := range []bool{false, true, false} {
			if _, err := lib.DeviceGetHandleByIndex(index); (err != nil) != stuck {
				t.Errorf("look-up of GPU %d: %v", index, err)
			}
			if _, err := lib.DeviceGetUUID(gpus[index+1]); (err != nil) != stuck {
				t.Errorf("UUID of GPU %d: %v", index, err)
			}
		}
		after(time.Hour)
	})
}

// TestStuckLookUp checks that a hanging look-up blocks only its index.
func TestStuckLookUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		gpus := handles(t, lib)
		_, err := sim.InjectGPUFault(1, "DeviceGetHandleByIndex", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)
		for range 2 {
			if _, err := lib.DeviceGetHandleByIndex(1); !errors.Is(err, nvml.Timeout) {
				t.Errorf("the look-up that hangs: %v", err)
			}
		}
		if calls := sim.Calls("DeviceGetHandleByIndex"); calls != 4+1 {
			t.Errorf("%d look-ups reached the driver, want one that hangs", calls-4)
		}
		_, err = lib.DeviceGetHandleByIndex(2)
		must(t, err)
		_, err = lib.DeviceGetUUID(gpus[1])
		must(t, err)
		_, err = lib.DeviceGetCount()
		must(t, err)
		after(time.Hour)
	})
}

// TestUntil checks that a hanging call ends half a second after its caller's context, that the caller makes no
// more calls, that others can go on with other GPUs, and that this works below a recorder and for a Partitioner's
// step.
func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		shared := nvml.WithDeadlines(sim, nvml.Limits{})
		gpus := handles(t, shared)
		uuid, err := shared.DeviceGetUUID(gpus[1])
		must(t, err)
		_, err = sim.InjectGPUFault(2, "DeviceGetMemoryInfo", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)
		hung := make(chan struct{})
		time.AfterFunc(time.Hour, func() { close(hung) })
		_, err = sim.InjectGPUFault(1, "DeviceSetMigMode", simnode.Fault{Until: hung, Times: 1})
		must(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		passOn := func(_ nvml.Call, do func() (any, error)) (any, error) { return do() }
		lib := nvml.Until(ctx, nvml.Intercept(shared, passOn))
		errs := make(chan error, 2)
		start := time.Now()
		go func() { _, err := lib.DeviceGetMemoryInfo(gpus[2]); errs <- err }()
		go func() { errs <- nvml.NewPartitioner(shared, nil).Apply(ctx, uuid, mig.Step{Action: mig.EnableMIG}) }()
		for range 2 {
			if err := <-errs; !errors.Is(err, nvml.Timeout) || elapsed(start) != 1500*time.Millisecond {
				t.Errorf("%v after %s, want TIMEOUT after 1.5 s", err, elapsed(start))
			}
		}
		if _, err := lib.DeviceGetCount(); !errors.Is(err, context.Canceled) {
			t.Errorf("a call after the end: %v", err)
		}
		_, err = shared.DeviceGetUUID(gpus[0])
		must(t, err)
		after(2 * time.Hour)
	})
}
