// Package simdra simulates the surroundings of a DRA driver, for tests and for the demo: an API
// server (api.go), and the scheduler and the kubelet's part in claims (cluster.go). They run in
// this process, on real sockets.
//
// The API server is as strict as a real one is towards a driver: writes need the current version,
// deletions need their preconditions, and reading another node's slices is reported. The scheduler
// supports devices, taints, attributes, capacity and counters, but no expressions;
// test/kubernetes/dra has the real scheduler.
package simdra
