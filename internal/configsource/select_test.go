package configsource

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/quick"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
)

func TestChoose(t *testing.T) {
	const label = "nvidia.com/device-plugin.config"
	two, all := []string{"a", "b"}, []Fallback{FallbackNamed, FallbackSingle, FallbackEmpty}
	for _, test := range []struct {
		name string
		wish Criteria
		want string
		err  string // part of it; "" without one
	}{
		{"the label", Criteria{LabelName: label, Label: "b", Default: "a", Names: two}, "b", ""},
		{"the label names nothing", Criteria{LabelName: label, Label: "c", Default: "a", Fallbacks: all, Names: two}, "c", `the node label nvidia.com/device-plugin.config names "c", which does not exist: the profiles are a, b`},
		{"the default", Criteria{LabelName: label, Default: "a", Fallbacks: all, Names: two}, "a", ""},
		{"the default names nothing", Criteria{Default: "c", Fallbacks: all, Names: two}, "c", `the default names "c", which does not exist: the profiles are a, b`},
		{"named", Criteria{Fallbacks: all, Names: []string{"a", "default"}}, "default", ""},
		{"named, without such a name", Criteria{Fallbacks: []Fallback{FallbackNamed}, Names: two}, "", "no fallback"},
		{"single", Criteria{Fallbacks: all, Names: []string{"a"}}, "a", ""},
		{"single, of two", Criteria{Fallbacks: []Fallback{FallbackSingle}, Names: two}, "", "no fallback"},
		{"empty", Criteria{Fallbacks: all, Names: two}, "", ""},
		{"the order counts", Criteria{Fallbacks: []Fallback{FallbackSingle, FallbackNamed}, Names: []string{"default"}}, "default", ""},
		{"empty before named", Criteria{Fallbacks: []Fallback{FallbackEmpty, FallbackNamed}, Names: []string{"default"}}, "", ""},
		{"nothing wanted", Criteria{LabelName: label, Names: two}, "", "the node has no label " + label},
		{"no profiles", Criteria{Fallbacks: all}, "", "there are no profiles"},
		{"no profiles, and a label", Criteria{Label: "a", Fallbacks: all}, "a", "there are no profiles"},
	} {
		t.Run(test.name, func(t *testing.T) {
			chosen, err := Choose(test.wish)
			got := chosen.Name
			if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("got %q, %v; want %q, %q", got, err, test.want, test.err)
			}
		})
	}
}

// TestChooseProperties checks that the choice exists, that the label outranks everything, and that the order of
// names does not matter.
func TestChooseProperties(t *testing.T) {
	names := []string{"", "a", "b", "c", "default"}
	property := func(label, preset, bits, order uint8) bool {
		w := Criteria{Label: names[int(label)%len(names)], Default: names[int(preset)%len(names)]}
		for i, name := range names[1:] {
			if bits>>i&1 == 1 {
				w.Names = append(w.Names, name)
			}
		}
		for i, fallback := range []Fallback{FallbackNamed, FallbackSingle, FallbackEmpty} {
			if order>>i&1 == 1 {
				w.Fallbacks = append(w.Fallbacks, fallback)
			}
		}
		chosen, err := Choose(w)
		got := chosen.Name
		slices.Reverse(w.Names)
		again, errAgain := Choose(w)
		switch {
		case got != again.Name || (err == nil) != (errAgain == nil):
			return false
		case w.Label != "":
			return got == w.Label && (err == nil) == slices.Contains(w.Names, got)
		case err == nil && got != "":
			return slices.Contains(w.Names, got)
		case err == nil:
			return slices.Contains(w.Fallbacks, FallbackEmpty) && len(w.Names) > 0
		}
		return true
	}
	if err := quick.Check(property, &quick.Config{MaxCount: 20_000}); err != nil {
		t.Error(err)
	}
}

func TestParseFallbacks(t *testing.T) {
	for _, test := range []struct {
		in   string
		want []Fallback
		err  string
	}{
		{"", nil, ""},
		{"named,single", []Fallback{FallbackNamed, FallbackSingle}, ""},
		{" empty , named ", []Fallback{FallbackEmpty, FallbackNamed}, ""},
		{"named,name", nil, `expected named, single or empty (got "name")`},
		{"single,single", nil, "listed twice"},
	} {
		got, err := ParseFallbacks(test.in)
		if diff := cmp.Diff(test.want, got); diff != "" || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%q: %v, %v", test.in, got, err)
		}
	}
}

func FuzzParseFallbacks(f *testing.F) {
	f.Add("named,single,empty")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseFallbacks(s)
		if err != nil {
			return
		}
		var text []string
		for _, fallback := range got {
			text = append(text, string(fallback))
		}
		again, err := ParseFallbacks(strings.Join(text, ","))
		if err != nil || !slices.Equal(got, again) {
			t.Errorf("%q: %v, then %v, %v", s, got, again, err)
		}
	})
}

