package nvml_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
)

// memory is a Store.
type memory struct {
	kept  []nvml.FatalHealth
	saves int
	mu    sync.Mutex
	err   error
}

func (m *memory) Load() ([]nvml.FatalHealth, error) { return m.kept, m.fails() }

func (m *memory) fails() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

func (m *memory) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

func (m *memory) Save(list []nvml.FatalHealth) error {
	m.saves++
	err := m.fails()
	if err == nil {
		m.kept = list
	}
	return err
}

// changesOf are the changes of the unit's health in a log of JSON lines.
func changesOf(t *testing.T, log *bytes.Buffer, unit string) []string {
	t.Helper()
	var changes []string
	for line := range bytes.Lines(log.Bytes()) {
		var c struct{ Index, To, Cause, Fault, Was string }
		must(t, json.Unmarshal(line, &c))
		if c.Index == unit {
			changes = append(changes, c.To+" by "+c.Cause+": "+c.Fault+c.Was)
		}
	}
	return changes
}

func selector(t *testing.T, text string) sharing.Selector {
	t.Helper()
	s, err := sharing.ParseSelector(text)
	must(t, err)
	return s
}

// TestSuspectRecovers checks that a unit recovers from a suspect error by itself after the recovery delay, that
// the delay grows if it flaps, and what is logged.
func TestSuspectRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, log := simulate(t, "a30x4"), &bytes.Buffer{}
		w := watchWith(t, sim, nvml.Options{Logger: slog.New(slog.NewJSONHandler(log, nil))})
		for _, quiet := range []time.Duration{5 * time.Minute, 10 * time.Minute, 20 * time.Minute} {
			must(t, sim.XID(1, 94, nvml.WholeGPU, nvml.WholeGPU))
			synctest.Wait()
			w.expect("after the XID", map[string]string{"1": "XID 94"})
			after(quiet - 11*time.Second)
			w.expect("before the recovery delay is over", map[string]string{"1": "XID 94"})
			after(22 * time.Second)
			w.expect("after the recovery delay", nil)
		}
		want := []string{
			"suspect by xid: XID 94", "healthy by quiet: XID 94",
			"suspect by xid: XID 94", "healthy by quiet: XID 94",
			"suspect by xid: XID 94", "healthy by quiet: XID 94",
		}
		if diff := cmp.Diff(want, changesOf(t, log, "1")); diff != "" {
			t.Errorf("changes (-want +got):\n%s", diff)
		}
		report := w.Health()
		gpus, _ := w.Inventory()
		counts := []sharing.TransitionCount{
			{GPU: gpus[1].UUID, From: sharing.Healthy, To: sharing.Suspect, Cause: sharing.CauseXID, Count: 3},
			{GPU: gpus[1].UUID, From: sharing.Suspect, To: sharing.Healthy, Cause: sharing.CauseQuiet, Count: 3},
		}
		if diff := cmp.Diff(counts, report.Transitions); diff != "" {
			t.Errorf("counted (-want +got):\n%s", diff)
		}
	})
}

// TestSuspectNeedsProbes checks that time alone does not end a suspicion: the recovery delay does not end while
// the GPU cannot be probed.
func TestSuspectNeedsProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		must(t, sim.XID(0, 94, nvml.WholeGPU, nvml.WholeGPU))
		end := sim.InjectFault("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		after(10 * time.Minute)
		w.expect("while probes fail", map[string]string{"0": "XID 94, memory query: UNKNOWN"})
		end()
		after(time.Minute)
		w.expect("a minute after the first good one", map[string]string{"0": "recovering from XID 94, memory query: UNKNOWN"})
		after(5 * time.Minute)
		w.expect("a recovery delay after it", nil)
	})
}

