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
	// Offered devices follow from the plan.
	Offered Phase = "offered"
	// Closing devices are surplus and held by a pod. They are never removed;
	// they stay Healthy for Timing.RetireAfter and are Unhealthy after that.
	Closing Phase = "closing"
	// Retiring devices are surplus and free. They are Unhealthy and leave the
	// list when the kubelet has applied that and a quiet time has passed.
	Retiring Phase = "retiring"
)

// Entry is a device in a list.
type Entry struct {
	sharing.Device
	// Index is the unit's index as in sharing.Unit; it names the unit to a
	// container when the unit itself is no longer planned.
	Index string
	Phase Phase
	// Since is when a Closing device became surplus. For a Retiring one it is
	// when the open stream was known to have been given a list that has it
	// Unhealthy; zero before, and zero for Offered.
	Since time.Time
	// Applied is when the kubelet was seen, after Since, to have applied that a
	// Retiring device is Unhealthy; zero before, and when it was seen to take it
	// for Healthy again.
	Applied time.Time
}

// List is what a resource advertises, and why.
type List struct {
	// Entries are sorted by the plan's order of units, then by replica.
	Entries []Entry
	// Dropped is when the plan was first without the resource; zero while it
	// has it.
	Dropped time.Time
	// Emptied is when the last entry of a dropped resource left; zero before.
	Emptied time.Time
}

func (l List) equal(other List) bool {
	return l.Dropped.Equal(other.Dropped) && l.Emptied.Equal(other.Emptied) && slices.Equal(l.Entries, other.Entries)
}

// Lists are the lists of all resources, by name.
type Lists map[string]List

func replica(id string) int {
	_, n, _ := sharing.ParseDeviceID(id)
	return n
}

// shared says that the device is one of several that stand for its unit.
func (e Entry) shared() bool {
	_, _, shared := sharing.ParseDeviceID(e.ID)
	return shared
}

// keptAs says that the lists need not be saved again: the devices are the same
// and equally far on their way out. Health is not kept.
func (l Lists) keptAs(saved Lists) bool {
	return saved != nil && maps.EqualFunc(l, saved, func(a, b List) bool {
		return slices.EqualFunc(a.Entries, b.Entries, func(a, b Entry) bool {
			return a.ID == b.ID && a.Index == b.Index && a.NUMANode == b.NUMANode && a.Phase == b.Phase
		})
	})
}
