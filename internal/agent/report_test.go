package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// fakeReporter keeps every report.
type fakeReporter struct {
	mutex   sync.Mutex
	reports []nodereport.Report
	changed chan struct{}
	ended   chan struct{}
}

func newFakeReporter() *fakeReporter {
	return &fakeReporter{changed: make(chan struct{}), ended: make(chan struct{})}
}

func (f *fakeReporter) Report(report nodereport.Report) {
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
func (f *fakeReporter) await(t *testing.T, what string, wanted func(nodereport.Report) bool) nodereport.Report {
	t.Helper()
	late, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		f.mutex.Lock()
		changed, reports := f.changed, f.reports
		f.mutex.Unlock()
		if len(reports) > 0 && wanted(reports[len(reports)-1]) {
			return reports[len(reports)-1]
		}
		select {
		case <-changed:
		case <-late.Done():
			t.Fatalf("no report of %s; they are %+v", what, reports)
		}
	}
}

func (f *fakeReporter) count() int {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return len(f.reports)
}

func reported(state nodereport.ProfileState, reason string) func(nodereport.Report) bool {
	return func(r nodereport.Report) bool { return r.State == state && r.Reason == reason }
}

// selectedPolicy names its profile.
type selectedPolicy struct {
	*input[configs.SelectedProfile]
}

func (p selectedPolicy) Profile() (configs.SelectedProfile, error) { return p.get() }

func (p selectedPolicy) WithLabel(string, string) (configs.SelectedProfile, error) { return p.get() }

// named is a profile of that generation.
func named(replicas int, generation string) configs.SelectedProfile {
	s := selected(generation)
	s.Profile = profile(replicas)
	return s
}

// TestReportsFeatures checks that the labels are reported with their profile.
func TestReportsFeatures(t *testing.T) {
	t.Parallel()
	reporter := newFakeReporter()
	policy := selectedPolicy{newInput(named(4, "g1"), nil)}
	newRig(t, func(r *rig) {
		r.options.Reporter, r.options.ConfigSource = reporter, policy
		r.options.Features = func(gpus []sharing.GPU, p sharing.Profile) map[string]string {
			return map[string]string{"gpus": fmt.Sprint(len(gpus)), "replicas": fmt.Sprint(p.TimeSlicing[0].Replicas)}
		}
	})
	for generation, replicas := range map[string]int{"g2": 2, "g3": 3} {
		policy.set(named(replicas, generation), nil)
		reporter.await(t, generation, func(r nodereport.Report) bool { return r.Applied.Generation == generation })
		reporter.mutex.Lock()
		for _, r := range reporter.reports {
			if r.Applied.Generation == generation && (r.Features["replicas"] != fmt.Sprint(replicas) || r.Features["gpus"] == "0") {
				t.Errorf("profile %s with the labels %v", generation, r.Features)
			}
		}
		reporter.mutex.Unlock()
	}
}

func TestReportsWhatHappens(t *testing.T) {
	t.Parallel()
	reporter := newFakeReporter()
	policy := selectedPolicy{newInput(named(4, "g1"), nil)}
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.Health = reporter, fakeHealth{}
		r.options.ConfigSource = policy
	})
	first := reporter.await(t, "the first profile", reported(nodereport.ProfileApplied, "Serving"))
	if first.Applied.Generation != "g1" || first.Ready != nodereport.ConditionTrue || first.Message != "nvidia.com/gpu (8 devices, 8 healthy)" || len(first.Units) != 1 || !first.NoLayout {
		t.Errorf("report %+v", first)
	}
	r.shows(8) // Once a profile is reported as applied, the kubelet has its devices.

	policy.set(selected(""), errors.New("ConfigMap gpu/profiles[data.a]:3: replicas: must be at least 1 (got -3)\nmore"))
	bad := reporter.await(t, "the refusal", reported(nodereport.ProfileRejected, "ProfileRejected"))
	if bad.Applied.Generation != "g1" || bad.Ready != nodereport.ConditionTrue || bad.Problem != "ConfigMap gpu/profiles[data.a]:3: replicas: must be at least 1 (got -3)" {
		t.Errorf("report %+v", bad)
	}

	policy.set(named(5, "g2"), nil)
	reporter.await(t, "the next profile", func(n nodereport.Report) bool {
		return n.State == nodereport.ProfileApplied && n.Applied.Generation == "g2"
	})
	r.shows(10)
	r.node.set(gpus("", "XID 79"), nil)
	reporter.await(t, "the fault", func(n nodereport.Report) bool { return n.Message == "nvidia.com/gpu (10 devices, 5 healthy)" })

	r.kubelet.HangRegister(true)
	if err := r.kubelet.Restart(r.ctx); err != nil {
		t.Fatal(err)
	}
	away := reporter.await(t, "the kubelet being away", reported(nodereport.ProfileApplied, "NotRegistered"))
	if away.Ready != nodereport.ConditionFalse || !strings.Contains(away.Message, gpuResource) {
		t.Errorf("report %+v", away)
	}
}