// TestIgnoredXIDOnlyCounts checks that an ignored XID has no other effect, and that new rules apply to later
// events.
func TestIgnoredXIDOnlyCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		xid := func(code uint64) {
			must(t, sim.XID(0, code, nvml.WholeGPU, nvml.WholeGPU))
			synctest.Wait()
		}
		xid(13)
		xid(13)
		w.expect("after ignored XIDs", nil)
		if w.changes != 1 {
			t.Errorf("changed was called %d times, want once for the first look", w.changes)
		}
		rules := sharing.DefaultHealthRules()
		rules.XIDs[13], rules.XIDs[79], rules.TemperatureLimit = sharing.FatalError, sharing.IgnoreError, 50
		rules.BoardTemperature = false
		w.SetHealthRules(rules)
		after(time.Minute)
		w.expect("with other rules", nil)
		xid(79)
		xid(12345)
		xid(13)
		w.expect("after a fatal one", map[string]string{"0": "XID 13, XID 12345"})
		must(t, sim.SetTemperature(0, 60))
		after(11 * time.Second)
		w.expect("warmer than the new limit", map[string]string{"0": "XID 13, XID 12345, temperature above 50 °C"})
		uuid := uuids(func() []sharing.GPU { gpus, _ := w.Inventory(); return gpus }())[0]
		want := []sharing.XIDCount{
			{GPU: uuid, XID: "13", Action: sharing.FatalError, Count: 1},
			{GPU: uuid, XID: "13", Action: sharing.IgnoreError, Count: 2},
			{GPU: uuid, XID: "79", Action: sharing.IgnoreError, Count: 1},
			{GPU: uuid, XID: sharing.OtherXID, Action: sharing.SuspectError, Count: 1},
		}
		if diff := cmp.Diff(want, w.Health().XIDs); diff != "" {
			t.Errorf("counted (-want +got):\n%s", diff)
		}
	})
}

// TestRowRemap checks that a memory row that waits for a reset is reported, and is a fault only by the rules.
func TestRowRemap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		pending := func(want bool) {
			t.Helper()
			for _, m := range w.Health().Monitors {
				if gpus, _ := w.Inventory(); m.RowRemapPending == nil || *m.RowRemapPending != (want && m.GPU == gpus[2].UUID) {
					t.Errorf("row remapping of %s is pending: %+v", m.GPU, m)
				}
			}
		}
		must(t, sim.Repair(2))
		after(11 * time.Second)
		w.expect("by default", nil)
		pending(true)
		rules := sharing.DefaultHealthRules()
		rules.RowRemap = true
		w.SetHealthRules(rules)
		after(11 * time.Second)
		w.expect("by the rules", map[string]string{"2": "row remapping waits for a reset"})
		w.SetHealthRules(sharing.DefaultHealthRules())
		after(21 * time.Second)
		w.expect("by default again", nil)
		pending(true)
		must(t, sim.Heal(2))
		after(11 * time.Second)
		pending(false)
	})
}

// strict are rules by which XID 69 is fatal, also for a partition alone.
func strict() sharing.HealthRules {
	rules := sharing.DefaultHealthRules()
	rules.XIDs[69] = sharing.FatalError
	return rules
}

// TestDriverAsksForRecovery checks that a GPU is unhealthy from the event on while the driver asks for a recovery
// action, even if the call fails, and that the explanation has the remedy. A profile that ignores XID 154 ignores
// the action.
func TestDriverAsksForRecovery(t *testing.T) {
	tests := []struct {
		action     uint32
		asks, todo string
	}{
		{nvml.RecoverReset, "a reset of the GPU", "reset it: virgate gpu reset"},
		{nvml.RecoverReboot, "a reboot of the node", "drain the node and reboot it"},
		{nvml.RecoverDrainAndReset, "no new work, and a reset", "reset it when its pods have ended: virgate gpu reset"},
		{nvml.RecoverIMEXDomain, "a recovery of the IMEX domain", "recover the IMEX domain that the node is in"},
		{nvml.RecoverBusReset, "a reset of the PCIe bus", "reset the PCIe bus that it is on, or reboot the node"},
		{nvml.RecoverSystemReboot, "a reboot of the system", "drain the node and reboot the whole system"},
		{99, "recovery action 99", "look up nvmlDeviceGpuRecoveryAction_t of this driver's nvml.h"},
	}
	for _, test := range tests {
		t.Run(test.asks, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				w := watch(t, sim)
				must(t, sim.Advise(2, test.action))
				synctest.Wait()
				faults := map[string]string{"2": "the driver asks for " + test.asks}
				w.expect("at once", faults)
				if got, want := w.Health().Units[2].Explanation, test.todo+"; ends with the next probe that finds nothing wrong"; got != want {
					t.Errorf("explanation %q, want %q", got, want)
				}
				sim.InjectFault("DeviceGetFieldValues", simnode.Fault{Return: nvml.Unknown, Times: 8})
				after(twiceTheDelay)
				w.expect("after twice the recovery delay", faults)
				rules := sharing.DefaultHealthRules()
				rules.XIDs[sharing.RecoveryActionChanged] = sharing.IgnoreError
				w.SetHealthRules(rules)
				after(21 * time.Second)
				w.expect("when the profile ignores it", nil)
				w.SetHealthRules(sharing.DefaultHealthRules())
				must(t, sim.Heal(2))
				after(21 * time.Second)
				w.expect("when it is over", nil)
			})
		})
	}
}

