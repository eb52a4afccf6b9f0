package mig

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Instance is a GPU instance of a board with its compute instances, as the
// driver lists them now.
type Instance struct {
	// GI is the driver's GPU instance ID.
	GI int `json:"gi"`
	// Profile is the GPU instance's; its Compute equals its Slices.
	Profile   Profile   `json:"profile"`
	Placement Placement `json:"placement"`
	// Computes are its compute instances, in any order. An instance without any
	// takes its slots all the same, and is free.
	Computes []Compute `json:"computes,omitempty"`
}

// Compute is a compute instance: a partition, as Kubernetes sees it.
type Compute struct {
	// CI is the driver's compute instance ID, unique in its GPU instance.
	CI int `json:"ci"`
	// Slices is the number of compute slices, the C of "Cc.Gg.Mgb".
	Slices int `json:"slices"`
	// UUID is that of the MIG device.
	UUID string `json:"uuid"`
	// Busy says that a pod or a process has it, or that nobody can tell.
	Busy bool `json:"busy,omitempty"`
}

// Partition is the profile of a compute instance of the GPU instance.
func (i Instance) Partition(c Compute) Profile {
	p := i.Profile
	p.Compute = c.Slices
	return p
}

// Change is the way of a board to its wanted layout, or as far as the
// partitions in use allow.
type Change struct {
	// Steps are in an order in which they can be made; none when there is nothing
	// to do now. What goes is freed before anything is made.
	Steps []Step `json:"steps,omitempty"`
	// Doomed and Kept are the UUIDs of the partitions that the steps destroy, and
	// of the others, sorted. A blocked partition is kept.
	Doomed []string `json:"doomed,omitempty"`
	Kept   []string `json:"kept,omitempty"`
	// Blocked are the partitions in use that keep the layout from being complete,
	// by placement; none when the steps complete it.
	Blocked []Blocked `json:"blocked,omitempty"`
	// Result are the board's partitions after the steps, by placement.
	Result []Placed `json:"result,omitempty"`
}

// Complete says that the board has the wanted layout after the steps.
func (c Change) Complete() bool { return len(c.Blocked) == 0 }

// Empty says that nothing is to be done now: the board has its layout, or only
// waits.
func (c Change) Empty() bool { return len(c.Steps) == 0 }

// Blocked is a partition in use that the wanted layout has no place for.
type Blocked struct {
	Placed
	UUID string `json:"uuid"`
	// Waiting are the wanted partitions that cannot be made while it is there, and
	// where they will be; none where it is only one too many, or where MIG mode
	// waits.
	Waiting []Placed `json:"waiting,omitempty"`
}

// String is for a message: what is in use, and what waits for it.
func (b Blocked) String() string {
	text := fmt.Sprintf("%s at %s is in use", b.Profile, b.Placement)
	if len(b.Waiting) == 0 {
		return text + " and not part of the layout"
	}
	waiting := make([]string, len(b.Waiting))
	for i, w := range b.Waiting {
		waiting[i] = fmt.Sprintf("%s at %s", w.Profile, w.Placement)
	}
	return text + ", in the way of " + strings.Join(waiting, ", ")
}

// sort brings what is no sequence into its order.
func (c *Change) sort() {
	slices.Sort(c.Doomed)
	slices.Sort(c.Kept)
	slices.SortFunc(c.Result, comparePlaced)
	slices.SortStableFunc(c.Blocked, func(a, b Blocked) int {
		return cmp.Or(comparePlaced(a.Placed, b.Placed), cmp.Compare(a.UUID, b.UUID))
	})
}
