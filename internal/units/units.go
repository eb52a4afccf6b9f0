// Package units decides who may hand out each unit of the node, a GPU or a partition of one: the
// device plugin, DRA, or for a while nobody. It is pure: see Owners. docs/architecture.md has the
// life of a unit.
package units

import "cmp"

// Path says who offers a unit. Its words are in the state file.
type Path string

// A unit goes from the device plugin to DRA and back in this order.
const (
	Plugin Path = ""
	// LeavingPlugin is a unit that the device plugin withdraws; its holders may still have it.
	LeavingPlugin Path = "leaving-plugin"
	DRA           Path = "dra"
	// LeavingDRA is a unit that no claim is to get any more. Those that have it, and those whom
	// the scheduler gave it before it knew, still do.
	LeavingDRA Path = "leaving-dra"
)

// ByDRA says that claims may have the unit.
func (p Path) ByDRA() bool { return p == DRA || p == LeavingDRA }

// Unit is a unit of the node.
type Unit struct {
	// Name is its place on the hardware (dra.Place), which is the same after a reboot.
	Name string
	// UUID is its own, GPU that of its GPU; they are the same for a whole GPU.
	UUID, GPU string
	// Path is the one that was kept for it, ForDRA says that the profile has it offered by DRA.
	Path   Path
	ForDRA bool
}

// Partition says that it is not a whole GPU.
func (u Unit) Partition() bool { return u.UUID != u.GPU }

// Owner is who may hand a unit out.
type Owner struct {
	// Path says who may still do so. A partition has that of its GPU where the GPU is not the
	// device plugin's.
	Path Path
	// Offered says that this is the path that the profile wants. Otherwise the unit leaves it, and
	// what was granted late is still served.
	Offered bool
	// Reserved is the strongest reservation; nil for none.
	Reserved *Reservation
}

// Purpose is what a reservation is for.
type Purpose int

// The purposes, from the strongest to the weakest. A change of partitions that has begun is
// stronger than all: it cannot be given up.
const (
	// Pause is while mig-manager changes MIG layouts: this program has no GPU open.
	Pause Purpose = iota
	// Release is for an operator who resets the GPU, or works on it otherwise.
	Release
	// MIGChange is for a MIG layout, or a partition for a claim.
	MIGChange
	// MPSDaemon is for an MPS daemon: no container may use the unit but as shares of the daemon.
	MPSDaemon
)

// Reservation keeps containers off units for a while.
type Reservation struct {
	Purpose Purpose
	// GPU is the UUID of the GPU that has the units; empty for all GPUs.
	GPU string
	// Only are the units that are concerned; nil for the GPU and all its partitions.
	Only func(Unit) bool
	// Begun says that the partitions are being changed.
	Begun bool
	// Text says why: of a pause or a release as a warning, otherwise completing "the device …".
	Text string
}

func (r Reservation) concerns(u Unit) bool {
	return (r.GPU == "" || r.GPU == u.GPU) && (r.Only == nil || r.Only(u))
}

// compare is negative where r is stronger than other. Of two that are as strong the text decides,
// so that the order in which they come does not matter.
func (r Reservation) compare(other Reservation) int {
	if r.Begun != other.Begun {
		if r.Begun {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(r.Purpose, other.Purpose), cmp.Compare(r.Text, other.Text))
}

// Owners finds the owner of each unit, by name. The order of units and reservations does not
// matter.
func Owners(all []Unit, reservations []Reservation) map[string]Owner {
	wholes := map[string]Path{}
	for _, u := range all {
		if !u.Partition() {
			wholes[u.GPU] = u.Path
		}
	}
	owners := make(map[string]Owner, len(all))
	for _, u := range all {
		owner := Owner{Path: u.Path}
		if whole := wholes[u.GPU]; whole != Plugin {
			owner.Path = whole
		}
		for i, r := range reservations {
			if r.concerns(u) && (owner.Reserved == nil || r.compare(*owner.Reserved) < 0) {
				owner.Reserved = &reservations[i]
			}
		}
		owner.Offered = owner.Path == Plugin && !u.ForDRA || owner.Path == DRA && u.ForDRA
		owners[u.Name] = owner
	}
	return owners
}