// TestNothingBeforeTheLabel is B11 of other plugins: the default must not come into force before the label is
// known, however long that takes.
func TestNothingBeforeTheLabel(t *testing.T) {
	s := newTestNode(t, func(n *NodeSource) { n.Default = "four" })
	s.nodes.Change("n1", fakeNode("n1", "ten"))
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"four": four, "ten": ten}))
	s.nodes.SetAway(errors.New("connection refused"))
	s.run()
	s.await("", "node n1: not known yet: list node n1: connection refused")
	if _, err := s.source.Profile(); !errors.Is(err, configs.ErrPending) {
		t.Errorf("%v is not pending", err)
	}
	s.nodes.SetAway(nil)
	s.await(generation(t, ten), "")
	if len(s.applied) != 1 {
		t.Errorf("applied %q, want one", s.applied)
	}
}

// TestServerAway checks that while the server is away the last state stays, and that changes made meanwhile are
// seen when it is back, even if the watch cannot go on.
func TestServerAway(t *testing.T) {
	for _, test := range []struct {
		name   string
		expire bool
		lists  int
	}{{"and back", false, 1}, {"and back, having forgotten", true, 2}} {
		t.Run(test.name, func(t *testing.T) {
			s := newTestNode(t, nil)
			s.nodes.Change("n1", fakeNode("n1", "a"))
			s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": ten}))
			s.run()
			s.await(generation(t, ten), "")
			// The Reflector takes a watch without an event in its first second for a broken one, and lists.
			s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": four}))
			s.await(generation(t, four), "")
			s.maps.SetAway(errors.New("connection refused"))
			s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": ten}))
			if test.expire {
				s.maps.Expire()
			}
			s.nodes.Change("n1", fakeNode("n1", "b"))
			s.await(generation(t, four), `names "b", which does not exist: the profiles are a`)
			s.nodes.Change("n1", fakeNode("n1", "a"))
			s.await(generation(t, four), "")
			s.maps.SetAway(nil)
			s.await(generation(t, ten), "")
			s.stop()
			ofMap, _ := s.maps.Answered()
			if lists, watches := s.nodes.Answered(); ofMap != test.lists || lists != 1 || watches != 1 {
				t.Errorf("%d lists of the ConfigMap, %d of the node, %d watches", ofMap, lists, watches)
			}
		})
	}
}

// TestDeletedWhileAway is B15 of other plugins: a Node is deleted while the watch is down.
func TestDeletedWhileAway(t *testing.T) {
	s := newTestNode(t, nil)
	s.nodes.Change("n1", fakeNode("n1", "a"))
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten}))
	s.run()
	s.await(generation(t, four), "")
	s.nodes.SetAway(errors.New("connection refused"))
	s.nodes.Change("n1", nil)
	s.nodes.Expire()
	s.nodes.SetAway(nil)
	s.await(generation(t, four), "node n1: not there")
	s.nodes.Change("n1", fakeNode("n1", "b"))
	s.await(generation(t, ten), "")
}

// TestOtherObjects checks that objects that were not requested are ignored.
func TestOtherObjects(t *testing.T) {
	third := strings.Replace(four, "4", "3", 1)
	s := newTestNode(t, nil)
	s.nodes.Change("n2", fakeNode("n2", "b"))
	s.nodes.Change("n1", fakeNode("n1", "a"))
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten, "c": third}))
	s.run()
	s.await(generation(t, four), "")
	before := s.problems
	s.nodes.Change("n2", fakeNode("n2", ""))
	s.nodes.Change("n2", fakeNode("n2", "b"))
	s.nodes.Change("n2", nil)
	s.nodes.Change("n1", fakeNode("n1", "c"))
	s.await(generation(t, third), "")
	s.stop()
	if len(s.applied) != 2 || s.problems != before {
		t.Errorf("applied %q, want two; %d problems, want none", s.applied, s.problems-before)
	}
}

// TestSettingOfTheProcess checks that a profile that changes a process setting is refused as a whole.
func TestSettingOfTheProcess(t *testing.T) {
	s := newTestNode(t, nil)
	s.nodes.Change("n1", fakeNode("n1", "a"))
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten + "flags: {nvidiaDriverRoot: /x, failOnInitError: false}\n"}))
	s.run()
	s.await(generation(t, four), "")
	s.nodes.Change("n1", fakeNode("n1", "b"))
	s.await(generation(t, four), "ConfigMap gpu/profiles[b]: flags.failOnInitError: cannot change while the program runs (is true, wanted false)")
	s.await(generation(t, four), "flags.nvidiaDriverRoot: cannot change while the program runs (is /, wanted /x)")
	if wanted, err := s.source.Profile(); err == nil || wanted.Name != "b" || wanted.Generation != "" {
		t.Errorf("got %+v, %v; want the name alone", wanted, err)
	}
}

// TestReadsOnce checks that an unchanged profile is not read again: handling a GPU's fault must not wait for a
// mebibyte of YAML.
func TestReadsOnce(t *testing.T) {
	s := newTestNode(t, nil)
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten}))
	s.nodes.Change("n1", fakeNode("n1", "a"))
	s.run()
	s.await(generation(t, four), "")
	s.stop()
	first := s.source.last.Load()
	for range 3 {
		if _, err := s.source.Profile(); err != nil || first == nil || s.source.last.Load() != first {
			t.Errorf("read again, %v", err)
		}
	}
}

