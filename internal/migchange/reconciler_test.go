package migchange

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
)

// blind is a kubelet that does not answer.
func blind(context.Context) ([]sharing.Allocation, error) { return nil, errors.New("no socket") }

func (w *world) state(r *Reconciler) nodereport.GPULayout {
	w.t.Helper()
	status := r.Status()
	if len(status) != 1 {
		w.t.Fatalf("status %+v, want one GPU", status)
	}
	return status[0]
}

// wipe destroys everything that a reset or a reboot destroys.
func (w *world) wipe() {
	w.t.Helper()
	must := func(err error) {
		w.t.Helper()
		if err != nil {
			w.t.Fatal(err)
		}
	}
	must(w.sim.Init())
	for _, instance := range w.migState().Instances {
		for _, c := range instance.Computes {
			must(nvmltest.DestroyComputeInstance(w.sim, 0, instance.GI, c.CI))
		}
		must(nvmltest.DestroyGPUInstance(w.sim, 0, instance.GI))
	}
	must(nvmltest.SetMIG(w.sim, 0, false))
	must(w.sim.Shutdown())
}

// TestReboot checks that the layout is restored before the node registers, even if the kubelet does not answer;
// that a GPU that was never partitioned waits for the kubelet; and that a GPU kept in MIG mode is never offered
// whole.
func TestReboot(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	r.Holders = blind
	w.run(r, wanted, true, 5)
	if got := w.state(r); got.State != nodereport.LayoutBlocked || w.writes != 0 || !strings.Contains(got.Reason, "cannot be read") {
		t.Errorf("a GPU that somebody may hold is %s (%s) after %d writes", got.State, got.Reason, w.writes)
	}
	w.run(w.program(), wanted, true, 5)
	made := w.layout()
	if len(made.Partitions) != 4 {
		t.Fatalf("made %v", made)
	}
	w.wipe()
	r = w.program()
	r.Holders = blind
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		t.Fatal(err)
	}
	r.journal.load()
	if !r.offers.published.Load().partitionsOnly[gpus[0].UUID] {
		t.Error("the GPU would be offered whole before it is partitioned again")
	}
	w.run(r, wanted, true, 5)
	if diff := cmp.Diff(made, w.layout()); diff != "" {
		t.Errorf("after the reboot (-want +got):\n%s", diff)
	}
	w.run(r, sharing.MIGConfig{}, false, 5)
	if len(w.kept.Enabled) != 0 || r.offers.published.Load().partitionsOnly[gpus[0].UUID] {
		t.Error("a GPU that is not managed any more is kept from being offered whole")
	}
}

// TestNeverWithoutManage checks that nothing is changed without mig.manage.
func TestNeverWithoutManage(t *testing.T) {
	t.Parallel()
	for _, wanted := range []sharing.MIGConfig{{}, {Name: "all-balanced"}, {Manage: true}} {
		w := newWorld(t, "h100+all-1g.10gb")
		w.run(w.program(), wanted, false, 5)
		if w.writes+w.saves != 0 {
			t.Errorf("%+v: %d writes", wanted, w.writes+w.saves)
		}
	}
}

// TestRefuse checks that a GPU is not changed while partitions are in the way, if the profile asks for that.
func TestRefuse(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	w.use([]int{5}, 6)
	wanted.WhenBusy = sharing.RefuseWhenBusy
	r := w.program()
	w.run(r, wanted, false, 5)
	got := w.state(r)
	if got.State != nodereport.LayoutBlocked || w.writes+w.saves != 0 {
		t.Errorf("%s (%s) after %d writes, want blocked and none", got.State, got.Reason, w.writes+w.saves)
	}
	if !strings.Contains(got.Reason, "1g.10gb at 6:1 is in use") || !strings.Contains(got.Reason, "default/pod") {
		t.Errorf("reason %q names neither partition nor pod", got.Reason)
	}
}

