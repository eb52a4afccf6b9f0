package nvml_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// memory is a Store and an Observer.
type memory struct {
	kept    []sharing.FatalHealth
	saves   int
	mu      sync.Mutex
	err     error
	changes []sharing.HealthChange
}

func (m *memory) Load() ([]sharing.FatalHealth, error) { return m.kept, m.fails() }

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

func (m *memory) Save(list []sharing.FatalHealth) error {
	m.saves++
	err := m.fails()
	if err == nil {
		m.kept = list
	}
	return err
}

func (m *memory) HealthChanged(c sharing.HealthChange) { m.changes = append(m.changes, c) }

// way is what the observer was told of the unit.
func (m *memory) way(unit string) []string {
	var way []string
	for _, c := range m.changes {
		if c.Index == unit {
			way = append(way, string(c.State)+" by "+string(c.Cause)+": "+c.Reason)
		}
	}
	return way
}

func selector(t *testing.T, text string) sharing.Selector {
	t.Helper()
	s, err := sharing.ParseSelector(text)
	must(t, err)
	return s
}

// TestSuspectRecovers holds that a unit recovers from a suspect error by itself,
// after the quiet time, that it takes longer when it flaps, and who is told.
func TestSuspectRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, told := simulate(t, "a30x4"), &memory{}
		w := watchWith(t, sim, nvml.Options{Observer: told})
		for _, quiet := range []time.Duration{5 * time.Minute, 10 * time.Minute, 20 * time.Minute} {
			must(t, sim.XID(1, 94, nvml.WholeBoard, nvml.WholeBoard))
			synctest.Wait()
			w.expect("after the XID", map[string]string{"1": "XID 94"})
			after(quiet - 11*time.Second)
			w.expect("before the quiet time is over", map[string]string{"1": "XID 94"})
			after(22 * time.Second)
			w.expect("after the quiet time", nil)
		}
		want := []string{
			"suspect by xid: XID 94", "healthy by quiet: XID 94",
			"suspect by xid: XID 94", "healthy by quiet: XID 94",
			"suspect by xid: XID 94", "healthy by quiet: XID 94",
		}
		if diff := cmp.Diff(want, told.way("1")); diff != "" {
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

// TestSuspectNeedsProbes holds that time alone ends no suspicion: while the
// board cannot be probed, the quiet time does not end.
func TestSuspectNeedsProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		must(t, sim.XID(0, 94, nvml.WholeBoard, nvml.WholeBoard))
		end := sim.Script("DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		after(10 * time.Minute)
		w.expect("while probes fail", map[string]string{"0": "XID 94, memory query: UNKNOWN"})
		end()
		after(time.Minute)
		w.expect("a minute after the first good one", map[string]string{"0": "recovering from XID 94, memory query: UNKNOWN"})
		after(5 * time.Minute)
		w.expect("a quiet time after it", nil)
	})
}

// TestIgnoredXIDOnlyCounts holds that nothing else comes of it, and that rules
// which change hold for what comes after.
func TestIgnoredXIDOnlyCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		xid := func(code uint64) {
			must(t, sim.XID(0, code, nvml.WholeBoard, nvml.WholeBoard))
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
		w.SetHealth(rules)
		after(time.Minute)
		w.expect("with other rules", nil)
		xid(79)
		xid(12345)
		xid(13)
		w.expect("after a fatal one", map[string]string{"0": "XID 13, XID 12345"})
		must(t, sim.Temperature(0, 60))
		after(11 * time.Second)
		w.expect("warmer than the new limit", map[string]string{"0": "XID 13, XID 12345, temperature 60 °C above 50 °C"})
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

// TestOperatorClears holds that a word of an operator ends what no probe does.
func TestOperatorClears(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, told := simulate(t, "dgx-a100+all-balanced"), &memory{}
		w := watchWith(t, sim, nvml.Options{Observer: told})
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		must(t, sim.XID(0, 95, 3, 0))
		after(time.Hour)
		w.expect("after an hour", map[string]string{"0": "XID 79", "0:2": "XID 95"})
		units, err := w.ClearHealth(context.Background(), selector(t, "0:2"))
		must(t, err)
		if len(units) != 1 || units[0].State != sharing.Recovering || units[0].Index != "0:2" {
			t.Errorf("cleared %+v", units)
		}
		w.expect("when one was cleared", map[string]string{"0": "XID 79", "0:2": "recovering from XID 95"})
		after(11 * time.Second)
		w.expect("a probe later", map[string]string{"0": "XID 79"})
		_, err = w.ClearHealth(context.Background(), selector(t, "0"))
		must(t, err)
		after(11 * time.Second)
		w.expect("when the board was cleared", nil)
		if _, err := w.ClearHealth(context.Background(), selector(t, "8")); err == nil {
			t.Error("cleared a GPU that there is not")
		}
		want := []string{"unhealthy by xid: XID 95", "recovering by operator: XID 95", "healthy by probe: XID 95"}
		if diff := cmp.Diff(want, told.way("0:2")); diff != "" {
			t.Errorf("changes (-want +got):\n%s", diff)
		}
	})
}

// TestOrdersEnd holds that an order to a Node that does not watch ends.
func TestOrdersEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	node := nvml.NewNode(simulate(t, "t4"), nvml.Options{Store: &memory{}})
	if _, err := node.ClearHealth(ctx, selector(t, "0")); err == nil {
		t.Error("cleared by a Node that does not watch")
	}
	if err := node.TakeOver(ctx); err == nil {
		t.Error("took over without watching")
	}
}
