// Package sharing decides what a node advertises: NewPlan turns the node's GPUs and a
// profile into resources, DeviceSet.Prefer chooses devices for a container, and Usage
// says who holds them.
//
// Everything here is pure: no I/O, no clock, no randomness, no goroutine. The
// same input gives the same output, byte for byte. The package knows nothing
// of NVML, of the kubelet or of any file format.
//
// Read it in this order: inventory.go, health.go and profile.go have what goes in;
// resource.go has what comes out, plan.go how; prefer.go and topology.go choose
// devices; usage.go says who holds and who uses them. The rest is parts of a profile:
// selector.go, mig.go.
//
// The words (GPU, partition, unit, device, resource, profile, plan, allocation) are
// those of docs/explanation/architecture.md.
package sharing