// TestWantsLayout checks that the layout state of an earlier run is dropped only once the profile in force is known
// to request no layout.
func TestWantsLayout(t *testing.T) {
	t.Parallel()
	with := func(c sharing.MIGConfig) *configs.SelectedProfile {
		return &configs.SelectedProfile{Config: configs.Config{Profile: sharing.Profile{MIG: c}}}
	}
	for _, test := range []struct {
		name    string
		profile *configs.SelectedProfile
		want    bool
	}{
		{"no profile yet", nil, false},
		{"no layout", with(sharing.MIGConfig{Manage: true}), false},
		{"not to be changed", with(sharing.MIGConfig{Name: "all-disabled"}), false},
		{"a layout", with(sharing.MIGConfig{Manage: true, Name: "all-disabled"}), true},
	} {
		if got := wantsLayout(test.profile); got != test.want {
			t.Errorf("%s: %t", test.name, got)
		}
		a := newAgent(withIdle(Options{Plugin: plugin.NewManager(plugin.Options{}), Health: fakeHealth{}}))
		report := a.reports.report(&state{profile: test.profile}, *a.progress.Load(), plugin.Status{})
		if want := test.profile != nil && !test.want; report.NoLayout != want {
			t.Errorf("%s: reported that no layout is wanted: %t", test.name, report.NoLayout)
		}
	}
}

// TestStandbyReportsNothing has an agent stand by, decide about profiles, and
// then serve.
func TestStandbyReportsNothing(t *testing.T) {
	t.Parallel()
	claimed := make(chan struct{})
	reporter := newFakeReporter()
	r := newRig(t, func(r *rig) {
		r.options.Reporter = reporter
		r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
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
	reporter.await(t, "serving", reported(nodereport.ProfileApplied, "Serving"))
}

func TestReportsDraining(t *testing.T) {
	t.Parallel()
	reporter := newFakeReporter()
	var end func()
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.DrainTimeout = reporter, time.Hour
		end = r.endable()
	})
	r.shows(8)
	end()
	report := reporter.await(t, "draining", func(n nodereport.Report) bool { return n.Reason == "Draining" })
	if report.Ready != nodereport.ConditionFalse {
		t.Errorf("report %+v", report)
	}
	<-reporter.ended
}

// TestReportsWithoutGPUs has no stream that could trigger a report.
func TestReportsWithoutGPUs(t *testing.T) {
	t.Parallel()
	reporter := newFakeReporter()
	newRig(t, func(r *rig) {
		r.options.Reporter = reporter
		r.node = fakeNode{newInput([]sharing.GPU{}, nil)}
		r.options.Node = r.node
	})
	report := reporter.await(t, "the profile", reported(nodereport.ProfileApplied, "Serving"))
	if report.Message != "no resource" {
		t.Errorf("report %+v", report)
	}
}

// TestReportsAreCoalesced makes a thousand changes that are not reported.
func TestReportsAreCoalesced(t *testing.T) {
	t.Parallel()
	reporter := newFakeReporter()
	r := newRig(t, func(r *rig) { r.options.Reporter = reporter })
	reporter.await(t, "the first profile", reported(nodereport.ProfileApplied, "Serving"))
	before := reporter.count()
	for range 1000 {
		r.agent.requestPlan()
		r.agent.wakeReport()
	}
	r.node.set(gpus("", "", ""), nil)
	reporter.await(t, "the third GPU", func(n nodereport.Report) bool {
		return n.Message == "nvidia.com/gpu (12 devices, 12 healthy)" && n.State == nodereport.ProfileApplied
	})
	if n := reporter.count() - before; n > 3 {
		t.Errorf("%d reports of one change", n)
	}
}