// TestDrainPeerToPeer checks that the advice to end peer-to-peer traffic is in the report and logged once, and
// that all GPUs stay healthy.
func TestDrainPeerToPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, log := simulate(t, "a30x4"), &bytes.Buffer{}
		w := watchWith(t, sim, nvml.Options{Logger: slog.New(slog.NewJSONHandler(log, nil))})
		advice := func(when, want string) {
			t.Helper()
			gpus, _ := w.Inventory()
			for _, m := range w.Health().Monitors {
				if m.GPU != gpus[2].UUID && m.Advice != "" || m.GPU == gpus[2].UUID && m.Advice != want {
					t.Errorf("%s: %+v, want the advice %q of GPU 2", when, m, want)
				}
			}
		}
		must(t, sim.Advise(2, nvml.RecoverDrainP2P))
		after(time.Minute)
		w.expect("while the driver asks for it", nil)
		advice("while the driver asks for it", "the end of peer-to-peer traffic")
		if n := strings.Count(log.String(), "no fault, its devices stay in use"); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
		must(t, sim.Advise(2, nvml.RecoverNone))
		after(11 * time.Second)
		advice("when it is over", "")
	})
}

// TestRecoveryAnyNumber checks that a GPU stays healthy only for the actions for which nvml.h allows it.
func TestRecoveryAnyNumber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		for _, action := range []uint32{1, 2, 3, 4, 5, 6, 7, 8, 100, 1 << 31, 1<<32 - 1} {
			must(t, sim.Advise(0, action))
			synctest.Wait()
			if gpus, _ := w.Inventory(); gpus[0].Health.Healthy() != (action == nvml.RecoverDrainP2P) {
				t.Errorf("recovery action %d: %+v", action, gpus[0].Health)
			}
			must(t, sim.Advise(0, nvml.RecoverNone))
			after(11 * time.Minute)
		}
	})
}

// TestGPUUnavailable checks the event of an unavailable GPU: it affects the whole GPU, and follows the rules.
func TestGPUUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100+all-balanced")
		w := watch(t, sim)
		must(t, sim.Unavailable(1))
		synctest.Wait()
		w.expect("at once", map[string]string{"1": "the driver reports it as unavailable"})
		after(6 * time.Minute)
		w.expect("after the recovery delay", nil)
		rules := sharing.DefaultHealthRules()
		rules.XIDs[sharing.RecoveryActionChanged] = sharing.IgnoreError
		w.SetHealthRules(rules)
		must(t, sim.Unavailable(1))
		after(11 * time.Second)
		w.expect("when the profile ignores it", nil)
	})
}

// TestOldDriver checks that a driver without recovery actions gives no advice, and that its other events are
// received.
func TestOldDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		must(t, sim.SetWorld("old-driver"))
		w := watch(t, sim)
		w.expectDeaf("at the start", nil)
		must(t, sim.Advise(2, nvml.RecoverReboot))
		must(t, sim.Unavailable(2))
		after(11 * time.Second)
		w.expect("what it does not tell", nil)
		must(t, sim.XID(2, 94, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("what it tells", map[string]string{"2": "XID 94"})
	})
}

