package nvml_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// handles opens the library and looks up its boards.
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

// TestDeadlines holds that a call which is not answered is abandoned after its
// limit, that its board alone is then out of reach, at once, and that the board
// is back when the call returns.
func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100+all-balanced")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		boards := handles(t, lib)
		partition, err := lib.DeviceGetMigDeviceHandleByIndex(boards[0], 0)
		must(t, err)
		instance, err := lib.DeviceGetGpuInstanceById(boards[0], 1)
		must(t, err)
		compute, err := lib.GpuInstanceGetComputeInstanceById(instance, 0)
		must(t, err)
		_, err = sim.ScriptGPU(0, "DeviceGetMemoryInfo", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)

		start := time.Now()
		_, err = lib.DeviceGetMemoryInfo(partition)
		if took := time.Since(start); took != 30*time.Second {
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
			"board":       func() error { _, err := lib.DeviceGetUUID(boards[0]); return err },
			"partition":   func() error { _, err := lib.DeviceGetUUID(partition); return err },
			"GI":          func() error { _, err := lib.GpuInstanceGetInfo(instance); return err },
			"CI":          func() error { _, err := lib.ComputeInstanceGetInfo(compute); return err },
			"index":       func() error { _, err := lib.DeviceGetHandleByIndex(0); return err },
			"second of 2": func() error { _, err := lib.DeviceGetTopologyCommonAncestor(boards[1], boards[0]); return err },
		} {
			if err := ask(); err == nil || err.Error() != first.Error() {
				t.Errorf("%s: error %v while stuck, want that of the stuck call", call, err)
			}
		}
		_, err = lib.DeviceGetUUID(boards[1])
		must(t, err)
		_, err = lib.DeviceGetHandleByIndex(1)
		must(t, err)
		_, err = lib.DeviceGetCount()
		must(t, err)
		if took := time.Since(start); took != 0 {
			t.Errorf("the answers took %s, want none to wait", took)
		}
		if got := sim.Calls("DeviceGetUUID"); got != 1 {
			t.Errorf("%d calls reached the driver, want that for the other board", got)
		}

		after(time.Hour)
		_, err = lib.DeviceGetUUID(boards[0])
		must(t, err)
	})
}

// TestDeadlineLimits holds how long each kind of call may take.
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
				sim.Script(test.call, simnode.Fault{Delay: test.limit - 1, Times: 1})
				must(t, test.ask(lib))
				must(t, lib.Init())
				sim.Script(test.call, simnode.Fault{Delay: test.limit + 1, Times: 1})
				start := time.Now()
				err := test.ask(lib)
				if took := time.Since(start); took != test.limit || !errors.Is(err, nvml.Timeout) {
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

// TestDeadlineLate holds that what an abandoned call has opened in the end is
// closed again, for nobody knows of it.
func TestDeadlineLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{Call: time.Second, Lookup: time.Second})
		must(t, lib.Init())
		sim.Script("EventSetCreate", simnode.Fault{Delay: time.Minute, Times: 1})
		if _, err := lib.EventSetCreate(); !errors.Is(err, nvml.Timeout) {
			t.Errorf("EventSetCreate: %v, want TIMEOUT", err)
		}
		after(time.Minute)
		sim.Script("Init", simnode.Fault{Delay: time.Minute, Times: 1})
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

// TestDeadlineTurns holds that calls for one board go one by one, so that one
// goroutine is stuck however many call.
func TestDeadlineTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		lib := nvml.WithDeadlines(sim, nvml.Limits{Call: time.Second})
		board := handles(t, lib)[0]
		sim.Script("DeviceGetUUID", simnode.Fault{Delay: time.Minute})
		const callers = 10
		errs := make(chan error, callers)
		for range callers {
			go func() { _, err := lib.DeviceGetUUID(board); errs <- err }()
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

// TestDeadlineEvents holds that a wait for events may outlast any limit.
func TestDeadlineEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := nvml.WithDeadlines(simulate(t, "t4"), nvml.Limits{Call: time.Second})
		handles(t, lib)
		set, err := lib.EventSetCreate()
		must(t, err)
		start := time.Now()
		_, err = lib.EventSetWait(set, time.Minute)
		if _, abandoned := errors.AsType[*nvml.AbandonedError](err); abandoned || time.Since(start) != time.Minute {
			t.Errorf("error %v after %s, want TIMEOUT of the wait itself after a minute", err, time.Since(start))
		}
	})
}

// TestScanStuckBoard holds that a board which does not answer hides no other,
// and is back when it answers.
func TestScanStuckBoard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100")
		lib := nvml.WithDeadlines(sim, nvml.Limits{})
		_, err := sim.ScriptGPU(3, "DeviceGetUUID", simnode.Fault{Delay: time.Hour, Times: 1})
		must(t, err)
		start := time.Now()
		gpus, err := nvml.Scan(lib)
		if len(gpus) != 7 || !errors.Is(err, nvml.Timeout) {
			t.Errorf("%d GPUs, error %v, want 7 and TIMEOUT", len(gpus), err)
		}
		if took := time.Since(start); took != 30*time.Second {
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
