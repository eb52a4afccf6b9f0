package agent

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// gate is a kubelet's side that remembers what is closed.
type gate struct {
	*world
	closed map[string]bool
	// closings is how often Close was called.
	closings int
}

func (g *gate) Close(_ string, units ...string) {
	g.closings++
	for _, unit := range units {
		g.closed[unit] = true
	}
}

func (g *gate) Reopen(units ...string) {
	for _, unit := range units {
		delete(g.closed, unit)
	}
}

// unlisted is a board that cannot be listed after so many times.
type unlisted struct {
	Partitioner
	after int
}

func (u *unlisted) Cut(ctx context.Context, gpu string) (sharing.Cut, error) {
	if u.after--; u.after < 0 {
		return sharing.Cut{}, nvml.GPUIsLost
	}
	return u.Partitioner.Cut(ctx, gpu)
}

// TestUnplugged holds that of a board which leaves in the middle of a change
// nothing stays closed, that nothing of it is offered when it is back before the
// change is finished, and that it is.
func TestUnplugged(t *testing.T) {
	w, wish := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	door := &gate{world: w, closed: map[string]bool{}}
	r.withdrawal = door
	gpu := w.gpu()
	// Neither the change nor its undoing comes to an end, as it cannot be listed.
	r.partitioner = &unlisted{Partitioner: r.partitioner, after: 3}
	w.lives(r, wish, false, 1)
	if !door.closed[gpu] || len(w.kept.Underway) != 1 {
		t.Fatalf("closed %v, journal %+v: want a change in its middle", door.closed, w.kept)
	}
	r.round(t.Context(), nil, wish, false)
	if len(door.closed) != 0 {
		t.Errorf("closed when the board is gone: %v", door.closed)
	}
	if only, limited := r.offered.Load().only[gpu]; !limited || len(only) != 0 {
		t.Errorf("of a board that comes back between two layouts %v would be offered (limited %t)", only, limited)
	}
	r.partitioner.(*unlisted).after = 1000
	w.lives(r, wish, false, 20)
	if got := w.state(r); got.State != sharing.LayoutApplied || len(w.kept.Underway) != 0 || r.offered.Load().only[gpu] != nil {
		t.Errorf("%s (%s), journal %+v", got.State, got.Reason, w.kept)
	}
}

// watched is a board that is looked at before each step.
type watched struct {
	Partitioner
	before func()
}

func (w *watched) Make(ctx context.Context, gpu string, step mig.Step) error {
	w.before()
	return w.Partitioner.Make(ctx, gpu, step)
}

// TestResumeOffersWhatLasts holds that while an interrupted change is finished,
// only partitions of both layouts are offered.
func TestResumeOffersWhatLasts(t *testing.T) {
	w, wish := newWorld(t, "a100-40+all-balanced"), layoutNamed("all-1g.5gb")
	both := map[string]bool{}
	for _, instance := range w.cut().Instances {
		if instance.Profile == parsed(t, "1g.5gb") {
			both[instance.Computes[0].UUID] = true
		}
	}
	w.dies, w.late = 2, true // The first step after the journal.
	if w.lives(w.program(), wish, false, 5) || len(w.kept.Underway) != 1 {
		t.Fatalf("journal %+v, want a change in its middle", w.kept)
	}
	w.dies = 0
	r, steps := w.program(), 0
	r.partitioner = &watched{r.partitioner, func() {
		steps++
		if diff := cmp.Diff(both, r.offered.Load().only[w.gpu()]); diff != "" {
			t.Errorf("offered in the middle (-want +got):\n%s", diff)
		}
	}}
	w.lives(r, wish, true, 5)
	if steps == 0 || len(w.kept.Underway) != 0 {
		t.Errorf("%d steps, journal %+v", steps, w.kept)
	}
}

// TestBlindStart holds that a whole board which is to be cut is not offered
// before the kubelet was seen, for a while: a pod that got it then would keep the
// layout waiting for as long as it runs.
func TestBlindStart(t *testing.T) {
	w, wish := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	holders := r.holders
	r.holders = blind
	gpu := w.gpu()
	once := func(starting bool) time.Duration {
		t.Helper()
		gpus, err := nvml.Scan(w.sim)
		if err != nil {
			t.Fatal(err)
		}
		return r.round(t.Context(), gpus[:1], wish, starting)
	}
	isBack := func() bool { only, limited := r.offered.Load().only[gpu]; return !limited || only[gpu] }
	if again := once(true); isBack() || again == 0 || w.writes != 0 {
		t.Errorf("offered %t, again in %s, %d writes: want it held back and looked at again", isBack(), again, w.writes)
	}
	w.clock = w.clock.Add(firstSight - time.Second)
	if once(false); isBack() {
		t.Error("offered before the kubelet had its time")
	}
	w.clock = w.clock.Add(2 * time.Second)
	if once(false); !isBack() {
		t.Error("held back for good, with a kubelet that cannot be read")
	}
	if got := w.state(r); got.State != sharing.LayoutBlocked || !strings.Contains(got.Reason, "cannot be read") {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}

	// A kubelet that was seen and then is not is no reason to take a board back.
	w = newWorld(t, "h100")
	r = w.program()
	w.held = []string{gpu}
	once(true)
	w.held = nil
	r.holders = blind
	if once(false); !isBack() {
		t.Error("a board was taken back because the kubelet does not answer")
	}
	r.holders = holders
}

