package plugin

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Phase is how far a device has come on its way through a resource's list.
type Phase string

const (
	// Offered devices are the ones that the plan wants. A device whose unit waits for its turn to
	// change its mode is still Offered, too; see Entry.Switching.
	Offered Phase = "offered"
	// HeldSurplus devices are surplus and held by a pod. They are not removed while they are held;
	// sharing.RetireAfter limits how long they stay Healthy.
	HeldSurplus Phase = "closing"
	// Removing devices are surplus and free. They are Unhealthy, and leave the list after the
	// kubelet has applied that and Timing.RemovalDelay has passed.
	Removing Phase = "retiring"
)

// Entry is a device in a list.
type Entry struct {
	sharing.Device
	// Mode is how the device shares its unit. The ID does not tell the mode of a device with the unit's
	// own ID: that device stays listed when the unit becomes time-sliced, see sharing.Use.CanBecome.
	Mode sharing.Mode
	// Index is the unit's index as in sharing.Unit. It is kept to name the unit to a container
	// after the unit has left the plan.
	Index string
	Phase Phase
	// Since is when a HeldSurplus device became surplus, and when an Offered device became Whole. For a
	// Removing device it is when the open stream was known to have been sent a list in which the
	// device is Unhealthy; zero before. It is zero for other Offered devices.
	Since time.Time
	// Applied is when the kubelet was seen, after Since, to have applied that a Removing device is
	// Unhealthy. It is zero before, and again if the kubelet is seen to consider the device Healthy.
	Applied time.Time
	// Switching is true if the plan has the device's unit in another mode, or not at all. If Phase
	// is Offered, the unit still waits for its turn.
	Switching bool
	// RefusesAllocate is true if Allocate refuses the device: it is Switching, and the kubelet has applied
	// that it is Unhealthy.
	RefusesAllocate bool
	// Unused is true if no pod held the device, or was about to get it, after it was refused. Its
	// unit can then be offered in another mode although this device is still listed.
	Unused bool
	// Whole is true if a pod that was promised the whole unit may hold this time-slice, because the unit
	// was exclusive when the pod got it. The other time-slices are offered once that pod has ended.
	Whole bool
}

// List is what a resource advertises, and why.
type List struct {
	// Entries are sorted by the plan's order of units, then by replica.
	Entries []Entry
	// Dropped is when the plan was first without the resource; zero while the plan has it.
	Dropped time.Time
	// Emptied is since when the kubelet has had the empty list of a dropped resource, or, while no
	// stream is open, since when the list has been empty; zero before.
	Emptied time.Time
}

func (l List) equal(other List) bool {
	return l.Dropped.Equal(other.Dropped) && l.Emptied.Equal(other.Emptied) && slices.Equal(l.Entries, other.Entries)
}

// Lists are the lists of all resources, by name.
type Lists map[string]List

func (e Entry) use(resource string) sharing.Use {
	return sharing.Use{Resource: resource, Mode: e.Mode}
}

func replica(id string) int {
	_, n, _ := sharing.ParseDeviceID(id)
	return n
}

// savedAs reports whether the lists need not be saved again, because devices and phases are the
// same. Health is not saved.
func (l Lists) savedAs(saved Lists) bool {
	return saved != nil && maps.EqualFunc(l, saved, func(a, b List) bool {
		return slices.EqualFunc(a.Entries, b.Entries, func(a, b Entry) bool {
			return a.ID == b.ID && a.Index == b.Index && a.NUMANode == b.NUMANode && a.Phase == b.Phase &&
				a.Mode == b.Mode && a.Whole == b.Whole
		})
	})
}

// RPCState is what the servers know about the kubelet's calls and about the lists it was sent.
type RPCState struct {
	// Granted is when Allocate last granted a device, and Preferred is when GetPreferredAllocation
	// last chose it. Refused is since when Allocate has refused a device that the list has as
	// RefusesAllocate. Shared is since when it has granted a Whole device as a time-slice.
	Granted, Preferred, Refused, Shared DeviceTimes
	// Busy are the resources with a call in progress.
	Busy map[string]bool
	// Sent are the resources with an open stream that was sent the newest list. Lost are the
	// resources without a stream, or with a different stream than at the last step.
	Sent, Lost map[string]bool
}