// TestBoardTemperature checks that a GPU is too hot at its board's limit, however that is reported; at 90 °C
// without one; and at the profile's limit if that is set.
func TestBoardTemperature(t *testing.T) {
	limited := sharing.DefaultHealthRules()
	limited.TemperatureLimit, limited.TemperatureSafe, limited.BoardTemperature = 70, 60, false
	wide := sharing.DefaultHealthRules()
	wide.TemperatureSafe = 70
	const board = "temperature at which the board slows it down"
	tests := []struct {
		name, node, world string
		rules             sharing.HealthRules
		silent            nvml.Return
		// At cold it is still healthy, at hot not; after hot it is still unhealthy at still, and healthy at safe.
		cold, hot, still, safe int
		fault, ends            string
	}{
		{"threshold", "a30", "", sharing.DefaultHealthRules(), 0, 88, 89, 85, 84, board, "ends at 84 °C, it has 89 °C"},
		{"another threshold", "t4", "", sharing.DefaultHealthRules(), 0, 92, 93, 89, 88, board, "ends at 88 °C, it has 93 °C"},
		{"margin", "h100", "", sharing.DefaultHealthRules(), 0, 86, 87, 83, 82, board, "ends at 82 °C, it has 87 °C"},
		{"the profile's hysteresis", "h100", "", wide, 0, 86, 87, 68, 67, board, "ends at 67 °C, it has 87 °C"},
		{"threshold of a driver without margins", "l40s", "old-driver", sharing.DefaultHealthRules(), 0, 92, 93, 89, 88, board, "ends at 88 °C, it has 93 °C"},
		{"a silent board", "h100", "", sharing.DefaultHealthRules(), nvml.NotSupported, 90, 91, 86, 85, "temperature above 90 °C", "ends at 85 °C, it has 91 °C"},
		{"an old driver", "h100", "", sharing.DefaultHealthRules(), nvml.FunctionNotFound, 90, 91, 86, 85, "temperature above 90 °C", "ends at 85 °C, it has 91 °C"},
		{"a board that cannot be read", "a30", "", sharing.DefaultHealthRules(), nvml.Unknown, 90, 91, 86, 85, "temperature above 90 °C", "ends at 85 °C, it has 91 °C"},
		{"the profile's limit", "h100", "", limited, 0, 70, 71, 61, 60, "temperature above 70 °C", "ends at 60 °C, it has 71 °C"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, test.node)
				must(t, sim.SetWorld(test.world))
				if test.silent != 0 {
					for _, call := range []string{"DeviceGetTemperatureThreshold", "DeviceGetMarginTemperature"} {
						sim.InjectFault(call, simnode.Fault{Return: test.silent})
					}
				}
				w := watch(t, sim)
				w.SetHealthRules(test.rules)
				at := func(celsius int, want map[string]string) {
					t.Helper()
					must(t, sim.SetTemperature(0, celsius))
					after(21 * time.Second)
					w.expect(fmt.Sprintf("at %d °C", celsius), want)
				}
				at(test.cold, nil)
				at(test.hot, map[string]string{"0": test.fault})
				if got := w.Health().Units[0].Explanation; got != test.ends {
					t.Errorf("explanation %q, want %q", got, test.ends)
				}
				at(test.still, map[string]string{"0": test.fault})
				at(test.safe, nil)
			})
		})
	}
}

// TestMarginFailsForOnce checks that an unreadable margin is derived from earlier values, and that an unreadable
// board limit is read again.
func TestMarginFailsForOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h100")
		sim.InjectFault("DeviceGetFieldValues", simnode.Fault{Return: nvml.Unknown, Times: 2})
		w := watch(t, sim)
		must(t, sim.SetTemperature(0, 88))
		after(31 * time.Second)
		hot := map[string]string{"0": "temperature at which the board slows it down"}
		w.expect("when it can be read", hot)
		asked := sim.Calls("DeviceGetTemperatureThreshold")
		end := sim.InjectFault("DeviceGetMarginTemperature", simnode.Fault{Return: nvml.Unknown})
		must(t, sim.SetTemperature(0, 89))
		after(time.Minute)
		w.expect("when it cannot", hot)
		must(t, sim.SetTemperature(0, 40))
		after(time.Minute)
		w.expect("when it cannot and the GPU is cold", nil)
		end()
		after(21 * time.Second)
		w.expect("when it can again", nil)
		if n := sim.Calls("DeviceGetTemperatureThreshold"); n != asked {
			t.Errorf("the threshold was asked for %d times more, of a GPU that tells its margin", n-asked)
		}
	})
}

