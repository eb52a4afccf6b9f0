package nvml

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// moment is when something is observed, and by which rules it is judged.
type moment struct {
	now   time.Time
	rules sharing.HealthRules
}

// record is what is known of one board.
type record struct {
	// gpu is the last reading, without faults.
	gpu    sharing.GPU
	device Device
	// units are the health of the board and of its partitions, by UUID.
	units map[string]unitHealth
	// gone says that the board was lost, or its driver away, since it was last read:
	// it comes back reset.
	gone bool
	// temperature is what the last temperature says against the board.
	temperature string
	// unplaced are reports for partitions that were not known yet.
	unplaced []report
	tally    *tally
}

// report is an event against a unit, judged when it came.
type report struct {
	event  Event
	kind   observationKind
	reason finding
}

// enter takes in a reading of the board.
func (k *record) enter(r reading, at moment) {
	reset := r.reset || k.gone
	k.keep(&r)
	k.gpu, k.device, k.gone = r.gpu, r.device, false
	if reset {
		k.temperature, k.unplaced = "", nil
		k.observeAll(observation{kind: wasReset}, at)
	}
	if r.thermometer {
		k.temperature = temperatureText(r.celsius, k.temperature, at.rules)
	}
	wrong := r.findings[k.gpu.UUID]
	if k.temperature != "" {
		wrong = append(slices.Clip(wrong), finding{sharing.CauseTemperature, k.temperature})
	}
	k.probe(k.gpu.UUID, wrong, reset, at)
	for _, p := range k.gpu.Partitions {
		k.probe(p.UUID, r.findings[p.UUID], reset, at)
	}
	for _, late := range k.unplaced {
		k.place(late, at)
	}
	k.unplaced = nil
}

// probe enters what a reading found wrong with the unit. The reading that shows
// a reset proves nothing else.
func (k *record) probe(unit string, wrong []finding, reset bool, at moment) {
	if len(wrong) > 0 || !reset {
		k.observe(unit, observation{kind: probed, findings: wrong}, at)
	}
}

// keep fills the reading up with what is known from before and could not be
// read now, and forgets the partitions that are no more.
func (k *record) keep(r *reading) {
	// What the next probe reads must not be written here.
	r.findings, r.gpu.Partitions = maps.Clone(r.findings), slices.Clone(r.gpu.Partitions)
	r.gpu.Memory = cmp.Or(r.gpu.Memory, k.gpu.Memory)
	for i := range r.gpu.Partitions {
		p := &r.gpu.Partitions[i]
		p.Memory = cmp.Or(p.Memory, k.memoryOf(p.UUID))
	}
	missing := missingFrom(r.gpu.Partitions, k.gpu.Partitions)
	for _, p := range missing {
		if r.problems == nil {
			delete(k.units, p.UUID)
			continue
		}
		// A partition must not seem destroyed because one call failed.
		r.gpu.Partitions = append(r.gpu.Partitions, p)
		r.found(p.UUID, unread())
	}
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

// place enters the report against the unit that it names; false when the board
// has no such partition.
func (k *record) place(r report, at moment) bool {
	o := observation{kind: r.kind, findings: []finding{r.reason}}
	if r.event.GI == WholeBoard || !k.gpu.MIG {
		k.observe(k.gpu.UUID, o, at)
		return true
	}
	placed := false
	for _, p := range k.gpu.Partitions {
		if uint32(p.GI) == r.event.GI && (r.event.CI == WholeBoard || uint32(p.CI) == r.event.CI) {
			k.observe(p.UUID, o, at)
			placed = true
		}
	}
	return placed
}

// absent enters that a pass could not read the board.
func (k *record) absent(why finding, at moment) {
	k.gone = k.gone || why.cause == sharing.CauseLost
	k.observe(k.gpu.UUID, observation{kind: probed, findings: []finding{why}}, at)
}

func (k *record) observeAll(o observation, at moment) {
	k.observe(k.gpu.UUID, o, at)
	for _, p := range k.gpu.Partitions {
		k.observe(p.UUID, o, at)
	}
}

func (k *record) observe(unit string, o observation, at moment) {
	before, known := k.units[unit]
	if !known {
		before = newUnitHealth(at.now)
	}
	after := before.observe(o, at.rules, at.now)
	k.units[unit] = after
	if after.state != before.state {
		k.tally.change(sharing.HealthChange{
			UnitHealth: k.health(unit, cmp.Or(after.reason(), before.reason())),
			From:       before.state, Cause: after.cause,
		})
	}
}

// health is the unit's health in words.
func (k *record) health(unit, reason string) sharing.UnitHealth {
	h := k.units[unit]
	return sharing.UnitHealth{
		Unit: unit, GPU: k.gpu.UUID, Index: k.index(unit), State: h.state, Reason: reason, Since: h.since,
	}
}