// TestBlindKubelet checks that no partition is destroyed while its holders are unknown.
func TestBlindKubelet(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	r := w.program()
	r.Holders = blind
	w.run(r, layoutNamed("all-3g.40gb"), false, 5)
	if got := w.state(r); got.State != nodereport.LayoutBlocked || w.writes != 0 || !strings.Contains(got.Reason, "no socket") {
		t.Errorf("%s (%s) after %d writes", got.State, got.Reason, w.writes)
	}
	if only := r.offers.published.Load().only[w.gpu()]; only != nil {
		t.Errorf("only %v is offered: not knowing is no reason to take partitions back", only)
	}
}

// TestStartWithdrawsNothing checks that devices the kubelet may know stay until they can be withdrawn.
func TestStartWithdrawsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	w.run(w.program(), layoutNamed("all-3g.40gb"), true, 5)
	if w.writes != 0 {
		t.Errorf("%d writes before devices could be withdrawn", w.writes)
	}
}

// TestWholeGPUInUse checks that MIG mode stays off while a pod or a process uses the GPU.
func TestWholeGPUInUse(t *testing.T) {
	t.Parallel()
	for name, use := range map[string]func(*world){
		"a pod":     func(w *world) { w.held = []string{w.gpu() + "::3"} },
		"a process": func(w *world) { _ = w.sim.AddProcess(0, simnode.WholeGPU, 1, 0) },
	} {
		w := newWorld(t, "h100")
		use(w)
		r := w.program()
		w.run(r, layoutNamed("all-balanced"), false, 5)
		if got := w.state(r); got.State != nodereport.LayoutBlocked || w.writes != 0 || !strings.Contains(got.Reason, "in use as a whole") {
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

// TestNoPermission checks that missing privileges are logged once, and that the GPU stays offered.
func TestNoPermission(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	for _, call := range []string{"ComputeInstanceDestroy", "GpuInstanceDestroy"} {
		w.sim.InjectFault(call, simnode.Fault{Return: nvml.NoPermission})
	}
	var log bytes.Buffer
	r := w.program()
	r.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))
	w.run(r, layoutNamed("all-3g.40gb"), false, 10)
	w.run(r, layoutNamed("all-3g.40gb"), false, 10)
	got := w.state(r)
	if got.State != nodereport.LayoutFailed || !strings.Contains(got.Reason, "privileged") {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
	if lines := strings.Count(log.String(), "\n"); lines != 1 {
		t.Errorf("%d lines of errors:\n%s", lines, log.String())
	}
	if tries := w.sim.Calls("ComputeInstanceDestroy"); tries != 1 {
		t.Errorf("tried %d times, which withdraws devices each time", tries)
	}
	w.run(r, layoutNamed("all-2g.20gb"), false, 10)
	if tries := w.sim.Calls("ComputeInstanceDestroy"); tries != 2 {
		t.Errorf("tried %d times in all, want once more for another layout", tries)
	}
	got = w.state(r)
	if r.offers.published.Load().only[got.GPU] != nil && !r.gpus[got.GPU].stale {
		t.Error("the GPU is not offered any more")
	}
}

// TestJournalFails checks that no change begins that could not be finished.
func TestJournalFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	w.saving = errDisk
	r := w.program()
	w.run(r, layoutNamed("all-3g.40gb"), false, 5)
	if got := w.state(r); got.State != nodereport.LayoutFailed || w.writes != 0 || !strings.Contains(got.Reason, errDisk.Error()) {
		t.Errorf("%s (%s) after %d writes", got.State, got.Reason, w.writes)
	}
}

// TestGrantInTheLastMoment checks that a unit granted just before its GPU is repartitioned is seen by the second
// look, which comes after it was closed.
func TestGrantInTheLastMoment(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		t.Fatal(err)
	}
	r := w.program()
	late := &lateGrant{world: w, unit: gpus[0].Partitions[0].UUID}
	r.Devices = late
	w.run(r, layoutNamed("all-disabled"), false, 1)
	if w.writes+w.saves != 0 {
		t.Errorf("%d writes of a change that the second look should have kept from beginning", w.writes+w.saves)
	}
	w.run(r, layoutNamed("all-disabled"), false, 10)
	if !partitionsOf(w.migState().Instances)[late.unit] {
		t.Error("a partition was destroyed that a pod was granted before it was closed")
	}
}

