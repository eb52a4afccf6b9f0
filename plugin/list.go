package plugin

import (
	"maps"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Phase is where a device is on its way through a resource's list.
type Phase string

const (
	// Offered devices are those that the plan wants.
	Offered Phase = "offered"
	// Closing devices are surplus and held by a pod. They are never removed;
	// sharing.RetireAfter says how long they stay Healthy.
	Closing Phase = "closing"
	// Retiring devices are surplus and free. They are Unhealthy and leave the
	// list when the kubelet has applied that and Timing.RemovalDelay has passed.
	Retiring Phase = "retiring"
)

// Entry is a device in a list.
type Entry struct {
	sharing.Device
	// Index is the unit's index as in sharing.Unit. It is kept here to name the unit to
	// a container when the unit is no longer planned.
	Index string
	Phase Phase
	// Since is when a Closing device became surplus. For a Retiring one it is
	// when the open stream was known to have been given a list that has it
	// Unhealthy; zero before, and zero for Offered.
	Since time.Time
	// Applied is when the kubelet was seen, after Since, to have applied that a
	// Retiring device is Unhealthy. It is zero before, and again if the kubelet is seen
	// to consider the device Healthy.
	Applied time.Time
	// Switching says that the plan has the device's unit in another mode, or not at
	// all. With Phase Offered, it is not the unit's turn yet.
	Switching bool
	// Closed says that Allocate refuses the device: it is Switching, and the kubelet
	// has applied that it is Unhealthy.
	Closed bool
	// Vacated says that nobody held the device, or was about to, after it was Closed.
	// Its unit can be offered in another mode while it is still listed.
	Vacated bool
}

// List is what a resource advertises, and why.
type List struct {
	// Entries are sorted by the plan's order of units, then by replica.
	Entries []Entry
	// Dropped is when the plan was first without the resource; zero while it has it.
	Dropped time.Time
	// Emptied is when the last entry of a dropped resource left; zero before.
	Emptied time.Time
}

func (l List) equal(other List) bool {
	return l.Dropped.Equal(other.Dropped) && l.Emptied.Equal(other.Emptied) && slices.Equal(l.Entries, other.Entries)
}

// Lists are the lists of all resources, by name.
type Lists map[string]List

// sharingMode is how a unit is offered: under which name, and whether shared.
type sharingMode struct {
	resource string
	shared   bool
}

func (e Entry) mode(resource string) sharingMode { return sharingMode{resource, e.shared()} }

func replica(id string) int {
	_, n, _ := sharing.ParseDeviceID(id)
	return n
}

// shared says that the device is a share of its unit, rather than the whole of it.
func (e Entry) shared() bool {
	_, _, shared := sharing.ParseDeviceID(e.ID)
	return shared
}

// savedAs says that the lists need not be saved again, because devices and phases are
// the same. Health is not saved.
func (l Lists) savedAs(saved Lists) bool {
	return saved != nil && maps.EqualFunc(l, saved, func(a, b List) bool {
		return slices.EqualFunc(a.Entries, b.Entries, func(a, b Entry) bool {
			return a.ID == b.ID && a.Index == b.Index && a.NUMANode == b.NUMANode && a.Phase == b.Phase
		})
	})
}