// Each right that the profile needs and the program lacks is in the condition once, with the chart's value, for
// any number of GPUs.
func TestConditionNamesMissingRights(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		value, warning string
		layouts        []nodereport.GPULayout
	}{
		{value: "mig.monitor", warning: "GPU 1: its partitions cannot be read: " + sharing.NoMIGRight},
		{value: "gpuSettings.manage", warning: "GPU 1: timeSlice long is not set: no nvidia-smi; that requires " + gpusettings.Right},
		{value: "mps.enabled", warning: decide.MPSUnanswered},
		{value: "dra.enabled", warning: decide.NoDRA},
		{value: "mig.reset", warning: "mig.reset has no effect: " + decide.MayNotReset},
		{value: "metrics.perContainer", warning: memoryguard.Unwatched},
		{value: "memoryGuard.evict", warning: "memory: " + nodereport.ErrMayNotEvict.Error()},
		{value: "mig.manage", layouts: []nodereport.GPULayout{
			{State: nodereport.LayoutFailed, Reason: migchange.NotPermitted + ": driver says no"},
			{State: nodereport.LayoutFailed, Reason: migchange.NotPermitted},
		}},
	} {
		t.Run(test.value, func(t *testing.T) {
			t.Parallel()
			s := decision("g1", "g1", nil)
			s.plan.Warnings = []string{"a name that nothing has", test.warning, test.warning}
			p := profileProgress{state: nodereport.ProfileApplied, applied: profileRef(selected("g1")), layouts: test.layouts}
			ready, reason, message := readiness(s, p, served(plugin.ResourceStatus{Name: "a", Streams: 1}), false)
			if ready != nodereport.ConditionTrue || reason != "Serving" || strings.Count(message, test.value) != 1 || strings.Contains(message, "nothing has") {
				t.Errorf("got %s %s: %s", ready, reason, message)
			}
		})
	}
}

func TestReadiness(t *testing.T) {
	t.Parallel()
	bad := errors.New("p.yaml:3: x: bad")
	listed, deaf := plugin.ResourceStatus{Name: "a", Streams: 1}, plugin.ResourceStatus{Name: "b"}
	unread := decision("g1", "g1", nil)
	unread.planned, unread.unread = false, errors.New("driver gone")
	notRead, notReady := decision("g1", "g1", nil), decision("g1", "g1", nil)
	notRead.planned, notReady.planned, notReady.unread = false, false, sharing.ErrNotRead
	denied := decision("g1", "g1", nil)
	denied.plan.Warnings = []string{"another", "GPU 1: " + sharing.NoMIGRight, "GPU 2: " + sharing.NoMIGRight}
	withheld := decision("g1", "g1", nil)
	withheld.host.Obstacles = map[string]string{"GPU-1": "there is no channel", "GPU-2": "there is no channel"}
	unlisted := decision("g1", "g1", nil)
	unlisted.unlisted = "the driver lists 7 of 8"
	is := func(state nodereport.ProfileState, applied string) profileProgress {
		p := profileProgress{state: state}
		if applied != "" {
			p.applied = profileRef(selected(applied))
		}
		return p
	}
	for _, test := range []struct {
		name     string
		state    *state
		progress profileProgress
		status   plugin.Status
		draining bool
		want     string
	}{
		{"draining", decision("g1", "g1", nil), is(nodereport.ProfileApplied, "g1"), served(listed), true, "False Draining"},
		{"nothing known", &state{}, profileProgress{}, plugin.Status{}, false, "Unknown Starting"},
		{"choice not known", decision("", "", configs.ErrPending), profileProgress{}, plugin.Status{}, false, "Unknown Starting"},
		{"no profile", decision("", "", bad), profileProgress{}, plugin.Status{}, false, "False NoProfile"},
		{"no driver", unread, profileProgress{}, plugin.Status{}, false, "False GPUsNotRead"},
		{"GPUs not read yet", notReady, profileProgress{}, plugin.Status{}, false, "Unknown Starting"},
		{"GPUs not asked for yet", notRead, profileProgress{}, plugin.Status{}, false, "Unknown Starting"},
		{"not served yet", decision("g1", "g1", nil), is(nodereport.ProfilePending, ""), plugin.Status{}, false, "Unknown Starting"},
		{"kubelet away", decision("g1", "g1", nil), is(nodereport.ProfileApplied, "g1"), served(listed, deaf), false, "False NotRegistered"},
		{"switching", decision("g2", "g2", nil), is(nodereport.ProfileSwitching, "g1"), served(listed), false, "True Switching"},
		{"rejected", decision("g1", "", bad), is(nodereport.ProfileRejected, "g1"), served(listed), false, "True ProfileRejected"},
		{"on its way", decision("g2", "g2", nil), is(nodereport.ProfilePending, "g1"), plugin.Status{Resources: []plugin.ResourceStatus{listed}}, false, "True ProfilePending"},
		{"serving", decision("g1", "g1", nil), is(nodereport.ProfileApplied, "g1"), served(listed), false, "True Serving"},
		{"a GPU that is not listed", unlisted, is(nodereport.ProfileApplied, "g1"), served(listed), false, "False GPUsNotListed"},
		{"serving nothing", withheld, is(nodereport.ProfileApplied, "g1"), served(listed), false, "True Serving"},
		{"serving without a right", denied, is(nodereport.ProfileApplied, "g1"), served(listed), false, "True Serving"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ready, reason, message := readiness(test.state, test.progress, test.status, test.draining)
			if got := string(ready) + " " + reason; got != test.want || message == "" {
				t.Errorf("%s (%s), want %s", got, message, test.want)
			}
			if got := strings.Count(message, "SYS_ADMIN and NVIDIA_MIG_MONITOR_DEVICES=all"); (got == 1) != (test.state == denied) {
				t.Errorf("message %q names the missing right %d times", message, got)
			}
			if got := strings.Contains(message, "; cannot be granted now: 2: there is no channel"); got != (test.state == withheld) {
				t.Errorf("message %q says why units are withheld: %t", message, got)
			}
			if errors.Is(test.state.rejected, bad) && !strings.Contains(message, bad.Error()) {
				t.Errorf("message %q does not say what is wrong", message)
			}
		})
	}
}