// lateGrant has a pod get the unit just before it is closed.
type lateGrant struct {
	*world
	unit string
}

func (l *lateGrant) SetRefusals(units map[string]string) {
	if len(units) > 0 {
		l.held = []string{l.unit}
	}
}

// TestRetryAfter checks that pauses grow, are limited and vary.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
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

// TestBlockedIsNotOffered checks that a partition in the way is withdrawn while a pod has it, so that no other
// pod gets it next, and that the layout is complete once it is free.
func TestBlockedIsNotOffered(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	w.use(nil, 1)
	r := w.program()
	gpu := w.gpu()
	r.Plan = func(context.Context) {
		if only := r.offers.published.Load().only[gpu]; len(w.held) > 0 && only[w.held[0]] {
			t.Errorf("offered for a moment: %v", only)
		}
	}
	door := &gate{world: w}
	r.Devices = door
	w.run(r, wanted, false, 10)
	if door.closings == 0 || len(door.closed) != 0 {
		t.Errorf("closed %d times, and then still %v", door.closings, door.closed)
	}
	got := w.state(r)
	only := r.offers.published.Load().only[got.GPU]
	if got.State != nodereport.LayoutBlocked || only == nil || only[w.held[0]] || len(only) != 1 {
		t.Errorf("%s, offered %v, want the one 3g.40gb and not %s", got.State, only, w.held[0])
	}
	w.held = nil
	w.run(r, wanted, false, 10)
	if got := w.state(r); got.State != nodereport.LayoutApplied || r.offers.published.Load().only[got.GPU] != nil {
		t.Errorf("%s (%s) when it is free", got.State, got.Reason)
	}
}

// TestStaleInventory checks that destroyed partitions are not offered, even if the inventory still shows them.
func TestStaleInventory(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	stale, err := nvml.Scan(w.sim)
	if err != nil {
		t.Fatal(err)
	}
	r := w.program()
	for range 5 {
		r.reconcileAndWait(t.Context(), stale, wanted, false)
	}
	got := w.state(r)
	only := r.offers.published.Load().only[got.GPU]
	if diff := cmp.Diff(partitionsOf(w.migState().Instances), only); diff != "" || got.State != nodereport.LayoutApplied {
		t.Errorf("%s, offered (-want +got):\n%s", got.State, diff)
	}
	w.run(r, wanted, false, 5)
	if only := r.offers.published.Load().only[got.GPU]; only != nil {
		t.Errorf("offered %v when the inventory shows the GPU, want all", only)
	}
}

// gate is a kubelet's side that records the refused units.
type gate struct {
	*world
	closed map[string]string
	// closings counts refusals.
	closings int
}

func (g *gate) SetRefusals(units map[string]string) {
	if g.closed = units; len(units) > 0 {
		g.closings++
	}
}

// unlisted is a GPU that cannot be listed after so many times.
type unlisted struct {
	Partitioner
	after int
}

func (u *unlisted) State(ctx context.Context, gpu string) (sharing.MIGState, error) {
	if u.after--; u.after < 0 {
		return sharing.MIGState{}, nvml.GPUIsLost
	}
	return u.Partitioner.State(ctx, gpu)
}

