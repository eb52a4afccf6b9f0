package agent

import (
	"context"
	"slices"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// TestModeBack holds that a MIG mode which waits for a reset is taken back when
// it is not wanted any more, so that no reboot brings it, but not under a pod.
func TestModeBack(t *testing.T) {
	for name, busy := range map[string]bool{"free": false, "in use": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "a100-40")
			r := w.program()
			w.lives(r, layoutNamed("all-balanced"), false, 5)
			if got := w.state(r); got.State != sharing.LayoutResetRequired {
				t.Fatalf("%s (%s)", got.State, got.Reason)
			}
			if busy {
				w.held = []string{w.gpu()}
			}
			writes := w.writes
			w.lives(r, layoutNamed("all-disabled"), false, 5)
			got := w.state(r)
			if busy {
				if !w.cut().Pending || w.writes != writes || got.State != sharing.LayoutResetRequired {
					t.Errorf("pending %t after %d writes, %s (%s)", w.cut().Pending, w.writes-writes, got.State, got.Reason)
				}
				w.held = nil
				w.lives(r, layoutNamed("all-disabled"), false, 5)
			}
			got = w.state(r)
			if w.cut().Pending || got.State != sharing.LayoutApplied || r.offered.Load().only[got.GPU] != nil {
				t.Errorf("pending %t, %s (%s), offered %v", w.cut().Pending, got.State, got.Reason, r.offered.Load().only)
			}
		})
	}
}

// TestWaitsThenWishChanges changes the wish while devices are being withdrawn, or
// while a partition is waited for. Nothing that was not begun is left behind:
// nothing closed, nothing held back that the new wish keeps.
func TestWaitsThenWishChanges(t *testing.T) {
	first, refuse := layoutNamed("all-3g.40gb"), layoutNamed("all-3g.40gb")
	refuse.WhenBusy = sharing.Refuse
	for _, test := range []struct {
		name string
		then sharing.Repartition
		// state is what the board comes to, parts how many partitions it has then.
		state sharing.LayoutState
		parts int
	}{
		{"no layout", sharing.Repartition{Manage: true, WhenBusy: sharing.Wait}, "", 7},
		{"not managed", sharing.Repartition{Name: "all-3g.40gb", WhenBusy: sharing.Wait}, "", 7},
		{"refuse", refuse, sharing.LayoutBlocked, 7},
		{"back", layoutNamed("all-1g.10gb"), sharing.LayoutApplied, 7},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, "h100+all-1g.10gb")
			w.use(nil, 1)
			r := w.program()
			door := &gate{world: w, closed: map[string]bool{}}
			r.withdrawal = &slow{door}
			w.lives(r, first, false, 3)
			if only := r.offered.Load().only[w.gpu()]; only == nil || w.writes != 0 {
				t.Fatalf("offered %v after %d writes, want a board whose devices are being withdrawn", only, w.writes)
			}
			if door.closings != 0 {
				t.Error("closed while the kubelet may still grant what it was told of")
			}
			w.lives(r, test.then, false, 3)
			if len(door.closed) != 0 || r.offered.Load().only[w.gpu()] != nil || w.writes+w.saves != 0 {
				if test.name != "back" || w.saves != 1 { // The board counts as one that Virgate keeps in MIG mode.
					t.Errorf("closed %v, offered %v, %d writes, %d saves", door.closed, r.offered.Load().only, w.writes, w.saves)
				}
			}
			if status := *r.status.Load(); test.state == "" && len(status) != 0 || test.state != "" && w.state(r).State != test.state {
				t.Errorf("status %+v, want %q", status, test.state)
			}
			if parts := len(w.arrangement().Partitions); parts != test.parts {
				t.Errorf("%d partitions", parts)
			}
		})
	}
}

// slow is a kubelet that never lets go.
type slow struct{ *gate }

func (*slow) Withdrawn(...string) bool { return false }

