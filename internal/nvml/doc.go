// Package nvml makes the node's GPUs, as package sharing knows them, out of a
// driver that speaks NVML. It declares the part of NVML that it needs, Library,
// and two back-ends implement that: internal/nvml/driver opens the real driver,
// internal/simnode simulates one. What is here (discovery, the MIG walk, the
// meaning of events and return codes) is the same for both and needs no cgo.
//
// Scan looks once. A Node keeps looking: it holds the driver open, probes the
// boards periodically, listens for events, and knows each unit's health. What
// that follows from is in docs/health.md; unitHealth decides it.
//
// It changes nothing on a GPU, and hands nothing out.
package nvml