// TestUnplugged checks a GPU that disappears during a change: none of its units stays refused, none is offered if
// it is back before the change is finished, and then the change is finished.
func TestUnplugged(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	door := &gate{world: w}
	r.Devices = door
	gpu := w.gpu()
	// The change can be neither finished nor undone, as the GPU cannot be listed.
	r.Partitioner = &unlisted{Partitioner: r.Partitioner, after: 3}
	w.run(r, wanted, false, 1)
	if door.closed[gpu] == "" || len(w.kept.Underway) != 1 {
		t.Fatalf("closed %v, journal %+v: want a change in its middle", door.closed, w.kept)
	}
	r.reconcileAndWait(t.Context(), nil, wanted, false)
	if len(door.closed) != 0 {
		t.Errorf("closed when the GPU is gone: %v", door.closed)
	}
	if only, limited := r.offers.published.Load().only[gpu]; !limited || len(only) != 0 {
		t.Errorf("of a GPU that comes back between two layouts %v would be offered (limited %t)", only, limited)
	}
	r.Partitioner.(*unlisted).after = 1000
	w.run(r, wanted, false, 20)
	if got := w.state(r); got.State != nodereport.LayoutApplied || len(w.kept.Underway) != 0 || r.offers.published.Load().only[gpu] != nil {
		t.Errorf("%s (%s), journal %+v", got.State, got.Reason, w.kept)
	}
}

// watched is a GPU that is looked at before each step.
type watched struct {
	Partitioner
	before func()
}

func (w *watched) Apply(ctx context.Context, gpu string, step mig.Step) error {
	w.before()
	return w.Partitioner.Apply(ctx, gpu, step)
}

// TestResumeOffersWhatLasts checks that while an interrupted change is finished, only partitions in both layouts
// are offered.
func TestResumeOffersWhatLasts(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "a100-40+all-balanced"), layoutNamed("all-1g.5gb")
	both := map[string]bool{}
	for _, instance := range w.migState().Instances {
		if instance.Profile == parsed(t, "1g.5gb") {
			both[instance.Computes[0].UUID] = true
		}
	}
	w.dies, w.late = 2, true // The first step after the journal.
	if w.run(w.program(), wanted, false, 5) || len(w.kept.Underway) != 1 {
		t.Fatalf("journal %+v, want a change in its middle", w.kept)
	}
	w.dies = 0
	r, steps := w.program(), 0
	r.Partitioner = &watched{r.Partitioner, func() {
		steps++
		if diff := cmp.Diff(both, r.offers.published.Load().only[w.gpu()]); diff != "" {
			t.Errorf("offered in the middle (-want +got):\n%s", diff)
		}
	}}
	w.run(r, wanted, true, 5)
	if steps == 0 || len(w.kept.Underway) != 0 {
		t.Errorf("%d steps, journal %+v", steps, w.kept)
	}
}

// TestBlindStart checks that a whole GPU to be partitioned is not offered until the kubelet was seen, for a
// while: a pod that got it would block the layout as long as it runs.
func TestBlindStart(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	holders := r.Holders
	r.Holders = blind
	gpu := w.gpu()
	once := func(starting bool) time.Duration {
		t.Helper()
		gpus, err := nvml.Scan(w.sim)
		if err != nil {
			t.Fatal(err)
		}
		return r.reconcileAndWait(t.Context(), gpus[:1], wanted, starting)
	}
	isBack := func() bool { only, limited := r.offers.published.Load().only[gpu]; return !limited || only[gpu] }
	if again := once(true); isBack() || again == 0 || w.writes != 0 {
		t.Errorf("offered %t, again in %s, %d writes: want it held back and looked at again", isBack(), again, w.writes)
	}
	w.clock = w.clock.Add(awaitKubelet - time.Second)
	if once(false); isBack() {
		t.Error("offered before the kubelet had its time")
	}
	w.clock = w.clock.Add(2 * time.Second)
	if once(false); !isBack() {
		t.Error("held back for good, with a kubelet that cannot be read")
	}
	if got := w.state(r); got.State != nodereport.LayoutBlocked || !strings.Contains(got.Reason, "cannot be read") {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}

	// If the kubelet was seen before, its silence withdraws no GPU.
	w = newWorld(t, "h100")
	r = w.program()
	w.held = []string{gpu}
	once(true)
	w.held = nil
	r.Holders = blind
	if once(false); !isBack() {
		t.Error("a GPU was taken back because the kubelet does not answer")
	}
	r.Holders = holders
}

