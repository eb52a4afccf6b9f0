// Package mig knows NVIDIA's Multi-Instance GPU (MIG): how profiles are written
// (1g.5gb), into which partitions each GPU model can be divided, where on a GPU
// they fit, and which steps lead from one layout to another.
//
// It is pure: it calls no driver, and imports only the standard library. What it
// knows about GPU models is for the simulator and for checking a layout away
// from its node. On a node, the GPU's driver says what the GPU can do.
//
// Read profile.go first, then geometry.go (what a GPU model can do), layout.go
// (what somebody wants), place.go (the search for places), change.go (the steps
// to a layout) with changesearch.go and outcome.go (what to keep and where the
// rest goes), and draw.go (a GPU as text).
package mig
