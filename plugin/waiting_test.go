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

// TestWaitingList follows a list in its wait: each number is announced and has its time, the last one
// too, but the list waits no longer than announceLimit in all, whatever comes.
func TestWaitingList(t *testing.T) {
	t.Parallel()
	const name = "nvidia.com/gpu"
	began := time.Now()
	now := began
	m := NewManager(Options{Announcer: anybody{}, Now: func() time.Time { return now }})
	s := &running{server: &server{Options: m.options, name: name}}
	r := &reconciler{Manager: m, servers: map[string]*running{name: s}}
	generationOf := func(healthy int) *generation {
		var list List
		health := map[string]sharing.Health{}
		for i := range 8 {
			id := fmt.Sprint("GPU-", i)
			health[id] = sharing.Health{}
			list.Entries = append(list.Entries, Entry{Device: sharing.Device{ID: id, Unit: id, Healthy: i < healthy}})
		}
		return newGeneration(sharing.Resource{Name: name}, list, grantTerms{}, health, nil, s.current.Load())
	}
	s.publish(generationOf(8))
	at := func(ms int, do func()) { now = began.Add(time.Duration(ms) * time.Millisecond); do() }
	list := func(healthy int) func() { return func() { r.publishOrWait(s, generationOf(healthy), now) } }
	written := func(healthy int, is bool) func() {
		return func() {
			r.announced(announcement{counts: map[string]count{name: {8, healthy}}, written: map[string]bool{name: is}})
		}
	}
	due := func() { r.publishDue(s, now) }
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
