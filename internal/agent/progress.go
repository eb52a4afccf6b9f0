package agent

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// progress is how far the wanted profile has come. It is immutable.
type progress struct {
	state sharing.ProfileState
	since time.Time
	// applied is the profile whose lists the kubelet has; zero before the first.
	applied sharing.ProfileRef
	// appliedAt is since when it has them.
	appliedAt time.Time
	// advertised are the resources that are served, gone those that were, by
	// name.
	advertised []string
	gone       []sharing.GoneResource
}

// after is the progress that follows p when the loop has decided s and the
// manager serves it like status. A profile that was applied stays so when a
// stream ends: it is the kubelet that is away then.
func (p progress) after(s *state, status plugin.Status, now time.Time) progress {
	if s.planned && s.profile != nil && delivered(status) && p.applied != refOf(*s.profile) {
		p.applied, p.appliedAt = refOf(*s.profile), now
	}
	next := sharing.ProfilePending
	switch {
	case errors.Is(s.rejected, configs.ErrPending):
	case s.rejected != nil:
		next = sharing.ProfileRejected
	case s.profile != nil && p.applied == refOf(*s.profile):
		next = sharing.ProfileApplied
	}
	if next != p.state {
		p.state, p.since = next, now
	}
	return p.follow(status, now)
}

// follow keeps account of the resources that come and go.
func (p progress) follow(status plugin.Status, now time.Time) progress {
	var advertised []string
	for _, r := range status.Resources {
		advertised = append(advertised, r.Name)
	}
	gone := slices.Clone(p.gone)
	for _, name := range p.advertised {
		if !slices.Contains(advertised, name) {
			gone = append(gone, sharing.GoneResource{Name: name, Since: now})
		}
	}
	gone = slices.DeleteFunc(gone, func(g sharing.GoneResource) bool { return slices.Contains(advertised, g.Name) })
	slices.SortFunc(gone, func(a, b sharing.GoneResource) int { return strings.Compare(a.Name, b.Name) })
	p.advertised, p.gone = advertised, gone
	return p
}

// delivered says that the kubelet has the lists of the last plan.
func delivered(status plugin.Status) bool {
	return status.Served && !slices.ContainsFunc(status.Resources, func(r plugin.ResourceStatus) bool {
		return r.Streams != 1 || !r.Sent
	})
}

// refOf names a profile.
func refOf(s configs.Selected) sharing.ProfileRef {
	return sharing.ProfileRef{Name: s.Name, Source: s.Source, Generation: s.Generation}
}

// status is the progress as it is shown.
func (p progress) status(s *state) ProfileStatus {
	status := ProfileStatus{State: p.state, Since: p.since, Wanted: refOf(s.wanted)}
	if p.applied != (sharing.ProfileRef{}) {
		applied := p.applied
		status.Applied = &applied
	}
	if s.rejected != nil {
		status.Problem, status.Error = firstProblem(s.rejected), s.rejected.Error()
	}
	return status
}

// firstProblem is the first thing that the error says, with its place.
func firstProblem(err error) string {
	if problems := configs.Problems(nil); errors.As(err, &problems) && len(problems) > 0 {
		return problems[0].Error()
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return first
}
