package nvml_test

import (
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
)

// Tests of answers that nvml.h allows or that real drivers have given, but the simulated driver does not give by
// itself; see docs/internals/nvml.md.

// probe is the default interval between two probes, and a little for a wait for events.
const probe = 10*time.Second + 300*time.Millisecond

// answering is the simulated driver with answers replaced by change, which gets the driver's own answer.
func answering(sim nvml.Library, change func(call nvml.Call, answer any, err error) (any, error)) nvml.Library {
	return nvml.Intercept(sim, func(call nvml.Call, do func() (any, error)) (any, error) {
		answer, err := do()
		return change(call, answer, err)
	})
}

// failing makes calls of that name fail with the code: those that fail with only, if it is set, else all.
func failing(method string, code nvml.Return, only error) func(nvml.Call, any, error) (any, error) {
	return func(call nvml.Call, answer any, err error) (any, error) {
		if call.Method != method || only != nil && !errors.Is(err, only) {
			return answer, err
		}
		return reflect.Zero(call.Answer).Interface(), &nvml.Error{Call: call.String(), Return: code}
	}
}

// TestHolesOfMIGDevices checks that a hole among the MIG devices may be INVALID_ARGUMENT, as in go-nvlib: in a
// scan, a change and a reading of the use.
func TestHolesOfMIGDevices(t *testing.T) {
	sim := simulate(t, "a100-40+all-balanced")
	want, err := nvml.Scan(sim)
	must(t, err)
	holes := answering(sim, failing("DeviceGetMigDeviceHandleByIndex", nvml.InvalidArgument, nvml.NotFound))
	got, err := nvml.Scan(holes)
	must(t, err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("scan (-NOT_FOUND +INVALID_ARGUMENT):\n%s", diff)
	}
	if _, state := firstState(t, holes); len(state.Instances) != len(want[0].Partitions) {
		t.Errorf("a change sees %d instances, want %d", len(state.Instances), len(want[0].Partitions))
	}
	use, err := nvml.NewMeter(holes).Read(t.Context())
	must(t, err)
	if len(use[0].Units) != len(want[0].Partitions) {
		t.Errorf("the use of %d partitions, want %d", len(use[0].Units), len(want[0].Partitions))
	}
}

// TestNVLinkErrors checks that a link with an unreadable state hides no other.
func TestNVLinkErrors(t *testing.T) {
	sim := simulate(t, "dgx-a100")
	links := func(lib nvml.Library) int {
		gpus, err := nvml.Scan(lib)
		must(t, err)
		return gpus[0].Links[0].NVLinks
	}
	all := links(sim)
	for _, code := range []nvml.Return{nvml.NotSupported, nvml.InvalidArgument, nvml.Unknown} {
		fails := answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
			if call.Method == "DeviceGetNvLinkState" && call.Arguments[1] == 0 {
				return false, &nvml.Error{Call: call.String(), Return: code}
			}
			return answer, err
		})
		if got := links(fails); got != all-1 {
			t.Errorf("%d links when the first is %s, want %d of %d", got, code, all-1, all)
		}
	}
	// A driver that does not answer is asked no further.
	for _, code := range []nvml.Return{nvml.GPUIsLost, nvml.Timeout} {
		var asked atomic.Int32
		fails := answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
			if call.Method == "DeviceGetNvLinkState" {
				asked.Add(1)
				return false, &nvml.Error{Call: call.String(), Return: code}
			}
			return answer, err
		})
		if links(fails); asked.Load() > 8 {
			t.Errorf("%d questions for the links of 8 GPUs that answer %s, want one each", asked.Load(), code)
		}
	}
}

// TestNVLinkCount checks that a newer driver's additional links count, and that a driver is not asked for many
// links that it does not have.
func TestNVLinkCount(t *testing.T) {
	sim := simulate(t, "dgx-a100")
	const has, newer = 12, 36
	for _, count := range []int{has, newer} {
		var asked atomic.Int32
		gpus, err := nvml.Scan(answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
			switch {
			case call.Method == "DeviceGetNvLinkState":
				asked.Add(1)
				if link := call.Arguments[1].(int); has <= link && link < count {
					return true, nil
				}
			case call.Method == "DeviceGetNvLinkRemotePciInfo" && err != nil:
				return nvml.PCIInfo{BusID: "00000000:AA:00.0"}, nil
			}
			return answer, err
		}))
		must(t, err)
		if got := gpus[0].Links[0].NVLinks; got != count {
			t.Errorf("%d links, want %d", got, count)
		}
		if most := 8 * max(count+1, 19); int(asked.Load()) > most {
			t.Errorf("%d questions for %d links of each of 8 GPUs, want %d at most", asked.Load(), count, most)
		}
	}
}

