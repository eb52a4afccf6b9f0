// Package simnode simulates a node's GPUs below the NVML adapter. A Node is an nvml.Library, so
// tests, the demo and a laptop run the production code of the discovery, the MIG walk and the
// handling of events.
//
// GPUs have the names, sizes and MIG geometry of real ones. UUIDs are derived from the node's name,
// so a node with the same name has the same UUIDs everywhere. Go code controls the GPUs with the
// methods of Node; other processes use the verbs of its Handler.
//
// The package simulates everything that a GPU monitor can observe, but no computation. A call that
// a GPU does not support returns NOT_SUPPORTED, as from the driver. No call panics.
//
// See node.go, description.go and model.go for the parts of a node; call.go for faults, and the
// function through which every NVML call goes; library.go, mig.go and event.go for the calls;
// hardware.go, process.go and verbs.go for what can be done to a node.
package simnode
