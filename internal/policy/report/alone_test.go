package report

import (
	"fmt"
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
)

func TestAlone(t *testing.T) {
	changed := func(change func(*sharing.NodeReport)) sharing.NodeReport {
		r := applied("g1")
		change(&r)
		return r
	}
	pending := changed(func(r *sharing.NodeReport) {
		r.State, r.Wanted, r.Reason = sharing.ProfilePending, ref("g2"), "ProfilePending"
	})
	deaf := pending
	deaf.Ready, deaf.Reason = sharing.ConditionFalse, "NotRegistered"
	board := func(wanted string, state sharing.LayoutState) sharing.NodeReport {
		return changed(func(r *sharing.NodeReport) {
			r.Layouts = []sharing.BoardLayout{{GPU: "GPU-a", Wanted: wanted, State: state}}
		})
	}
	tests := []struct {
		name       string
		last, next sharing.NodeReport
		want       bool
	}{
		{"the first profile", sharing.NodeReport{State: sharing.ProfilePending}, applied("g1"), true},
		{"a profile on its way", applied("g1"), pending, false},
		{"applied", pending, applied("g2"), false},
		{"applied at once", applied("g1"), applied("g2"), false},
		{"refused", applied("g1"), changed(func(r *sharing.NodeReport) { r.State, r.Problem = sharing.ProfileRejected, "bad" }), false},
		{"another name is registered", pending, deaf, false},
		{"and has been", deaf, applied("g2"), false},
		{"another name", applied("g1"), changed(func(r *sharing.NodeReport) { r.State, r.Wanted.Name = sharing.ProfilePending, "b" }), true},
		{"a layout", board("all-1g.5gb", sharing.LayoutApplied), board("all-2g.10gb", sharing.LayoutPending), false},
		{"a board that is cut", board("all-2g.10gb", sharing.LayoutPending), board("all-2g.10gb", sharing.LayoutApplied), true},
		{"a board more", applied("g1"), board("all-2g.10gb", sharing.LayoutPending), false},
		{"the kubelet is away", applied("g1"), changed(func(r *sharing.NodeReport) { r.Ready = sharing.ConditionFalse }), true},
		{"a unit", applied("g1"), changed(func(r *sharing.NodeReport) { r.Units = []sharing.UnitHealth{{Unit: "GPU-a"}} }), true},
		{"a unit while a profile comes", applied("g1"), changed(func(r *sharing.NodeReport) {
			r.State, r.Units = sharing.ProfilePending, []sharing.UnitHealth{{Unit: "GPU-a"}}
		}), true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := alone(test.last, test.next); got != test.want {
				t.Errorf("%t, want %t", got, test.want)
			}
		})
	}
}

// TestManyNodesWriteApart: what all nodes have to tell waits for a while, and
// ends waiting when something comes that is this node's alone, or when the Node
// is another one.
func TestManyNodesWriteApart(t *testing.T) {
	patient, hasty := newFakeAPI(t), newFakeAPI(t)
	timing := fast()
	other := start(t, everything(hasty), timing)
	timing.spread = 24 * time.Hour
	r := start(t, everything(patient), timing)
	says := func(f *fakeAPI, generation string) func() bool {
		return func() bool { return f.node.Annotations[GenerationAnnotation] == generation }
	}
	r.Report(applied("g1"))
	patient.await("the start", says(patient, "g1"))
	r.Report(applied("g2"))
	next := applied("g3")
	r.Report(next)
	for i := range 10 {
		last := fmt.Sprint("g", i)
		other.Report(applied(last))
		hasty.await("a node that does not wait", says(hasty, last))
	}
	patient.change(func() {
		if !says(patient, "g1")() {
			t.Error("it did not wait")
		}
	})
	next.Units = []sharing.UnitHealth{{Unit: "GPU-a", GPU: "GPU-a", State: sharing.Unhealthy, Reason: "XID 79"}}
	r.Report(next)
	patient.await("the unit's health, and the profile", says(patient, "g3"))
	for i := range 10 { // The task may take either signal first.
		last := applied(fmt.Sprint("h", i))
		last.Units = next.Units
		r.Report(last)
		<-time.After(2 * time.Millisecond)
		r.NodeReplaced()
		patient.await("the other Node", says(patient, last.Applied.Generation))
	}
	// A day is not over by chance.
	if wait := part(timing.spread); wait < 0 || wait > timing.spread || wait == part(timing.spread) {
		t.Errorf("waits %s", wait)
	}
}
