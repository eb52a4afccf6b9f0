package plugin

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestNextKeepsWhatItCannotSee(t *testing.T) {
	w := newWorld(t)
	w.blind = true
	w.step(planOf(nil, "gpu=3:A"))
	w.calls.Granted["gpu"] = map[string]time.Time{"A::2": w.now}
	small := planOf(nil, "gpu=2:A")
	w.pass(small, time.Hour)
	w.expect("gpu", "A0 a1- A2") // Granted is held, and nothing is removed.
	w.pass(planOf(nil, "other=1:A"), time.Hour)
	w.expect("other", "none")
}

func TestNextCallsPostponeRemoval(t *testing.T) {
	for _, test := range []struct {
		name string
		call func(*world)
		want string
	}{
		{"none", func(*world) {}, "A0 A1"},
		{"named lately", func(w *world) { w.calls.Named["gpu"] = map[string]time.Time{"A::2": w.now.Add(5 * time.Second)} }, "A0 A1 a2-"},
		{"in progress", func(w *world) { w.calls.Busy["gpu"] = true }, "A0 A1 a2-"},
		{"granted meanwhile", func(w *world) { w.calls.Granted["gpu"] = map[string]time.Time{"A::2": w.now.Add(5 * time.Second)} }, "A0 A2"},
		{"held meanwhile", func(w *world) { w.held.add("gpu", "A::2") }, "A0 A2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=3:A"))
			small := planOf(nil, "gpu=2:A")
			w.pass(small, time.Second)
			w.expect("gpu", "A0 A1 a2-")
			test.call(w)
			w.pass(small, 13*time.Second)
			got := strings.Fields(w.show("gpu"))
			want := strings.Fields(test.want)
			slices.Sort(got)
			slices.Sort(want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestNextBlindRestart starts with a list of which the state file knows that a
// pod held a surplus device.
func TestNextBlindRestart(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=3:A"))
	entries := w.lists["gpu"].Entries
	entries[2].Phase, entries[2].Since = Closing, w.now
	w.blind = true
	small := planOf(nil, "gpu=2:A")
	w.pass(small, 30*time.Second)
	w.expect("gpu", "A0 A1 A2+")
	w.blind = false
	w.pass(small, 13*time.Second)
	w.expect("gpu", "A0 A1")
}

// TestNextRemovalNeedsEveryReading breaks one condition at a time at the moment
// at which a device could leave.
func TestNextRemovalNeedsEveryReading(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*world)
		gone   bool
	}{
		{"all is well", func(*world) {}, true},
		{"healthy again for the kubelet", func(w *world) { w.seen.applied.add("gpu", "A::2") }, false},
		{"held read too early", func(w *world) { w.seen.heldAt = w.lists["gpu"].Entries[2].Applied }, false},
		{"held unknown", func(w *world) { w.seen.heldKnown = false }, false},
		{"applied unknown", func(w *world) { w.seen.appliedKnown = false }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=3:A"))
			small := planOf(nil, "gpu=2:A")
			w.pass(small, 12*time.Second)
			w.expect("gpu", "A0 A1 a2-")
			w.now = w.now.Add(time.Second)
			w.look()
			test.change(w)
			w.step(small)
			if gone := w.show("gpu") == "A0 A1"; gone != test.gone {
				t.Errorf("list %q", w.show("gpu"))
			}
		})
	}
}

// TestNextTellsBeforeItRemoves shows nothing Healthy all the time, as a kubelet
// does that has lost its stream or has older lists to read. What happens after
// eleven seconds, short of the removal, starts the wait again.
func TestNextTellsBeforeItRemoves(t *testing.T) {
	for _, test := range []struct {
		name   string
		before func(*world)
		after  func(*world)
		gone   time.Duration
	}{
		{"told at once", func(*world) {}, func(*world) {}, 13 * time.Second},
		{"never told", func(w *world) { w.unsent = true }, func(*world) {}, 0},
		{"no stream", func(w *world) { w.lost, w.unsent = true, true }, func(*world) {}, 0},
		{"told late", func(w *world) { w.unsent = true }, func(w *world) { w.unsent = false }, 23 * time.Second},
		{"stream lost", func(*world) {}, func(w *world) { w.lost, w.unsent = true, true }, 0},
		{"stream lost when it could leave", func(*world) {}, func(w *world) {
			w.pass(planOf(nil, "gpu=2:A"), time.Second)
			w.lost, w.unsent = true, true
		}, 0},
		{"stream replaced", func(*world) {}, func(w *world) {
			w.lost = true
			w.pass(planOf(nil, "gpu=2:A"), time.Second)
			w.lost = false
		}, 23 * time.Second},
		{"healthy for the kubelet", func(*world) {}, func(w *world) {
			w.now = w.now.Add(time.Second)
			w.look()
			w.seen.applied.add("gpu", "A::2")
			w.step(planOf(nil, "gpu=2:A"))
		}, 23 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(planOf(nil, "gpu=3:A"))
			small := planOf(nil, "gpu=2:A")
			test.before(w)
			began := w.now
			w.pass(small, 11*time.Second)
			w.expect("gpu", "A0 A1 a2-")
			test.after(w)
			for w.show("gpu") != "A0 A1" && w.now.Before(began.Add(time.Minute)) {
				w.pass(small, time.Second)
			}
			took := w.now.Sub(began)
			if gone := w.show("gpu") == "A0 A1"; gone != (test.gone > 0) || gone && took != test.gone {
				t.Errorf("list %q after %s", w.show("gpu"), took)
			}
		})
	}
}

func TestNextWantsAReadingAfterTheList(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=3:A"))
	small := planOf(nil, "gpu=2:A")
	w.seen = Sight{held: idSet{}, applied: idSet{}, heldAt: w.now, appliedAt: w.now, heldKnown: true, appliedKnown: true}
	for range 60 { // Nothing was Healthy in this reading, which is older than the list.
		w.step(small)
		w.now = w.now.Add(time.Second)
		w.seen.heldAt = w.now
	}
	w.expect("gpu", "A0 A1 a2-")
}

// TestNextHeldAtTheLastMoment grants a device in the step in which it could
// have made room for another way.
func TestNextHeldAtTheLastMoment(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=1:A"))
	renamed := planOf(nil, "gpu.shared=2:A")
	w.pass(renamed, 12*time.Second)
	w.expect("gpu", "a-")
	w.now = w.now.Add(time.Second)
	w.held.add("gpu", "A")
	w.look()
	w.step(renamed)
	w.expect("gpu", "A+")
	w.expect("gpu.shared", "none")
}