// TestXIDLeftToDriver checks that if the driver reports recovery actions, it decides about XID 109 unless the
// profile does, and else the catalogue.
func TestXIDLeftToDriver(t *testing.T) {
	explicit := sharing.DefaultHealthRules()
	explicit.LeftToDriver = nil
	tests := []struct {
		name   string
		silent bool
		advice uint32
		rules  sharing.HealthRules
		want   map[string]string
	}{
		{"the driver asks for nothing", false, nvml.RecoverNone, sharing.DefaultHealthRules(), nil},
		{
			"the driver asks for a reset", false, nvml.RecoverReset, sharing.DefaultHealthRules(),
			map[string]string{"0": "XID 109, the driver asks for a reset of the GPU"},
		},
		{"the driver reports no recovery action", true, nvml.RecoverNone, sharing.DefaultHealthRules(), map[string]string{"0": "XID 109"}},
		{"the profile decides", false, nvml.RecoverNone, explicit, map[string]string{"0": "XID 109"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				if test.silent {
					sim.InjectFault("DeviceGetFieldValues", simnode.Fault{Return: nvml.NotSupported})
				}
				w := watch(t, sim)
				w.SetHealthRules(test.rules)
				must(t, sim.XID(0, 109, nvml.WholeGPU, nvml.WholeGPU))
				synctest.Wait()
				w.expect("at once", map[string]string{"0": "XID 109"})
				must(t, sim.Advise(0, test.advice))
				after(twiceTheDelay)
				w.expect("after twice the recovery delay", test.want)
				must(t, sim.Advise(0, nvml.RecoverNone))
				_, err := w.ClearHealth(context.Background(), selector(t, "0"))
				must(t, err)
				after(21 * time.Second)
				w.expect("when it is over", nil)
			})
		})
	}
}

// TestOperatorClears checks that an operator can clear faults that no probe ends.
func TestOperatorClears(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, log := simulate(t, "dgx-a100+all-balanced"), &bytes.Buffer{}
		w := watchWith(t, sim, nvml.Options{Logger: slog.New(slog.NewJSONHandler(log, nil))})
		w.SetHealthRules(strict())
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		must(t, sim.XID(0, 69, 3, 0))
		after(twiceTheDelay)
		w.expect("after twice the recovery delay", map[string]string{"0": "XID 79", "0:2": "XID 69"})
		units, err := w.ClearHealth(context.Background(), selector(t, "0:2"))
		must(t, err)
		if len(units) != 1 || units[0].State != sharing.Recovering || units[0].Index != "0:2" {
			t.Errorf("cleared %+v", units)
		}
		w.expect("when one was cleared", map[string]string{"0": "XID 79", "0:2": "recovering from XID 69"})
		after(11 * time.Second)
		w.expect("a probe later", map[string]string{"0": "XID 79"})
		_, err = w.ClearHealth(context.Background(), selector(t, "0"))
		must(t, err)
		after(11 * time.Second)
		w.expect("when the GPU was cleared", nil)
		if _, err := w.ClearHealth(context.Background(), selector(t, "8")); err == nil {
			t.Error("cleared a GPU that there is not")
		}
		want := []string{"unhealthy by xid: XID 69", "recovering by operator: XID 69", "healthy by probe: XID 69"}
		if diff := cmp.Diff(want, changesOf(t, log, "0:2")); diff != "" {
			t.Errorf("changes (-want +got):\n%s", diff)
		}
	})
}

// TestRequestsEnd checks that a request to a Node without Watch ends.
func TestRequestsEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	node := nvml.NewNode(simulate(t, "t4"), nvml.Options{Store: &memory{}})
	if _, err := node.ClearHealth(ctx, selector(t, "0")); err == nil {
		t.Error("cleared by a Node that does not watch")
	}
	if err := node.RestoreHealth(ctx); err == nil {
		t.Error("took over without watching")
	}
}

