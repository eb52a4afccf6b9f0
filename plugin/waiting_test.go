package plugin

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
)

type anybody struct{}

func (anybody) Announce(context.Context, map[string]int, map[string]int) map[string]bool { return nil }

// TestWaitingList follows a list while it waits. Each number is announced and gets its time, also the last one,
// but the list waits at most announceLimit after the last lower number, and burstLimit more in all.
func TestWaitingList(t *testing.T) {
	t.Parallel()
	const name = "nvidia.com/gpu"
	began := time.Now()
	now := began
	m := NewManager(Options{Announcer: anybody{}, Now: func() time.Time { return now }})
	s := &running{server: &server{Options: m.options, name: name}}
	r := &reconciler{Manager: m, servers: map[string]*running{name: s}}
	generationOf := func(healthy int) *generation { return s.generationOf(healthy, 0) }
	s.publish(generationOf(8))
	at := func(ms int, do func()) { now = began.Add(time.Duration(ms) * time.Millisecond); do() }
	list := func(healthy int) func() { return func() { r.publishOrWait(s, generationOf(healthy), now) } }
	written := func(healthy int, is bool) func() {
		return func() {
			r.announced(announcement{notices: map[string]notice{name: {count: count{8, healthy}}}, written: map[string]bool{name: is}})
		}
	}
	due := func() { r.publishDue(s, now) }
	grant := func() { s.current.Load().uses[0].granted.Store(now.UnixNano()) }
	for _, step := range []struct {
		ms   int
		do   func()
		want int // healthy devices of the list that is served
	}{
		{0, list(6), 8},
		{20, written(6, true), 8},
		{130, list(5), 8},
		{130, list(5), 8},
		{140, written(6, true), 8}, // Of a number that does not count any more.
		{140, written(5, true), 8},
		{171, due, 8},
		{289, due, 8},
		{290, due, 5},
		{1000, list(4), 5},
		{1010, written(4, false), 5},
		{1010, due, 4}, // The API server refuses: nothing is waited for.
		{2000, list(3), 4},
		{2299, list(2), 4},
		{2300, list(1), 1}, // Nothing puts it off beyond the limit.
		{3000, list(0), 1},
		{3010, list(2), 2}, // More again.
		{4000, list(1), 2},
		{4010, written(1, true), 2},
		{4155, grant, 2},
		{4160, due, 2}, // The kubelet admits a pod that was bound before.
		{4290, grant, 2},
		{4300, list(1), 2},
		{4439, due, 2},
		{4440, due, 1},
		{5000, list(0), 1},
		{5010, written(0, false), 1},
		{5010, grant, 1},
		{5010, due, 0}, // The scheduler goes on binding: there is no burst to wait for.
		{6000, list(8), 8},
		{6000, list(7), 8},
		{6010, written(7, true), 8},
		{7290, grant, 8},
		{7299, due, 8},
		{7300, due, 7}, // Nor does a burst put it off beyond its limit.
		{8000, list(4), 7},
		{8010, written(4, true), 7},
		{8290, grant, 7},
		{8310, list(5), 7}, // The new pod holds one of the devices to be removed, so the burst goes on.
		{8310, due, 7},
		{8320, written(5, false), 7}, // The API server still has the lower number.
		{8320, due, 7},
		{8400, grant, 7},
		{8549, due, 7},
		{8550, due, 5},
		{9000, list(3), 5},
		{9010, written(3, true), 5},
		{9290, grant, 5},
		{9310, list(2), 5}, // Fewer devices: this needs a new announcement.
		{9310, due, 5},
		{9320, written(2, true), 5},
		{9469, due, 5},
		{9470, due, 2},
		{10000, list(1), 2},
		{10010, written(1, true), 2},
		{10140, grant, 2},
		{10280, grant, 2},
		{10420, grant, 2},
		{10560, list(0), 2},
		{10859, due, 2},
		{10860, due, 0}, // The API server is away meanwhile.
		{11000, list(8), 8},
		{11000, list(1), 8},
		{11010, written(1, true), 8},
		{12200, grant, 8},
		{12250, list(0), 8},
		{12299, due, 8},
		{12300, due, 0}, // In all no longer than a burst.
	} {
		at(step.ms, step.do)
		if got := s.current.Load().list.count().healthy; got != step.want {
			t.Errorf("after %d ms the list has %d healthy devices, want %d", step.ms, got, step.want)
		}
	}
	if s.waiting.Load() != nil {
		t.Error("a list waits at the end")
	}
}

