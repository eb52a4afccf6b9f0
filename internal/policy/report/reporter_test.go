package report

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

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
