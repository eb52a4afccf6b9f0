// Package simnode simulates a node's GPUs below the NVML adapter: a Node is an
// nvml.Library, so in tests, in the demo and on a laptop discovery, the MIG walk
// and the handling of events are the production code.
//
// GPUs have the names, sizes and MIG geometry of real ones, and UUIDs that are
// derived from the node's name, so a node of one name is the same everywhere. Go
// code controls what happens to them with methods of Node, other processes with
// the verbs of its Handler.
//
// It simulates what a monitor of GPUs can observe, and no computation. A call that
// a GPU does not support is answered as by the driver, with NOT_SUPPORTED; none
// panics.
//
// Read node.go, description.go and model.go for what a node consists of; call.go,
// which every NVML call goes through, with its faults; library.go, mig.go and
// event.go for the calls; hardware.go, process.go and verbs.go for what can be
// done to a node.
package simnode