// selected is a profile by its generation alone.
func selected(generation string) configs.SelectedProfile {
	return configs.SelectedProfile{Name: "a", Source: "ConfigMap gpu/profiles", Generation: generation}
}

// decision is the loop's decision about the wanted profile.
func decision(inForce, wanted string, err error) *state {
	s := &state{wanted: selected(wanted), rejected: err, planned: inForce != ""}
	if inForce != "" {
		profile := selected(inForce)
		s.profile = &profile
	}
	return s
}

func served(resources ...plugin.ResourceStatus) plugin.Status {
	return plugin.Status{Served: true, Resources: resources}
}

func TestProgress(t *testing.T) {
	t.Parallel()
	listed := plugin.ResourceStatus{Name: gpuResource, Streams: 1, Applied: true}
	unsent, away := listed, listed
	unsent.Applied, away.Streams = false, 0
	var notTakenUp plugin.Status
	bad := errors.New("p.yaml:3: replicas: must be at least 1")
	for _, test := range []struct {
		name    string
		applied string // before
		state   *state
		status  plugin.Status
		want    nodereport.ProfileState
		now     string // applied after
	}{
		{"nothing known", "", &state{}, notTakenUp, nodereport.ProfilePending, ""},
		{"nothing known, nothing served", "", &state{}, served(), nodereport.ProfilePending, ""},
		{"rejected from the start", "", decision("", "", bad), served(), nodereport.ProfileRejected, ""},
		{"choice not known", "", decision("", "", configs.ErrPending), served(), nodereport.ProfilePending, ""},
		{"accepted, GPUs not read", "", &state{wanted: selected("g1"), profile: new(selected("g1"))}, served(listed), nodereport.ProfilePending, ""},
		{"accepted, not taken up", "", decision("g1", "g1", nil), notTakenUp, nodereport.ProfilePending, ""},
		{"accepted, not sent", "", decision("g1", "g1", nil), served(listed, unsent), nodereport.ProfilePending, ""},
		{"accepted, kubelet away", "", decision("g1", "g1", nil), served(listed, away), nodereport.ProfilePending, ""},
		{"accepted and sent", "", decision("g1", "g1", nil), served(listed, listed), nodereport.ProfileApplied, "g1"},
		{"nothing to offer", "", decision("g1", "g1", nil), served(), nodereport.ProfileApplied, "g1"},
		{"the next is accepted", "g1", decision("g2", "g2", nil), served(unsent), nodereport.ProfilePending, "g1"},
		{"the next is sent", "g1", decision("g2", "g2", nil), served(listed), nodereport.ProfileApplied, "g2"},
		{"the kubelet restarts", "g1", decision("g1", "g1", nil), served(away), nodereport.ProfileApplied, "g1"},
		{"a fault is being listed", "g1", decision("g1", "g1", nil), served(unsent), nodereport.ProfileApplied, "g1"},
		{"rejected, the last good one serves", "g1", decision("g1", "", bad), served(listed), nodereport.ProfileRejected, "g1"},
		{"rejected, the last run's one serves", "", decision("g1", "", bad), served(listed), nodereport.ProfileRejected, "g1"},
		{"choice not known, the last run's one serves", "", decision("g1", "", fmt.Errorf("label: %w", configs.ErrPending)), served(listed), nodereport.ProfilePending, "g1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := profileProgress{}
			if test.applied != "" {
				p.applied = profileRef(selected(test.applied))
			}
			got := p.next(test.state, test.status, nil, time.Unix(100, 0))
			if got.state != test.want || got.applied.Generation != test.now {
				t.Errorf("%s with %q applied, want %s with %q", got.state, got.applied.Generation, test.want, test.now)
			}
		})
	}
}

