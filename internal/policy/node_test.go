package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
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

// TestNothingBeforeTheLabel is B11 of other plugins: the default must not come
// into force while the label is not known, however long that takes.
func TestNothingBeforeTheLabel(t *testing.T) {
	s := newSite(t, func(n *Node) { n.Default = "four" })
	s.nodes.change("n1", fakeNode("n1", "ten"))
	s.maps.change("profiles", fakeConfigMap(map[string]string{"four": four, "ten": ten}))
	s.nodes.setAway(errors.New("connection refused"))
	s.run()
	s.await("", "node n1: not known yet: list node n1: connection refused")
	if _, err := s.policy.Profile(); !errors.Is(err, configs.ErrPending) {
		t.Errorf("%v is not pending", err)
	}
	s.nodes.setAway(nil)
	s.await(generation(t, ten), "")
	if len(s.applied) != 1 {
		t.Errorf("applied %q, want one", s.applied)
	}
}

// TestServerAway: what was last seen stays, and what changed meanwhile is seen
// when it is back, also where the watch cannot go on.
func TestServerAway(t *testing.T) {
	for _, test := range []struct {
		name   string
		expire bool
		lists  int
	}{{"and back", false, 1}, {"and back, having forgotten", true, 2}} {
		t.Run(test.name, func(t *testing.T) {
			s := newSite(t, nil)
			s.nodes.change("n1", fakeNode("n1", "a"))
			s.maps.change("profiles", fakeConfigMap(map[string]string{"a": four}))
			s.run()
			s.await(generation(t, four), "")
			s.maps.setAway(errors.New("connection refused"))
			s.maps.change("profiles", fakeConfigMap(map[string]string{"a": ten}))
			if test.expire {
				s.maps.expire()
			}
			s.nodes.change("n1", fakeNode("n1", "b"))
			s.await(generation(t, four), `wants "b": it holds a`)
			s.nodes.change("n1", fakeNode("n1", "a"))
			s.await(generation(t, four), "")
			s.maps.setAway(nil)
			s.await(generation(t, ten), "")
			if s.stop(); s.maps.lists != test.lists || s.nodes.lists != 1 || s.nodes.opened != 1 {
				t.Errorf("%d lists of the ConfigMap, %d of the node, %d watches", s.maps.lists, s.nodes.lists, s.nodes.opened)
			}
		})
	}
}

// TestDeletedWhileAway is B15 of other plugins: a Node that goes while nobody
// watches.
func TestDeletedWhileAway(t *testing.T) {
	s := newSite(t, nil)
	s.nodes.change("n1", fakeNode("n1", "a"))
	s.maps.change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten}))
	s.run()
	s.await(generation(t, four), "")
	s.nodes.setAway(errors.New("connection refused"))
	s.nodes.change("n1", nil)
	s.nodes.expire()
	s.nodes.setAway(nil)
	s.await(generation(t, four), "node n1: not there")
	s.nodes.change("n1", fakeNode("n1", "b"))
	s.await(generation(t, ten), "")
}

// TestOtherObjects: what a server sends beyond what was asked for is ignored.
func TestOtherObjects(t *testing.T) {
	third := strings.Replace(four, "4", "3", 1)
	s := newSite(t, nil)
	s.nodes.change("n2", fakeNode("n2", "b"))
	s.nodes.change("n1", fakeNode("n1", "a"))
	s.maps.change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten, "c": third}))
	s.run()
	s.await(generation(t, four), "")
	before := s.problems
	s.nodes.change("n2", fakeNode("n2", ""))
	s.nodes.change("n2", fakeNode("n2", "b"))
	s.nodes.change("n2", nil)
	s.nodes.change("n1", fakeNode("n1", "c"))
	s.await(generation(t, third), "")
	s.stop()
	if len(s.applied) != 2 || s.problems != before {
		t.Errorf("applied %q, want two; %d problems, want none", s.applied, s.problems-before)
	}
}

// TestSettingOfTheProcess: a profile that changes one is refused as a whole.
func TestSettingOfTheProcess(t *testing.T) {
	s := newSite(t, nil)
	s.nodes.change("n1", fakeNode("n1", "a"))
	s.maps.change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten + "flags: {nvidiaDriverRoot: /x, failOnInitError: false}\n"}))
	s.run()
	s.await(generation(t, four), "")
	s.nodes.change("n1", fakeNode("n1", "b"))
	s.await(generation(t, four), "ConfigMap gpu/profiles[b]: flags.failOnInitError: cannot change while the program runs (is true, wanted false)")
	s.await(generation(t, four), "flags.nvidiaDriverRoot: cannot change while the program runs (is /, wanted /x)")
	if wanted, err := s.policy.Profile(); err == nil || wanted.Name != "b" || wanted.Generation != "" {
		t.Errorf("got %+v, %v; want the name alone", wanted, err)
	}
}