// TestStartOffersNoDoomed checks that partitions that the layout will destroy are not in the first lists, so that
// they can be destroyed at once.
func TestStartOffersNoDoomed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	w.use(nil, 2)
	r := w.program()
	w.run(r, layoutNamed("all-balanced"), true, 3)
	only, limited := r.offers.published.Load().only[w.gpu()]
	if !limited || len(only) == 0 || len(only) > 2 || w.writes != 0 {
		t.Errorf("offered at the start: %v after %d writes, want the two small ones that stay", only, w.writes)
	}
	w.run(r, layoutNamed("all-balanced"), false, 20)
	if got := w.state(r); got.State != nodereport.LayoutApplied && got.State != nodereport.LayoutBlocked {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
}

// TestEndNotKept checks that a change whose end could not be kept counts once, and is ended when that is
// possible.
func TestEndNotKept(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	r.Refresh = noRefresh(func() { w.saving = errDisk })
	w.run(r, wanted, false, 5)
	if got := w.state(r); got.State != nodereport.LayoutFailed || !strings.Contains(got.Reason, errDisk.Error()) {
		t.Errorf("%s (%s)", got.State, got.Reason)
	}
	w.saving, r.Refresh = nil, noRefresh(func() {})
	w.run(r, wanted, false, 5)
	if got := w.state(r); got.State != nodereport.LayoutApplied || len(w.kept.Underway) != 0 || r.executor.applied.Load() != 1 {
		t.Errorf("%s (%s), %d changes applied, journal %+v", got.State, got.Reason, r.executor.applied.Load(), w.kept)
	}
}

// TestRebootOfABlockedGPU checks that the journal has a GPU whose layout was never complete, as a reboot
// turns off the MIG mode of some GPUs.
func TestRebootOfABlockedGPU(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100+all-1g.10gb"), layoutNamed("all-3g.40gb")
	w.use(nil, 1)
	w.run(w.program(), wanted, false, 10)
	if !slices.Contains(w.kept.Enabled, w.gpu()) {
		t.Errorf("journal %+v does not have the GPU that Virgate has partitioned", w.kept)
	}
}

// TestComputePlacement checks a partition for which its GPU instance has enough slices, but not adjacent ones: a
// 2c beside a 1c in the middle. The driver refuses and the change is undone. Tries become rarer, because each one
// withholds free partitions for a while.
func TestComputePlacement(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1c.3g.40gb")
	w.held = []string{w.migState().Instances[0].Computes[1].UUID, w.migState().Instances[1].Computes[1].UUID}
	wanted := sharing.MIGConfig{Manage: true, Name: "mixed", WhenBusy: sharing.WaitWhenBusy, Blocks: []sharing.LayoutBlock{{
		All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{
			{Profile: parsed(t, "1c.3g.40gb"), Count: 2}, {Profile: parsed(t, "2c.3g.40gb"), Count: 1},
		}},
	}}}
	before, busy := w.layout(), w.inUse()
	r := w.program()
	begun := w.clock
	tries := 0
	for w.clock.Before(begun.Add(24 * time.Hour)) {
		gpus, err := nvml.Scan(w.sim)
		if err != nil {
			t.Fatal(err)
		}
		undone := r.executor.undone.Load()
		again := r.reconcileAndWait(t.Context(), gpus, wanted, false)
		if again == 0 {
			break
		}
		if r.executor.undone.Load() > undone {
			tries++
			got := w.state(r)
			if got.State != nodereport.LayoutFailed || !strings.Contains(got.Reason, "undone after create partition 2c.3g.40gb") {
				t.Fatalf("try %d: %s (%s)", tries, got.State, got.Reason)
			}
			if diff := cmp.Diff(before, w.layout()); diff != "" || len(w.kept.Underway) != 0 {
				t.Fatalf("try %d: journal %+v, GPU (-before +after):\n%s", tries, w.kept, diff)
			}
			w.survive(busy)
		}
		w.clock = w.clock.Add(again)
	}
	if tries < 2 || tries > 60 {
		t.Errorf("%d tries in a day", tries)
	}
	// Once the pods have gone, it is possible.
	w.held = nil
	w.run(r, wanted, false, 20)
	if got := w.state(r); got.State != nodereport.LayoutApplied {
		t.Errorf("with everything free: %s (%s)", got.State, got.Reason)
	}
}