// Next returns what each resource should list now. It is pure: the same arguments give the same lists.
//
// A list grows at once and shrinks in two phases (see Phase). Devices that pods hold are kept first.
//
// A unit changes its sharing mode if it gets another resource name, becomes shared instead of
// exclusive, or is shared by MPS with another number of shares. It is offered in the new mode once
// none of its old devices can be used any more. The old devices stay in the list, Unhealthy, until
// they can leave it. There is one exception: a unit that becomes time-sliced instead of exclusive
// under the same name keeps its device, Healthy, as its first share; see Entry.Whole. When the
// kubelet cannot be read, nothing is removed, and that exception is the only change of mode.
//
// A device that a pod holds and no list has, because NVIDIA's plugin granted it or the state file
// was lost, is treated as if it had been listed.
func Next(have Lists, want sharing.Plan, kubelet KubeletSnapshot, rpc RPCState, now time.Time, timing Timing) Lists {
	s := inputs{
		kubelet:     kubelet,
		rpc:         rpc,
		now:         now,
		timing:      timing.withDefaults(),
		retireAfter: want.RetireAfter,
		health:      want.Health,
		units:       map[string]*unitState{},
		missing:     map[string]*sharing.Device{},
	}
	have = s.adopt(have, want)

	wanted := map[string]sharing.Resource{}
	for _, r := range want.Resources {
		wanted[r.Name] = r
	}
	s.findUnits(have, want)
	s.startWaves(have, wanted)

	next := Lists{}
	for name, resource := range wanted {
		old, had := have[name]
		entries := s.entries(name, old.Entries, resource.Devices)
		if had || len(entries) > 0 { // Otherwise all of its units are still in use in another mode.
			next[name] = List{Entries: entries}
		}
	}
	for name, old := range have {
		if _, planned := wanted[name]; planned {
			continue
		}
		list := List{Entries: s.entries(name, old.Entries, nil), Dropped: cmp.Or(old.Dropped, now)}
		if sent := len(old.Entries) == 0 && rpc.Sent[name]; len(list.Entries) == 0 && (sent || rpc.Lost[name]) {
			list.Emptied = cmp.Or(old.Emptied, now)
		}
		if list.Emptied.IsZero() || now.Before(list.Emptied.Add(s.timing.StopAfter)) {
			next[name] = list
		}
	}
	return next
}

// inputs are the arguments of Next, and what follows from them for all resources.
type inputs struct {
	kubelet     KubeletSnapshot
	rpc         RPCState
	now         time.Time
	timing      Timing
	retireAfter sharing.RetireAfter
	health      map[string]sharing.Health
	units       map[string]*unitState
	// ranked and missing are buffers, reused from unit to unit: a unit may have thousands of devices.
	ranked  []rankedEntry
	missing map[string]*sharing.Device
}

// held reports whether a pod holds the device, or may hold it.
func (s *inputs) held(resource, id string) bool {
	return s.kubelet.Held.has(resource, id) ||
		s.kubelet.pendingGrant(resource, id, s.rpc.Granted[resource][id], s.timing.RemovalDelay)
}

// mayBeHeld is held for a device in a list. A device that a pod held when Virgate last ran counts
// as held until the kubelet is read for the first time.
func (s *inputs) mayBeHeld(resource string, e Entry) bool {
	return s.held(resource, e.ID) || (e.Phase == HeldSurplus && s.kubelet.HeldAt.IsZero())
}

// removable reports whether a surplus device can leave the list without harm: the kubelet applied
// long enough ago that it is Unhealthy, no pod holds it, and no admission that may have chosen it
// is still in progress.
func (s *inputs) removable(resource string, e Entry) bool {
	return s.isUnhealthy(resource, e) && s.kubelet.HeldAt.After(e.Applied) &&
		!s.held(resource, e.ID) && !s.rpc.Busy[resource] &&
		!s.now.Before(e.Applied.Add(s.timing.RemovalDelay)) &&
		!s.now.Before(s.rpc.Preferred[resource][e.ID].Add(s.timing.RemovalDelay))
}

// isUnhealthy reports whether the kubelet has applied that the device is Unhealthy, and can be read.
func (s *inputs) isUnhealthy(resource string, e Entry) bool {
	return !e.Applied.IsZero() && !s.rpc.Lost[resource] && !s.kubelet.Applied.has(resource, e.ID) &&
		s.kubelet.HeldKnown && s.kubelet.AppliedKnown
}

// settled reports whether every list is as the plan wants it, apart from units that still gain
// shares (see grows).
func (l Lists) settled() bool {
	for _, list := range l {
		if !list.Dropped.IsZero() || slices.ContainsFunc(list.Entries,
			func(e Entry) bool { return e.Phase != Offered || e.Switching }) {
			return false
		}
	}
	return true
}

