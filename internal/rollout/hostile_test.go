package rollout

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodestatus"
)

// foreignRecords are records that a node may write about a rollout to itself, its own or an unknown one.
func foreignRecords(id string) []string {
	records := []string{"", "{", "[]", "null", `"x"`, strings.Repeat("x", 100_000)}
	for _, state := range append(NodeStates(), "elsewhere", "") {
		records = append(records, fmt.Sprintf(`{"id":%q,"rollout":%q,"label":"pool","to":"evil","mig":true,"by":"eve","started":"2020-01-01T00:00:00Z",`+
			`"selector":"","max":100,"timeout":1,"domain":"evil.example","allowUnhealthy":true,"from":"evil","wave":0,"place":%q,"set":true,`+
			`"since":"2999-01-01T00:00:00Z","reason":"because\nn01: of that","before":{"unhealthy":-1000},"unhealthy":-1000,"trusted":true}`, id, id, state))
	}
	return records
}

// TestForeignRecords checks that an annotation in another format is ignored, and that a reason becomes one line.
func TestForeignRecords(t *testing.T) {
	known := 0
	for _, record := range foreignRecords("r") {
		var n corev1.Node
		n.Annotations = map[string]string{RecordAnnotation: record}
		p := progressOf(&n)
		if p == nil {
			continue
		}
		known++
		if !slices.Contains(NodeStates(), p.State) || p.Reason != "because n01: of that" {
			t.Errorf("%.200s: %+v", record, *p)
		}
	}
	if known != len(NodeStates()) {
		t.Errorf("%d are of the form, want %d", known, len(NodeStates()))
	}
}

// TestNodeOutside checks that a node outside a rollout cannot change it, whatever it writes to itself, and does not
// become part of it.
func TestNodeOutside(t *testing.T) {
	t.Parallel()
	for _, phase := range []Phase{Running, Paused, Stopped, Finished, TakingBack, TakenBack} {
		t.Run(string(phase), func(t *testing.T) {
			t.Parallel()
			a := startAPI(t, names(6)...)
			a.edit("n00", func(n *corev1.Node) { n.Labels["pool"] = "b" }) // The first one that is read.
			c, s := a.client("alice"), spec
			s.PauseAfter = 1
			r := start(t, c, s)
			for _, record := range foreignRecords(r.ID) {
				a.edit("n00", func(n *corev1.Node) {
					n.Annotations[RecordAnnotation] = record
					n.Annotations["virgate.github.io/rollout-head"] = fmt.Sprintf(`{"rollout":%q,"phase":%q,"holder":"","ignoreUnhealthy":true}`, r.ID, phase)
					n.Labels[nodestatus.StateLabel] = "rejected"
				})
				if seen := find(t, c, r.ID); len(seen.Nodes) != 5 || seen.To != "new" || seen.Label != ProfileLabel || seen.Max != 2 || seen.Phase != Running || seen.Holder != "alice" {
					t.Fatalf("%s: %d nodes, %+v, %+v", record[:min(len(record), 80)], len(seen.Nodes), seen.Params, seen.State)
				}
			}
			r, err := c.Drive(t.Context(), r.ID, Resume{})
			if err != nil || r.Phase != Paused || r.Count(Done) != 2 || r.Count(Waiting) != 3 {
				t.Fatalf("%v: %+v", err, r.State)
			}
			if r, err = c.Drive(t.Context(), r.ID, Resume{}); err != nil || r.Phase != Finished || r.Count(Done) != 5 {
				t.Fatalf("%v: %+v", err, r.State)
			}
			expect(t, a, "new", "n01", "n02", "n03", "n04", "n05")
			if r, err = c.Undo(t.Context(), r.ID, false); err != nil || r.Phase != TakenBack || r.Count(Undone) != 5 {
				t.Fatalf("%v: %+v", err, r.State)
			}
			expect(t, a, "old", names(6)...)
			if err := c.Forget(t.Context(), r.ID, false); err != nil {
				t.Error(err)
			}
			if list, err := c.List(t.Context()); err != nil || len(list) != 0 {
				t.Errorf("%v, %d rollouts", err, len(list))
			}
			if n := a.node("n00"); n.Labels["pool"] != "b" {
				t.Errorf("%v", n.Labels)
			}
		})
	}
}

// TestNodeInventsRollout checks that nodes cannot make or prevent a rollout by anything they write.
func TestNodeInventsRollout(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(3)...)
	c := a.client("alice")
	for i, record := range foreignRecords("r1") {
		a.edit(names(3)[i%3], func(n *corev1.Node) {
			n.Annotations[RecordAnnotation] = record
			n.Annotations["virgate.github.io/rollout-head"] = `{"rollout":"r1","phase":"running","holder":"eve"}`
		})
		if list, err := c.List(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("%v, %d rollouts", err, len(list))
		}
		if _, err := c.Undo(t.Context(), "r1", true); err == nil || errors.Is(err, errHeld) {
			t.Errorf("undo of a rollout that is none: %v", err)
		}
	}
	r, err := c.Drive(t.Context(), start(t, c, spec).ID, Resume{})
	if err != nil || r.Phase != Finished {
		t.Fatalf("%v: %+v", err, r)
	}
	expect(t, a, "new", names(3)...)
}