// TestAnySequenceOfChanges: whatever happens to label and ConfigMap, the profile
// in force ends as the choice over the last state, and what came into force on
// the way were right choices, in order: each for a label and a ConfigMap that
// were there, neither older than the one before. (The two have no common order:
// a node may see the one change before the other.)
func TestAnySequenceOfChanges(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			h := &history{site: newSite(t, func(n *Node) { n.Fallbacks = []Fallback{Named, Single} }), random: rand.New(rand.NewPCG(seed, 1))}
			h.labels, h.shelves = []*string{nil}, []configs.Documents{nil}
			h.run()
			for range 60 {
				h.change()
			}
			label := "a"
			h.setLabel(&label)
			last := h.setShelf(configs.Documents{"a": h.unique()})
			h.await(generation(t, last["a"]), "")
			h.stop()
			h.judge()
		})
	}
}

// history is what happened to label and ConfigMap, from the beginning.
type history struct {
	*site
	random  *rand.Rand
	labels  []*string
	shelves []configs.Documents
	made    int
}

// unique is a document that was never there before.
func (h *history) unique() string {
	h.made++
	return strings.Replace(four, "4", fmt.Sprint(h.made), 1)
}

func (h *history) setLabel(value *string) {
	h.labels = append(h.labels, value)
	if value == nil {
		h.nodes.change("n1", nil)
		return
	}
	h.nodes.change("n1", fakeNode("n1", *value))
}

func (h *history) setShelf(shelf configs.Documents) configs.Documents {
	h.shelves = append(h.shelves, shelf)
	if shelf == nil {
		h.maps.change("profiles", nil)
	} else {
		h.maps.change("profiles", fakeConfigMap(shelf))
	}
	return shelf
}

func (h *history) change() {
	names := []string{"", "a", "b", "default"}
	switch h.random.IntN(18) {
	case 0:
		h.setLabel(nil)
	case 1:
		h.setShelf(nil)
	case 2:
		h.nodes.expire()
	case 3:
		h.maps.expire()
	case 16:
		h.nodes.drop()
	case 17:
		h.maps.drop()
	case 4, 5, 6, 7, 8:
		label := names[h.random.IntN(len(names))]
		h.setLabel(&label)
	default:
		shelf := configs.Documents{}
		for _, name := range names[1:] {
			switch h.random.IntN(4) {
			case 0:
			case 1:
				shelf[name] = "{broken"
			default:
				shelf[name] = h.unique()
			}
		}
		h.setShelf(shelf)
	}
	// Some changes come one by one, others at once.
	if h.random.IntN(3) == 0 {
		<-time.After(time.Duration(h.random.IntN(5)) * time.Millisecond)
	}
}

// judge finds for each profile that came into force when it was right.
func (h *history) judge() {
	label, shelf := 0, 0
	for step, applied := range h.applied {
		name, from := "", -1
		for i := shelf; i < len(h.shelves) && from < 0; i++ {
			for _, candidate := range h.shelves[i].Profiles() {
				if selected, err := h.shelves[i].Select("", candidate, nil); err == nil && selected.Generation == applied {
					name, from = candidate, i
				}
			}
		}
		if from < 0 {
			h.t.Fatalf("step %d: %s was in no ConfigMap since number %d", step, applied, shelf)
		}
		shelf = from
		for ; ; label++ {
			if label == len(h.labels) {
				h.t.Fatalf("step %d: %s was wanted by no later label", step, name)
			}
			if h.labels[label] == nil {
				continue
			}
			wish := Wish{Label: *h.labels[label], Fallbacks: h.policy.Fallbacks, Names: h.shelves[shelf].Profiles()}
			if chosen, err := Choose(wish); err == nil && chosen == name {
				break
			}
		}
	}
}

// TestReadsOnce: what has not changed is not read again, however often it is
// asked for, since a fault of a GPU must not wait for a mebibyte of YAML.
func TestReadsOnce(t *testing.T) {
	s := newSite(t, nil)
	s.maps.change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten}))
	s.nodes.change("n1", fakeNode("n1", "a"))
	s.run()
	s.await(generation(t, four), "")
	s.stop()
	first := s.policy.last.Load()
	for range 3 {
		if _, err := s.policy.Profile(); err != nil || first == nil || s.policy.last.Load() != first {
			t.Errorf("read again, %v", err)
		}
	}
}