// grows reports whether a unit's other shares wait for a pod that has the whole unit.
func (l Lists) grows() bool {
	for _, list := range l {
		if slices.ContainsFunc(list.Entries, func(e Entry) bool { return e.Whole }) {
			return true
		}
	}
	return false
}

// switched reports whether only pods keep units from being offered as the plan wants them.
func (l Lists) switched(held DeviceIDs) bool {
	for resource, list := range l {
		if slices.ContainsFunc(list.Entries, func(e Entry) bool {
			return e.Switching && !e.Unused && e.Phase != HeldSurplus || e.Whole && !held.has(resource, e.ID)
		}) {
			return false
		}
	}
	return true
}

// entries returns the resource's next list. old is what it lists now, and want what it should list.
func (s *inputs) entries(resource string, old []Entry, want []sharing.Device) []Entry {
	entries := make([]Entry, 0, max(len(old), len(want)))
	for _, group := range groupByUnit(old, want) {
		entries = s.appendUnit(entries, resource, group)
	}
	if slices.Equal(entries, old) {
		return old // Keeps only one of the two in memory.
	}
	return withRoom(entries, old)
}

type unitDevices struct {
	unit string
	old  []Entry
	want []sharing.Device
}

// groupByUnit returns the units in the order of the plan, then the units that are not in the plan, by ID.
func groupByUnit(old []Entry, want []sharing.Device) []*unitDevices {
	var groups []*unitDevices
	byUnit := map[string]*unitDevices{}
	at := func(unit string) *unitDevices {
		if byUnit[unit] == nil {
			byUnit[unit] = &unitDevices{unit: unit}
			groups = append(groups, byUnit[unit])
		}
		return byUnit[unit]
	}
	for devices := range sameUnit(want, func(d sharing.Device) string { return d.Unit }) {
		p := at(devices[0].Unit)
		p.want = concat(p.want, devices)
	}
	planned := len(groups)
	for entries := range sameUnit(old, func(e Entry) string { return e.Unit }) {
		p := at(entries[0].Unit)
		p.old = concat(p.old, entries)
	}
	slices.SortFunc(groups[planned:], func(a, b *unitDevices) int { return cmp.Compare(a.unit, b.unit) })
	return groups
}

// sameUnit yields the runs of adjacent elements that belong to one unit. Lists are sorted so that a
// run has all devices of its unit. Nothing is copied, because there may be thousands.
func sameUnit[T any](list []T, unit func(T) string) iter.Seq[[]T] {
	return func(yield func([]T) bool) {
		for len(list) > 0 {
			end := 1
			for end < len(list) && unit(list[end]) == unit(list[0]) {
				end++
			}
			if !yield(list[:end:end]) {
				return
			}
			list = list[end:]
		}
	}
}

// concat returns more itself if list is empty.
func concat[T any](list, more []T) []T {
	if len(list) == 0 {
		return more
	}
	return append(list, more...)
}

// rankedEntry is a device that may stay in the list or enter it.
type rankedEntry struct {
	Entry
	rank    int
	replica int
	fresh   bool // not listed yet
}

// The devices of a unit are interchangeable, so the ranks decide which of them are offered: first
// the ones that pods hold, then the ones that the plan names.
const (
	rankHeld = iota
	rankWanted
	rankExtra
)

// appendUnit appends the devices of one unit to the list, by replica. It offers as many of them as
// the plan wants; the others are surplus.
func (s *inputs) appendUnit(entries []Entry, resource string, p *unitDevices) []Entry {
	candidates, surplus := s.candidates(resource, p)
	slices.SortFunc(candidates, func(a, b rankedEntry) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.replica, b.replica))
	})
	unit := s.units[p.unit]
	healthy := s.healthy(p.unit) && !unit.withheld
	kept := candidates[:0] // In place: there may be thousands.
	for i, c := range candidates {
		switch {
		case i < len(p.want):
			// A pod that NVIDIA's plugin served may hold the unit in another mode as well.
			otherwise := unit.whole && !c.Whole || unit.held && unit.blocked() && c.rank != rankHeld
			c.offer(healthy && !otherwise)
			kept = append(kept, c)
		case !c.fresh:
			c.Switching = false
			kept = s.appendSurplus(kept, resource, c)
		}
	}
	kept = append(kept, surplus...)
	slices.SortFunc(kept, func(a, b rankedEntry) int {
		return cmp.Or(cmp.Compare(a.replica, b.replica), cmp.Compare(a.ID, b.ID))
	})
	for _, c := range kept {
		if unit.planned {
			c.Index = unit.index
		}
		entries = append(entries, c.Entry)
	}
	s.ranked = kept
	return entries
}