func TestProgressKeepsTime(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	p := profileProgress{}.next(decision("g1", "g1", nil), served(), nil, now)
	p = p.next(decision("g1", "g1", nil), served(), nil, now.Add(time.Minute))
	if !p.since.Equal(now) {
		t.Errorf("applied since %s, want %s", p.since, now)
	}
	p = p.next(decision("g1", "", errors.New("bad")), served(), nil, now.Add(time.Hour))
	if !p.appliedAt.Equal(now) {
		t.Errorf("the kubelet has had the lists since %s, want %s", p.appliedAt, now)
	}
	if next := p.next(decision("g2", "g2", nil), served(), nil, now.Add(2*time.Hour)); !next.appliedAt.Equal(now.Add(2 * time.Hour)) {
		t.Errorf("the kubelet has had the next lists since %s", next.appliedAt)
	}
	if !p.since.Equal(now.Add(time.Hour)) {
		t.Errorf("rejected since %s", p.since)
	}
}

func TestProgressFollowsResources(t *testing.T) {
	t.Parallel()
	s := decision("g1", "g1", nil)
	resources := func(names ...string) plugin.Status {
		var list []plugin.ResourceStatus
		for _, name := range names {
			list = append(list, plugin.ResourceStatus{Name: name, Streams: 1, Applied: true})
		}
		return served(list...)
	}
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	p := profileProgress{}.next(s, resources("b", "a"), nil, at(1))
	p = p.next(s, resources("a"), nil, at(2))
	p = p.next(s, resources(), nil, at(3))
	want := []nodereport.GoneResource{{Name: "a", Since: at(3)}, {Name: "b", Since: at(2)}}
	if diff := cmp.Diff(want, p.gone); diff != "" {
		t.Error(diff)
	}
	earlier := p
	p = p.next(s, resources("b"), nil, at(4))
	if diff := cmp.Diff(want[:1], p.gone); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(want, earlier.gone); diff != "" {
		t.Errorf("an earlier progress changed: %s", diff)
	}
}

