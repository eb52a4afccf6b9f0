// Package simdra plays what stands around a DRA driver, for tests and for the demo: an API server
// (api.go), and the scheduler and the kubelet's side of claims (cluster.go), in this process, on
// real sockets.
//
// The API server is as strict as a driver meets it: writes need the version that is there, deletions
// their preconditions, and reading another node's slices is reported. The scheduler knows devices,
// taints, attributes, capacity and counters, and no expressions; test/kubernetes/dra has the real one.
package simdra
