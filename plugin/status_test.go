package plugin

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// TestAppliedIsWhatTheKubeletHas follows one server's lists to the kubelet: a list that was sent may not be
// applied yet.
func TestAppliedIsWhatTheKubeletHas(t *testing.T) {
	m := NewManager(Options{Kubelet: struct{ Kubelet }{}})
	s := &running{server: &server{name: "r"}}
	r := &reconciler{Manager: m}
	publish := func(healthy bool) {
		list := List{Entries: []Entry{{Device: sharing.Device{ID: "GPU-a", Unit: "GPU-a", Healthy: healthy}, Phase: Offered}}}
		s.publish(newGeneration(sharing.Resource{Name: "r"}, list, grantTerms{host: &grant.Host{}}, nil, nil, s.current.Load()))
	}
	start := time.Unix(1000, 0)
	second := func(n int) time.Time { return start.Add(time.Duration(n) * time.Second) }
	shows := func(at int, ids ...string) func() {
		return func() {
			r.kubelet = KubeletSnapshot{Applied: DeviceIDs{}, AppliedAt: second(at), AppliedKnown: true}
			for _, id := range ids {
				r.kubelet.Applied.add("r", id)
			}
		}
	}
	nothing := func() {}
	publish(true)
	m.status.Store(&managerStatus{servers: []*server{s.server}, superseded: make(chan struct{})})
	for i, step := range []struct {
		what                   string
		do                     func()
		sent, lost             bool
		wantWaits, wantApplied bool
	}{
		{"no stream", nothing, false, true, false, false},
		{"sent", nothing, true, true, true, false},
		{"a reading from before", shows(0, "GPU-a"), true, false, true, false},
		{"not applied yet", shows(4), true, false, true, false},
		{"cannot be read", func() { shows(5, "GPU-a")(); r.kubelet.AppliedKnown = false }, true, false, true, false},
		{"applied", shows(6, "GPU-a"), true, false, false, true},
		{"a list without news", func() { publish(true) }, true, false, false, true},
		{"a list to come", func() { publish(false) }, false, false, false, false},
		{"sent too", nothing, true, false, true, false},
		{"the old one still there", shows(10, "GPU-a"), true, false, true, false},
		{"applied too", shows(11), true, false, false, true},
		{"another stream", shows(12), true, true, true, false},
		{"applied there", shows(14), true, false, false, true},
	} {
		step.do()
		waits := !r.isApplied(s, step.sent, step.lost, second(i+1))
		if applied := m.Status().Resources[0].Applied; waits != step.wantWaits || applied != step.wantApplied {
			t.Errorf("%s: applied %t, waited for %t; want %t, %t", step.what, applied, waits, step.wantApplied, step.wantWaits)
		}
	}
}

// TestStatusCountsWhatIsListed has a GPU that is offered, one that waits for its holder, and one that no pod can
// get any more.
func TestStatusCountsWhatIsListed(t *testing.T) {
	entry := func(id, unit string, phase Phase, healthy, switching bool) Entry {
		return Entry{Device: sharing.Device{ID: id, Unit: unit, Healthy: healthy}, Phase: phase, Switching: switching}
	}
	list := List{Entries: []Entry{
		entry("GPU-a::0", "GPU-a", Offered, true, false), entry("GPU-a::1", "GPU-a", Offered, true, false), entry("GPU-a::2", "GPU-a", HeldSurplus, true, false),
		entry("GPU-b", "GPU-b", HeldSurplus, false, true), entry("GPU-c::0", "GPU-c", Removing, false, true), entry("GPU-d::0", "GPU-d", Offered, true, true),
		{Device: sharing.Device{ID: "GPU-e", Unit: "GPU-e", Healthy: true}, Phase: Offered, Whole: true}, entry("GPU-e::1", "GPU-e", Offered, false, false),
	}}
	units := map[string]sharing.Unit{"GPU-a": {ID: "GPU-a", GPU: "GPU-a", Index: "0", Replicas: 9}}
	s := &server{name: "r", Options: Options{Now: time.Now}}
	s.publish(newGeneration(sharing.Resource{Name: "r"}, list, grantTerms{host: &grant.Host{}}, nil, units, nil))
	m := NewManager(Options{})
	m.status.Store(&managerStatus{servers: []*server{s}, holders: []sharing.Allocation{{Pod: "p"}}})
	got := m.Status()
	if r := got.Resources[0]; r.Devices != 8 || r.Healthy != 5 || r.Leaving != 3 || len(got.Holders) != 1 {
		t.Errorf("status %+v", got)
	}
	offered := map[string]int{}
	for _, unit := range got.Resources[0].Units {
		offered[unit.ID+" "+unit.Index] = unit.Replicas
	}
	if diff := cmp.Diff(map[string]int{"GPU-a 0": 2, "GPU-b ": 1, "GPU-d ": 1, "GPU-e ": 1}, offered); diff != "" {
		t.Error(diff)
	}
}

// TestChangedWhenThePlanIsTakenUp checks that subscribers hear of a new plan even without a server.
func TestChangedWhenThePlanIsTakenUp(t *testing.T) {
	m := NewManager(Options{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = m.Run(ctx) })
	defer func() { cancel(); running.Wait() }()
	changed := m.Subscribe()
	m.Apply(sharing.Plan{})
	for !m.Status().Served {
		<-changed
	}
}

// TestSubscribe gives each reader every change, however slow the others are.
func TestSubscribe(t *testing.T) {
	m := NewManager(Options{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)})
	m.readers.notify() // no subscriber
	slow, quick := m.Subscribe(), m.Subscribe()
	for range 3 {
		m.readers.notify()
		select {
		case <-quick:
		default:
			t.Fatal("a reader was not told")
		}
	}
	<-slow
	select {
	case <-slow:
		t.Error("a reader that was busy was told more than once")
	default:
	}
	(*subscribers)(nil).notify()
}