// TestFatalSurvivesRestart has one program keep its faults and another restore them, on a node that may have
// changed in between.
func TestFatalSurvivesRestart(t *testing.T) {
	fatal := map[string]string{"0": "XID 79", "1:0": "XID 69"}
	tests := []struct {
		name string
		// between changes the kept faults and the new node.
		between func(*testing.T, *memory, *simnode.Node)
		boot    string
		want    map[string]string
	}{
		{"the same boot", func(*testing.T, *memory, *simnode.Node) {}, "first", fatal},
		{"another boot", func(*testing.T, *memory, *simnode.Node) {}, "second", nil},
		{"an unknown boot", func(*testing.T, *memory, *simnode.Node) {}, "", fatal},
		{"another driver", func(_ *testing.T, m *memory, _ *simnode.Node) {
			for i := range m.kept {
				m.kept[i].Driver = "570.00"
			}
		}, "first", nil},
		{"a partition that is no more", func(t *testing.T, _ *memory, sim *simnode.Node) {
			must(t, sim.Init())
			must(t, nvmltest.DestroyComputeInstance(sim, 1, 1, 0))
			must(t, sim.Shutdown())
		}, "first", map[string]string{"0": "XID 79"}},
		{"a GPU that is no more", func(t *testing.T, _ *memory, sim *simnode.Node) { must(t, sim.Remove(0)) },
			"first", map[string]string{"0:0": "XID 69"}},
		{"nothing can be read", func(_ *testing.T, m *memory, _ *simnode.Node) { m.kept, m.err = nil, errors.New("disk") }, "first", nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			store := &memory{}
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4+all-balanced")
				w := watchWith(t, sim, nvml.Options{Store: store, Boot: "first"})
				w.SetHealthRules(strict())
				must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
				synctest.Wait()
				must(t, sim.Heal(2))
				after(time.Minute)
				must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
				must(t, sim.XID(1, 69, 1, 0))
				must(t, sim.XID(3, 94, nvml.WholeGPU, nvml.WholeGPU))
				synctest.Wait()
				if store.saves > 0 {
					t.Fatalf("saved %d times before it serves the node", store.saves)
				}
				must(t, w.RestoreHealth(context.Background()))
				synctest.Wait()
				if store.saves != 1 || len(store.kept) != 2 {
					t.Fatalf("saved %d times, %+v", store.saves, store.kept)
				}
				after(time.Minute)
				if store.saves != 1 {
					t.Errorf("saved %d times without news", store.saves)
				}
			})
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4+all-balanced")
				test.between(t, store, sim)
				w := watchWith(t, sim, nvml.Options{Store: store, Boot: test.boot})
				w.expect("before it takes over", nil)
				must(t, w.RestoreHealth(context.Background()))
				w.expect("when it has taken over", test.want)
				after(twiceTheDelay)
				w.expect("twice the recovery delay later", test.want)
				if store.err == nil && len(store.kept) != len(test.want) {
					t.Errorf("kept %+v", store.kept)
				}
			})
		})
	}
}

