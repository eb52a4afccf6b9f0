// Package simnode simulates a node's GPUs below the NVML adapter. A Node is an nvml.Library, so in
// tests, in the demo and on a laptop the discovery, the MIG walk and the handling of events run the
// production code.
//
// GPUs have the names, sizes and MIG geometry of real ones. UUIDs are derived from the node's name,
// so a node of one name is the same everywhere. Go code controls the GPUs with methods of Node,
// other processes with the verbs of its Handler.
//
// The package simulates what a GPU monitor can observe, but no computation. A call that a GPU does
// not support returns NOT_SUPPORTED, as from the driver. No call panics.
//
// See node.go, description.go and model.go for what a node consists of; call.go for faults, and the
// function through which every NVML call goes; library.go, mig.go and event.go for the calls;
// hardware.go, process.go and verbs.go for what can be done to a node.
package simnode