func TestFirstProblem(t *testing.T) {
	t.Parallel()
	problems := configs.Problems{
		{File: "ConfigMap gpu/profiles[data.a]", Line: 3, Path: "sharing.x", Value: "-1", Message: "must be at least 1"},
		{File: "ConfigMap gpu/profiles[data.a]", Line: 9, Path: "y", Message: "unknown key"},
	}
	for _, test := range []struct {
		name string
		err  error
		want string
	}{
		{"problems", problems, "ConfigMap gpu/profiles[data.a]:3: sharing.x: must be at least 1 (got -1)"},
		{"a misspelt key", configs.Problems{
			{File: "p", Line: 4, Path: "a.replicas", Message: configs.Required}, {File: "p", Line: 5, Path: "a.replica", Message: "unknown key, did you mean replicas?"},
		}, "p:5: a.replica: unknown key, did you mean replicas?"},
		{"a missing key alone", configs.Problems{{File: "p", Line: 4, Path: "a.replicas", Message: configs.Required}}, "p:4: a.replicas: is required"},
		{"wrapped", fmt.Errorf("read: %w", problems), "ConfigMap gpu/profiles[data.a]:3: sharing.x: must be at least 1 (got -1)"},
		{"other", errors.New("p.yaml: flags.a: cannot change\nflags.b: cannot change"), "p.yaml: flags.a: cannot change"},
		{"no problem at all", configs.Problems{}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := firstProblem(test.err); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// TestOnTheWay checks that GPUs with another layout than the wanted one are pending, so that the last layout's
// state is not mistaken for the next one's.
func TestOnTheWay(t *testing.T) {
	t.Parallel()
	gpus := []nodereport.GPULayout{
		{GPU: "GPU-a", Wanted: "night", State: nodereport.LayoutBlocked, Reason: "in use"},
		{GPU: "GPU-b", Wanted: "day", State: nodereport.LayoutApplied},
	}
	wish := func(mig sharing.MIGConfig) *configs.SelectedProfile {
		return &configs.SelectedProfile{Config: configs.Config{Profile: sharing.Profile{MIG: mig}}}
	}
	pending := nodereport.GPULayout{GPU: "GPU-b", Wanted: "night", State: nodereport.LayoutPending}
	for _, test := range []struct {
		name    string
		profile *configs.SelectedProfile
		want    []nodereport.GPULayout
	}{
		{"another layout", wish(sharing.MIGConfig{Manage: true, Name: "night"}), []nodereport.GPULayout{gpus[0], pending}},
		{"no layout", wish(sharing.MIGConfig{Manage: true}), gpus},
		{"nothing is partitioned any more", wish(sharing.MIGConfig{Name: "night"}), gpus},
		{"no profile", nil, gpus},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := fmt.Sprint(gpus)
			if diff := cmp.Diff(test.want, pendingLayouts(gpus, test.profile)); diff != "" {
				t.Error(diff)
			}
			if fmt.Sprint(gpus) != before {
				t.Error("what was published has changed")
			}
		})
	}
}

// TestLayoutRefused tells an unknown layout in a label from other problems with a profile.
func TestLayoutRefused(t *testing.T) {
	t.Parallel()
	reporter := newFakeReporter()
	policy := selectedPolicy{newInput(named(4, "g1"), nil)}
	newRig(t, func(r *rig) { r.options.Reporter, r.options.ConfigSource = reporter, policy })
	reporter.await(t, "the profile", reported(nodereport.ProfileApplied, "Serving"))
	for _, test := range []struct {
		name string
		err  error
		want bool
	}{
		{"layout", fmt.Errorf("label: %w", configs.ErrMIGLayout), true},
		{"another problem", errors.New("p.yaml:1: x"), false},
	} {
		policy.set(selected(""), test.err)
		got := reporter.await(t, test.name, func(r nodereport.Report) bool { return r.Problem == test.err.Error() })
		if got.LayoutRefused != test.want {
			t.Errorf("%s: refused %v", test.name, got.LayoutRefused)
		}
	}
}

// TestReportsWhatASwitchWaitsFor renames the resource while a pod has a share of one of
// two GPUs.
func TestReportsWhatASwitchWaitsFor(t *testing.T) {
	t.Parallel()
	reporter := newFakeReporter()
	policy := selectedPolicy{newInput(named(4, "g1"), nil)}
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.Kubelet, r.options.ConfigSource = reporter, r.sight, policy
	})
	reporter.await(t, "the first profile", reported(nodereport.ProfileApplied, "Serving"))
	_, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "c", Requests: map[string]int{gpuResource: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	renamed := named(4, "g2")
	renamed.Profile.TimeSlicing[0].Rename = "nvidia.com/gpu.shared"
	policy.set(renamed, nil)
	waits := reporter.await(t, "the pod", func(n nodereport.Report) bool {
		return n.State == nodereport.ProfileSwitching && len(n.Waits) == 1 && strings.HasPrefix(n.Message, "nvidia.com/gpu (1 devices, 0 healthy), nvidia.com/gpu.shared (4 devices, 4 healthy); ")
	})
	if w := waits.Waits[0]; waits.Ready != nodereport.ConditionTrue || waits.Reason != "Switching" || waits.Applied.Generation != "g1" ||
		w.GPU != "GPU-a" || w.Unit != "GPU-a" || w.Index != "0" || w.Resource != gpuResource || w.Since.IsZero() || !strings.Contains(waits.Message, "GPU 0 (GPU-a), held as nvidia.com/gpu by n/p, since ") {
		t.Errorf("report %+v", waits)
	}
	r.awaitBody("/readyz", 200, "ok\nswitching waits: GPU 0 (GPU-a), held as nvidia.com/gpu by n/p")
	if err := r.kubelet.DeletePod("n", "p"); err != nil {
		t.Fatal(err)
	}
	done := reporter.await(t, "the end of the switch", reported(nodereport.ProfileApplied, "Serving"))
	if done.Applied.Generation != "g2" || len(done.Waits) > 0 || done.Message != "nvidia.com/gpu.shared (8 devices, 8 healthy)" {
		t.Errorf("report %+v", done)
	}
	r.awaitBody("/readyz", 200, "ok\n")
}

func entry(id string, healthy bool) plugin.Entry {
	unit, _, _ := sharing.ParseDeviceID(id)
	return plugin.Entry{Device: sharing.Device{ID: id, Unit: unit, Healthy: healthy}, Phase: plugin.Offered}
}

