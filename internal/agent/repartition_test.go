package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// blind is a kubelet that cannot be asked.
func blind(context.Context) ([]sharing.Allocation, error) { return nil, errors.New("no socket") }

func (w *world) state(r *repartitioner) sharing.BoardLayout {
	w.t.Helper()
	status := *r.status.Load()
	if len(status) != 1 {
		w.t.Fatalf("status %+v, want one board", status)
	}
	return status[0]
}

// wipe takes away what a reset or a reboot does.
func (w *world) wipe() {
	w.t.Helper()
	must := func(err error) {
		w.t.Helper()
		if err != nil {
			w.t.Fatal(err)
		}
	}
	must(w.sim.Init())
	for _, instance := range w.cut().Instances {
		for _, c := range instance.Computes {
			must(w.sim.DestroyComputeInstance(0, instance.GI, c.CI))
		}
		must(w.sim.DestroyGPUInstance(0, instance.GI))
	}
	must(w.sim.SetMIG(0, false))
	must(w.sim.Shutdown())
}

// TestReboot holds that the layout is there again before the node registers,
// also while the kubelet cannot be asked; that a board which was never cut waits
// for the kubelet; and that one which is kept in MIG mode is never offered whole.
func TestReboot(t *testing.T) {
	w, wish := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	r.holders = blind
	w.lives(r, wish, true, 5)
	if got := w.state(r); got.State != sharing.LayoutBlocked || w.writes != 0 || !strings.Contains(got.Reason, "cannot be read") {
		t.Errorf("a GPU that somebody may hold is %s (%s) after %d writes", got.State, got.Reason, w.writes)
	}
	w.lives(w.program(), wish, true, 5)
	made := w.arrangement()
	if len(made.Partitions) != 4 {
		t.Fatalf("made %v", made)
	}
	w.wipe()
	r = w.program()
	r.holders = blind
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		t.Fatal(err)
	}
	r.restore()
	if !r.offered.Load().parts[gpus[0].UUID] {
		t.Error("the board would be offered whole before it is cut again")
	}
	w.lives(r, wish, true, 5)
	if diff := cmp.Diff(made, w.arrangement()); diff != "" {
		t.Errorf("after the reboot (-want +got):\n%s", diff)
	}
	w.lives(r, sharing.Repartition{}, false, 5)
	if len(w.kept.Enabled) != 0 || r.offered.Load().parts[gpus[0].UUID] {
		t.Error("a board that is not managed any more is kept from being offered whole")
	}
}

// TestNeverWithoutManage holds that nothing is cut without mig.manage.
func TestNeverWithoutManage(t *testing.T) {
	for _, wish := range []sharing.Repartition{{}, {Name: "all-balanced"}, {Manage: true}} {
		w := newWorld(t, "h100+all-1g.10gb")
		w.lives(w.program(), wish, false, 5)
		if w.writes+w.saves != 0 {
			t.Errorf("%+v: %d writes", wish, w.writes+w.saves)
		}
	}
}

// TestRefuse holds that a board with partitions in the way stays as it is where
// the profile says so.
func TestRefuse(t *testing.T) {
	w, wish := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	w.use([]int{5}, 6)
	wish.WhenBusy = sharing.Refuse
	r := w.program()
	w.lives(r, wish, false, 5)
	got := w.state(r)
	if got.State != sharing.LayoutBlocked || w.writes+w.saves != 0 {
		t.Errorf("%s (%s) after %d writes, want blocked and none", got.State, got.Reason, w.writes+w.saves)
	}
	if !strings.Contains(got.Reason, "1g.10gb at 6:1 is in use") || !strings.Contains(got.Reason, "default/pod") {
		t.Errorf("reason %q names neither partition nor pod", got.Reason)
	}
}

// TestBlindKubelet holds that no partition goes while nobody can tell who holds
// it.
func TestBlindKubelet(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	r := w.program()
	r.holders = blind
	w.lives(r, layoutNamed("all-3g.40gb"), false, 5)
	if got := w.state(r); got.State != sharing.LayoutBlocked || w.writes != 0 || !strings.Contains(got.Reason, "no socket") {
		t.Errorf("%s (%s) after %d writes", got.State, got.Reason, w.writes)
	}
	if only := r.offered.Load().only[w.gpu()]; only != nil {
		t.Errorf("only %v is offered: not knowing is no reason to take partitions back", only)
	}
}

// TestStartWithdrawsNothing holds that what somebody may have been told of stays
// until it can be withdrawn.
func TestStartWithdrawsNothing(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	w.lives(w.program(), layoutNamed("all-3g.40gb"), true, 5)
	if w.writes != 0 {
		t.Errorf("%d writes before devices could be withdrawn", w.writes)
	}
}

