// Package simnode simulates a node's GPUs below the NVML adapter: a Node is an
// nvml.Library, so discovery, the MIG walk and the handling of events run the
// production code in tests, in the demo and on a laptop.
//
// Boards have the names, sizes and MIG geometry of real ones, and UUIDs that
// follow from the node's name, so that the same node is the same everywhere.
// What happens to them is under control: Go code calls methods of Node, other
// processes post the same verbs to its Handler.
//
// It simulates what a monitor of GPUs can observe, and no computing. A call
// that makes no sense on a board is answered as the driver would, with
// NOT_SUPPORTED, and never panics.
package simnode
