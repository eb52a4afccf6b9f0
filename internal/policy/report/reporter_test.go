package report

import (
	"context"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/sharing"
)

// fast is quick enough for tests and slow enough to coalesce.
func fast() timing {
	return timing{
		settle: time.Millisecond, pace: time.Millisecond, firstRetry: 5 * time.Millisecond, lastRetry: 20 * time.Millisecond, lastLook: 20 * time.Millisecond,
		request: 20 * time.Second, repeat: time.Millisecond, between: time.Millisecond, burst: 25, grace: time.Hour,
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

func ref(generation string) sharing.ProfileRef {
	return sharing.ProfileRef{Name: "a100", Source: "ConfigMap gpu/profiles", Generation: generation}
}

// applied is a node on which all is well.
func applied(generation string) sharing.NodeReport {
	return sharing.NodeReport{
		State: sharing.ProfileApplied, Wanted: ref(generation), Applied: ref(generation),
		Ready: sharing.ConditionTrue, Reason: "Serving", Message: "nvidia.com/gpu: 8 devices",
	}
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
	bad.State, bad.Wanted.Generation, bad.Problem = sharing.ProfileRejected, "", `ConfigMap gpu/profiles[a100]:4: sharing.timeSlicing.resources[0].replicas: must be at least 1 (got -3)`
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

// TestNothingNewWritesNothing reports the same again and again, and then
// something else so as to know that the end was reached.
func TestNothingNewWritesNothing(t *testing.T) {
	f := newFakeAPI(t)
	r := start(t, everything(f), fast())
	for range 50 {
		r.Report(applied("g1"))
	}
	f.await("written", func() bool { _, ok := f.condition(); return ok && f.node.Annotations[GenerationAnnotation] == "g1" })
	same := applied("g1")
	same.Gone = []sharing.GoneResource{{Name: "x", Since: time.Now()}} // Said nowhere yet.
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

// TestConditionKeepsItsTime restarts the reporter while the condition goes on,
// and changes its status later.
func TestConditionKeepsItsTime(t *testing.T) {
	f := newFakeAPI(t)
	began := metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))
	f.node.Status.Conditions = append(f.node.Status.Conditions, corev1.NodeCondition{
		Type: ConditionType, Status: "True", Reason: "Old", LastTransitionTime: began,
	})
	r := start(t, everything(f), fast())
	r.Report(applied("g1"))
	f.await("the new reason", func() bool { c, _ := f.condition(); return c.Reason == "Serving" })
	f.change(func() {
		if c, _ := f.condition(); !c.LastTransitionTime.Equal(&began) {
			t.Errorf("began at %s, want %s", c.LastTransitionTime, began)
		}
	})
	broken := applied("g1")
	broken.Ready, broken.Reason = sharing.ConditionFalse, "KubeletAway"
	r.Report(broken)
	f.await("False", func() bool { c, _ := f.condition(); return c.Status == "False" })
	f.change(func() {
		if c, _ := f.condition(); !c.LastTransitionTime.After(began.Time) {
			t.Errorf("began at %s, before it changed", c.LastTransitionTime)
		}
	})
}

// TestRefusedAndBack refuses in every way, for each kind of request alone, and
// sees that the others go on and that the latest state is written afterwards.
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
			r.Report(next)
			f.change(func() { delete(f.refuse, test.path) })
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

// TestAway reports a thousand changes to an API that does not answer. The
// latest is written when it does, and no more events than the queue has.
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
		if len(f.events) > longestQueue {
			t.Errorf("%d events were kept", len(f.events))
		}
	})
}

// TestNodeMadeAnew deletes the Node and makes another: what is Virgate's is
// written to it too, at once when somebody sees it, else with the next try.
func TestNodeMadeAnew(t *testing.T) {
	for _, test := range []struct {
		name string
		seen bool
	}{
		{"seen", true},
		{"not seen", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFakeAPI(t)
			slow := fast()
			slow.firstRetry, slow.lastRetry, slow.lastLook = time.Hour, time.Hour, time.Hour // Being seen ends backing off too.
			if !test.seen {
				slow = fast()
			}
			r := start(t, everything(f), slow)
			r.Report(applied("g1"))
			written := func() bool {
				_, ok := f.condition()
				return ok && f.node.Annotations[GenerationAnnotation] == "g1"
			}
			f.await("written", written)
			f.change(func() { f.node = nil })
			gone := applied("g1")
			gone.Message, gone.State = "other", sharing.ProfilePending
			r.Report(gone)
			f.await("404", func() bool {
				return f.count("PATCH /api/v1/nodes/n1 ") >= 2 && f.count("PATCH /api/v1/nodes/n1/status") >= 2
			})
			f.change(func() { f.node = newNode() })
			if test.seen {
				r.NodeReplaced()
			}
			f.await("written again", written)
		})
	}
}