// TestStartOffersNoDoomed holds that what the layout has no place for is not in
// the first lists: nobody was told of it, so that it is cut at once.
func TestStartOffersNoDoomed(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	w.use(nil, 2)
	r := w.program()
	w.lives(r, layoutNamed("all-balanced"), true, 3)
	only, limited := r.offered.Load().only[w.gpu()]
	if !limited || len(only) == 0 || len(only) > 2 || w.writes != 0 {
		t.Errorf("offered at the start: %v after %d writes, want the two small ones that stay", only, w.writes)
	}
	w.lives(r, layoutNamed("all-balanced"), false, 20)
	if got := w.state(r); got.State != sharing.LayoutApplied && got.State != sharing.LayoutBlocked {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
}

// TestEndNotKept holds that a change whose end the journal could not keep counts
// once, and ends when it can.
func TestEndNotKept(t *testing.T) {
	w, wish := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	r.refresh = noRefresh(func() { w.saving = errDisk })
	w.lives(r, wish, false, 5)
	if got := w.state(r); got.State != sharing.LayoutFailed || !strings.Contains(got.Reason, errDisk.Error()) {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
	w.saving, r.refresh = nil, noRefresh(func() {})
	w.lives(r, wish, false, 5)
	if got := w.state(r); got.State != sharing.LayoutApplied || len(w.kept.Underway) != 0 || r.results.applied.Load() != 1 {
		t.Errorf("%s (%s), %d changes applied, journal %+v", got.State, got.Reason, r.results.applied.Load(), w.kept)
	}
}

// TestRebootOfABlockedBoard holds that a board whose layout was never complete is
// known to be cut after a reboot too, which takes the MIG mode of some boards
// with it.
func TestRebootOfABlockedBoard(t *testing.T) {
	w, wish := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	w.use(nil, 1)
	w.lives(w.program(), wish, false, 10)
	if !slices.Contains(w.kept.Enabled, w.gpu()) {
		t.Errorf("journal %+v does not have the board that Virgate has cut", w.kept)
	}
}

// TestComputePlacement holds what becomes of a partition that the slices of its
// GPU instance would do for, but not as they lie: a 2c beside a 1c in the middle.
// The driver refuses, the board is as it was, and it is tried ever more rarely,
// because each try takes free partitions away for a while.
func TestComputePlacement(t *testing.T) {
	w := newWorld(t, "h100+all-1c.3g.40gb")
	w.held = []string{w.cut().Instances[0].Computes[1].UUID, w.cut().Instances[1].Computes[1].UUID}
	wish := sharing.Repartition{Manage: true, Name: "mixed", WhenBusy: sharing.Wait, Blocks: []sharing.LayoutBlock{{
		All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.Count{
			{Profile: parsed(t, "1c.3g.40gb"), Count: 2}, {Profile: parsed(t, "2c.3g.40gb"), Count: 1},
		}},
	}}}
	before, busy := w.arrangement(), w.inUse()
	r := w.program()
	begun := w.clock
	tries := 0
	for w.clock.Before(begun.Add(24 * time.Hour)) {
		gpus, err := nvml.Scan(w.sim)
		if err != nil {
			t.Fatal(err)
		}
		undone := r.results.undone.Load()
		again := r.round(t.Context(), gpus, wish, false)
		if again == 0 {
			break
		}
		if r.results.undone.Load() > undone {
			tries++
			got := w.state(r)
			if got.State != sharing.LayoutFailed || !strings.Contains(got.Reason, "undone after create partition 2c.3g.40gb") {
				t.Fatalf("try %d: %s (%s)", tries, got.State, got.Reason)
			}
			if diff := cmp.Diff(before, w.arrangement()); diff != "" || len(w.kept.Underway) != 0 {
				t.Fatalf("try %d: journal %+v, board (-before +after):\n%s", tries, w.kept, diff)
			}
			w.survive(busy)
		}
		w.clock = w.clock.Add(again)
	}
	if tries < 2 || tries > 60 {
		t.Errorf("%d tries in a day", tries)
	}
	// When the pods have gone there is a way.
	w.held = nil
	w.lives(r, wish, false, 20)
	if got := w.state(r); got.State != sharing.LayoutApplied {
		t.Errorf("with everything free: %s (%s)", got.State, got.Reason)
	}
}
