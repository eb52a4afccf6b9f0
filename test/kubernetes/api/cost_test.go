package api

import "testing"

// testManyNodes has the nodes of a cluster watch at once, and holds bounds of
// what they cost: see docs/scale.md.
func testManyNodes(t *testing.T, s *server) {
	const nodes = 200
	two, four, ten := document("2"), document("4"), document("10")
	s.setProfiles(map[string]string{"a": two, "b": four})
	s.makeNodes(t, nodes, "a")
	all := s.startFleet(t, nodes, nil)
	all.awaits(is(t, "a", two))
	begin := all.cost()
	t.Logf("start: %.2f requests, %.0f bytes read, %.0f written a node", begin.requests/nodes, begin.read/nodes, begin.written/nodes)

	// One label: one node is told.
	s.setNode(nodeName(7), "b")
	all.nodes[7].awaits(t, is(t, "b", four), "")
	flip := all.cost()
	t.Logf("one label: %.0f bytes read by all nodes together", flip.read-begin.read)

	// One edit: all are told, nobody asks.
	s.setProfiles(map[string]string{"a": ten, "b": ten})
	for i, node := range all.nodes {
		if i != 7 {
			node.awaits(t, is(t, "a", ten), "")
		}
	}
	all.nodes[7].awaits(t, is(t, "b", ten), "")
	edit := all.cost()
	t.Logf("one edit of the ConfigMap: %.0f bytes read a node", (edit.read-flip.read)/nodes)
	// A busy server may refuse a request of a few; nobody has reason for more.
	if edit.requests < 4*nodes || edit.requests > 4.2*nodes {
		t.Errorf("%.0f requests of %d nodes, want 4 each: %q", edit.requests, nodes, all.nodes[0].seen())
	}
	if edit.connections != nodes {
		t.Errorf("%.0f connections of %d nodes", edit.connections, nodes)
	}
	if perNode := begin.read / nodes; perNode > 30_000 {
		t.Errorf("%.0f bytes read a node at the start, want 30000 at most", perNode)
	}
	if told := flip.read - begin.read; told > 30_000 {
		t.Errorf("one label had %.0f bytes read: other nodes heard of it", told)
	}
	for i, node := range all.nodes {
		want := 2
		if i == 7 {
			want = 3
		}
		if history := node.history(); len(history) != want {
			t.Errorf("node %d applied %q", i, history)
		}
	}

	// Cut off together, they come back one by one and go on where they were.
	all.cut()
	s.setProfiles(map[string]string{"a": two, "b": two})
	for i, node := range all.nodes {
		name := "a"
		if i == 7 {
			name = "b"
		}
		node.awaits(t, is(t, name, two), "")
	}
	again := all.cost().minus(edit)
	dials := all.dials()[nodes:]
	span := dials[len(dials)-1].Sub(dials[0])
	t.Logf("after a cut: %.2f requests a node, connections over %s", again.requests/nodes, span)
	if again.requests < 2*nodes || again.requests > 2.2*nodes {
		t.Errorf("%.0f requests of %d nodes after a cut, want 2 each: %q", again.requests, nodes, all.nodes[0].seen())
	}
	if span.Seconds() < 2 {
		t.Errorf("all came back in %s, want them to be seconds apart", span)
	}
	all.stop()
}
