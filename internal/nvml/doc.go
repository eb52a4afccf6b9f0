// Package nvml reads the node's GPUs, as package sharing describes them, from a driver that
// implements NVML. It declares the part of NVML that it needs, Library, with two back-ends:
// internal/nvml/driver opens the real driver, and internal/simnode simulates one. The code in this
// package, such as discovery, the walk over MIG devices, and the meaning of events and return
// codes, is the same for both and needs no cgo.
//
// Scan reads the node once. A Node keeps watching it: it holds the driver open, probes the GPUs
// periodically, listens for events, and tracks each unit's health (docs/reference/health.md). A
// Meter reads how the GPUs are used, and by which processes. A Partitioner lists and changes their
// MIG instances. Nothing else here changes a GPU, and nothing here decides which change to make or
// allocates a GPU.
//
// Read in this order: library.go, the part of NVML; intercept.go, through which every call can be
// observed or replaced; deadline.go, which uses it to handle hung calls; gpu.go and scan.go, which
// read GPUs; health.go and tracker.go, which derive a unit's health from readings and events; then
// node.go with its two goroutines, poller.go (with events.go) and publisher.go. usage.go and
// partitioner.go are independent of them.
package nvml