// TestResetWhileDown resets GPUs while no program, or none with a session, watches. Only evidence from the driver
// or the kernel ends the fault afterwards, not the reset itself, as a driver need not keep a trace of it.
func TestResetWhileDown(t *testing.T) {
	heal := func(t *testing.T, sim *simnode.Node) { must(t, sim.Heal(0)) }
	advise := func(t *testing.T, sim *simnode.Node) { must(t, sim.XID(0, 154, nvml.WholeGPU, nvml.WholeGPU)) }
	const stays, over = true, false
	tests := []struct {
		name            string
		before, between func(*testing.T, *simnode.Node)
		want            bool
	}{
		{"nothing", nil, nil, stays},
		{"the driver still advises a reset", advise, nil, stays},
		{"a reset that nothing shows", nil, heal, stays},
		{"a reset that the driver advised", advise, heal, over},
		{"a reset, and a driver that gives no advice", advise, func(t *testing.T, sim *simnode.Node) {
			heal(t, sim)
			sim.InjectFault("DeviceGetFieldValues", simnode.Fault{Return: nvml.FunctionNotFound})
		}, stays},
		{"a row is remapped", func(t *testing.T, sim *simnode.Node) { must(t, sim.Repair(0)) }, heal, over},
		{"a row is remapped, which cannot be read at once", func(t *testing.T, sim *simnode.Node) { must(t, sim.Repair(0)) }, func(t *testing.T, sim *simnode.Node) {
			heal(t, sim)
			sim.InjectFault("DeviceGetRemappedRows", simnode.Fault{Return: nvml.Unknown, Times: 20})
		}, over},
		{"a row still waits", func(t *testing.T, sim *simnode.Node) { must(t, sim.Repair(0)) }, nil, stays},
		{"the GPU comes back to the bus", nil, func(t *testing.T, sim *simnode.Node) {
			must(t, sim.Remove(0))
			_, err := sim.Add("")
			must(t, err)
		}, over},
		{"the same driver is loaded again", nil, func(t *testing.T, sim *simnode.Node) { must(t, sim.Reload()) }, over},
	}
	for _, test := range tests {
		for _, restarted := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, restarted %t", test.name, restarted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					sim, options := simulate(t, "a30x4"), nvml.Options{Store: &memory{}, Boot: "boot"}
					w := watchWith(t, sim, options)
					must(t, w.RestoreHealth(context.Background()))
					must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
					synctest.Wait()
					if test.before != nil {
						test.before(t, sim)
					}
					after(time.Minute)
					if restarted {
						must(t, w.stop())
					} else {
						sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Uninitialized, Times: 1})
						for sim.Calls("Shutdown") == 0 {
							after(100 * time.Millisecond)
						}
					}
					if test.between != nil {
						test.between(t, sim)
					}
					if restarted {
						options.Known = nil
						w = watchWith(t, sim, options)
						must(t, w.RestoreHealth(context.Background()))
					}
					after(10 * time.Minute)
					gpus, err := w.Inventory()
					must(t, err)
					if reason := gpus[0].Health.Reason; strings.HasPrefix(reason, "XID 79") != test.want || !test.want && reason != "" {
						t.Errorf("fault %q, stays: %t", reason, test.want)
					}
				})
			})
		}
	}
}

// TestFatalBeforeTheDriver checks that kept faults wait for their GPU, also over another restart, and end if the
// GPU was away.
func TestFatalBeforeTheDriver(t *testing.T) {
	gpus, err := nvml.Scan(simulate(t, "a30x4"))
	must(t, err)
	kept := []nvml.FatalHealth{
		{GPU: gpus[0].UUID, Unit: gpus[0].UUID, Reasons: []string{"XID 79"}, XIDs: []uint64{79}, Since: time.Unix(1, 0).UTC()},
		{GPU: gpus[2].UUID, Unit: gpus[2].UUID, Reasons: []string{"XID 48"}, Since: time.Unix(2, 0).UTC()},
		{GPU: gpus[3].UUID, Unit: gpus[3].UUID, Reasons: []string{"XID 48"}, Since: time.Unix(2, 0).UTC()}, // As before there were XIDs.
	}
	slices.SortFunc(kept, func(a, b nvml.FatalHealth) int { return strings.Compare(a.Unit, b.Unit) })
	synctest.Test(t, func(t *testing.T) {
		sim, store := simulate(t, "a30x4"), &memory{kept: kept}
		must(t, sim.Lose(2))
		_, err := sim.InjectGPUFault(3, "DeviceGetUUID", simnode.Fault{Return: nvml.Unknown, Times: 1})
		must(t, err)
		end := sim.InjectFault("Init", simnode.Fault{Return: nvml.LibraryNotFound})
		w := watchWith(t, sim, nvml.Options{Store: store})
		must(t, w.RestoreHealth(context.Background()))
		if _, err := w.Inventory(); !errors.Is(err, nvml.LibraryNotFound) {
			t.Errorf("taken over without a driver: %v", err)
		}
		if diff := cmp.Diff(kept, store.kept); diff != "" {
			t.Errorf("without a driver it keeps (-want +got):\n%s", diff)
		}
		end()
		after(2 * time.Second)
		w.expect("with the driver", map[string]string{"0": "XID 79"})
		after(rescan)
		w.expect("when the last GPU can be read", map[string]string{"0": "XID 79", "3": "XID 48"})
		if got := w.Health().Units[0].Explanation; !strings.Contains(got, "fallen off the bus") {
			t.Errorf("after a restart XID 79 is %q", got)
		}
		if since := w.Health().Units[0].Since; !since.Equal(time.Unix(1, 0)) {
			t.Errorf("unhealthy since %v, want since it was found", since)
		}
		must(t, sim.Heal(2))
		after(time.Minute)
		w.expect("when the lost GPU is back", map[string]string{"0": "XID 79", "3": "XID 48"})
	})
}

