package nvml

import (
	"cmp"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// ledger remembers every board that was ever seen, and what speaks against it.
// It asks the driver nothing; passes and events are entered into it, and it
// tells the inventory that follows from them. One goroutine owns it.
type ledger struct {
	records map[string]*record
}

// record is what is known of one board.
type record struct {
	// gpu is the last reading, with the faults that it showed.
	gpu    sharing.GPU
	device Device
	// absent says why the last pass did not read the board; "" when it did.
	absent string
	// temperature is the temperature fault.
	temperature string
	// events are the event faults by unit, in the order in which they came.
	// They hold until the board is reset: after an XID a board may well answer.
	events map[string][]string
	// unplaced are events that named a partition which was not known yet.
	unplaced []Event
}

func newLedger() *ledger { return &ledger{records: map[string]*record{}} }

// enter takes in a pass that read something. A board that the pass says nothing
// of is no longer listed by the driver, but its pods still hold it, so it stays.
func (l *ledger) enter(p pass) {
	read := map[string]bool{}
	for _, r := range p.readings {
		uuid := r.gpu.UUID
		read[uuid] = true
		known := l.records[uuid]
		if known == nil {
			known = &record{events: map[string][]string{}}
			l.records[uuid] = known
		}
		known.enter(r)
	}
	for uuid, known := range l.records {
		if !read[uuid] {
			known.absent = cmp.Or(p.unreadable[uuid], faultLost)
		}
	}
}

// enter takes in a reading of the board.
func (k *record) enter(r reading) {
	if r.reset || k.absent == faultLost {
		clear(k.events)
		k.unplaced = nil
		k.temperature = ""
	}
	k.absent = ""
	if r.thermometer {
		k.temperature = temperatureFault(r.celsius, k.temperature)
	}
	r.gpu.Memory = cmp.Or(r.gpu.Memory, k.gpu.Memory)
	for i := range r.gpu.Partitions {
		p := &r.gpu.Partitions[i]
		p.Memory = cmp.Or(p.Memory, k.memoryOf(p.UUID))
	}
	if r.problems != nil {
		// A partition must not seem destroyed because one call failed.
		for _, missing := range missingFrom(r.gpu.Partitions, k.gpu.Partitions) {
			missing.Fault = "cannot be read"
			r.gpu.Partitions = append(r.gpu.Partitions, missing)
		}
	}
	for _, gone := range missingFrom(r.gpu.Partitions, k.gpu.Partitions) {
		delete(k.events, gone.UUID)
	}
	k.gpu, k.device = r.gpu, r.device
	for _, event := range k.unplaced {
		k.place(event, eventFault(event))
	}
	k.unplaced = nil
}

// memoryOf is what the partition's memory was, in bytes; 0 when unknown.
func (k *record) memoryOf(uuid string) uint64 {
	for _, partition := range k.gpu.Partitions {
		if partition.UUID == uuid {
			return partition.Memory
		}
	}
	return 0
}

// event takes in an event. It is the board's and not placed when it names a
// partition that is not known: look again, the next pass may find it. A board
// of "" says that no board has the event's handle, as after a reset.
func (l *ledger) event(e Event) (board, fault string, placed bool) {
	fault = eventFault(e)
	for uuid, known := range l.records {
		if known.device != e.Device {
			continue
		}
		if fault == "" || known.place(e, fault) {
			return uuid, fault, true
		}
		if !slices.Contains(known.unplaced, e) {
			known.unplaced = append(known.unplaced, e)
		}
		return uuid, fault, false
	}
	return "", fault, true
}

// place notes the fault against the unit that the event names; false when the
// board has no such partition.
func (k *record) place(e Event, fault string) bool {
	if e.GI == WholeBoard || !k.gpu.MIG {
		k.note(k.gpu.UUID, fault)
		return true
	}
	placed := false
	for _, partition := range k.gpu.Partitions {
		if uint32(partition.GI) == e.GI && (e.CI == WholeBoard || uint32(partition.CI) == e.CI) {
			k.note(partition.UUID, fault)
			placed = true
		}
	}
	return placed
}

func (k *record) note(unit, fault string) {
	if !slices.Contains(k.events[unit], fault) {
		k.events[unit] = append(k.events[unit], fault)
	}
}

// inventory is the boards as they are now, by index; nothing in it is shared
// with the ledger.
func (l *ledger) inventory() []sharing.GPU {
	gpus := make([]sharing.GPU, 0, len(l.records))
	for _, known := range l.records {
		gpus = append(gpus, known.describe())
	}
	slices.SortFunc(gpus, func(a, b sharing.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	return gpus
}

func (k *record) describe() sharing.GPU {
	gpu := k.gpu
	gpu.Partitions = slices.Clone(gpu.Partitions)
	slices.SortFunc(gpu.Partitions, func(a, b sharing.Partition) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	for i := range gpu.Partitions {
		partition := &gpu.Partitions[i]
		partition.Fault = joinFaults(append(slices.Clone(k.events[partition.UUID]), partition.Fault)...)
	}
	events := joinFaults(k.events[gpu.UUID]...)
	if k.absent != "" {
		gpu.Fault = joinFaults(k.absent, events)
	} else {
		gpu.Fault = joinFaults(events, gpu.Fault, k.temperature)
	}
	return gpu
}