// TestAnySequenceOfChanges checks that for any changes of label and ConfigMap, the profile in force ends as the
// choice over the last state. Each profile on the way was a right choice for a label and a ConfigMap that existed,
// neither older than the one before. (The two have no common order: a node may see one change before the other.)
func TestAnySequenceOfChanges(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { testSequenceOfChanges(t, seed) })
		})
	}
}

func testSequenceOfChanges(t *testing.T, seed uint64) {
	h := &history{testNode: newTestNode(t, func(n *NodeSource) { n.Fallbacks = []Fallback{FallbackNamed, FallbackSingle} }), random: rand.New(rand.NewPCG(seed, 1))}
	h.labels, h.configMaps = []*string{nil}, []configs.Documents{nil}
	h.run()
	for range 60 {
		h.change()
	}
	label := "a"
	h.setLabel(&label)
	last := h.setConfigMap(configs.Documents{"a": h.unique()})
	h.await(generation(t, last["a"]), "")
	h.stop()
	h.judge()
}

// history has all changes of label and ConfigMap, from the beginning.
type history struct {
	*testNode
	random     *rand.Rand
	labels     []*string
	configMaps []configs.Documents
	made       int
}

// unique is a new document each time.
func (h *history) unique() string {
	h.made++
	return strings.Replace(four, "4", fmt.Sprint(h.made), 1)
}

func (h *history) setLabel(value *string) {
	h.labels = append(h.labels, value)
	if value == nil {
		h.nodes.Change("n1", nil)
		return
	}
	h.nodes.Change("n1", fakeNode("n1", *value))
}

func (h *history) setConfigMap(documents configs.Documents) configs.Documents {
	h.configMaps = append(h.configMaps, documents)
	if documents == nil {
		h.maps.Change("profiles", nil)
	} else {
		h.maps.Change("profiles", fakeConfigMap(documents))
	}
	return documents
}

func (h *history) change() {
	names := []string{"", "a", "b", "default"}
	switch h.random.IntN(18) {
	case 0:
		h.setLabel(nil)
	case 1:
		h.setConfigMap(nil)
	case 2:
		h.nodes.Expire()
	case 3:
		h.maps.Expire()
	case 16:
		h.nodes.Drop()
	case 17:
		h.maps.Drop()
	case 4, 5, 6, 7, 8:
		label := names[h.random.IntN(len(names))]
		h.setLabel(&label)
	default:
		documents := configs.Documents{}
		for _, name := range names[1:] {
			switch h.random.IntN(4) {
			case 0:
			case 1:
				documents[name] = "{broken"
			default:
				documents[name] = h.unique()
			}
		}
		h.setConfigMap(documents)
	}
	// Some changes come one by one, others at once.
	if h.random.IntN(3) == 0 {
		<-time.After(time.Duration(h.random.IntN(5)) * time.Millisecond) //nolint:forbidigo // in a synctest bubble: the time is simulated
	}
}

// judge finds when each profile that came into force was the right one.
func (h *history) judge() {
	label, documents := 0, 0
	for step, applied := range h.applied {
		name, from := "", -1
		for i := documents; i < len(h.configMaps) && from < 0; i++ {
			for _, candidate := range h.configMaps[i].ProfileNames() {
				if selected, err := h.configMaps[i].Select("", candidate, nil); err == nil && selected.Generation == applied {
					name, from = candidate, i
				}
			}
		}
		if from < 0 {
			h.t.Fatalf("step %d: %s was in no ConfigMap since number %d", step, applied, documents)
		}
		documents = from
		for ; ; label++ {
			if label == len(h.labels) {
				h.t.Fatalf("step %d: %s was wanted by no later label", step, name)
			}
			if h.labels[label] == nil {
				continue
			}
			criteria := Criteria{Label: *h.labels[label], Fallbacks: h.source.Fallbacks, Names: h.configMaps[documents].ProfileNames()}
			if chosen, err := Choose(criteria); err == nil && chosen.Name == name {
				break
			}
		}
	}
}

// fakeSource is a Source that notifies when tell is called.
type fakeSource struct {
	Source
	started chan struct{}
	tell    func()
}

func (s *fakeSource) Watch(ctx context.Context, changed func()) error {
	s.tell = changed
	close(s.started)
	<-ctx.Done()
	return nil
}

// TestWatching checks that changes are reported, whether they come before or after Watch is called.
func TestWatching(t *testing.T) {
	source := &fakeSource{started: make(chan struct{})}
	a := StartWatching(t.Context(), &NodeSource{Source: source})
	<-source.started
	tell := source.tell
	var told atomic.Bool
	go func() {
		told.Store(true)
		tell()
	}()
	a.Await(t.Context(), told.Load)
	brief, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	a.Await(brief, func() bool { return false })
	cancel()

	heard := make(chan struct{}, 10)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Watch(ctx, func() { heard <- struct{}{} }) }()
	<-heard
	tell()
	<-heard
	cancel()
	if err := errors.Join(<-ended, a.Stop()); err != nil {
		t.Error(err)
	}
}
