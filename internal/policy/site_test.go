package policy

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
)

// site is a node's policy over two fake servers, and what it would have had
// applied.
type site struct {
	t           *testing.T
	nodes, maps *fakeServer
	policy      *Node
	mu          sync.Mutex
	applied     []string
	problem     error
	// problems counts looks that found one.
	problems int
	stop     func()
}

func newSite(t *testing.T, change func(*Node)) *site {
	t.Helper()
	s := &site{t: t, nodes: newFakeServer(), maps: newFakeServer()}
	log := slog.New(slog.DiscardHandler)
	s.policy = &Node{
		Labels: newLabels("n1", labelName, log, func(into sink) *feed { return s.nodes.feed("node n1", into, log) }),
		Shelf:  newConfigMap("gpu", "profiles", log, func(what string, into sink) *feed { return s.maps.feed(what, into, log) }),
	}
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.policy.Started = started.Process
	if change != nil {
		change(s.policy)
	}
	return s
}

func (s *site) run() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.policy.Watch(ctx, s.look) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				s.t.Error(err)
			}
		case <-time.After(10 * time.Second):
			s.t.Error("the policy does not end")
		}
	})
	s.t.Cleanup(s.stop)
}

// look does what the agent does at every change.
func (s *site) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	selected, err := s.policy.Profile()
	if s.problem = err; err != nil {
		s.problems++
		return
	}
	if next := selected.Generation; len(s.applied) == 0 || s.applied[len(s.applied)-1] != next {
		s.applied = append(s.applied, next)
	}
}

// await waits for the generation in force and a part of the problem, "" for
// none.
func (s *site) await(generation, problem string) {
	s.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		s.mu.Lock()
		have, err := "", s.problem
		if len(s.applied) > 0 {
			have = s.applied[len(s.applied)-1]
		}
		s.mu.Unlock()
		if have == generation && (err == nil) == (problem == "") && (err == nil || strings.Contains(err.Error(), problem)) {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("in force %q, problem %v; want %q, %q", have, err, generation, problem)
		}
		<-time.After(5 * time.Millisecond)
	}
}

func generation(t *testing.T, text string) string {
	t.Helper()
	config, err := configs.Parse("", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return configs.Generation(config.Profile)
}
