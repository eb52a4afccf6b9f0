package rollout

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/internal/cluster"
)

// behaviour is a model node's reaction to another label.
type behaviour int

const (
	follows behaviour = iota
	refusesNew
	silent
	breaks    // It follows, and then a GPU fails.
	loses     // It follows, and then the kubelet does not use its resources.
	relabeled // Its label is changed by someone else after a while.
	deleted
	dark // It is not ready for a while.
)

// modelNode is a Node in the API server, with the node's real state.
type modelNode struct {
	Node
	behaviour behaviour
	version   int
	began     *string // The label before the rollout.
	// sees is when the node will see its current label; seen is the label it saw last.
	sees time.Time
	seen string
	// force is the profile really in force; rejects: it rejects the label it saw.
	force   string
	rejects bool
	// metadata and condition are when the node will next report its real state in them.
	metadata, condition time.Time
	trouble             time.Time
	foreign             bool
}

type model struct {
	t      *testing.T
	seed   uint64
	random *rand.Rand
	now    time.Time
	nodes  map[string]*modelNode
	head   State
	params Params
	labels int // How many were set.
}

const fallback = "default"

// failf ends the test, as anything after a model's first mistake means nothing.
func (m *model) failf(format string, arguments ...any) {
	m.t.Helper()
	m.t.Fatalf("seed %d: %s", m.seed, fmt.Sprintf(format, arguments...))
}

func (m *model) soon(most time.Duration) time.Time {
	return m.now.Add(time.Duration(m.random.Int64N(int64(most))))
}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{t: t, seed: seed, random: rand.New(rand.NewPCG(seed, 1)), now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), nodes: map[string]*modelNode{}}
	count := 1 + m.random.IntN(12)
	m.params = Params{ID: "r", Label: ProfileLabel, To: "new", Max: 1 + m.random.IntN(4), Timeout: 120, Domain: "nvidia.com"}
	m.head = State{Phase: Running, PauseAt: m.random.IntN(3)}
	for i := range count {
		n := &modelNode{Node: Node{Node: cluster.Node{Name: fmt.Sprintf("n%02d", i)}, Labels: map[string]string{}}}
		if m.random.IntN(2) == 0 {
			n.behaviour = behaviour(m.random.IntN(int(dark) + 1))
		}
		from := []string{"", "old", "bad", "new"}[m.random.IntN(4)]
		if from != "" {
			n.Labels[ProfileLabel] = from
			n.began = &from
		}
		n.seen, n.force, n.rejects = from, from, from == "bad"
		if from == "" || n.rejects {
			n.force = []string{fallback, "new"}[m.random.IntN(2)] // The profile in force before the bad one.
			if from == "" {
				n.force = fallback
			}
		}
		if m.random.IntN(4) == 0 { // Its label has just been changed, and it has not seen that.
			n.seen, n.sees = "old", m.soon(2*time.Second)
			n.force, n.rejects = []string{"old", "new"}[m.random.IntN(2)], false
		}
		n.Capacity, n.Allocatable = map[string]int64{"nvidia.com/gpu": 8}, map[string]int64{"nvidia.com/gpu": 8}
		m.writeMetadata(n)
		m.writeCondition(n)
		n.Record = &Record{
			Params:   m.params,
			From:     n.label(ProfileLabel),
			Wave:     i / m.params.Max,
			Progress: Progress{Rollout: m.params.ID, State: Waiting},
		}
		m.nodes[n.Name] = n
	}
	return m
}

func (m *model) writeMetadata(n *modelNode) {
	n.State, n.Applied, n.Generation, n.metadata = "applied", n.force, "g-"+n.force, time.Time{}
	if n.rejects {
		n.State = "rejected"
	}
	n.version++
}

func (m *model) writeCondition(n *modelNode) {
	status, message := corev1.ConditionTrue, "serving "+n.force
	if n.rejects {
		message = "the wanted profile is refused: " + n.seen
	}
	if n.behaviour == loses && !n.trouble.IsZero() && !m.now.Before(n.trouble) {
		status, message = corev1.ConditionFalse, "nobody listens"
	}
	if n.Condition.Status != status || n.Condition.Message != message {
		n.Condition = corev1.NodeCondition{Type: "GPUSharingReady", Status: status, Message: message, LastHeartbeatTime: metav1.Time{Time: m.now.Truncate(time.Second)}}
		n.version++
	}
	n.condition = time.Time{}
}