// TestNodeMadeAnewDuringAPause has the Node replaced while a task pauses after a
// write that worked.
func TestNodeMadeAnewDuringAPause(t *testing.T) {
	f := newFakeAPI(t)
	slow := fast()
	slow.pace = time.Hour
	r := start(t, everything(f), slow)
	r.Report(applied("g1"))
	written := func() bool {
		_, ok := f.condition()
		return ok && f.node.Annotations[GenerationAnnotation] == "g1"
	}
	f.await("written", written)
	f.change(func() { f.node = newNode() })
	r.NodeReplaced()
	f.await("written again", written)
}

// TestNodeMadeAnewUnderWay has the report be what it was, when the Node is there
// again after writing to none has failed.
func TestNodeMadeAnewUnderWay(t *testing.T) {
	f := newFakeAPI(t)
	r := start(t, everything(f), fast())
	r.Report(applied("g1"))
	written := func() bool {
		_, ok := f.condition()
		return ok && f.node.Annotations[GenerationAnnotation] == "g1"
	}
	f.await("written", written)
	f.change(func() { f.node = nil })
	gone := applied("g1")
	gone.State, gone.Reason = sharing.ProfileRejected, "Gone"
	r.Report(gone)
	f.await("404", func() bool {
		return f.count("PATCH /api/v1/nodes/n1 ") >= 2 && f.count("PATCH /api/v1/nodes/n1/status") >= 2
	})
	r.Report(applied("g1"))
	f.change(func() { f.node = newNode() })
	f.await("written again", written)
}

// TestStopIsQuick ends Run while requests hang.
func TestStopIsQuick(t *testing.T) {
	f := newFakeAPI(t)
	f.hang = true
	r, err := New(everything(f))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.Report(applied("g1"))
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("Run has not ended")
	}
}

// TestWritesNothingUnasked is what a program that stands by does: nothing is
// reported, nothing is written.
func TestWritesNothingUnasked(t *testing.T) {
	f := newFakeAPI(t)
	r := start(t, everything(f), fast())
	r.NodeReplaced()
	r.Report(applied("g1"))
	f.await("written", func() bool { return f.node.Annotations[GenerationAnnotation] == "g1" })
	f.change(func() {
		for _, request := range f.requests {
			if strings.Contains(request, "PATCH") && f.node.Labels[StateLabel] != "applied" {
				t.Errorf("%s before the report", request)
			}
		}
		if got := f.count("GET"); got > 1 {
			t.Errorf("%d reads", got)
		}
	})
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

func TestStaleResources(t *testing.T) {
	zero, one := resource.MustParse("0"), resource.MustParse("1")
	f := newFakeAPI(t)
	f.node.Status.Capacity = corev1.ResourceList{"nvidia.com/old": zero, "nvidia.com/used": one, "nvidia.com/theirs": zero, "nvidia.com/young": zero, "cpu": one}
	options := everything(f)
	brief := fast()
	r := start(t, options, brief)
	report := applied("g1")
	ago := time.Now().Add(-2 * time.Hour)
	report.Gone = []sharing.GoneResource{{Name: "nvidia.com/missing", Since: ago}, {Name: "nvidia.com/old", Since: ago}, {Name: "nvidia.com/used", Since: ago}, {Name: "nvidia.com/young", Since: time.Now()}}
	r.Report(report)
	left := func() map[string]bool {
		names := map[string]bool{}
		for name := range f.node.Status.Capacity {
			names[string(name)] = true
		}
		return names
	}
	f.await("removed", func() bool { return !left()["nvidia.com/old"] })
	want := map[string]bool{"nvidia.com/used": true, "nvidia.com/theirs": true, "nvidia.com/young": true, "cpu": true}
	f.change(func() {
		if got := left(); !maps.Equal(got, want) {
			t.Errorf("left %v, want %v", got, want)
		}
	})
}

// TestStaleResourceInUseAgain has the value change between reading and
// patching: the patch must not take it.
func TestStaleResourceInUseAgain(t *testing.T) {
	node := newNode()
	node.Status.Capacity = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("4")}
	f := newFakeAPI(t)
	f.node = node
	c, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := (&remover{client: c}).remove(t.Context(), "nvidia.com/gpu"); err != nil {
		t.Error(err)
	}
	if got := node.Status.Capacity["nvidia.com/gpu"]; got.String() != "4" {
		t.Errorf("capacity %s", got.String())
	}
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