// hostile plays rollouts in which n01, a node in the middle, overwrites itself at each moment, whatever the
// driver writes there. It fails if another node gets a wrong label, or gets one at the wrong time.
type hostile struct {
	t     testing.TB
	name  string
	write func(n *corev1.Node, now time.Time)
	now   time.Time
	nodes map[string]corev1.Node
	plan  plan
	// sets is how many labels the honest nodes got.
	sets int
}

func newHostile(t testing.TB, name string, write func(n *corev1.Node, now time.Time)) *hostile {
	h := &hostile{
		t:     t,
		name:  name,
		write: write,
		now:   time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		nodes: startNodes(names(6)...),
	}
	h.plan = plan{
		Params: Params{
			ID:      "r",
			Label:   ProfileLabel,
			To:      "new",
			By:      "alice",
			Max:     2,
			Timeout: 600,
			Domain:  "nvidia.com",
		},
		State: State{Phase: Running, PauseAt: 1},
	}
	old := "old"
	for _, name := range names(5) { // n05 is no part of it.
		h.plan.members = append(h.plan.members, member{name, &old})
	}
	return h
}

// is is the driver's view of the rollout.
func (h *hostile) is() *Rollout {
	evil := h.nodes["n01"]
	evil = *evil.DeepCopy()
	h.write(&evil, h.now)
	h.nodes["n01"] = evil
	nodes := map[string]Node{}
	for name, n := range h.nodes {
		nodes[name] = nodeOf(&n, h.plan.Domain)
	}
	return h.plan.join(nodes)
}

// step is a driver's step. Honest nodes follow at once.
func (h *hostile) step(undoNow bool) {
	r := h.is()
	before := fmt.Sprintf("%+v %+v", r.Params, h.plan)
	writes, phase, reason := Next(r, h.now, undoNow)
	if after := fmt.Sprintf("%+v %+v", r.Params, h.plan); before != after {
		h.t.Fatalf("%s: %s became %s", h.name, before, after)
	}
	for _, w := range writes {
		n := h.nodes[w.Node.Name]
		if !h.plan.has(w.Node.Name) {
			h.t.Fatalf("%s: %s is written, which is no part of it", h.name, w.Node.Name)
		}
		if w.SetLabel && (w.Record.Label != ProfileLabel || w.Label == nil || *w.Label != "old" && *w.Label != "new") {
			h.t.Fatalf("%s: %s gets the label %s=%s", h.name, w.Node.Name, w.Record.Label, value(w.Label))
		}
		n = *n.DeepCopy()
		if w.SetLabel {
			n.Labels[ProfileLabel] = *w.Label
		}
		if n.Name != "n01" {
			h.honest(r, w, &n)
		}
		n.Annotations[RecordAnnotation] = encode(w.Record.Progress)
		h.nodes[n.Name] = n
	}
	if len(reason) > 5*700 || strings.Count(reason, "\n") > 5 {
		h.t.Fatalf("%s: a reason of %d bytes, %d lines", h.name, len(reason), strings.Count(reason, "\n"))
	}
	if len(writes) == 0 {
		h.plan.Phase, h.plan.Reason = phase, reason
	}
	h.now = h.now.Add(10 * time.Second)
}

// honest checks a write to an honest node, and has it follow.
func (h *hostile) honest(r *Rollout, w Write, n *corev1.Node) {
	if !w.SetLabel {
		if slices.Contains([]NodeState{Failed, Skipped, Left}, w.Record.State) {
			h.t.Fatalf("%s: %s is %s: %s", h.name, n.Name, w.Record.State, w.Record.Reason)
		}
		return
	}
	h.sets++
	want, underWay := "new", 1
	if r.Phase == TakingBack {
		want = "old"
	}
	for _, other := range r.Nodes {
		if other.Name != "n01" && other.Name != n.Name && (other.Record.State == Pending || other.Record.State == Undoing) {
			underWay++
		}
	}
	switch {
	case *w.Label != want:
		h.t.Fatalf("%s: %s gets %s while it is %s", h.name, n.Name, *w.Label, r.Phase)
	case r.Phase != Running && r.Phase != TakingBack:
		h.t.Fatalf("%s: %s gets a label while it is %s", h.name, n.Name, r.Phase)
	case r.Phase == Running && underWay > r.Max:
		h.t.Fatalf("%s: %d honest nodes under way, at most %d may be", h.name, underWay, r.Max)
	case r.Phase == Running && r.PauseAt > 0 && slices.Index(names(5), n.Name)/r.Max >= r.PauseAt:
		h.t.Fatalf("%s: %s gets a label, a pause is asked for after wave %d", h.name, n.Name, r.PauseAt)
	}
	obey(n, ProfileLabel)
}

