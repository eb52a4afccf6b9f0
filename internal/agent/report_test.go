package agent

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// fakeReporter keeps every report.
type fakeReporter struct {
	mutex   sync.Mutex
	reports []sharing.NodeReport
	changed chan struct{}
	ended   chan struct{}
}

func newFakeReporter() *fakeReporter {
	return &fakeReporter{changed: make(chan struct{}), ended: make(chan struct{})}
}

func (f *fakeReporter) Report(report sharing.NodeReport) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.reports = append(f.reports, report)
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fakeReporter) Run(ctx context.Context) error {
	<-ctx.Done()
	close(f.ended)
	return nil
}

// await waits until the last report is as wanted.
func (f *fakeReporter) await(t *testing.T, what string, wanted func(sharing.NodeReport) bool) sharing.NodeReport {
	t.Helper()
	late := time.After(30 * time.Second)
	for {
		f.mutex.Lock()
		changed, reports := f.changed, f.reports
		f.mutex.Unlock()
		if len(reports) > 0 && wanted(reports[len(reports)-1]) {
			return reports[len(reports)-1]
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("no report of %s; they are %+v", what, reports)
		}
	}
}

func (f *fakeReporter) count() int {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return len(f.reports)
}

func reported(state sharing.ProfileState, reason string) func(sharing.NodeReport) bool {
	return func(r sharing.NodeReport) bool { return r.State == state && r.Reason == reason }
}

// selectedPolicy says what its profile is called.
type selectedPolicy struct{ *input[configs.Selected] }

func (p selectedPolicy) Profile() (configs.Selected, error) { return p.get() }

// named is a profile of that generation.
func named(replicas int, generation string) configs.Selected {
	s := selected(generation)
	s.Profile = profile(replicas)
	return s
}

func TestReportsWhatHappens(t *testing.T) {
	reporter := newFakeReporter()
	policy := selectedPolicy{newInput(named(4, "g1"), nil)}
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.Health = reporter, &fakeHealth{}
		r.options.Policy = policy
	})
	first := reporter.await(t, "the first profile", reported(sharing.ProfileApplied, "Serving"))
	if first.Applied.Generation != "g1" || first.Ready != sharing.ConditionTrue || first.Message != "nvidia.com/gpu (8 devices, 8 healthy)" || len(first.Units) != 1 {
		t.Errorf("report %+v", first)
	}
	r.shows(8) // What is called applied, the kubelet has.

	policy.set(selected(""), errors.New("ConfigMap gpu/profiles[data.a]:3: replicas: must be at least 1 (got -3)\nmore"))
	bad := reporter.await(t, "the refusal", reported(sharing.ProfileRejected, "ProfileRejected"))
	if bad.Applied.Generation != "g1" || bad.Ready != sharing.ConditionTrue || bad.Problem != "ConfigMap gpu/profiles[data.a]:3: replicas: must be at least 1 (got -3)" {
		t.Errorf("report %+v", bad)
	}

	policy.set(named(5, "g2"), nil)
	reporter.await(t, "the next profile", func(n sharing.NodeReport) bool {
		return n.State == sharing.ProfileApplied && n.Applied.Generation == "g2"
	})
	r.shows(10)
	r.node.set(gpus("", "XID 79"), nil)
	reporter.await(t, "the fault", func(n sharing.NodeReport) bool { return n.Message == "nvidia.com/gpu (10 devices, 5 healthy)" })

	r.kubelet.SetSilent(true)
	if err := r.kubelet.Restart(r.ctx); err != nil {
		t.Fatal(err)
	}
	away := reporter.await(t, "the kubelet being away", reported(sharing.ProfileApplied, "NotRegistered"))
	if away.Ready != sharing.ConditionFalse || !strings.Contains(away.Message, gpuResource) {
		t.Errorf("report %+v", away)
	}
}