// candidates returns the unit's devices that may be offered, and as surplus the listed devices that
// may not be offered but have to stay in the list for now.
func (s *inputs) candidates(resource string, p *unitDevices) (candidates, surplus []rankedEntry) {
	use := sharing.Use{Resource: resource}
	if len(p.want) > 0 {
		use.Mode = sharing.ModeOf(p.want[0].ID)
	}
	unit := s.units[p.unit]
	blocked := unit.blocked()
	candidates = slices.Grow(s.ranked[:0], max(len(p.old), len(p.want)))
	missing := s.missing
	clear(missing)
	if len(p.old) > 0 { // Otherwise all are missing, and there may be thousands.
		for i, d := range p.want {
			missing[d.ID] = &p.want[i]
		}
	}
	for _, e := range p.old {
		e = s.asPlanned(resource, e, unit)
		c := rankedEntry{
			Entry:   e,
			rank:    rankExtra,
			replica: replica(e.ID),
		}
		planned := e.ID
		if e.ID == e.Unit && use.Mode == sharing.TimeSliced {
			planned = sharing.NewDeviceID(e.Unit, 0) // It becomes the first share.
		}
		named := missing[planned]
		switch {
		case len(p.want) > 0 && e.use(resource) == use:
		case named != nil && !blocked:
			c.Mode, c.Whole = use.Mode, false // No pod has it in the old mode, and its ID stays the same.
		default:
			c.Switching = true
			surplus = s.appendSurplus(surplus, resource, c)
			continue
		}
		delete(missing, planned)
		switch {
		case (blocked || unit.whole) && e.Phase == Removing:
			// It was already on its way out when the unit was offered in another mode.
			surplus = s.appendSurplus(surplus, resource, c)
			continue
		case named != nil:
			c.rank, c.NUMANode = rankWanted, named.NUMANode
		}
		if s.held(resource, e.ID) {
			c.rank = rankHeld
		}
		candidates = append(candidates, c)
	}
	if blocked || unit.whole {
		return candidates, surplus
	}
	for _, d := range p.want {
		if missing[d.ID] != nil || len(p.old) == 0 {
			candidates = append(candidates, rankedEntry{
				Entry:   Entry{Device: d, Mode: use.Mode},
				rank:    rankWanted,
				replica: replica(d.ID),
				fresh:   true,
			})
		}
	}
	return candidates, surplus
}

// healthy reports whether the unit is healthy now. A unit that has left the node is not.
func (s *inputs) healthy(unit string) bool {
	health, present := s.health[unit]
	return present && health.Healthy()
}

func (e *Entry) offer(healthy bool) {
	since := e.Since
	*e = Entry{
		Device: e.Device,
		Mode:   e.Mode,
		Index:  e.Index,
		Phase:  Offered,
		Whole:  e.Whole,
	}
	e.Healthy = healthy
	if e.Whole {
		e.Since = since
	}
}

// appendSurplus appends a listed device that the plan does not want, unless it leaves the list now.
func (s *inputs) appendSurplus(kept []rankedEntry, resource string, c rankedEntry) []rankedEntry {
	next, stays := s.nextSurplus(resource, c.Entry)
	if !stays {
		return kept
	}
	c.Entry = next
	return append(kept, c)
}

// nextSurplus returns the next entry of a surplus device; stays is false if the device leaves the list.
func (s *inputs) nextSurplus(resource string, e Entry) (next Entry, stays bool) {
	switch {
	case e.Switching && e.Phase == Offered && !s.units[e.Unit].begins: // The unit's turn has not come yet.
		e.offer(s.healthy(e.Unit))
		e.Switching = true
		return e, true
	case s.mayBeHeld(resource, e):
		return s.heldSurplus(e), true
	case s.removable(resource, e):
		return Entry{}, false
	default:
		return s.removing(resource, e), true
	}
}

// heldSurplus returns the entry of a surplus device that a pod holds.
func (s *inputs) heldSurplus(e Entry) Entry {
	if e.Phase != HeldSurplus {
		e.Since = s.now
	}
	next := Entry{
		Device:    e.Device,
		Mode:      e.Mode,
		Index:     e.Index,
		Phase:     HeldSurplus,
		Since:     e.Since,
		Switching: e.Switching,
		Whole:     e.Whole,
	}
	usable := s.healthy(e.Unit) && (e.Switching || !s.units[e.Unit].withheld)
	next.Healthy = usable && s.now.Before(next.Since.Add(s.healthyFor(next)))
	return next
}