// TestStoreFails checks that a failed save is tried again, and does not affect health.
func TestStoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, store := simulate(t, "t4"), &memory{err: errors.New("disk full")}
		w := watchWith(t, sim, nvml.Options{Store: store})
		must(t, w.RestoreHealth(context.Background()))
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		after(time.Minute)
		w.expect("unkept", map[string]string{"0": "XID 79"})
		store.fail(nil)
		after(11 * time.Second)
		if len(store.kept) != 1 || !slices.Equal(store.kept[0].XIDs, []uint64{79}) {
			t.Errorf("kept %+v", store.kept)
		}
	})
}

// stuckStore is a store whose Save blocks until letGo is closed.
type stuckStore struct {
	memory
	saving, letGo chan struct{}
}

func (s *stuckStore) Save(list []nvml.FatalHealth) error {
	s.saving <- struct{}{}
	<-s.letGo
	return s.memory.Save(list)
}

// TestFaultIsPublishedBeforeItIsSaved checks that fatal faults do not wait for the disk, that the newest state is
// saved in the end, and that Watch ends only after that.
func TestFaultIsPublishedBeforeItIsSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		store := &stuckStore{saving: make(chan struct{}, 9), letGo: make(chan struct{})}
		w := watchWith(t, sim, nvml.Options{Store: store})
		must(t, w.RestoreHealth(context.Background()))
		changes := w.changes
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("while it is being saved", map[string]string{"0": "XID 79"})
		if len(store.saving) != 1 || w.changes != changes+1 {
			t.Errorf("%d saves begun, changed called %d times, want 1 each", len(store.saving), w.changes-changes)
		}
		must(t, sim.XID(1, 79, nvml.WholeGPU, nvml.WholeGPU))
		must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("while the first is still being saved", map[string]string{"0": "XID 79", "1": "XID 79", "2": "XID 79"})
		go func() { pass(400 * time.Millisecond); close(store.letGo) }()
		if err := w.stop(); err != nil {
			t.Error(err)
		}
		if len(store.saving) != 2 || len(store.kept) != 3 {
			t.Errorf("%d saves, kept %+v at the end, want 2 and all three", len(store.saving), store.kept)
		}
	})
}

// TestWatchEndsBesideAStuckDisk checks that Watch waits for a disk only as long as for a driver, and returns an
// error.
func TestWatchEndsBesideAStuckDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		store := &stuckStore{saving: make(chan struct{}, 9), letGo: make(chan struct{})}
		w := watchWith(t, sim, nvml.Options{Store: store})
		must(t, w.RestoreHealth(context.Background()))
		must(t, sim.XID(0, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		began := time.Now()
		err := w.stop()
		if took := elapsed(began); err == nil || !strings.Contains(err.Error(), "fatal errors") || took > time.Second {
			t.Errorf("Watch ended with %v after %s", err, took)
		}
		close(store.letGo)
	})
}

// TestRestoreBeforeTheFirstScan checks that nothing is reported of GPUs that were not read yet.
func TestRestoreBeforeTheFirstScan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		sim.InjectFault("Init", simnode.Fault{Delay: time.Second})
		w := watchWith(t, sim, nvml.Options{Store: &memory{}})
		must(t, w.RestoreHealth(context.Background()))
		if gpus, err := w.Inventory(); gpus != nil || !errors.Is(err, sharing.ErrNotRead) {
			t.Errorf("Inventory() = %v, %v, want none and ErrNotRead", gpus, err)
		}
		after(2 * time.Second)
		w.expect("after the first look", nil)
		if w.changes != 1 {
			t.Errorf("changed was called %d times, want once", w.changes)
		}
	})
}
