// Package units decides who may hand out each unit of the node, a GPU or a partition of one: the
// device plugin, DRA, or for a while nobody. It is pure: see Owners. docs/explanation/architecture.md has the
// life of a unit.
package units

import (
	"cmp"
	"slices"
)

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

// ByDRA says that claims may use the unit: on LeavingDRA those that had it, or were given it, before.
func (p Path) ByDRA() bool { return p == DRA || p == LeavingDRA }

// Unit is a unit of the node.
type Unit struct {
	// UUID is its own, GPU that of its GPU; they are the same for a whole GPU.
	UUID, GPU string
	// Path is the one that the state file has for it, ForDRA says that the profile has it offered
	// by DRA.
	Path   Path
	ForDRA bool
}

// Partition says that it is not a whole GPU.
func (u Unit) Partition() bool { return u.UUID != u.GPU }

// Owner says who may hand a unit out, and what restricts that.
type Owner struct {
	// Path says who may still do so: a partition has that of its GPU where more of it is handed
	// out by DRA than on its own.
	Path Path
	// Offered says that Path still hands it out to new pods or claims. Otherwise the unit is
	// leaving it, and only late grants are served.
	Offered bool
	// Reserved are its reservations, the strongest first.
	Reserved []Reservation
}

// ReservedFor says that it is reserved for one of the purposes, though maybe not for that first.
func (o Owner) ReservedFor(purposes ...Purpose) bool {
	return slices.ContainsFunc(o.Reserved, func(r Reservation) bool { return slices.Contains(purposes, r.Purpose) })
}

// Purpose is what a reservation is for.
type Purpose int

// The purposes, from the strongest to the weakest. But a change of partitions that has begun comes
// before all: it cannot be given up.
const (
	// Pause is while another program changes MIG layouts or the driver: this program has no GPU open.
	Pause Purpose = iota
	// Release is for an operator who resets the GPU, or works on it otherwise.
	Release
	// MIGChange is for a MIG layout, or a partition for a claim.
	MIGChange
	// MPSDaemon is for an MPS daemon: no container may use the unit but as shares of the daemon.
	MPSDaemon
)

// Reservation keeps units from being handed out for a while.
type Reservation struct {
	Purpose Purpose
	// GPU limits it to the units of one GPU, by UUID; empty for all GPUs.
	GPU string
	// Only limits it to some of these units; nil for all of them.
	Only func(Unit) bool
	// Begun says that the partitions are being changed.
	Begun bool
	// Text says why: of a pause or a release as a whole warning, of others as a unit's fault.
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

// nearerDRA is the one of two paths on which more is handed out by DRA.
func nearerDRA(a, b Path) Path {
	order := []Path{Plugin, LeavingPlugin, LeavingDRA, DRA}
	return order[max(slices.Index(order, a), slices.Index(order, b), 0)]
}

// Owners finds the owner of each unit, by UUID. The order of units and reservations does not
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
		owner := Owner{Path: nearerDRA(u.Path, wholes[u.GPU])}
		for _, r := range reservations {
			if r.concerns(u) {
				owner.Reserved = append(owner.Reserved, r)
			}
		}
		slices.SortFunc(owner.Reserved, Reservation.compare)
		owner.Offered = owner.Path == Plugin && !u.ForDRA || owner.Path == DRA && u.ForDRA
		owners[u.UUID] = owner
	}
	return owners
}
