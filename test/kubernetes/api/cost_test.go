package api

import (
	"fmt"
	"sync"
	"testing"
)

// testManyNodes has the nodes of a cluster watch at once, and counts what they
// cost: see docs/operations.md.
func testManyNodes(t *testing.T, s *server) {
	const nodes = 200
	two, four, ten := document("2"), document("4"), document("10")
	s.setProfiles(map[string]string{"a": two, "b": four})
	followers := make([]*follower, nodes)
	for i := range followers {
		s.setNode(fmt.Sprint("node-", i), "a")
	}
	for i := range followers {
		followers[i] = s.follow(t, fmt.Sprint("node-", i), virgateToken, nil)
	}
	for _, f := range followers {
		f.awaits(t, is(t, "a", two), "")
	}
	begin := sum(followers)
	t.Logf("start: %.2f requests, %.0f bytes read, %.0f written a node", begin.requests/nodes, begin.read/nodes, begin.written/nodes)

	// One label: one node is told.
	s.setNode("node-7", "b")
	followers[7].awaits(t, is(t, "b", four), "")
	flip := sum(followers)
	t.Logf("one label: %.0f bytes read by all nodes together", flip.read-begin.read)

	// One edit: all are told, nobody asks.
	s.setProfiles(map[string]string{"a": ten, "b": four})
	for i, f := range followers {
		if i != 7 {
			f.awaits(t, is(t, "a", ten), "")
		}
	}
	edit := sum(followers)
	t.Logf("one edit of the ConfigMap: %.0f bytes read a node", (edit.read-flip.read)/nodes)
	// A busy server may refuse a request of a few; nobody has reason for more.
	if edit.requests < 4*nodes || edit.requests > 4.2*nodes {
		t.Errorf("%.0f requests of %d nodes, want 4 each: %q", edit.requests, nodes, followers[0].seen())
	}
	if perNode := begin.read / nodes; perNode > 20_000 {
		t.Errorf("%.0f bytes read a node at the start, want 20000 at most", perNode)
	}
	if told := flip.read - begin.read; told > 20_000 {
		t.Errorf("one label had %.0f bytes read: other nodes heard of it", told)
	}
	for i, f := range followers {
		if history := f.history(); len(history) != 2 {
			t.Errorf("node %d applied %q", i, history)
		}
	}
	var ended sync.WaitGroup
	for _, f := range followers {
		ended.Go(f.stop)
	}
	ended.Wait()
}

type cost struct{ requests, read, written float64 }

func sum(followers []*follower) cost {
	var total cost
	for _, f := range followers {
		total.requests += float64(len(f.seen()))
		total.read += float64(f.read.Load())
		total.written += float64(f.written.Load())
	}
	return total
}