// removing returns the entry of a surplus device that no pod holds and that cannot leave the list yet.
func (s *inputs) removing(resource string, e Entry) Entry {
	// A kubelet that does not show the device as Healthy may just have lost its stream, or may
	// still have to read an older list that has it Healthy. So the clock starts only once the open
	// stream was sent the list.
	if e.Phase != Removing || s.rpc.Lost[resource] {
		e.Phase = Removing
		e.Since = time.Time{}
		e.Applied = time.Time{}
	}
	if e.Since.IsZero() && s.rpc.Sent[resource] && !e.Healthy {
		e.Since = s.now
	}
	e.Healthy = false
	switch {
	case s.kubelet.Applied.has(resource, e.ID):
		e.Applied = time.Time{}
	case e.Applied.IsZero() && !e.Since.IsZero() && s.kubelet.AppliedKnown && s.kubelet.AppliedAt.After(e.Since):
		e.Applied = s.now
	}
	unit := s.units[e.Unit]
	e.Unused = e.Unused || e.Switching && !unit.blocked()
	e.RefusesAllocate = e.Unused || e.Switching && unit.closes
	return e
}

func (s *inputs) healthyFor(e Entry) time.Duration {
	switch {
	case e.Switching:
		return s.retireAfter.Switch
	case s.retireAfter.ShrinkSet:
		return s.retireAfter.Shrink
	}
	return s.timing.RetireAfter
}

// mostListed is the largest number of devices in one list. A plan has no more for a resource
// (sharing.NewPlan), but between two plans a list has the Removing devices beside the new ones.
const mostListed = sharing.MaxDevices

// withRoom drops new entries, starting from the end, so that the list is not longer than the
// kubelet accepts: otherwise the kubelet would close the stream, and all devices would be gone. The
// dropped entries are added once others have left. Entries that were listed before stay.
func withRoom(entries, old []Entry) []Entry {
	surplus := len(entries) - mostListed
	if surplus <= 0 {
		return entries
	}
	listed := make(map[string]bool, len(old))
	for _, e := range old {
		listed[e.ID] = true
	}
	slices.Reverse(entries)
	entries = slices.DeleteFunc(entries, func(e Entry) bool {
		leaves := surplus > 0 && !listed[e.ID]
		if leaves {
			surplus--
		}
		return leaves
	})
	slices.Reverse(entries)
	return entries
}

// domain is the domain of the resource names under which Virgate, or NVIDIA's plugin before it, may
// have granted GPUs.
const domain = "nvidia.com/"

// adopt returns have plus the devices that pods hold and that no list has. It must not adopt
// another plugin's devices: the resource must be one of Virgate's or NVIDIA's, and the ID must
// belong to a GPU or partition.
func (s *inputs) adopt(have Lists, want sharing.Plan) Lists {
	adopted := Lists{}
	maps.Copy(adopted, have)
	for resource, held := range s.kubelet.Held {
		list, had := have[resource]
		planned := slices.ContainsFunc(want.Resources, func(r sharing.Resource) bool { return r.Name == resource })
		if !had && !planned && !strings.HasPrefix(resource, domain) {
			continue
		}
		listed := make(map[string]struct{}, len(list.Entries))
		for _, e := range list.Entries {
			listed[e.ID] = struct{}{}
		}
		list.Entries = slices.Clip(list.Entries)
		for _, id := range slices.Sorted(maps.Keys(held)) {
			unit, _, _ := sharing.ParseDeviceID(id)
			if _, ok := listed[id]; !ok && s.isUnit(unit) {
				list.Entries = append(list.Entries, Entry{
					Device: sharing.Device{
						ID:       id,
						Unit:     unit,
						NUMANode: numaNode(want, unit),
					},
					Mode:  sharing.ModeOf(id),
					Phase: Offered,
				})
				adopted[resource] = list
			}
		}
	}
	return adopted
}

// isUnit reports whether the ID belongs to a GPU or partition, on this node now or in the past.
func (s *inputs) isUnit(unit string) bool {
	_, present := s.health[unit]
	return present || strings.HasPrefix(unit, "GPU-") || strings.HasPrefix(unit, "MIG-")
}

func numaNode(want sharing.Plan, unit string) int {
	for _, r := range want.Resources {
		if i := slices.IndexFunc(r.Units, func(u sharing.Unit) bool { return u.ID == unit }); i >= 0 {
			return r.Units[i].NUMANode
		}
	}
	return -1
}
