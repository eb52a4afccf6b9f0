package api

import "testing"

// TestAPI plays everything on one API server, as starting it is what takes
// longest. Each part begins without Nodes and without a ConfigMap.
func TestAPI(t *testing.T) {
	s := cluster(t)
	for _, part := range []struct {
		name string
		play func(*testing.T, *server)
	}{
		{"choice", testChoice},
		{"no label", testNoLabel},
		{"refused", testRefused},
		{"allowed", testAllowed},
		{"cut off", testCutOff},
		{"rights taken", testRightsTaken},
		{"pods", testPods},
		{"kubelet", testKubelet},
		{"MIG label", testMIGLabel},
		{"list limit", testListLimit},
		{"one connection", testOneConnection},
		{"200 nodes", testManyNodes},
		{"server restarts", testServerRestarts},
	} {
		t.Run(part.name, func(t *testing.T) {
			whole := s.t
			s.t = t
			defer func() { s.t = whole }()
			s.reset()
			part.play(t, s)
		})
	}
}
