package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/virgate/virgate/configs"
)

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