// TestWholeGPUInUse holds that MIG mode stays off while a pod or a process has
// the GPU.
func TestWholeGPUInUse(t *testing.T) {
	for name, use := range map[string]func(*world){
		"a pod":     func(w *world) { w.held = []string{w.gpu() + "::3"} },
		"a process": func(w *world) { _ = w.sim.AddProcess(0, simnode.WholeGPU, 1, 0) },
	} {
		w := newWorld(t, "h100")
		use(w)
		r := w.program()
		w.lives(r, layoutNamed("all-balanced"), false, 5)
		if got := w.state(r); got.State != sharing.LayoutBlocked || w.writes != 0 || !strings.Contains(got.Reason, "in use as a whole") {
			t.Errorf("%s: %s (%s) after %d writes", name, got.State, got.Reason, w.writes)
		}
	}
}

func (w *world) gpu() string {
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		w.t.Fatal(err)
	}
	return gpus[0].UUID
}

// TestResetRequired holds that a mode which waits for a reset is reported, that
// the board is kept free for it and no other board is touched, and that the
// layout is made after it.
func TestResetRequired(t *testing.T) {
	w, wish := newWorld(t, "a100-40x2"), layoutNamed("all-balanced")
	r := w.program()
	w.lives(r, wish, false, 5)
	got := w.state(r)
	if got.State != sharing.LayoutResetRequired || w.writes != 1 {
		t.Errorf("%s (%s) after %d writes, want reset-required after 1", got.State, got.Reason, w.writes)
	}
	if only := r.offered.Load().only[got.GPU]; only == nil || len(only) != 0 {
		t.Errorf("offered of the board: %v, want nothing", only)
	}
	if len(w.kept.Underway) != 0 {
		t.Errorf("journal %+v, want nothing under way", w.kept)
	}
	gpus, err := nvml.Scan(w.sim)
	if err != nil || gpus[1].MIGPending {
		t.Errorf("the other board was touched (%v)", err)
	}
	if err := w.sim.Heal(0); err != nil {
		t.Fatal(err)
	}
	w.lives(r, wish, false, 5)
	if got := w.state(r); got.State != sharing.LayoutApplied {
		t.Errorf("after the reset: %s (%s)", got.State, got.Reason)
	}
	if only := r.offered.Load().only[got.GPU]; only != nil {
		t.Errorf("offered of the board in the end: %v, want all", only)
	}
}

// TestNoPermission holds that a lack of privileges is said once, whatever is
// tried, and that the board goes on being offered.
func TestNoPermission(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	for _, call := range []string{"ComputeInstanceDestroy", "GpuInstanceDestroy"} {
		w.sim.Script(call, simnode.Fault{Return: nvml.NoPermission})
	}
	var log bytes.Buffer
	r := w.program()
	r.log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))
	w.lives(r, layoutNamed("all-3g.40gb"), false, 10)
	w.lives(r, layoutNamed("all-3g.40gb"), false, 10)
	got := w.state(r)
	if got.State != sharing.LayoutFailed || !strings.Contains(got.Reason, "privileged") {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
	if lines := strings.Count(log.String(), "\n"); lines != 1 {
		t.Errorf("%d lines of errors:\n%s", lines, log.String())
	}
	if tries := w.sim.Calls("ComputeInstanceDestroy"); tries != 1 {
		t.Errorf("tried %d times, which withdraws devices each time", tries)
	}
	w.lives(r, layoutNamed("all-2g.20gb"), false, 10)
	if tries := w.sim.Calls("ComputeInstanceDestroy"); tries != 2 {
		t.Errorf("tried %d times in all, want once more for another layout", tries)
	}
	got = w.state(r)
	if r.offered.Load().only[got.GPU] != nil && !r.boards[got.GPU].settling {
		t.Error("the board is not offered any more")
	}
}

// TestJournalFails holds that nothing begins that could not be finished.
func TestJournalFails(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	w.saving = errDisk
	r := w.program()
	w.lives(r, layoutNamed("all-3g.40gb"), false, 5)
	if got := w.state(r); got.State != sharing.LayoutFailed || w.writes != 0 || !strings.Contains(got.Reason, errDisk.Error()) {
		t.Errorf("%s (%s) after %d writes", got.State, got.Reason, w.writes)
	}
}

// TestGrantInTheLastMoment holds that a unit which is granted while its board is
// about to be cut is seen by the second look, which comes after it was closed.
func TestGrantInTheLastMoment(t *testing.T) {
	w := newWorld(t, "h100+all-1g.10gb")
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		t.Fatal(err)
	}
	r := w.program()
	late := &lateGrant{world: w, unit: gpus[0].Partitions[0].UUID}
	r.withdrawal = late
	w.lives(r, layoutNamed("all-disabled"), false, 1)
	if w.writes+w.saves != 0 {
		t.Errorf("%d writes of a change that the second look should have kept from beginning", w.writes+w.saves)
	}
	w.lives(r, layoutNamed("all-disabled"), false, 10)
	if !uuids(w.cut())[late.unit] {
		t.Error("a partition was destroyed that a pod was granted before it was closed")
	}
}