// pass lets time pass: nodes see labels, switch, and report with a delay.
func (m *model) pass(long time.Duration) {
	for end := m.now.Add(long); m.now.Before(end); m.now = m.now.Add(200 * time.Millisecond) {
		for _, name := range slices.Sorted(maps.Keys(m.nodes)) {
			n := m.nodes[name]
			due := func(at time.Time) bool { return !at.IsZero() && !m.now.Before(at) }
			if due(n.sees) {
				n.sees, n.seen = time.Time{}, n.Labels[ProfileLabel]
				n.rejects = n.seen == "bad" || n.behaviour == refusesNew && n.seen == "new"
				if n.behaviour != silent {
					if !n.rejects {
						n.force = n.seen
						if n.seen == "" {
							n.force = fallback
						}
					}
					n.metadata, n.condition = m.soon(2*time.Second), m.soon(2*time.Second)
					if n.behaviour == breaks || n.behaviour == loses {
						n.trouble = m.soon(3 * time.Minute)
					}
				}
			}
			if due(n.metadata) {
				m.writeMetadata(n)
			}
			if due(n.trouble) && n.behaviour == breaks && n.Allocatable["nvidia.com/gpu"] == 8 {
				n.Allocatable = map[string]int64{"nvidia.com/gpu": 4}
				n.version++
			}
			if due(n.condition) || due(n.trouble) && n.behaviour == loses {
				m.writeCondition(n)
			}
			chance := m.random.IntN(1000) == 0
			switch {
			case chance && n.behaviour == deleted:
				delete(m.nodes, name)
			case chance && n.behaviour == relabeled && !n.foreign:
				n.Labels = map[string]string{ProfileLabel: "foreign"}
				n.foreign, n.sees = true, m.soon(2*time.Second)
				n.version++
			case chance && n.behaviour == dark:
				n.NotReady = map[string]string{"": "the node is not ready: gone dark"}[n.NotReady]
				n.version++
			}
		}
	}
}

