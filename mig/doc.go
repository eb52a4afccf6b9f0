// Package mig implements the rules of NVIDIA's Multi-Instance GPU (MIG): how profiles are written
// (1g.5gb), into which partitions each GPU model can be divided, where on a GPU they fit, and which
// steps lead from one layout to another.
//
// The package is pure: it calls no driver, and imports only the standard library. Its data about
// GPU models is for the simulator, and for checking a layout away from its node. On a node, the
// GPU's driver decides what the GPU can do.
//
// Read profile.go first, then geometry.go (what a GPU model can do), layout.go (the wanted
// partitions), place.go (the search for placements), change.go (the steps to a layout) with
// changesearch.go and outcome.go (which partitions to keep and where the others go), and draw.go (a
// GPU as text).
package mig