// play runs to the pause, to the end, and back, each for at most half an hour, and then undoes at once.
func (h *hostile) play() {
	const steps = 180
	run := func(now bool) {
		for range steps {
			if h.plan.Phase != Running && h.plan.Phase != TakingBack {
				return
			}
			h.step(now)
		}
	}
	run(false)
	if h.plan.Phase == Stopped {
		sets := h.sets
		run(false)
		if h.sets != sets {
			h.t.Fatalf("%s: it goes on when it has stopped", h.name)
		}
	}
	if h.plan.Phase == Finished {
		h.t.Fatalf("%s: it is finished, and was to pause", h.name)
	}
	h.plan.Phase, h.plan.PauseAt = Running, 0
	run(false)
	if n := h.nodes["n05"]; n.Labels[ProfileLabel] != "old" || n.Annotations[RecordAnnotation] != "" {
		h.t.Fatalf("%s: n05 is no part of it and has %v, %v", h.name, n.Labels, n.Annotations)
	}
	h.plan.Phase = TakingBack
	run(false)
	h.plan.Phase = TakingBack
	run(true) // No node can delay an undo at once.
	for name, n := range h.nodes {
		if name != "n01" && n.Labels[ProfileLabel] != "old" {
			h.t.Fatalf("%s: %s has %s after the undo", h.name, name, n.Labels[ProfileLabel])
		}
	}
}

// TestNodeInside checks that a node that is part of a rollout can stop it by its reports, but cannot change another
// node, have more under way, or have the rollout go on after a stop or past a pause. An undo at once reaches all
// others.
func TestNodeInside(t *testing.T) {
	t.Parallel()
	writes := map[string]func(n *corev1.Node, now time.Time){
		"nothing": func(*corev1.Node, time.Time) {},
		"its label": func(n *corev1.Node, _ time.Time) {
			n.Labels[ProfileLabel] = "evil"
		},
		"no label": func(n *corev1.Node, _ time.Time) {
			delete(n.Labels, ProfileLabel)
		},
		"rejected": func(n *corev1.Node, _ time.Time) {
			refuse(n, ProfileLabel)
		},
		"a profile with a long name of many lines": func(n *corev1.Node, _ time.Time) {
			refuse(n, ProfileLabel)
			n.Annotations[nodestatus.ProfileAnnotation] = strings.Repeat("n02: it fails\n", 10_000)
		},
		"not ready": func(n *corev1.Node, _ time.Time) {
			n.Status.Conditions[0].Status, n.Status.Conditions[0].Reason = corev1.ConditionFalse, strings.Repeat("because\n", 10_000)
		},
		"a condition that is False": func(n *corev1.Node, _ time.Time) {
			n.Status.Conditions[1].Status, n.Status.Conditions[1].Message = corev1.ConditionFalse, strings.Repeat("n02: it fails\n", 10_000)
		},
		"no condition": func(n *corev1.Node, _ time.Time) {
			n.Status.Conditions = nil
		},
		"fewer devices each time": func(n *corev1.Node, now time.Time) {
			n.Status.Allocatable = quantities(8 - now.Unix()%8)
		},
		"more devices than there are": func(n *corev1.Node, _ time.Time) {
			n.Status.Capacity = quantities(1<<63 - 1)
		},
		"another rollout's progress": func(n *corev1.Node, _ time.Time) {
			n.Annotations[RecordAnnotation] = `{"rollout":"s","place":"done","set":true}`
		},
	}
	for i, record := range foreignRecords("r") {
		writes[fmt.Sprintf("record %d: %.80s", i, record)] = func(n *corev1.Node, _ time.Time) {
			n.Annotations[RecordAnnotation] = record
		}
	}
	for _, state := range NodeStates() {
		writes["it is just now "+string(state)] = func(n *corev1.Node, now time.Time) {
			n.Annotations[RecordAnnotation] = encode(Progress{Rollout: "r", State: state, Set: true, Since: now})
		}
	}
	for name, write := range writes {
		t.Run(name, func(t *testing.T) { newHostile(t, name, write).play() })
	}
}

// FuzzHostileNode has a node alternate between two arbitrary contents.
func FuzzHostileNode(f *testing.F) {
	for _, record := range foreignRecords("r") {
		f.Add(record, `{"rollout":"r","place":"done","set":true}`, "rejected", "theirs", "new", "False", int64(4))
	}
	f.Fuzz(func(t *testing.T, record, other, state, label, profile, condition string, devices int64) {
		odd := false
		newHostile(t, "fuzz", func(n *corev1.Node, _ time.Time) {
			odd = !odd
			n.Annotations[RecordAnnotation] = record
			n.Labels[nodestatus.StateLabel] = state
			if odd {
				n.Annotations[RecordAnnotation] = other
				n.Labels[ProfileLabel] = label
				n.Annotations[nodestatus.ProfileAnnotation] = profile
				n.Status.Conditions[1].Status = corev1.ConditionStatus(condition)
				n.Status.Allocatable = quantities(devices)
			}
		}).play()
	})
}
