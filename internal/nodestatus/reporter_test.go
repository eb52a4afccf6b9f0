package nodestatus

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// fast is quick enough for tests and slow enough to coalesce.
func fast() timing {
	return timing{
		settle: time.Millisecond, pace: time.Millisecond, retry: wait.Backoff{Duration: 5 * time.Millisecond, Factor: 2, Steps: 3}, withoutNode: 20 * time.Millisecond,
		request: time.Hour, repeat: time.Millisecond, between: time.Millisecond, burst: 25, grace: time.Hour,
	}
}

func everything(f *fakeAPI) Options {
	return Options{Config: f.config(), Node: nodeName, Events: true, Condition: true, Annotations: true, RemoveStale: true}
}

// start runs a reporter for as long as the test.
func start(t *testing.T, options Options, timing timing) *Reporter {
	t.Helper()
	r, err := newReporter(options, timing)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return r
}

func ref(generation string) nodereport.ProfileRef {
	return nodereport.ProfileRef{Name: "a100", Source: "ConfigMap gpu/profiles", Generation: generation}
}

// applied is a healthy node.
func applied(generation string) nodereport.Report {
	return nodereport.Report{
		State: nodereport.ProfileApplied, Wanted: ref(generation), Applied: ref(generation),
		Ready: nodereport.ConditionTrue, Reason: "Serving", Message: "nvidia.com/gpu: 8 devices",
	}
}

// byRule is a healthy node with a profile from that rule.
func byRule(generation string, rule int, list string) nodereport.Report {
	r := applied(generation)
	r.Wanted.By, r.Wanted.Rule, r.Wanted.Rules = fmt.Sprintf("rule %d of ConfigMap gpu/profiles", rule), rule, list
	r.Applied = r.Wanted
	return r
}

// TestNodeSaysWhy writes which rule wants a profile, and removes that without rules.
func TestNodeSaysWhy(t *testing.T) {
	f := newFakeAPI(t)
	r := start(t, everything(f), fast())
	why := func(wanted, by, rules string) func() bool {
		return func() bool {
			a := f.node.Annotations
			return a[WantedAnnotation] == wanted && a[WantedByAnnotation] == by && a[RulesAnnotation] == rules
		}
	}
	r.Report(byRule("g1", 2, "list1"))
	f.await("the rule", why("a100", "rule 2 of ConfigMap gpu/profiles", "list1"))
	r.Report(byRule("g1", 2, "list2"))
	f.await("another list", why("a100", "rule 2 of ConfigMap gpu/profiles", "list2"))
	refused := byRule("g1", 2, "list2")
	refused.State, refused.Problem = nodereport.ProfileRejected, "bad"
	refused.Wanted = nodereport.ProfileRef{Source: "ConfigMap gpu/profiles", By: "refused rules of ConfigMap gpu/profiles", Rules: "list3"}
	r.Report(refused)
	f.await("a refused list", why("", "refused rules of ConfigMap gpu/profiles", "list3"))
	r.Report(applied("g1"))
	f.await("no rules", why("", "", ""))
}

func TestNodeSaysWhatIsReported(t *testing.T) {
	f := newFakeAPI(t)
	r := start(t, everything(f), fast())
	r.Report(applied("g1"))
	f.await("applied", func() bool {
		c, ok := f.condition()
		return ok && c.Status == "True" && c.Reason == "Serving" && !c.LastTransitionTime.IsZero() && !c.LastHeartbeatTime.IsZero() &&
			f.node.Labels[StateLabel] == "applied" && f.node.Annotations[GenerationAnnotation] == "g1" && len(f.events) == 1
	})
	f.change(func() {
		want := map[string]string{"theirs": "annotation", ProfileAnnotation: "a100", SourceAnnotation: "ConfigMap gpu/profiles", GenerationAnnotation: "g1"}
		if diff := cmp.Diff(want, f.node.Annotations); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff(map[string]string{"theirs": "label", StateLabel: "applied"}, f.node.Labels); diff != "" {
			t.Error(diff)
		}
		if len(f.node.Status.Conditions) != 2 || f.node.Status.Conditions[0].Type != corev1.NodeReady {
			t.Errorf("conditions %+v", f.node.Status.Conditions)
		}
		for _, request := range f.requests {
			if strings.HasPrefix(request, "PATCH") && !strings.HasSuffix(request, "application/strategic-merge-patch+json") || strings.HasPrefix(request, "PUT") {
				t.Errorf("request %q", request)
			}
		}
	})

	bad := applied("g1")
	bad.State, bad.Wanted.Generation, bad.Problem = nodereport.ProfileRejected, "", `ConfigMap gpu/profiles[a100]:4: sharing.timeSlicing.resources[0].replicas: must be at least 1 (got -3)`
	r.Report(bad)
	f.await("rejected", func() bool { return f.node.Labels[StateLabel] == "rejected" && len(f.events) == 2 })
	f.change(func() {
		if got := f.node.Annotations[GenerationAnnotation]; got != "g1" {
			t.Errorf("generation %q while the last good one is in force", got)
		}
		want := []string{
			"ProfileApplied profile a100 of ConfigMap gpu/profiles is in force, generation g1 x1",
			"ProfileRejected profile a100 of ConfigMap gpu/profiles is refused, generation g1 stays in force: " + bad.Problem + " x1",
		}
		if diff := cmp.Diff(want, f.told()); diff != "" {
			t.Error(diff)
		}
		for _, e := range f.events {
			if e.InvolvedObject.Kind != "Node" || e.InvolvedObject.Name != nodeName || e.InvolvedObject.UID != nodeName || e.Namespace != "default" || e.Source.Host != nodeName {
				t.Errorf("event about %+v", e.InvolvedObject)
			}
			if want := map[string]string{"ProfileApplied": "Normal", "ProfileRejected": "Warning"}[e.Reason]; e.Type != want {
				t.Errorf("%s is %s", e.Reason, e.Type)
			}
		}
	})
}