// TestProcessesOfMPS checks that a list of MPS clients that is not permitted or not supported does not affect the
// use; any other error counts as in use.
func TestProcessesOfMPS(t *testing.T) {
	sim := simulate(t, "a100-40+all-1g.5gb")
	for code, busy := range map[nvml.Return]bool{nvml.InvalidArgument: false, nvml.NoPermission: false, nvml.NotSupported: false, nvml.Unknown: true} {
		_, state := firstState(t, answering(sim, failing("DeviceGetMPSComputeRunningProcesses", code, nil)))
		if state.Instances[0].Computes[0].Busy != busy {
			t.Errorf("busy is %t when the list of MPS clients is %s", !busy, code)
		}
	}
}

// TestHandleOfAnotherPartition checks that a probe notices when a partition's handle now means another partition
// or none, even if its memory query works.
func TestHandleOfAnotherPartition(t *testing.T) {
	for name, err := range map[string]error{
		"another one": nil, "none": &nvml.Error{Call: "DeviceGetUUID", Return: nvml.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "h200+all-1g.35gb")
				gpus, scanErr := nvml.Scan(sim)
				must(t, scanErr)
				var gone atomic.Bool
				w := watch(t, answering(sim, func(call nvml.Call, answer any, callErr error) (any, error) {
					switch {
					case !gone.Load() || callErr != nil:
					case call.Method == "DeviceGetUUID" && answer == gpus[0].Partitions[1].UUID:
						return "MIG-other", err
					case call.Method == "DeviceGetMigDeviceHandleByIndex" && call.Arguments[1] == 1 && err != nil:
						return answer, &nvml.Error{Call: call.String(), Return: nvml.NotFound}
					}
					return answer, callErr
				}))
				gone.Store(true)
				after(probe)
				now, _ := w.Inventory()
				for _, p := range now[0].Partitions {
					if p.UUID == gpus[0].Partitions[1].UUID {
						t.Errorf("%s is still a partition after the next probe: %+v", p.UUID, p)
					}
				}
				if want := len(gpus[0].Partitions); err == nil && len(now[0].Partitions) != want {
					t.Errorf("%d partitions, want %d with the new one", len(now[0].Partitions), want)
				}
			})
		})
	}
}

// TestPartitionAnsweredFromMemory checks that a destroyed partition whose UUID the driver still returns leaves
// the inventory with the next probe.
func TestPartitionAnsweredFromMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h200+all-1g.35gb")
		var gone atomic.Bool
		var handle atomic.Uint64
		w := watch(t, answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
			switch {
			case call.Method == "DeviceGetMigDeviceHandleByIndex" && call.Arguments[1] == 1:
				handle.Store(uint64(answer.(nvml.Device)))
				if gone.Load() {
					return answer, &nvml.Error{Call: call.String(), Return: nvml.NotFound}
				}
			case call.Method == "DeviceGetMemoryInfo" && gone.Load() && call.Arguments[0] == nvml.Device(handle.Load()):
				return answer, &nvml.Error{Call: call.String(), Return: nvml.Unknown}
			}
			return answer, err
		}))
		before, _ := w.Inventory()
		gone.Store(true)
		after(probe)
		now, _ := w.Inventory()
		if len(now[0].Partitions) != len(before[0].Partitions)-1 {
			t.Errorf("%d partitions, before one went there were %d", len(now[0].Partitions), len(before[0].Partitions))
		}
		w.expect("after the probe", nil)
	})
}

// TestFailedRepairs checks that a failed row remapping, or a page waiting to be retired, is a fault as long as
// the driver reports it.
func TestFailedRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a100-40")
		var rows, pages atomic.Bool
		w := watch(t, answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
			switch {
			case call.Method == "DeviceGetRemappedRows" && rows.Load():
				return nvml.RemappedRows{Uncorrectable: 512, Failed: true}, nil
			case call.Method == "DeviceGetRetiredPagesPendingStatus" && pages.Load():
				return true, nil
			}
			return answer, err
		}))
		rows.Store(true)
		after(probe)
		w.expect("after a remapping failed", map[string]string{"0": "row remapping failed"})
		pages.Store(true)
		after(probe)
		w.expect("and a page waits", map[string]string{"0": "row remapping failed, page retirement waits for a reset"})
		rows.Store(false)
		pages.Store(false)
		after(time.Minute)
		w.expect("when both are over", nil)
	})
}

