// Package dra holds the slices that package internal/dra makes against Kubernetes' own code,
// and is nothing but its tests: the validation of the API server, and the allocator that
// the scheduler uses, of Kubernetes 1.36.3 with the features that are on by default.
//
// There is no API server and no scheduler here: a claim that is allocated is one whose
// result is put into the state that the allocator is given next time.
package dra