// TestNothingNewWritesNothing reports the same again and again, and then something else to mark the end.
func TestNothingNewWritesNothing(t *testing.T) {
	f := newFakeAPI(t)
	r := start(t, everything(f), fast())
	for range 50 {
		r.Report(applied("g1"))
	}
	f.await("written", func() bool { _, ok := f.condition(); return ok && f.node.Annotations[GenerationAnnotation] == "g1" })
	same := applied("g1")
	same.Gone = []nodereport.GoneResource{{Name: "x", Since: time.Now()}} // Said nowhere yet.
	r.Report(same)
	r.Report(applied("g2"))
	f.await("the next", func() bool { return f.node.Annotations[GenerationAnnotation] == "g2" && len(f.events) == 2 })
	f.change(func() {
		for prefix, most := range map[string]int{"GET": 1, "PATCH /api/v1/nodes/n1/status": 1, "PATCH /api/v1/nodes/n1 ": 2} {
			if got := f.count(prefix); got > most {
				t.Errorf("%d requests %s, want %d at most", got, prefix, most)
			}
		}
	})
}

func TestEachCanBeSwitchedOff(t *testing.T) {
	for _, test := range []struct {
		name                           string
		events, condition, annotations bool
	}{
		{"events alone", true, false, false},
		{"condition alone", false, true, false},
		{"annotations alone", false, false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFakeAPI(t)
			options := Options{Config: f.config(), Node: nodeName, Events: test.events, Condition: test.condition, Annotations: test.annotations}
			r := start(t, options, fast())
			r.Report(applied("g1"))
			f.await("written", func() bool { return len(f.requests) > 0 })
			next := applied("g2")
			next.Reason = "Other"
			r.Report(next)
			f.await("written again", func() bool {
				c, _ := f.condition()
				return len(f.events) == 2 || c.Reason == "Other" || f.node.Annotations[GenerationAnnotation] == "g2"
			})
			f.change(func() {
				_, hasCondition := f.condition()
				if hasCondition != test.condition || (len(f.events) > 0) != test.events || (f.node.Labels[StateLabel] != "") != test.annotations {
					t.Error(f.describe())
				}
			})
		})
	}
}

func TestFlappingGPUDoesNotFlood(t *testing.T) {
	f := newFakeAPI(t)
	calm := fast()
	calm.repeat = time.Hour
	r := start(t, Options{Config: f.config(), Node: nodeName, Events: true}, calm)
	unit := sharing.UnitHealth{Unit: "GPU-a", GPU: "GPU-a", Index: "0"}
	for range 500 {
		for _, state := range []sharing.HealthState{sharing.Unhealthy, sharing.Healthy} {
			report := applied("g1")
			report.Units = []sharing.UnitHealth{unit}
			report.Units[0].State = state
			if state == sharing.Unhealthy {
				report.Units[0].Reason = "XID 79"
			}
			r.Report(report)
		}
	}
	r.Report(applied("g2"))
	f.await("the last", func() bool { return strings.Contains(strings.Join(f.told(), "\n"), "generation g2") })
	f.change(func() {
		if len(f.events) != 4 || len(f.requests) != 4 {
			t.Error(f.describe())
		}
	})
}

