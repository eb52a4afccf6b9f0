package agent

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// selected is a profile by its generation alone.
func selected(generation string) configs.Selected {
	return configs.Selected{Name: "a", Source: "ConfigMap gpu/profiles", Generation: generation}
}

// decision is what the loop decides about the wanted profile.
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
	listed := plugin.ResourceStatus{Name: gpuResource, Streams: 1, Sent: true}
	unsent, away := listed, listed
	unsent.Sent, away.Streams = false, 0
	var notTakenUp plugin.Status
	bad := errors.New("p.yaml:3: replicas: must be at least 1")
	for _, test := range []struct {
		name    string
		applied string // before
		state   *state
		status  plugin.Status
		want    sharing.ProfileState
		now     string // applied after
	}{
		{"nothing known", "", &state{}, notTakenUp, sharing.ProfilePending, ""},
		{"nothing known, nothing served", "", &state{}, served(), sharing.ProfilePending, ""},
		{"rejected from the start", "", decision("", "", bad), served(), sharing.ProfileRejected, ""},
		{"choice not known", "", decision("", "", configs.ErrPending), served(), sharing.ProfilePending, ""},
		{"accepted, GPUs not read", "", &state{wanted: selected("g1"), profile: new(selected("g1"))}, served(listed), sharing.ProfilePending, ""},
		{"accepted, not taken up", "", decision("g1", "g1", nil), notTakenUp, sharing.ProfilePending, ""},
		{"accepted, not sent", "", decision("g1", "g1", nil), served(listed, unsent), sharing.ProfilePending, ""},
		{"accepted, kubelet away", "", decision("g1", "g1", nil), served(listed, away), sharing.ProfilePending, ""},
		{"accepted and sent", "", decision("g1", "g1", nil), served(listed, listed), sharing.ProfileApplied, "g1"},
		{"nothing to offer", "", decision("g1", "g1", nil), served(), sharing.ProfileApplied, "g1"},
		{"the next is accepted", "g1", decision("g2", "g2", nil), served(unsent), sharing.ProfilePending, "g1"},
		{"the next is sent", "g1", decision("g2", "g2", nil), served(listed), sharing.ProfileApplied, "g2"},
		{"the kubelet restarts", "g1", decision("g1", "g1", nil), served(away), sharing.ProfileApplied, "g1"},
		{"a fault is being listed", "g1", decision("g1", "g1", nil), served(unsent), sharing.ProfileApplied, "g1"},
		{"rejected, the last good one serves", "g1", decision("g1", "", bad), served(listed), sharing.ProfileRejected, "g1"},
		{"rejected, the last run's one serves", "", decision("g1", "", bad), served(listed), sharing.ProfileRejected, "g1"},
		{"choice not known, the last run's one serves", "", decision("g1", "", fmt.Errorf("label: %w", configs.ErrPending)), served(listed), sharing.ProfilePending, "g1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := progress{}
			if test.applied != "" {
				p.applied = refOf(selected(test.applied))
			}
			got := p.after(test.state, test.status, time.Unix(100, 0))
			if got.state != test.want || got.applied.Generation != test.now {
				t.Errorf("%s with %q applied, want %s with %q", got.state, got.applied.Generation, test.want, test.now)
			}
		})
	}
}

func TestProgressKeepsTime(t *testing.T) {
	now := time.Unix(1000, 0)
	p := progress{}.after(decision("g1", "g1", nil), served(), now)
	p = p.after(decision("g1", "g1", nil), served(), now.Add(time.Minute))
	if !p.since.Equal(now) {
		t.Errorf("applied since %s, want %s", p.since, now)
	}
	p = p.after(decision("g1", "", errors.New("bad")), served(), now.Add(time.Hour))
	if !p.appliedAt.Equal(now) {
		t.Errorf("the kubelet has had the lists since %s, want %s", p.appliedAt, now)
	}
	if next := p.after(decision("g2", "g2", nil), served(), now.Add(2*time.Hour)); !next.appliedAt.Equal(now.Add(2 * time.Hour)) {
		t.Errorf("the kubelet has had the next lists since %s", next.appliedAt)
	}
	if !p.since.Equal(now.Add(time.Hour)) {
		t.Errorf("rejected since %s", p.since)
	}
}

func TestProgressFollowsResources(t *testing.T) {
	s := decision("g1", "g1", nil)
	resources := func(names ...string) plugin.Status {
		var list []plugin.ResourceStatus
		for _, name := range names {
			list = append(list, plugin.ResourceStatus{Name: name, Streams: 1, Sent: true})
		}
		return served(list...)
	}
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	p := progress{}.after(s, resources("b", "a"), at(1))
	p = p.after(s, resources("a"), at(2))
	p = p.after(s, resources(), at(3))
	want := []sharing.GoneResource{{Name: "a", Since: at(3)}, {Name: "b", Since: at(2)}}
	if diff := cmp.Diff(want, p.gone); diff != "" {
		t.Error(diff)
	}
	earlier := p
	p = p.after(s, resources("b"), at(4))
	if diff := cmp.Diff(want[:1], p.gone); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(want, earlier.gone); diff != "" {
		t.Errorf("an earlier progress changed: %s", diff)
	}
}

func TestFirstProblem(t *testing.T) {
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

func TestGenerationNumber(t *testing.T) {
	for _, test := range []struct {
		text string
		want float64
		ok   bool
	}{
		{"", 0, false}, {"x", 0, false}, {"0000000000ff", 255, true}, {"ffffffffffff", 1<<48 - 1, true},
	} {
		if got, ok := generationNumber(test.text); ok != test.ok || ok && got != test.want {
			t.Errorf("%q is %v, %t", test.text, got, ok)
		}
	}
}