// lateGrant lets a pod have the unit in the moment before it is closed.
type lateGrant struct {
	*world
	unit string
}

func (l *lateGrant) Close(string, ...string) { l.held = []string{l.unit} }

// TestRetryAfter holds that pauses grow, have a limit and are not all the same.
func TestRetryAfter(t *testing.T) {
	for failures, want := range map[int]time.Duration{1: 5 * time.Second, 3: 20 * time.Second, 12: longestRetry, 1000: longestRetry} {
		var pauses []time.Duration
		for range 20 {
			pause := retryAfter(failures, longestRetry)
			if pause < want/2 || pause > want {
				t.Errorf("%d failures: %s, want %s to %s", failures, pause, want/2, want)
			}
			pauses = append(pauses, pause)
		}
		if slices.Min(pauses) == slices.Max(pauses) {
			t.Errorf("%d failures: always %s", failures, pauses[0])
		}
	}
}

// TestUnreachable holds which free slots count as lost.
func TestUnreachable(t *testing.T) {
	g, _ := mig.GeometryOf(0x20B0)
	at := func(text string, start, size int) mig.Instance {
		p, err := mig.ParseProfile(text)
		if err != nil {
			t.Fatal(err)
		}
		return mig.Instance{Profile: p, Placement: mig.Placement{Start: start, Size: size}}
	}
	for name, test := range map[string]struct {
		instances []mig.Instance
		want      int
	}{
		"empty": {nil, 0},
		"all that takes the last slot would lie on this 1g": {[]mig.Instance{at("1g.5gb", 6, 1)}, 1},
		"4g and 3g leave nothing":                           {[]mig.Instance{at("4g.20gb", 0, 4), at("3g.20gb", 4, 4)}, 0},
		"seven 1g leave the last one": {slices.Collect(func(yield func(mig.Instance) bool) {
			for start := range 7 {
				if !yield(at("1g.5gb", start, 1)) {
					return
				}
			}
		}), 1},
		"3g and 3g have a slice left and no slot": {[]mig.Instance{at("3g.20gb", 0, 4), at("3g.20gb", 4, 4)}, 0},
	} {
		if got := unreachable(sharing.Cut{Geometry: g, MIG: true, Instances: test.instances}); got != test.want {
			t.Errorf("%s: %d, want %d", name, got, test.want)
		}
	}
}

// TestBlockedIsNotOffered holds that a partition in the way is withdrawn while a
// pod has it, so that no other pod gets it next, and that the layout is complete
// when it is free.
func TestBlockedIsNotOffered(t *testing.T) {
	w, wish := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	w.use(nil, 1)
	r := w.program()
	gpu := w.gpu()
	r.show = func(context.Context) {
		if only := r.offered.Load().only[gpu]; len(w.held) > 0 && only[w.held[0]] {
			t.Errorf("offered for a moment: %v", only)
		}
	}
	door := &gate{world: w, closed: map[string]bool{}}
	r.withdrawal = door
	w.lives(r, wish, false, 10)
	if door.closings == 0 || len(door.closed) != 0 {
		t.Errorf("closed %d times, and then still %v", door.closings, door.closed)
	}
	got := w.state(r)
	only := r.offered.Load().only[got.GPU]
	if got.State != sharing.LayoutBlocked || only == nil || only[w.held[0]] || len(only) != 1 {
		t.Errorf("%s, offered %v, want the one 3g.40gb and not %s", got.State, only, w.held[0])
	}
	w.held = nil
	w.lives(r, wish, false, 10)
	if got := w.state(r); got.State != sharing.LayoutApplied || r.offered.Load().only[got.GPU] != nil {
		t.Errorf("%s (%s) when it is free", got.State, got.Reason)
	}
}

// TestStaleInventory holds that partitions which were destroyed are not offered
// because the inventory still shows them.
func TestStaleInventory(t *testing.T) {
	w, wish := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	stale, err := nvml.Scan(w.sim)
	if err != nil {
		t.Fatal(err)
	}
	r := w.program()
	for range 5 {
		r.round(t.Context(), stale, wish, false)
	}
	got := w.state(r)
	only := r.offered.Load().only[got.GPU]
	if diff := cmp.Diff(uuids(w.cut()), only); diff != "" || got.State != sharing.LayoutApplied {
		t.Errorf("%s, offered (-want +got):\n%s", got.State, diff)
	}
	w.lives(r, wish, false, 5)
	if only := r.offered.Load().only[got.GPU]; only != nil {
		t.Errorf("offered %v when the inventory shows the board, want all", only)
	}
}