// generationOf is the server's next generation: of 8 devices, so many are Healthy, starting with that one.
func (r *running) generationOf(healthy, from int) *generation {
	var list List
	health := map[string]sharing.Health{}
	for i := range 8 {
		id := fmt.Sprint("GPU-", i)
		health[id] = sharing.Health{}
		list.Entries = append(list.Entries, Entry{Device: sharing.Device{ID: id, Unit: id, Healthy: i >= from && i < from+healthy}})
	}
	return newGeneration(sharing.Resource{Name: r.name}, list, grantTerms{}, health, nil, r.current.Load())
}

// TestAnnounceState follows what is known of the API server's numbers. A number written before the kubelet
// applied a list does not count, as the kubelet may have reported the old ones since.
func TestAnnounceState(t *testing.T) {
	t.Parallel()
	const name = "nvidia.com/gpu"
	m := NewManager(Options{Announcer: anybody{}})
	s := &running{server: &server{Options: m.options, name: name}}
	r := &reconciler{Manager: m, servers: map[string]*running{name: s}}
	list := func(healthy, from int) func() { return func() { s.publish(s.generationOf(healthy, from)) } }
	lower := func(healthy int) func() { return func() { list(healthy, 0)(); s.lowered = true } }
	applies := func() { s.applied.Store(s.current.Load().version); r.announceApplied(s) }
	var sent notice
	send := func() { sent = r.toAnnounce[name]; r.toAnnounce = nil }
	answer := func(written bool) func() {
		return func() {
			r.announced(announcement{notices: map[string]notice{name: sent}, written: map[string]bool{name: written}})
		}
	}
	for i, step := range []struct {
		do   func()
		want AnnounceState
	}{
		{list(8, 0), Announcing},
		{applies, Announcing},
		{send, Announcing},
		{answer(true), Announced},
		{lower(4), Announcing},
		{func() { sent = notice{count: count{8, 4}} }, Announcing}, // Before the list.
		{answer(true), Announcing},
		{applies, Announcing},
		{answer(true), Announcing}, // It comes late, and is still the one before the list.
		{send, Announcing},
		{answer(true), Announced},
		{list(4, 1), Announcing},
		{applies, Announced}, // The numbers are the same.
		{func() {
			if len(r.toAnnounce) > 0 {
				t.Errorf("announces %v", r.toAnnounce)
			}
		}, Announced},
		{list(6, 0), Announcing},
		{applies, Announcing},
		{send, Announcing},
		{list(7, 0), Announcing},
		{applies, Announcing},
		{answer(true), Announcing}, // Of the list before.
		{send, Announcing},
		{answer(false), Unannounced},
		{list(8, 0), Announcing},
		{applies, Announcing},
		{send, Announcing},
		{list(8, 0), Announcing},
		{applies, Announcing},
		{answer(true), Announced},
		{func() { s.waiting.Store(&waitingList{generation: s.generationOf(2, 0)}) }, Announcing},
	} {
		if step.do(); s.announceState() != step.want {
			t.Fatalf("after step %d it is %v, want %v", i, s.announceState(), step.want)
		}
	}
}

// TestSwitched checks that a switch does not wait for units that a pod holds, but for all others that are not yet
// as planned.
func TestSwitched(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		entry Entry
		want  bool
	}{
		"as planned":              {Entry{Phase: Offered}, true},
		"fewer of the unit":       {Entry{Phase: Removing}, true},
		"not its turn yet":        {Entry{Phase: Offered, Switching: true}, false},
		"on its way out":          {Entry{Phase: Removing, Switching: true}, false},
		"known to be free":        {Entry{Phase: Removing, Switching: true, Unused: true}, true},
		"held by a pod":           {Entry{Phase: HeldSurplus, Switching: true}, true},
		"held, fewer of the unit": {Entry{Phase: HeldSurplus}, true},
		"held as a whole":         {Entry{Device: sharing.Device{ID: "held"}, Phase: Offered, Whole: true}, true},
		"not looked yet":          {Entry{Phase: Offered, Whole: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lists := Lists{"a": {}, "b": {Entries: []Entry{{Phase: Offered}, test.entry}}}
			if got := lists.switched(DeviceIDs{"b": {"held": {}}}); got != test.want {
				t.Errorf("switched: %t", got)
			}
		})
	}
}