// TestProgressOfSwitches switches the sharing mode of a GPU and a partition.
func TestProgressOfSwitches(t *testing.T) {
	t.Parallel()
	since := time.Unix(50, 0)
	gpus := []sharing.GPU{{UUID: "GPU-a", Index: 0}, {UUID: "GPU-b", Index: 1, Partitions: []sharing.Partition{{UUID: "MIG-b", Index: 2}}}}
	leaves := func(id string, phase plugin.Phase, seconds int) plugin.Entry {
		e := entry(id, false)
		e.Phase, e.Switching, e.Since = phase, true, since.Add(time.Duration(seconds)*time.Second)
		return e
	}
	whole := func(id string) plugin.Entry {
		e := entry(id, true)
		e.Mode, e.Whole, e.Since = sharing.TimeSliced, true, since
		return e
	}
	vacated := leaves("GPU-a", plugin.Removing, 0)
	vacated.Unused = true
	pod := func(name, resource, id string) sharing.Allocation {
		return sharing.Allocation{Namespace: "ns", Pod: name, Container: "c", Resource: resource, Devices: []string{id}}
	}
	layout := func(state nodereport.LayoutState) []nodereport.GPULayout {
		return []nodereport.GPULayout{{GPU: "GPU-b", State: state}}
	}
	bad := errors.New("p.yaml:3: x: bad")
	for _, test := range []struct {
		name     string
		rejected error
		listed   []plugin.Entry
		layouts  []nodereport.GPULayout
		want     nodereport.ProfileState
		waits    []nodereport.Wait
	}{
		{"nothing leaves", nil, []plugin.Entry{entry("GPU-a", true)}, nil, nodereport.ProfileApplied, nil},
		{"surplus that is held", nil, []plugin.Entry{{Device: sharing.Device{ID: "GPU-a::9", Unit: "GPU-a"}, Phase: plugin.HeldSurplus}}, nil, nodereport.ProfileApplied, nil},
		{"its turn has not come", nil, []plugin.Entry{leaves("GPU-a", plugin.Offered, 0)}, nil, nodereport.ProfileSwitching, nil},
		{"free", nil, []plugin.Entry{leaves("GPU-a", plugin.Removing, 0)}, nil, nodereport.ProfileSwitching, nil},
		{"nobody can use it any more", nil, []plugin.Entry{vacated}, nil, nodereport.ProfileApplied, nil},
		{"not on this node any more", nil, []plugin.Entry{leaves("GPU-gone", plugin.HeldSurplus, 0)}, nil, nodereport.ProfileApplied, nil},
		{"held", nil, []plugin.Entry{
			leaves("MIG-b", plugin.HeldSurplus, 0), leaves("GPU-a::0", plugin.HeldSurplus, 7), leaves("GPU-a::1", plugin.HeldSurplus, 3), leaves("GPU-a::2", plugin.Removing, 0),
		}, nil, nodereport.ProfileSwitching, []nodereport.Wait{
			{GPU: "GPU-a", Unit: "GPU-a", Index: "0", Resource: "r", Pods: []string{"ns/one", "ns/two"}, Since: since.Add(3 * time.Second)},
			{GPU: "GPU-b", Unit: "MIG-b", Index: "1:2", Resource: "r", Pods: []string{}, Since: since},
		}},
		{"held, and the next profile is bad", bad, []plugin.Entry{leaves("MIG-b", plugin.HeldSurplus, 0)}, nil, nodereport.ProfileRejected, []nodereport.Wait{
			{GPU: "GPU-b", Unit: "MIG-b", Index: "1:2", Resource: "r", Pods: []string{}, Since: since},
		}},
		{"promised to a pod as a whole", nil, []plugin.Entry{whole("MIG-b")}, nil, nodereport.ProfileSwitching, []nodereport.Wait{
			{GPU: "GPU-b", Unit: "MIG-b", Index: "1:2", Resource: "r", Pods: []string{}, Since: since},
		}},
		{"not looked yet who has it", nil, []plugin.Entry{whole("GPU-a")}, nil, nodereport.ProfileSwitching, nil},
		{"a layout that waits", nil, nil, layout(nodereport.LayoutBlocked), nodereport.ProfileSwitching, nil},
		{"a GPU that is cut", nil, nil, layout(nodereport.LayoutPending), nodereport.ProfileSwitching, nil},
		{"a layout that cannot be had", nil, nil, layout(nodereport.LayoutFailed), nodereport.ProfileApplied, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			status := served(plugin.ResourceStatus{Name: "r", Streams: 1, Applied: true, Listed: test.listed})
			status.Holders = []sharing.Allocation{
				pod("two", "r", "GPU-a::1"), pod("one", "r", "GPU-a::0"), pod("one", "r", "GPU-a::1"), {Pod: "uid:1", Resource: "r", Devices: []string{"MIG-b"}},
				{Namespace: "ns", Pod: "claiming", Container: "c", Resource: "gpu.nvidia.com", Devices: []string{"GPU-a", "MIG-b"}, Claim: "claim"},
			}
			s := decision("g1", "g1", test.rejected)
			s.gpus = gpus
			for _, applied := range []string{"", "g1"} {
				p := profileProgress{}
				if applied != "" {
					p.applied = profileRef(selected(applied))
				}
				got := p.next(s, status, test.layouts, time.Unix(100, 0))
				if diff := cmp.Diff(test.waits, got.waits); diff != "" {
					t.Error(diff)
				}
				if got.state != test.want || test.want == nodereport.ProfileSwitching && got.applied.Generation != applied {
					t.Errorf("%s with %q applied, want %s with %q", got.state, got.applied.Generation, test.want, applied)
				}
			}
		})
	}
}

