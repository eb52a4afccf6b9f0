package soak

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/policy/report"
	"github.com/virgate/virgate/internal/state"
)

// profiles is where a program has its profile from, as in
// cmd/virgate/cluster.go.
type profiles struct {
	node    *policy.Node
	ahead   *policy.Ahead
	started configs.Process
}

func openProfiles(ctx context.Context, api *policy.API, kept state.Profile, reporter *report.Reporter, log *slog.Logger) (profiles, error) {
	flags, err := configs.Parse("", nil, configs.Overrides{})
	if err != nil {
		return profiles{}, err
	}
	p := profiles{started: flags.Process}
	patience := 5 * time.Second
	if stored, ok := kept.Peek(); ok {
		if last, err := policy.Restore(stored, configs.Overrides{}); err == nil {
			p.started, patience = last.Process, time.Second
		}
	}
	labels := policy.NewLabels(api, nodeName, profileLabel, log)
	labels.Replaced = reporter.NodeReplaced
	p.node = &policy.Node{Labels: labels, Shelf: policy.NewConfigMap(api, "gpu", "profiles", log)}
	p.ahead = policy.WatchAhead(ctx, p.node.Watch)
	waiting, done := context.WithTimeout(ctx, patience)
	defer done()
	p.ahead.Await(waiting, func() bool {
		wanted, err := p.node.Wanted()
		if err == nil {
			p.started = wanted.Process
		}
		return !errors.Is(err, configs.ErrPending)
	})
	p.node.Started = p.started
	return p, nil
}

// seenPolicy is the program's policy, which remembers what the program has seen
// of it: the loop calls Profile whenever it decides.
type seenPolicy struct {
	profiles atomic.Pointer[profiles]

	mu sync.Mutex
	// edit and layout are those of the last profile that could be used.
	edit   int
	layout string
	err    error
	looks  int
}

func (s *seenPolicy) use(p profiles) { s.profiles.Store(&p) }

var editLine = regexp.MustCompile(`(?m)^# edit (\d+)\.$`)

// Profile implements agent.Policy.
func (s *seenPolicy) Profile() (configs.Selected, error) {
	selected, err := s.profiles.Load().node.Profile()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looks++
	s.err = err
	if err == nil {
		if written := editLine.FindStringSubmatch(selected.Documents[selected.Name]); written != nil {
			s.edit, _ = strconv.Atoi(written[1])
		}
		s.layout = selected.Layout
	}
	return selected, err
}

// Watch implements agent.Policy.
func (s *seenPolicy) Watch(ctx context.Context, changed func()) error {
	return s.profiles.Load().ahead.Watch(ctx, changed)
}

// look is what was last seen, and how often it was looked at.
func (s *seenPolicy) look() (edit int, layout string, looks int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.edit, s.layout, s.looks, s.err
}

// missing says that the last thing seen is not the wish; empty when it is.
func (s *seenPolicy) missing(want wish) string {
	edit, layout, _, err := s.look()
	label := ""
	if want.labelled {
		label = want.layout
	}
	switch {
	case err != nil:
		return fmt.Sprintf("profile: %v, want edit %d", err, want.edit)
	case edit != want.edit:
		return fmt.Sprintf("profile: edit %d seen, want %d", edit, want.edit)
	case layout != label:
		return fmt.Sprintf("profile: MIG label %q seen, want %q", layout, label)
	}
	return ""
}

// awaited says why the operation has to wait on; empty when it has not.
func (s *seenPolicy) awaited(o operation) string {
	if !o.rejected {
		return s.missing(*o.wish)
	}
	if _, _, _, err := s.look(); err == nil || errors.Is(err, configs.ErrPending) {
		return "the profile is not rejected"
	}
	return ""
}
