// Package units decides who owns each unit of the node, a GPU or a partition: the device plugin,
// DRA, or for a while neither. Only the owner may hand the unit out. The package is pure: see
// Owners. docs/explanation/architecture.md describes the life of a unit.
package units

import (
	"cmp"
	"slices"
)

// Path is who offers a unit. Its values are stored in the state file.
type Path string

// A unit moves from the device plugin to DRA and back in this order.
const (
	Plugin Path = ""
	// LeavingPlugin is a unit that the device plugin is withdrawing. Pods may still hold it.
	LeavingPlugin Path = "leaving-plugin"
	DRA           Path = "dra"
	// LeavingDRA is a unit for which no new claims are accepted. Claims that have it keep it, and
	// so do claims that the scheduler allocated before it knew.
	LeavingDRA Path = "leaving-dra"
)

// ByDRA reports whether claims may use the unit. On LeavingDRA these are only claims that had the
// unit, or were allocated it, before.
func (p Path) ByDRA() bool { return p == DRA || p == LeavingDRA }

// Unit is a unit of the node.
type Unit struct {
	// UUID is the unit's UUID, GPU the UUID of its GPU; they are the same for a whole GPU.
	UUID, GPU string
	// Path is the unit's path in the state file. ForDRA is true if the profile offers the unit by
	// DRA.
	Path   Path
	ForDRA bool
}

// Partition reports whether the unit is a partition, not a whole GPU.
func (u Unit) Partition() bool { return u.UUID != u.GPU }

// Owner is who may hand a unit out, and what restricts that.
type Owner struct {
	// Path is who may still hand it out. A partition has the path of its GPU if that path is nearer
	// to DRA than its own.
	Path Path
	// Offered is true if Path still hands the unit out to new pods or claims. Otherwise the unit is
	// leaving Path, and only late grants are served.
	Offered bool
	// Reserved are the unit's reservations, the strongest first.
	Reserved []Reservation
}

// ReservedFor reports whether the unit is reserved for one of the purposes, even if a stronger
// reservation comes first.
func (o Owner) ReservedFor(purposes ...Purpose) bool {
	return slices.ContainsFunc(o.Reserved, func(r Reservation) bool { return slices.Contains(purposes, r.Purpose) })
}

// Purpose is the purpose of a reservation.
type Purpose int

// The purposes, from the strongest to the weakest. A change of partitions that has begun is
// stronger than all of them, because it cannot be abandoned.
const (
	// Pause is for a time in which another program changes MIG layouts or the driver. This program
	// then keeps no GPU open.
	Pause Purpose = iota
	// Release is for an operator who resets the GPU or works on it in another way.
	Release
	// MIGChange is for a new MIG layout, or for a partition that is made for a claim.
	MIGChange
	// MPSDaemon is for an MPS daemon: containers may use the unit only as shares of the daemon.
	MPSDaemon
)

// Reservation prevents units from being handed out for a while.
type Reservation struct {
	Purpose Purpose
	// GPU limits it to the units of one GPU, by UUID; empty for all GPUs.
	GPU string
	// Only further limits it to the units for which it returns true; nil for all of them.
	Only func(Unit) bool
	// Begun is true once the partitions are being changed.
	Begun bool
	// Text is the reason: a complete warning for a pause or a release, otherwise a unit's fault.
	Text string
}

func (r Reservation) concerns(u Unit) bool {
	return (r.GPU == "" || r.GPU == u.GPU) && (r.Only == nil || r.Only(u))
}

// compare is negative if r is stronger than other. Of two equally strong reservations the text
// decides, so the result does not depend on their order.
func (r Reservation) compare(other Reservation) int {
	if r.Begun != other.Begun {
		if r.Begun {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(r.Purpose, other.Purpose), cmp.Compare(r.Text, other.Text))
}

// nearerDRA returns the path that is nearer to DRA, where more is handed out by DRA.
func nearerDRA(a, b Path) Path {
	order := []Path{Plugin, LeavingPlugin, LeavingDRA, DRA}
	return order[max(slices.Index(order, a), slices.Index(order, b), 0)]
}

// Owners returns the owner of each unit, by UUID. The order of units and reservations does not
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