// TestModeBack checks that a pending MIG mode that is no longer wanted is undone, so that no reboot activates it,
// but not while a pod uses the GPU.
func TestModeBack(t *testing.T) {
	t.Parallel()
	for name, busy := range map[string]bool{"free": false, "in use": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorldIn(t, "a100-40", "passthrough")
			r := w.program()
			w.run(r, layoutNamed("all-balanced"), false, 5)
			if got := w.state(r); got.State != nodereport.LayoutResetRequired {
				t.Fatalf("%s (%s)", got.State, got.Reason)
			}
			if busy {
				w.held = []string{w.gpu()}
			}
			writes := w.writes
			w.run(r, layoutNamed("all-disabled"), false, 5)
			got := w.state(r)
			if busy {
				if !w.migState().Pending || w.writes != writes || got.State != nodereport.LayoutResetRequired {
					t.Errorf("pending %t after %d writes, %s (%s)", w.migState().Pending, w.writes-writes, got.State, got.Reason)
				}
				w.held = nil
				w.run(r, layoutNamed("all-disabled"), false, 5)
			}
			got = w.state(r)
			if w.migState().Pending || got.State != nodereport.LayoutApplied || r.offers.published.Load().only[got.GPU] != nil {
				t.Errorf("pending %t, %s (%s), offered %v", w.migState().Pending, got.State, got.Reason, r.offers.published.Load().only)
			}
		})
	}
}

// TestWaitsThenLayoutChanges changes the wanted layout while devices are being withdrawn, or a partition is
// waited for. Nothing stays closed, and nothing is withheld that the new layout keeps.
func TestWaitsThenLayoutChanges(t *testing.T) {
	t.Parallel()
	first, refuse := layoutNamed("all-3g.40gb"), layoutNamed("all-3g.40gb")
	refuse.WhenBusy = sharing.RefuseWhenBusy
	for _, test := range []struct {
		name string
		then sharing.MIGConfig
		// state is the GPU's final state, parts its number of partitions then.
		state nodereport.LayoutState
		parts int
	}{
		{"no layout", sharing.MIGConfig{Manage: true, WhenBusy: sharing.WaitWhenBusy}, "", 7},
		{"not managed", sharing.MIGConfig{Name: "all-3g.40gb", WhenBusy: sharing.WaitWhenBusy}, "", 7},
		{"refuse", refuse, nodereport.LayoutBlocked, 7},
		{"back", layoutNamed("all-1g.10gb"), nodereport.LayoutApplied, 7},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, "h100+all-1g.10gb")
			w.use(nil, 1)
			r := w.program()
			door := &gate{world: w}
			r.Devices = &slow{door}
			w.run(r, first, false, 3)
			if only := r.offers.published.Load().only[w.gpu()]; only == nil || w.writes != 0 {
				t.Fatalf("offered %v after %d writes, want a GPU whose devices are being withdrawn", only, w.writes)
			}
			if door.closings != 0 {
				t.Error("closed while the kubelet may still grant what it was told of")
			}
			w.run(r, test.then, false, 3)
			if len(door.closed) != 0 || r.offers.published.Load().only[w.gpu()] != nil || w.writes+w.saves != 0 {
				if test.name != "back" || w.saves != 1 { // The GPU counts as one that Virgate keeps in MIG mode.
					t.Errorf("closed %v, offered %v, %d writes, %d saves", door.closed, r.offers.published.Load().only, w.writes, w.saves)
				}
			}
			if status := r.Status(); test.state == "" && len(status) != 0 || test.state != "" && w.state(r).State != test.state {
				t.Errorf("status %+v, want %q", status, test.state)
			}
			if parts := len(w.layout().Partitions); parts != test.parts {
				t.Errorf("%d partitions", parts)
			}
		})
	}
}

