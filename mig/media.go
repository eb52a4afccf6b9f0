package mig

import (
	"slices"
	"strings"
)

// The media engines of a board are a third thing that its partitions share,
// beside slices and slots (NVIDIA MIG User Guide, "Supported MIG Profiles", the
// columns for NVDEC, NVENC, JPEG and OFA).

// has says that the profile has the attribute, sign included.
func (p Profile) has(attribute string) bool {
	names, ok := strings.CutPrefix(p.Attributes, attribute[:1])
	return ok && slices.Contains(strings.Split(names, ","), attribute[1:])
}

// exclude says that the two cannot stand on one board: one takes every media
// engine, so that the other must be one without any.
func exclude(p, q Profile) bool {
	return p.has("+me.all") && !q.has("-me") || q.has("+me.all") && !p.has("-me")
}

// rival says that the two count against the same maximum. All profiles with
// media extensions draw on the one set that a board has, whatever their size.
func rival(p, q Profile) bool {
	return p == q || p.has("+me") && q.has("+me")
}