// TestListedAgain holds that a unit which is in a list again when it is closed, as
// one is that was granted in the last moment, is not cut, and can be granted.
func TestListedAgain(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	r := w.program()
	door := &gate{world: w, closed: map[string]bool{}}
	r.withdrawal = &relisted{door}
	w.lives(r, layoutNamed("all-3g.40gb"), false, 3)
	if door.closings == 0 || len(door.closed) != 0 || w.writes+w.saves != 0 {
		t.Errorf("closed %d times, now %v; %d writes", door.closings, door.closed, w.writes+w.saves)
	}
}

// relisted is a kubelet's side on which a closed unit is in a list again.
type relisted struct{ *gate }

func (r *relisted) Withdrawn(...string) bool { return len(r.closed) == 0 }

// TestManagedNoMore holds that a change in its middle is ended, and the board
// then left alone, when the profile does not want it any more.
func TestManagedNoMore(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	before := w.arrangement()
	r := w.program()
	// The change fails, and so does its undoing, until the driver works again.
	end := w.sim.Script("GpuInstanceCreateComputeInstance", simnode.Fault{Return: nvml.Unknown})
	w.lives(r, layoutNamed("all-3g.40gb"), false, 2)
	if len(w.kept.Underway) != 1 {
		t.Fatalf("journal %+v, want a change in its middle", w.kept)
	}
	end()
	wish := layoutNamed("all-3g.40gb")
	wish.Manage = false
	w.lives(r, wish, false, 20)
	after := w.arrangement()
	if len(w.kept.Underway)+len(w.kept.Enabled) != 0 || len(after.Partitions) != 2 && !contains([]sharing.Arrangement{before}, after) {
		t.Errorf("journal %+v, board %v", w.kept, after)
	}
	if r.offered.Load().only[w.gpu()] != nil || r.offered.Load().parts[w.gpu()] {
		t.Errorf("held back: %+v", r.offered.Load())
	}
}

// TestTwoBoards holds that one board in trouble keeps no other from its layout.
func TestTwoBoards(t *testing.T) {
	w := newWorld(t, "h100x2+all-1g.10gb")
	gpus, err := nvml.Scan(w.sim)
	if err != nil || len(gpus) != 2 {
		t.Fatalf("%d GPUs, %v", len(gpus), err)
	}
	if _, err := w.sim.ScriptGPU(0, "DeviceGetPciInfo", simnode.Fault{Return: nvml.GPUIsLost}); err != nil {
		t.Fatal(err)
	}
	r := w.program()
	for range 5 {
		r.round(t.Context(), gpus, layoutNamed("all-3g.40gb"), false)
		w.clock = w.clock.Add(drainInterval)
	}
	states := map[int]sharing.LayoutState{}
	for _, board := range *r.status.Load() {
		states[board.Index] = board.State
	}
	if states[0] != sharing.LayoutFailed || states[1] != sharing.LayoutApplied {
		t.Errorf("states %v", states)
	}
	if order := *r.status.Load(); !slices.IsSortedFunc(order, func(a, b sharing.BoardLayout) int { return a.Index - b.Index }) {
		t.Errorf("boards in the order %+v", order)
	}
}

// reminded is a kubelet's side that remembers what it was reminded of.
type reminded struct {
	*world
	units []string
}

func (r *reminded) Remind(units ...string) { r.units = units }

// TestRemind holds that the kubelet is reminded of units that a board waits for
// and whose holder it does not name, and of no others.
func TestRemind(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	parts := w.cut().Instances
	gone, runs := parts[1].Computes[0].UUID, parts[2].Computes[0].UUID
	r := w.program()
	side := &reminded{world: w}
	r.withdrawal = side
	r.holders = func(context.Context) ([]sharing.Allocation, error) {
		return []sharing.Allocation{{Pod: "uid:1", Devices: []string{gone}}, {Namespace: "default", Pod: "pod", Devices: []string{runs}}}, nil
	}
	wish := layoutNamed("all-3g.40gb")
	wish.WhenBusy = sharing.Refuse
	w.lives(r, wish, false, 2)
	if !slices.Equal(side.units, []string{gone}) {
		t.Errorf("reminded of %v, want %s", side.units, gone)
	}
}