// TestStandbyReportsNothing has an agent stand by, decide about profiles, and
// then serve.
func TestStandbyReportsNothing(t *testing.T) {
	claimed := make(chan struct{})
	reporter := newFakeReporter()
	r := newRig(t, func(r *rig) {
		r.options.Reporter = reporter
		r.options.Claim = func(ctx context.Context, standBy func()) error {
			standBy()
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	r.awaitBody("/plan", 200, `"devices": 8`)
	r.policy.set(profile(5), nil)
	r.awaitBody("/plan", 200, `"devices": 10`)
	r.awaitBody("/api/v1/status", 200, `"role": "standby"`)
	if n := reporter.count(); n != 0 {
		t.Errorf("%d reports while standing by", n)
	}
	close(claimed)
	reporter.await(t, "serving", reported(sharing.ProfileApplied, "Serving"))
}

func TestReportsDraining(t *testing.T) {
	reporter := newFakeReporter()
	var end func()
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.DrainTimeout = reporter, 30*time.Second
		end = r.endable()
	})
	r.shows(8)
	end()
	report := reporter.await(t, "draining", func(n sharing.NodeReport) bool { return n.Reason == "Draining" })
	if report.Ready != sharing.ConditionFalse {
		t.Errorf("report %+v", report)
	}
	select {
	case <-reporter.ended:
	case <-time.After(30 * time.Second):
		t.Error("the reporter runs on")
	}
}

// TestReportsWithoutGPUs has no stream whose coming and going could be noticed.
func TestReportsWithoutGPUs(t *testing.T) {
	reporter := newFakeReporter()
	newRig(t, func(r *rig) {
		r.options.Reporter = reporter
		r.node = fakeNode{newInput([]sharing.GPU{}, nil)}
		r.options.Node = r.node
	})
	report := reporter.await(t, "the profile", reported(sharing.ProfileApplied, "Serving"))
	if report.Message != "no resource" {
		t.Errorf("report %+v", report)
	}
}

// TestReportsAreCoalesced changes a thousand things that are not reported.
func TestReportsAreCoalesced(t *testing.T) {
	reporter := newFakeReporter()
	r := newRig(t, func(r *rig) { r.options.Reporter = reporter })
	reporter.await(t, "the first profile", reported(sharing.ProfileApplied, "Serving"))
	before := reporter.count()
	for range 1000 {
		r.agent.look()
		r.agent.tellAgain()
	}
	r.node.set(gpus("", "", ""), nil)
	reporter.await(t, "the third GPU", func(n sharing.NodeReport) bool {
		return n.Message == "nvidia.com/gpu (12 devices, 12 healthy)" && n.State == sharing.ProfileApplied
	})
	if n := reporter.count() - before; n > 3 {
		t.Errorf("%d reports of one change", n)
	}
}

func TestReadiness(t *testing.T) {
	bad := errors.New("p.yaml:3: x: bad")
	listed, deaf := plugin.ResourceStatus{Name: "a", Streams: 1}, plugin.ResourceStatus{Name: "b"}
	unread := decision("g1", "g1", nil)
	unread.planned, unread.unread = false, errors.New("driver gone")
	notRead := decision("g1", "g1", nil)
	notRead.planned = false
	is := func(state sharing.ProfileState, applied string) progress {
		p := progress{state: state}
		if applied != "" {
			p.applied = refOf(selected(applied))
		}
		return p
	}
	for _, test := range []struct {
		name     string
		state    *state
		progress progress
		status   plugin.Status
		draining bool
		want     string
	}{
		{"draining", decision("g1", "g1", nil), is(sharing.ProfileApplied, "g1"), served(listed), true, "False Draining"},
		{"nothing known", &state{}, progress{}, plugin.Status{}, false, "Unknown Starting"},
		{"choice not known", decision("", "", configs.ErrPending), progress{}, plugin.Status{}, false, "Unknown Starting"},
		{"no profile", decision("", "", bad), progress{}, plugin.Status{}, false, "False NoProfile"},
		{"no driver", unread, progress{}, plugin.Status{}, false, "False GPUsNotRead"},
		{"GPUs not read yet", notRead, progress{}, plugin.Status{}, false, "Unknown Starting"},
		{"not served yet", decision("g1", "g1", nil), is(sharing.ProfilePending, ""), plugin.Status{}, false, "Unknown Starting"},
		{"kubelet away", decision("g1", "g1", nil), is(sharing.ProfileApplied, "g1"), served(listed, deaf), false, "False NotRegistered"},
		{"rejected", decision("g1", "", bad), is(sharing.ProfileRejected, "g1"), served(listed), false, "True ProfileRejected"},
		{"on its way", decision("g2", "g2", nil), is(sharing.ProfilePending, "g1"), plugin.Status{Resources: []plugin.ResourceStatus{listed}}, false, "True ProfilePending"},
		{"serving", decision("g1", "g1", nil), is(sharing.ProfileApplied, "g1"), served(listed), false, "True Serving"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ready, reason, message := readiness(test.state, test.progress, test.status, test.draining)
			if got := string(ready) + " " + reason; got != test.want || message == "" {
				t.Errorf("%s (%s), want %s", got, message, test.want)
			}
			if errors.Is(test.state.rejected, bad) && !strings.Contains(message, bad.Error()) {
				t.Errorf("message %q does not say what is wrong", message)
			}
		})
	}
}
