// Package sharing decides what a node advertises: NewPlan turns the node's GPUs and a profile into
// resources, DeviceSet.Prefer chooses devices for a container, and Usage finds their holders.
//
// Everything here is pure: no I/O, no clock, no randomness, no goroutine. The same input gives the
// same output, byte for byte. The package knows nothing about NVML, the kubelet or any file format.
//
// Read the inputs first: inventory.go, health.go and profile.go, with selector.go and mig.go for
// parts of a profile. resource.go has the result, and plan.go computes it. prefer.go and
// topology.go choose devices; usage.go finds who holds and who uses them.
//
// docs/explanation/architecture.md defines the terms GPU, partition, unit, device, resource,
// profile, plan and allocation.
package sharing
