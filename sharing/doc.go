// Package sharing decides what a node advertises: NewPlan turns the node's
// GPUs and a profile into resources, Index.Prefer picks devices for a
// container.
//
// Everything here is pure: no I/O, no clock, no randomness, no goroutine. The
// same input gives the same output, byte for byte. The package knows nothing
// of NVML, of the kubelet or of any file format.
//
// The words (GPU, partition, unit, device, resource, profile, plan,
// allocation) are those of docs/architecture.md.
package sharing