// TestBlockedForAMomentIsNoEvent checks that a layout blocked by a pod that has just ended gives no Event, and
// one that stays blocked does.
func TestBlockedForAMomentIsNoEvent(t *testing.T) {
	f := newFakeAPI(t)
	timing := fast()
	timing.blocked = 50 * time.Millisecond
	r := start(t, Options{Config: f.config(), Node: nodeName, Events: true}, timing)
	layout := func(state nodereport.LayoutState, reason string) {
		report := applied("g1")
		report.Layouts = []nodereport.GPULayout{{GPU: "GPU-a", Wanted: "day", State: state, Reason: reason}}
		r.Report(report)
	}
	layout(nodereport.LayoutBlocked, "held by n/ended")
	layout(nodereport.LayoutPending, "")
	layout(nodereport.LayoutBlocked, "held by n/runs")
	f.await("the one that lasts", func() bool { return strings.Contains(strings.Join(f.told(), "\n"), "held by n/runs") })
	f.change(func() {
		for _, event := range f.events {
			if strings.Contains(event.Message, "n/ended") {
				t.Errorf("told %s", event.Message)
			}
		}
	})
}

func TestNewNeedsNodeAndConfig(t *testing.T) {
	f := newFakeAPI(t)
	for _, test := range []struct {
		name    string
		options Options
		want    string
	}{
		{"no node", Options{Config: f.config()}, "this node's name is not known"},
		{"no config", Options{Node: nodeName}, "no way to reach it"},
		{"all", everything(f), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.options.Logger = slog.New(slog.DiscardHandler)
			_, err := New(test.options)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestConcernsThisNodeOnly(t *testing.T) {
	changed := func(change func(*nodereport.Report)) nodereport.Report {
		r := applied("g1")
		change(&r)
		return r
	}
	pending := changed(func(r *nodereport.Report) {
		r.State, r.Wanted, r.Reason = nodereport.ProfilePending, ref("g2"), "ProfilePending"
	})
	deaf := pending
	deaf.Ready, deaf.Reason = nodereport.ConditionFalse, "NotRegistered"
	gpu := func(wanted string, state nodereport.LayoutState) nodereport.Report {
		return changed(func(r *nodereport.Report) {
			r.Layouts = []nodereport.GPULayout{{GPU: "GPU-a", Wanted: wanted, State: state}}
		})
	}
	waits := func(n int) nodereport.Report {
		return changed(func(r *nodereport.Report) {
			r.State, r.Waits = nodereport.ProfileSwitching, make([]nodereport.Wait, n)
		})
	}
	tests := []struct {
		name       string
		last, next nodereport.Report
		want       bool
	}{
		{"the first profile", nodereport.Report{State: nodereport.ProfilePending}, applied("g1"), true},
		{"a profile on its way", applied("g1"), pending, false},
		{"applied", pending, applied("g2"), false},
		{"applied at once", applied("g1"), applied("g2"), false},
		{"refused", applied("g1"), changed(func(r *nodereport.Report) { r.State, r.Problem = nodereport.ProfileRejected, "bad" }), false},
		{"another name is registered", pending, deaf, false},
		{"and has been", deaf, applied("g2"), false},
		{"another name", applied("g1"), changed(func(r *nodereport.Report) { r.State, r.Wanted.Name = nodereport.ProfilePending, "b" }), true},
		{"another name by the same rules", byRule("g1", 1, "list"), changed(func(r *nodereport.Report) { r.Wanted.Name, r.Wanted.Rules = "b", "list" }), true},
		{"another name by another list of rules", byRule("g1", 1, "list"), changed(func(r *nodereport.Report) { r.Wanted.Name, r.Wanted.Rules = "b", "new" }), false},
		{"a layout", gpu("all-1g.5gb", nodereport.LayoutApplied), gpu("all-2g.10gb", nodereport.LayoutPending), false},
		{"a GPU that is cut", gpu("all-2g.10gb", nodereport.LayoutPending), gpu("all-2g.10gb", nodereport.LayoutApplied), true},
		{"a GPU more", applied("g1"), gpu("all-2g.10gb", nodereport.LayoutPending), false},
		{"pods that a switch waits for", pending, waits(2), false},
		{"one that has ended", waits(2), waits(1), true},
		{"the kubelet is away", applied("g1"), changed(func(r *nodereport.Report) { r.Ready = nodereport.ConditionFalse }), true},
		{"a unit", applied("g1"), changed(func(r *nodereport.Report) { r.Units = []sharing.UnitHealth{{Unit: "GPU-a"}} }), true},
		{"a unit while a profile comes", applied("g1"), changed(func(r *nodereport.Report) {
			r.State, r.Units = nodereport.ProfilePending, []sharing.UnitHealth{{Unit: "GPU-a"}}
		}), true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := concernsThisNodeOnly(test.last, test.next); got != test.want {
				t.Errorf("%t, want %t", got, test.want)
			}
		})
	}
}

// TestManyNodesWriteApart checks that a change that all nodes report waits for a while, and that the wait ends with
// a change of this node alone, or with another Node.
func TestManyNodesWriteApart(t *testing.T) { synctest.Test(t, testManyNodesWriteApart) }

func testManyNodesWriteApart(t *testing.T) {
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
	for i := range 10 { // The Node is replaced while it waits after a write, and while it waits for other nodes.
		last := applied(fmt.Sprint("h", i))
		last.Units = next.Units
		r.Report(last)
		<-time.After(time.Duration(i%2) * 10 * time.Millisecond) //nolint:forbidigo // in a synctest bubble: the time is simulated
		synctest.Wait()
		r.NodeReplaced()
		patient.await("the other Node", says(patient, last.Applied.Generation))
	}
}

// TestRefusedAndBack refuses each kind of request in every way, and checks that the others go on and that the
// latest state is written afterwards.
func TestRefusedAndBack(t *testing.T) {
	for _, test := range []struct {
		path   string
		status int
	}{
		{"/nodes/n1", 409}, {"/nodes/n1", 403}, {"/nodes/n1", 500}, {"/nodes/n1", 404},
		{"/nodes/n1/status", 409}, {"/nodes/n1/status", 403}, {"/nodes/n1/status", 503},
		{"/events", 422}, {"/events", 403}, {"/events", 500}, {"/events", 429},
	} {
		t.Run(test.path+" "+string(rune('0'+test.status/100))+"xx", func(t *testing.T) {
			f := newFakeAPI(t)
			f.refuse[test.path] = test.status
			r := start(t, everything(f), fast())
			r.Report(applied("g1"))
			f.await("refused", func() bool {
				_, hasCondition := f.condition()
				refused := 0
				for _, request := range f.requests {
					if path := strings.Fields(request)[1]; strings.HasSuffix(path, test.path) {
						refused++
					}
				}
				others := (hasCondition || strings.Contains(test.path, "nodes")) && (len(f.events) == 1 || test.path == "/events") &&
					(f.node.Labels[StateLabel] != "" || test.path == "/nodes/n1")
				if test.status == 422 {
					return refused >= 1 && hasCondition // It is not asked again.
				}
				return refused >= 3 && others
			})
			next := applied("g2")
			next.Reason = "Latest"
			again := func() { f.change(func() { delete(f.refuse, test.path) }) }
			if test.status == 422 {
				again() // A second Event that is refused so would be lost, too.
			}
			r.Report(next)
			again()
			f.await("written", func() bool {
				c, _ := f.condition()
				told := 2
				if test.status == 422 {
					told = 1
				}
				return c.Reason == "Latest" && f.node.Annotations[GenerationAnnotation] == "g2" && len(f.events) == told
			})
		})
	}
}

// TestAway reports a thousand changes to a hanging API server. Once it answers, the latest state is written, and
// the events still in the queue.
func TestAway(t *testing.T) {
	f := newFakeAPI(t)
	f.hang = true
	quick := fast()
	quick.request = 500 * time.Millisecond
	quick.burst = 1000
	r := start(t, everything(f), quick)
	for i := range 1000 {
		r.Report(applied("g" + string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676))))
	}
	last := applied("last")
	r.Report(last)
	f.change(func() { f.hang = false })
	f.await("the last state", func() bool {
		return f.node.Annotations[GenerationAnnotation] == "last" && strings.Contains(strings.Join(f.told(), "\n"), "generation last")
	})
	f.change(func() {
		// The queue may drop the one that is being written.
		if len(f.events) > maxQueued+1 {
			t.Errorf("%d events were kept", len(f.events))
		}
	})
}

// TestStopIsQuick ends Run while requests hang.
func TestStopIsQuick(t *testing.T) {
	f := newFakeAPI(t)
	f.hang = true
	patient := fast()
	patient.request = time.Hour
	r, err := newReporter(everything(f), patient)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.Report(applied("g1"))
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// numberedWriter reports which of several writers is used.
type numberedWriter struct {
	number int
	used   chan<- int
}

func (w numberedWriter) write(context.Context, nodereport.Report) (time.Duration, error) {
	w.used <- w.number
	return 0, nil
}

// TestNodeReplacedAtRest checks that an idle loop starts anew for a replaced Node, as the earlier writes are
// gone.
func TestNodeReplacedAtRest(t *testing.T) {
	made, used := 0, make(chan int, 1)
	l := newWriteLoop(func() writer {
		made++
		return numberedWriter{made, used}
	}, func() *nodereport.Report { return &nodereport.Report{} }, fast(), slog.New(slog.DiscardHandler))
	l.replaced.Notify()
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { l.run(ctx) })
	if number := <-used; number != 2 {
		t.Errorf("writer %d writes to the new Node, want the second", number)
	}
	stop()
	running.Wait()
}
