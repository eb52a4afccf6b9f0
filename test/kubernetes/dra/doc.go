// Package dra tests the slices that package internal/dra makes against Kubernetes' own code: the
// validation of the API server, and the allocator of the scheduler, of Kubernetes 1.36.3 with the
// features that are on by default. It consists of tests only.
//
// There is no API server and no scheduler here. To allocate a claim, the tests put its result into
// the state that the allocator gets the next time.
package dra