// slow is a kubelet that never releases a unit.
type slow struct{ *gate }

func (*slow) Withdrawn(...string) bool { return false }

// TestListedAgain checks that a unit that is listed again when it is closed, as after a grant in the last moment,
// is not repartitioned and can be granted.
func TestListedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	r := w.program()
	door := &gate{world: w}
	r.Devices = &relisted{door}
	w.run(r, layoutNamed("all-3g.40gb"), false, 3)
	if door.closings == 0 || len(door.closed) != 0 || w.writes+w.saves != 0 {
		t.Errorf("closed %d times, now %v; %d writes", door.closings, door.closed, w.writes+w.saves)
	}
}

// relisted is a kubelet's side with a closed unit in a list again.
type relisted struct{ *gate }

func (r *relisted) Withdrawn(...string) bool { return len(r.closed) == 0 }

// TestManagedNoMore checks that a change in progress is ended, and the GPU then left alone, if the profile no
// longer wants it.
func TestManagedNoMore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	before := w.layout()
	r := w.program()
	// The change and its undoing fail until the driver works again.
	end := w.sim.InjectFault("GpuInstanceCreateComputeInstance", simnode.Fault{Return: nvml.Unknown})
	w.run(r, layoutNamed("all-3g.40gb"), false, 2)
	if len(w.kept.Underway) != 1 {
		t.Fatalf("journal %+v, want a change in its middle", w.kept)
	}
	end()
	wanted := layoutNamed("all-3g.40gb")
	wanted.Manage = false
	w.run(r, wanted, false, 20)
	after := w.layout()
	if len(w.kept.Underway)+len(w.kept.Enabled) != 0 || len(after.Partitions) != 2 && !contains([]mig.PlacedLayout{before}, after) {
		t.Errorf("journal %+v, GPU %v", w.kept, after)
	}
	if r.offers.published.Load().only[w.gpu()] != nil || r.offers.published.Load().partitionsOnly[w.gpu()] {
		t.Errorf("held back: %+v", r.offers.published.Load())
	}
}

// TestLeftToAnother checks that a change in progress is forgotten, and nothing more is changed, once another
// program makes the layouts.
func TestLeftToAnother(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	r := w.program()
	end := w.sim.InjectFault("GpuInstanceCreateComputeInstance", simnode.Fault{Return: nvml.Unknown})
	w.run(r, layoutNamed("all-3g.40gb"), false, 2)
	if len(w.kept.Underway) != 1 {
		t.Fatalf("journal %+v, want a change in its middle", w.kept)
	}
	end()
	before, writes := w.layout(), w.writes
	wanted := layoutNamed("all-3g.40gb")
	wanted.Manage, wanted.LeftTo = false, "mig-manager makes them"
	for _, starting := range []bool{true, false} {
		r = w.program() // The next run of the program finds the journal.
		w.run(r, wanted, starting, 20)
	}
	if diff := cmp.Diff(before, w.layout()); diff != "" || w.writes != writes || len(w.kept.Underway)+len(w.kept.Enabled) != 0 {
		t.Errorf("%d writes, journal %+v, GPU (-before +after):\n%s", w.writes-writes, w.kept, diff)
	}
	if r.offers.published.Load().only[w.gpu()] != nil || r.offers.published.Load().partitionsOnly[w.gpu()] {
		t.Errorf("held back: %+v", r.offers.published.Load())
	}
}

