package api

import (
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/policy"
)

// testChoice plays what operators do to a node, one after another.
func testChoice(t *testing.T, s *server) {
	two, four, ten := document("2"), document("4"), document("10")
	f := s.follow(t, "n1", virgateToken, func(n *policy.Node) { n.Default = "two" })

	// Neither the Node nor the ConfigMap is there.
	f.awaits(t, "", "node n1: not there")
	s.setNode("n1", "four")
	f.awaits(t, "", "ConfigMap gpu/profiles: not there")
	s.setProfiles(map[string]string{"two": two, "four": four, "broken": document("0")})
	f.awaits(t, is(t, "four", four), "")
	if first := f.history(); !slices.Equal(first, []string{is(t, "four", four)}) {
		t.Errorf("applied %q, want what the label says and never the default", first)
	}

	// A label that moves, is taken away, and names nothing.
	s.setNode("n1", "two")
	f.awaits(t, is(t, "two", two), "")
	s.setNode("n1", "four")
	f.awaits(t, is(t, "four", four), "")
	s.setNode("n1", "")
	f.awaits(t, is(t, "two", two), "")
	s.setNode("n1", "gone")
	f.awaits(t, is(t, "two", two), `ConfigMap gpu/profiles: the node label nvidia.com/device-plugin.config wants "gone": it holds broken, four, two`)

	// Edits: the name that was missing, other content, something broken.
	s.setProfiles(map[string]string{"two": two, "four": four, "gone": ten})
	f.awaits(t, is(t, "gone", ten), "")
	s.setProfiles(map[string]string{"two": two, "four": four, "gone": four})
	f.awaits(t, is(t, "gone", four), "")
	s.setProfiles(map[string]string{"two": two, "gone": document("0")})
	f.awaits(t, is(t, "gone", four), "ConfigMap gpu/profiles[gone]:2: sharing.timeSlicing.resources[0].replicas: expected 1 or more (got 0)")
	s.setProfiles(map[string]string{"two": two, "gone": "flags: {nvidiaDriverRoot: /other}\n"})
	f.awaits(t, is(t, "gone", four), "ConfigMap gpu/profiles[gone]: flags.nvidiaDriverRoot: cannot change while the program runs (is /, wanted /other)")

	// The active key is removed (peers.md B12), then the node relabelled.
	s.setProfiles(map[string]string{"two": two, "four": four})
	f.awaits(t, is(t, "gone", four), `wants "gone"`)
	s.setNode("n1", "two")
	f.awaits(t, is(t, "two", two), "")

	// The ConfigMap and the Node go and come back.
	s.removeProfiles()
	f.awaits(t, is(t, "two", two), "ConfigMap gpu/profiles: not there")
	s.setProfiles(map[string]string{"two": ten, "four": four})
	f.awaits(t, is(t, "two", ten), "")
	s.removeNode("n1")
	f.awaits(t, is(t, "two", ten), "node n1: not there")
	s.setNode("n1", "four")
	f.awaits(t, is(t, "four", four), "")

	// All that took one list and one watch of each object.
	requests := f.seen()
	if len(requests) != 4 {
		t.Errorf("%d requests, want 4: %q", len(requests), requests)
	}
	for _, request := range requests {
		if !strings.Contains(request, "fieldSelector=metadata.name%3Dn1") && !strings.Contains(request, "fieldSelector=metadata.name%3Dprofiles") {
			t.Errorf("%s is for more than one object", request)
		}
	}
	t.Logf("%d changes of the profile cost %d requests, %d bytes read, %d written", len(f.history()), len(requests), f.read.Load(), f.written.Load())
}

// testNoLabel: without a node name the label is not looked at.
func testNoLabel(t *testing.T, s *server) {
	s.setProfiles(map[string]string{"default": document("4")})
	f := s.follow(t, "n1", virgateToken, func(n *policy.Node) { n.Labels, n.Fallbacks = nil, []policy.Fallback{policy.Named} })
	f.awaits(t, is(t, "default", document("4")), "")
	if requests := f.seen(); len(requests) != 2 {
		t.Errorf("%d requests without a label, want 2: %q", len(requests), requests)
	}
}