// TestEventsOfTheWholeGPUName checks that the log names instances only for events that do.
func TestEventsOfTheWholeGPUName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h200+all-1g.35gb")
		var log strings.Builder
		w := watchWith(t, sim, nvml.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		must(t, sim.XID(0, 94, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		must(t, sim.XID(0, 94, 1, nvml.WholeGPU))
		synctest.Wait()
		must(t, sim.XID(0, 94, 1, 0))
		synctest.Wait()
		must(t, w.stop())
		var got []string
		for line := range strings.Lines(log.String()) {
			if _, instances, ok := strings.Cut(line, "data=94"); ok {
				instances, _, _ = strings.Cut(instances, " fault=")
				got = append(got, instances)
			}
		}
		if diff := cmp.Diff([]string{"", " gi=1", " gi=1 ci=0"}, got); diff != "" {
			t.Errorf("(-want +got):\n%s\n%s", diff, log.String())
		}
	})
}

// TestEventsOfUnknownHandles checks events with an unknown handle: its UUID identifies the GPU, and if the driver
// gives none, all GPUs are suspect.
func TestEventsOfUnknownHandles(t *testing.T) {
	const foreign = 1 << 40
	every := func(reason string) map[string]string {
		return map[string]string{"0": reason, "1": reason, "2": reason, "3": reason}
	}
	unknown := func(string, error) (string, error) {
		return "", &nvml.Error{Call: "DeviceGetUUID", Return: nvml.Unknown}
	}
	tests := []struct {
		name   string
		xid    uint64
		layout string
		uuid   func(asked string, err error) (string, error)
		want   map[string]string
		action string
	}{
		{"its UUID tells", 79, "", func(asked string, err error) (string, error) { return asked, err }, map[string]string{"2": "XID 79"}, "action=fatal"},
		{"nothing tells", 79, "", unknown, every("XID 79 of a GPU that the driver does not name"), "action=suspect"},
		{"nothing tells whose partition", 94, "+all-balanced", unknown, every("XID 94 of a GPU that the driver does not name"), "action=suspect"},
		{"nothing tells, and it is a program's", 31, "", unknown, nil, "ignored"},
		{"a GPU that is not listed", 79, "", func(string, error) (string, error) { return "GPU-other", nil }, nil, "not known"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4"+test.layout)
				gi := nvml.WholeGPU
				if test.layout != "" {
					gi = 2
				}
				var others atomic.Int32
				var log strings.Builder
				w := watchWith(t, answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
					switch event, isEvent := answer.(nvml.Event); {
					case isEvent && err == nil:
						event.Device += foreign
						return event, nil
					case call.Method == "DeviceGetUUID" && call.Arguments[0].(nvml.Device) > foreign:
						others.Add(1)
						return test.uuid(sim.DeviceGetUUID(call.Arguments[0].(nvml.Device) - foreign))
					}
					return answer, err
				}), nvml.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
				scans := sim.Calls("DeviceGetCount")
				must(t, sim.XID(2, test.xid, gi, nvml.WholeGPU))
				synctest.Wait()
				w.expect("after the event", test.want)
				if !strings.Contains(log.String(), test.action) {
					t.Errorf("the log does not say %s:\n%s", test.action, log.String())
				}
				if again := sim.Calls("DeviceGetCount") > scans; again != (test.name == "a GPU that is not listed") {
					t.Errorf("looks for other GPUs at once: %t", again)
				}
				if others.Load() != 1 {
					t.Errorf("the UUID was asked %d times, want once", others.Load())
				}
				after(6 * time.Minute)
				if len(test.want) != 1 {
					w.expect("after the recovery delay", nil)
				}
			})
		})
	}
}

// TestEventOfAnOlderHandle checks that an event with a GPU's handle from before a reset belongs to that GPU.
func TestEventOfAnOlderHandle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		must(t, sim.Init())
		defer func() { must(t, sim.Shutdown()) }()
		old, err := sim.DeviceGetHandleByIndex(2)
		must(t, err)
		w := watch(t, answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
			if event, isEvent := answer.(nvml.Event); isEvent && err == nil {
				event.Device = old
				return event, nil
			}
			return answer, err
		}))
		must(t, sim.Heal(2))
		after(probe)
		must(t, sim.XID(2, 94, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("after the event", map[string]string{"2": "XID 94"})
	})
}