// TestTwoGPUs checks that one GPU in trouble keeps no other from its layout.
func TestTwoGPUs(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100x2+all-1g.10gb")
	gpus, err := nvml.Scan(w.sim)
	if err != nil || len(gpus) != 2 {
		t.Fatalf("%d GPUs, %v", len(gpus), err)
	}
	if _, err := w.sim.InjectGPUFault(0, "DeviceGetPciInfo", simnode.Fault{Return: nvml.GPUIsLost}); err != nil {
		t.Fatal(err)
	}
	r := w.program()
	for range 5 {
		r.reconcileAndWait(t.Context(), gpus, layoutNamed("all-3g.40gb"), false)
		w.clock = w.clock.Add(retryInterval)
	}
	states := map[int]nodereport.LayoutState{}
	for _, gpu := range r.Status() {
		states[gpu.Index] = gpu.State
	}
	if states[0] != nodereport.LayoutFailed || states[1] != nodereport.LayoutApplied {
		t.Errorf("states %v", states)
	}
	if order := r.Status(); !slices.IsSortedFunc(order, func(a, b nodereport.GPULayout) int { return a.Index - b.Index }) {
		t.Errorf("GPUs in the order %+v", order)
	}
}

// reminded is a kubelet's side that records RefreshHolders calls.
type reminded struct {
	*world
	units []string
	times int
}

func (r *reminded) RefreshHolders(units ...string) { r.units, r.times = units, r.times+1 }

// TestRefreshHolders checks that holders are refreshed for units that a GPU waits for and whose pod the kubelet
// does not name, and for no others.
func TestRefreshHolders(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100+all-1g.10gb")
	parts := w.migState().Instances
	gone, runs := parts[1].Computes[0].UUID, parts[2].Computes[0].UUID
	r := w.program()
	side := &reminded{world: w}
	r.Devices = side
	r.Holders = func(context.Context) ([]sharing.Allocation, error) {
		return []sharing.Allocation{{Pod: "uid:1", Devices: []string{gone}}, {Namespace: "default", Pod: "pod", Devices: []string{runs}}}, nil
	}
	wanted := layoutNamed("all-3g.40gb")
	wanted.WhenBusy = sharing.RefuseWhenBusy
	w.run(r, wanted, false, 2)
	if !slices.Equal(side.units, []string{gone}) {
		t.Errorf("reminded of %v, want %s", side.units, gone)
	}
	// A refresh wakes the program; that must not refresh again.
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		t.Fatal(err)
	}
	before := side.times
	for range 10 {
		r.reconcileAndWait(t.Context(), gpus, wanted, false)
	}
	if now := side.times; now > before+1 {
		t.Errorf("reminded %d times in a moment", now-before)
	}
}

// closed is a driver that is closed because some GPU is released.
type closed struct{ Partitioner }

func (closed) State(context.Context, string) (sharing.MIGState, error) {
	return sharing.MIGState{}, fmt.Errorf("read MIG: %w", sharing.ErrReleased)
}

// TestDriverClosed checks that nothing counts as failed, and no time is lost, while the driver is closed for
// another GPU's release.
func TestDriverClosed(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "h100"), layoutNamed("all-balanced")
	r := w.program()
	w.reconcileAll(r, wanted, 20)
	before := w.state(r)
	if before.State != nodereport.LayoutApplied {
		t.Fatalf("%+v", before)
	}
	open := r.Partitioner
	r.Partitioner = closed{open}
	w.clock = w.clock.Add(time.Hour)
	w.reconcileAll(r, layoutNamed("all-1g.10gb"), 3)
	if got := w.state(r); got.State == nodereport.LayoutFailed {
		t.Errorf("while it is closed: %+v", got)
	}
	r.Partitioner = open
	w.reconcileAll(r, layoutNamed("all-1g.10gb"), 20)
	if got := w.state(r); got.State != nodereport.LayoutApplied {
		t.Errorf("when it is open again: %+v", got)
	}
}
