// Package nvml presents the node's GPUs, as package sharing describes them, from
// a driver that speaks NVML. It declares the part of NVML that it needs, Library,
// which two back-ends implement: internal/nvml/driver opens the real driver,
// internal/simnode simulates one. Everything here, such as discovery, the walk
// over MIG devices, and the meaning of events and return codes, is the same for
// both and needs no cgo.
//
// Scan reads the node once. A Node keeps watching it: it holds the driver open,
// probes the GPUs periodically, listens for events, and tracks each unit's
// health (docs/reference/health.md). A Meter reads who uses the GPUs. A Partitioner lists
// and changes their MIG instances; nothing else here changes a GPU, and nothing
// decides which change to make or hands a GPU out.
//
// Read in this order: library.go, what NVML is here; intercept.go,
// through which every call can be observed or replaced, and deadline.go, which
// handles hung calls with it; gpu.go and scan.go, reading GPUs; health.go and
// tracker.go, what readings and events say of a unit; then node.go with its two
// goroutines, poller.go (with events.go) and publisher.go. usage.go and
// partitioner.go stand by themselves.
package nvml