func (m *model) rollout() *Rollout {
	var nodes []Node
	for _, n := range m.nodes {
		shown := n.Node
		record := *n.Record
		shown.Record, shown.Version = &record, fmt.Sprint(n.version)
		nodes = append(nodes, shown)
	}
	slices.SortFunc(nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return &Rollout{Params: m.params, State: m.head, Nodes: nodes}
}

func (m *model) underWay() (count int) {
	for _, n := range m.nodes {
		if n.Record.State == Pending || n.Record.State == Undoing {
			count++
		}
	}
	return count
}

// step is a driver's step. The driver may be killed at a write, or see old Nodes.
func (m *model) step(atOnce bool) {
	view := m.rollout()
	if m.random.IntN(5) == 0 {
		m.pass(time.Second) // The view is old.
	}
	writes, phase, reason := Next(view, m.now, atOnce)
	killed := -1
	if m.random.IntN(4) == 0 {
		killed = m.random.IntN(len(writes) + 1)
	}
	for i, w := range writes {
		if i == killed {
			return
		}
		n := m.nodes[w.Node.Name]
		if n == nil || fmt.Sprint(n.version) != w.Node.Version {
			continue // The API server refuses it.
		}
		m.check(n, w)
		n.version++
		record := w.Record
		n.Record = &record
		if w.SetLabel {
			m.labels++
			n.Labels = maps.Clone(n.Labels)
			delete(n.Labels, ProfileLabel)
			if w.Label != nil {
				n.Labels[ProfileLabel] = *w.Label
			}
			n.sees = m.soon(2 * time.Second)
			if (m.head.Phase == Running || w.Record.State == Undoing && w.Node.Record.State == Done) && m.underWay() > m.params.Max {
				m.failf("%d nodes under way, at most %d may be", m.underWay(), m.params.Max)
			}
		}
	}
	if killed < 0 && len(writes) == 0 {
		m.head.Phase, m.head.Reason = phase, reason
	}
}

// check fails the test if a write is not allowed.
func (m *model) check(n *modelNode, w Write) {
	is := n.label(ProfileLabel)
	if w.SetLabel && n.foreign && is != nil && *is == "foreign" {
		m.failf("%s: somebody else's label is overwritten", n.Name)
	}
	if m.head.Phase != Running {
		return
	}
	for _, other := range m.nodes {
		if w.SetLabel && other.Record.State == Failed {
			m.failf("%s gets a label while %s has failed: %s", n.Name, other.Name, other.Record.Reason)
		}
	}
	if w.SetLabel && m.head.PauseAt > 0 && w.Record.Wave >= m.head.PauseAt {
		m.failf("%s of wave %d gets a label, a pause is asked for at %d", n.Name, w.Record.Wave, m.head.PauseAt)
	}
	if w.Record.State == Done && n.Record.State == Pending && n.force != "new" {
		m.failf("%s is taken for done, has %s and has seen %q: %+v", n.Name, n.force, n.seen, w.Record)
	}
	if w.Record.State == Failed && strings.Contains(w.Record.Reason, "refuses") && (!n.rejects || n.seen != "new") {
		m.failf("%s is taken for refusing and has %s: %s", n.Name, n.force, w.Record.Reason)
	}
}

// TestModel checks that whatever nodes do, and wherever a driver is killed, at most Max nodes are under way,
// reports from before the label was set are ignored, and no node gets a label once one has failed. An undo restores
// every label that the rollout has set.
func TestModel(t *testing.T) {
	ends := map[Phase]int{}
	for seed := range uint64(1000) {
		m := newModel(t, seed)
		undoAt := m.random.IntN(400)
		for i := 0; i < undoAt && !m.head.Phase.Ended(); i++ {
			m.pass(time.Duration(m.random.IntN(10)) * time.Second)
			before := m.labels
			stopped := m.head.Phase != Running
			m.step(false)
			if stopped && m.labels > before {
				m.failf("a label is set although it is %s", m.head.Phase)
			}
			if m.head.Phase == Paused {
				m.head.Phase, m.head.PauseAt = Running, 0
			}
			if m.head.Phase == Stopped && m.random.IntN(3) == 0 {
				break
			}
		}
		ends[m.head.Phase]++
		if m.head.Phase == Finished {
			for _, n := range m.nodes {
				if n.Record.State != Done && n.Record.State != Skipped {
					m.failf("finished, and %s is %s", n.Name, n.Record.State)
				}
			}
		}
		m.head.Phase = TakingBack
		for i := 0; m.head.Phase == TakingBack; i++ {
			m.pass(time.Duration(m.random.IntN(10)) * time.Second)
			m.step(seed%3 == 0)
			if i > 5000 {
				m.failf("the undo does not end")
			}
		}
		for _, n := range m.nodes {
			is := n.label(ProfileLabel)
			if foreign := is != nil && *is == "foreign"; !same(is, n.began) && !foreign {
				m.failf("%s has the label %s after the undo and had %s: %+v", n.Name, value(is), value(n.began), *n.Record)
			}
		}
	}
	t.Log(ends)
	if ends[Finished] < 50 || ends[Stopped] < 50 || ends[Running] < 10 {
		t.Errorf("the model does not reach everything: %v", ends)
	}
}

// TestJudge checks a node's next state for each report.
func TestJudge(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	old, to := "old", "new"
	ready := corev1.NodeCondition{Type: "GPUSharingReady", Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Time{Time: now}}
	earlier, no := ready, ready
	earlier.LastHeartbeatTime = metav1.Time{Time: now.Add(-time.Hour)}
	no.Status, no.Reason, no.Message = corev1.ConditionFalse, "NotRegistered", "nobody listens"
	unknown := ready
	unknown.Status, unknown.Reason = corev1.ConditionUnknown, "Stopped"
	before := Reported{State: "applied", Profile: "old", Generation: "g1", Layout: "success", Heartbeat: earlier.LastHeartbeatTime.UTC().Format(time.RFC3339)}
	node := func(state, applied string, condition corev1.NodeCondition, unhealthy int64) Node {
		return Node{Labels: map[string]string{ProfileLabel: "new", LayoutLabel: "new"}, Node: cluster.Node{
			Name: "n", State: state, Applied: applied, Generation: "g1", LayoutState: "success", Condition: condition,
			Capacity: map[string]int64{"nvidia.com/gpu": 8}, Allocatable: map[string]int64{"nvidia.com/gpu": 8 - unhealthy},
		}}
	}
	change := func(n Node, change func(n *Node)) Node { change(&n); return n }
	record := func(state NodeState, took time.Duration, change ...func(*Record)) Record {
		r := Record{
			Params:   Params{Label: ProfileLabel, To: to, Timeout: 600},
			From:     &old,
			Progress: Progress{State: state, Set: state != Waiting, Since: now.Add(-took), Before: before},
		}
		for _, c := range change {
			c(&r)
		}
		return r
	}
	layout := func(r *Record) { r.MIG, r.Label = true, LayoutLabel }
	had := func(r *Record) { r.From = &to }
	saidNew := func(r *Record) { r.Before.Profile = "new" }
	since := func(ago time.Duration) func(r *Record) { return func(r *Record) { r.Applied = now.Add(-ago) } }
	for _, test := range []struct {
		name   string
		record Record
		node   Node
		want   NodeState
		doubt  bool
		reason string
	}{
		{"nothing yet", record(Pending, time.Second), node("applied", "old", earlier, 0), Pending, false, ""},
		{"applied, news", record(Pending, time.Second), node("applied", "new", ready, 0), Done, false, ""},
		{"applied, the condition is not written yet", record(Pending, time.Second), node("applied", "new", earlier, 0), Pending, false, ""},
		{"applied, the condition says the same", record(Pending, settle), node("applied", "new", earlier, 0), Done, false, ""},
		{"applied as before", record(Pending, time.Second, saidNew), node("applied", "new", ready, 0), Pending, false, ""},
		{"applied as before, for a while", record(Pending, settle, saidNew), node("applied", "new", ready, 0), Done, false, ""},
		{"it had that label", record(Pending, 0, had, saidNew), node("applied", "new", earlier, 0), Done, false, ""},
		{"switching", record(Pending, time.Minute), node("switching", "new", ready, 0), Pending, false, ""},
		{"without a condition", record(Pending, settle), node("applied", "new", corev1.NodeCondition{}, 0), Done, false, ""},
		{"applied, and not serving", record(Pending, time.Minute), node("applied", "new", no, 0), Pending, false, ""},
		{"applied, and not ready", record(Pending, time.Minute), change(node("applied", "new", ready, 0), func(n *Node) { n.NotReady = "away" }), Pending, false, ""},
		{"too long", record(Pending, 10*time.Minute), node("switching", "old", ready, 0), Failed, false, "not done within 10m0s: it says switching, with profile old in force"},
		{"rejected at once", record(Pending, time.Second), node("rejected", "old", ready, 0), Pending, true, ""},
		{"rejected", record(Pending, settle), node("rejected", "old", ready, 0), Failed, false, "the node refuses the profile: it says rejected"},
		{"rejected as before", record(Pending, settle, func(r *Record) { r.Before.State = "rejected" }), node("rejected", "old", earlier, 0), Pending, true, ""},
		{"rejected as before, for a while", record(Pending, unchanged, func(r *Record) { r.Before.State = "rejected" }), node("rejected", "old", earlier, 0), Failed, false, "the node says the same as before"},
		{"devices on their way out", record(Pending, time.Second), node("applied", "new", ready, 4), Pending, false, ""},
		{"devices out for long", record(Pending, time.Minute, since(leaving)), node("applied", "new", ready, 4), Failed, false, "a new fault: 4 devices cannot be given out, 0 before"},
		{"devices out for long, which does not matter", record(Pending, time.Second, func(r *Record) { r.AllowUnhealthy = true }), node("applied", "new", ready, 4), Done, false, ""},
		{"as many out as before", record(Pending, time.Second, func(r *Record) { r.Before.Unhealthy = 4 }), node("applied", "new", ready, 4), Done, false, ""},
		{"another label", record(Pending, time.Second), change(node("applied", "new", ready, 0), func(n *Node) { n.Labels = map[string]string{ProfileLabel: "x"} }), Failed, false, `it is "x" and was "new"`},
		{"its turn is to come", record(Waiting, 0), change(node("applied", "old", ready, 0), func(n *Node) { n.Labels = map[string]string{ProfileLabel: "old"} }), Waiting, false, ""},
		{"another label before its turn", record(Waiting, 0), change(node("applied", "old", ready, 0), func(n *Node) { n.Labels = nil }), Failed, false, `it is not there and was "old"`},
		{"done", record(Done, time.Hour), node("applied", "new", earlier, 0), Done, false, ""},
		{"done, rejected later", record(Done, time.Hour), node("rejected", "new", ready, 0), Failed, false, "refuses the profile"},
		{"done, not serving", record(Done, time.Hour), node("applied", "new", no, 0), Failed, false, "a new fault: NotRegistered: nobody listens"},
		{"done, a GPU fails", record(Done, time.Hour), node("applied", "new", ready, 4), Failed, false, "a new fault: 4 devices"},
		{"done, a GPU fails that had failed", record(Done, time.Hour, func(r *Record) { r.Unhealthy = 4 }), node("applied", "new", ready, 4), Done, false, ""},
		{"done, its plugin ends", record(Done, time.Hour), node("applied", "new", unknown, 0), Pending, false, "was done"},
		{"done, switching again", record(Done, time.Hour), node("switching", "new", ready, 0), Pending, false, "was done"},
		{"done, another label", record(Done, time.Hour), change(node("applied", "new", ready, 0), func(n *Node) { n.Labels = nil }), Failed, false, "it is not there"},
		{"the layout of before", record(Pending, 9*time.Minute, layout), node("applied", "old", ready, 0), Pending, false, ""},
		{"another layout, by its generation", record(Pending, time.Second, layout), change(node("applied", "old", ready, 0), func(n *Node) { n.Generation = "g2" }), Done, false, ""},
		{"another layout, seen on its way", record(Pending, time.Second, layout, func(r *Record) { r.Before.Layout = "pending" }), node("applied", "old", ready, 0), Done, false, ""},
		{"a layout, and the profile is not applied", record(Pending, time.Second, layout, func(r *Record) { r.Before.Layout = "pending" }), node("pending", "old", ready, 0), Pending, false, ""},
		{"a layout that fails", record(Pending, settle, layout), change(node("applied", "old", ready, 0), func(n *Node) { n.LayoutState = "failed" }), Failed, false, "the node refuses the layout"},
	} {
		t.Run(test.name, func(t *testing.T) {
			next, doubt := test.record.judge(test.node, now)
			if next.State != test.want || doubt != test.doubt || !strings.Contains(next.Reason, test.reason) || test.reason == "" && next.Reason != "" {
				t.Errorf("%s, doubt %t: %q; want %s, %t: %q", next.State, doubt, next.Reason, test.want, test.doubt, test.reason)
			}
		})
	}
	seen, _ := record(Pending, time.Second, layout).judge(change(node("applied", "old", ready, 0), func(n *Node) { n.LayoutState = "pending" }), now)
	if seen.Before.Layout != "pending" {
		t.Error("it is not kept that the layout was on its way")
	}
	better, _ := record(Done, time.Hour, func(r *Record) { r.Unhealthy = 4 }).judge(node("applied", "new", ready, 1), now)
	if better.State != Done || better.Unhealthy != 1 {
		t.Errorf("a GPU that recovers: %s, %d", better.State, better.Unhealthy)
	}
}

func TestParseMax(t *testing.T) {
	for text, want := range map[string]int{"1": 1, "50": 50, "10%": 2, "1%": 1, "100%": 11} {
		if got, err := ParseMax(text, 11); err != nil || got != want {
			t.Errorf("%s of 11: %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "-1", "0%", "101%", "1.5", "%", "1 %", "x"} {
		if got, err := ParseMax(text, 11); err == nil {
			t.Errorf("%q: %d", text, got)
		}
	}
}