// sickUnits is the health of so many units.
type sickUnits struct {
	idle
	units []sharing.UnitHealth
}

func (s sickUnits) Health() sharing.HealthReport { return sharing.HealthReport{Units: s.units} }

// TestReportsPodsOfFaultyUnits checks that the report names only pods that hold a faulty unit or a partition of a
// faulty GPU. Otherwise it would change with every pod.
func TestReportsPodsOfFaultyUnits(t *testing.T) {
	t.Parallel()
	node := []sharing.GPU{{UUID: "GPU-a", MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-0"}, {UUID: "MIG-1"}}}, {UUID: "GPU-b", Index: 1}}
	holds := func(pod string, devices ...string) sharing.Allocation {
		return sharing.Allocation{Namespace: "n", Pod: pod, Container: "c", Resource: gpuResource, Devices: devices}
	}
	held := []sharing.Allocation{holds("p", "MIG-0::0"), holds("q", "MIG-1::0"), holds("r", "MIG-1::1", "GPU-b"), {Resource: gpuResource, Devices: []string{"MIG-0::1"}}}
	held = append(held, sharing.Allocation{Namespace: "n", Pod: "claimer", Resource: "gpu.nvidia.com", Devices: []string{"GPU-b"}, Claim: "c"},
		sharing.Allocation{Namespace: "n", Pod: "anywhere", Resource: "gpu.example.com", Devices: []string{"GPU-a", "GPU-b"}, Claim: "c", AnyGPU: true})
	unit := func(uuid, gpu string, state sharing.HealthState) sharing.UnitHealth {
		return sharing.UnitHealth{Unit: uuid, GPU: gpu, State: state}
	}
	for _, test := range []struct {
		name  string
		units []sharing.UnitHealth
		want  map[string][]string
	}{
		{"none is faulty", []sharing.UnitHealth{unit("GPU-a", "GPU-a", sharing.Healthy), unit("MIG-0", "GPU-a", sharing.Recovering)}, map[string][]string{}},
		{"a partition", []sharing.UnitHealth{unit("GPU-a", "GPU-a", sharing.Healthy), unit("MIG-1", "GPU-a", sharing.Suspect)}, map[string][]string{"MIG-1": {"n/q", "n/r"}}},
		{"a GPU with partitions", []sharing.UnitHealth{unit("GPU-a", "GPU-a", sharing.Unhealthy), unit("MIG-1", "GPU-a", sharing.Healthy)}, map[string][]string{"GPU-a": {"n/p", "n/q", "n/r"}}},
		{"a GPU", []sharing.UnitHealth{unit("GPU-b", "GPU-b", sharing.Unhealthy)}, map[string][]string{"GPU-b": {"n/claimer (claim c)", "n/r"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &reports{
				current:  &current{},
				health:   sickUnits{units: test.units},
				guard:    memoryguard.New(memoryguard.Options{}),
				unserved: func() []error { return nil },
			}
			report := r.report(&state{gpus: node}, profileProgress{}, plugin.Status{Holders: held})
			if diff := cmp.Diff(test.want, report.Hit); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestReportsWithDRA has a second subscriber of the plugin's changes. It once took every other change, so the
// first profile was never reported as applied.
func TestReportsWithDRA(t *testing.T) {
	t.Parallel()
	reporter, policy := newFakeReporter(), selectedPolicy{newInput(named(2, "g2"), nil)}
	newRig(t, func(r *rig) {
		r.options.Kubelet, r.options.Reporter, r.options.ConfigSource = r.sight, reporter, policy
		r.options.DRA = draOptions(r, &fakeDRA{}, &memory{})
	})
	for replicas := 2; replicas < 8; replicas++ {
		generation := fmt.Sprintf("g%d", replicas)
		policy.set(named(replicas, generation), nil)
		reporter.await(t, generation, func(r nodereport.Report) bool {
			return r.State == nodereport.ProfileApplied && r.Applied.Generation == generation
		})
	}
}
