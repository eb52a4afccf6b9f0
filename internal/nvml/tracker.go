package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/virgate/virgate/sharing"
)

// tracker remembers every GPU that was ever seen, and its faults. It does not call the driver: it
// gets scans and events, and derives the inventory and the health from them. One goroutine owns it.
type tracker struct {
	gpus map[string]*gpuState
	// handles holds all handles by which GPUs were ever read, with the GPUs' UUIDs.
	handles  map[Device]string
	counters *counters
	// driver is the last known version of the driver. unloaded is true if no driver was loaded at
	// some time since.
	driver   string
	unloaded bool
	// known holds every GPU that has an index, by UUID: the GPUs in gpus, and those of an earlier
	// run. boot is the machine's boot ID; empty before these are known.
	known map[string]KnownGPU
	boot  string
	// complete means that the last complete scan found all existing GPUs; certain means that it
	// also identified them.
	complete, certain bool
	// released reports whether a GPU is released and so not looked up, and returns the driver's
	// last index of it.
	released func(gpu string) (driverIndex int, released bool)
	// pending holds the fatal errors of an earlier run for units that have not been seen yet.
	pending []FatalHealth
}

func newTracker(released func(gpu string) (driverIndex int, released bool)) *tracker {
	return &tracker{
		released: released,
		gpus:     map[string]*gpuState{},
		handles:  map[Device]string{},
		known:    map[string]KnownGPU{},
		counters: &counters{
			transitions: map[sharing.TransitionCount]sharing.TransitionCount{},
			xids:        map[sharing.XIDCount]sharing.XIDCount{},
		},
	}
}

// moment is the time of an observation, and the health rules that apply to it.
type moment struct {
	now   time.Time
	rules sharing.HealthRules
}

// addScan adds a scan that has read something. A GPU that is missing in a complete scan is no
// longer listed by the driver. It stays in the inventory, because its pods still hold it.
func (t *tracker) addScan(scanned scanResult, at moment) {
	// Loading a driver resets the GPUs, whether it is another driver or the same one.
	if t.unloaded || differ(scanned.driver, t.driver) {
		for _, gpu := range t.gpus {
			gpu.lost = true
		}
	}
	t.unloaded, t.driver = false, cmp.Or(scanned.driver, t.driver)
	if !scanned.unwatchedSince.IsZero() {
		for _, gpu := range t.gpus {
			gpu.unwatch(scanned.unwatchedSince)
		}
	}
	if scanned.complete {
		t.complete = !scanned.uncertain
		t.certain = t.complete && !scanned.lostThere
	}
	read := map[string]bool{}
	for _, r := range scanned.readings {
		uuid := r.gpu.UUID
		read[uuid], t.handles[r.device] = true, uuid
		gpu := t.gpus[uuid]
		if gpu == nil {
			gpu = t.newGPU()
			t.gpus[uuid] = gpu
		}
		gpu.driverIndex, gpu.listed = r.gpu.Index, true
	}
	for _, r := range scanned.readings {
		gpu := t.gpus[r.gpu.UUID]
		r.gpu.Index = t.index(r.gpu.UUID, r.gpu.Index)
		gpu.addReading(r, at)
		t.restoreGPU(gpu, at)
	}
	for _, uuid := range t.uuids() {
		why, failed := scanned.unreadable[uuid]
		switch {
		case read[uuid]:
		case scanned.pending[uuid]:
			t.gpus[uuid].gpu.Denied = t.gpus[uuid].gpu.Denied || scanned.refused[uuid]
		case failed:
			t.gpus[uuid].addUnreadable(why, at)
		case scanned.complete && scanned.uncertain:
			t.gpus[uuid].addUnreadable(notReadFinding(), at)
		case scanned.complete:
			t.gpus[uuid].addUnreadable(lostFinding(), at)
			t.gpus[uuid].listed = scanned.lostThere
		}
	}
	if scanned.complete && !scanned.uncertain {
		t.pending = slices.DeleteFunc(t.pending,
			func(f FatalHealth) bool { return !read[f.GPU] && !scanned.pending[f.GPU] })
	}
	t.addMissing(at)
}

func (t *tracker) newGPU() *gpuState {
	return &gpuState{units: map[string]unitHealth{}, counters: t.counters}
}

// index returns a GPU's index: the one under which it was first known. A new GPU gets the driver's
// index, even if a GPU that is gone had it, as after a replacement. If the node still has that
// other GPU, the new one gets the next index that no known GPU has. If the node only may have it,
// that index is provisional.
func (t *tracker) index(uuid string, driver int) int {
	gpu, known := t.known[uuid]
	if known && (!gpu.Provisional || !t.certain) {
		return gpu.Index
	}
	delete(t.known, uuid)
	owners := map[int]string{}
	for owner, gpu := range t.known {
		owners[gpu.Index] = owner
	}
	index := driver
	if t.certain && t.gpus[owners[index]] == nil {
		delete(t.known, owners[index])
	} else {
		for owners[index] != "" {
			index++
		}
	}
	t.known[uuid] = KnownGPU{GPU: sharing.GPU{UUID: uuid, Index: index}, Provisional: !t.certain && index != driver}
	return index
}

// remember restores the GPUs that an earlier run knew, with their indexes. boot is the machine's
// current boot ID; empty if unknown.
func (t *tracker) remember(stored []KnownGPU, boot string, at moment) {
	t.known, t.boot = map[string]KnownGPU{}, boot
	for _, gpu := range stored {
		t.known[gpu.UUID] = gpu
	}
	for _, gpu := range t.inventory() {
		t.gpus[gpu.UUID].gpu.Index = t.index(gpu.UUID, gpu.Index)
	}
	t.addMissing(at)
}

// addMissing adds, as lost, the GPUs that an earlier run knew since the machine was booted and that
// the driver does not list. The meaning of four GPUs in a profile must not depend on whether the
// program was restarted.
func (t *tracker) addMissing(at moment) {
	for uuid, known := range t.known {
		index, released := t.released(uuid)
		switch {
		case !t.complete || t.gpus[uuid] != nil:
		case released:
			t.addReleased(known.GPU, index, at)
		case t.boot != "" && t.boot == known.Boot:
			t.gpus[uuid] = t.newGPU()
			t.gpus[uuid].gpu, t.gpus[uuid].listed = known.GPU, !t.certain
			t.gpus[uuid].addUnreadable(lostFinding(), at)
		}
	}
}

// knownGPUs returns the GPUs to store for a restart, by index.
func (t *tracker) knownGPUs() []KnownGPU {
	for uuid, gpu := range t.gpus {
		known := KnownGPU{
			GPU:         gpu.gpu,
			Boot:        t.boot,
			Provisional: t.known[uuid].Provisional,
		}
		known.Links = nil
		t.known[uuid] = known
	}
	return slices.SortedFunc(maps.Values(t.known), func(a, b KnownGPU) int { return cmp.Compare(a.Index, b.Index) })
}

func (t *tracker) addFailure(err error) { t.unloaded = t.unloaded || errors.Is(err, DriverNotLoaded) }

// uuids returns the UUIDs of the known GPUs, sorted.
func (t *tracker) uuids() []string { return slices.Sorted(maps.Keys(t.gpus)) }

// addEvent adds an event to the GPU with the UUID that came with it, or else to the GPU that has or
// had its handle. If neither identifies the GPU, uuid is empty, and all GPUs are suspect. assigned
// is false if the event names an unknown GPU or partition: the next scan may find it.
func (t *tracker) addEvent(
	e receivedEvent,
	at moment,
) (uuid string, r errorReport, action sharing.ErrorAction, assigned bool) {
	found, action := classify(e.Event, at.rules)
	r = errorReport{
		event:   e.Event,
		kind:    reportedSuspect,
		finding: found,
	}
	uuid = cmp.Or(e.uuid, t.handles[e.Device]) // A handle may have been reused for another GPU.
	if uuid == "" && action != sharing.IgnoreError {
		action = sharing.SuspectError
		r.finding.text += " of a GPU that the driver does not name"
		r.event.GI = WholeGPU
		for _, uuid := range t.uuids() {
			t.gpus[uuid].assign(r, at)
		}
	}
	gpu := t.gpus[uuid]
	xid := e.Type&EventXIDCritical != 0
	if xid && at.rules.LeftToDriver[e.Data] && gpu != nil && gpu.recoveryKnown && action == sharing.FatalError {
		action = sharing.SuspectError
	}
	if action == sharing.FatalError {
		r.kind = reportedFatal
	}
	if gpu == nil {
		return uuid, r, action, uuid == ""
	}
	if xid {
		t.counters.addXID(uuid, e.Data, action, at.rules)
	}
	if action == sharing.IgnoreError || gpu.assign(r, at) {
		return uuid, r, action, true
	}
	if !slices.Contains(gpu.unassigned, r) {
		gpu.unassigned = append(gpu.unassigned, r)
	}
	return uuid, r, action, false
}

// errNoUnit means that a selector matches nothing on the node.
var errNoUnit = errors.New("no such GPU or partition")

// clear records an operator's confirmation that the selected units may be used, for a GPU including
// its partitions. It returns their health after that. A GPU that the driver does not list is
// forgotten.
func (t *tracker) clear(selector sharing.Selector, at moment) ([]sharing.UnitHealth, error) {
	var cleared []sharing.UnitHealth
	for _, uuid := range t.uuids() {
		gpu := t.gpus[uuid]
		for _, unit := range gpu.matching(selector) {
			gpu.observe(unit, observation{kind: wasCleared}, at)
			cleared = append(cleared, gpu.health(unit, at.rules))
		}
		if selector.MatchGPU(gpu.gpu) && !gpu.listed {
			delete(t.gpus, uuid)
			delete(t.known, uuid)
		}
	}
	if cleared == nil {
		return nil, fmt.Errorf("%w: %s", errNoUnit, selector)
	}
	return cleared, nil
}

// restore restores the fatal errors of an earlier run, except those from an earlier boot.
func (t *tracker) restore(stored []FatalHealth, boot string, at moment) {
	t.pending = slices.DeleteFunc(slices.Clone(stored), func(f FatalHealth) bool { return differ(f.Boot, boot) })
	for _, uuid := range t.uuids() {
		t.restoreGPU(t.gpus[uuid], at)
	}
}

// restoreGPU adds the pending errors of a GPU that was read. It drops errors of a partition that
// the GPU does not have: the partition was destroyed.
func (t *tracker) restoreGPU(gpu *gpuState, at moment) {
	t.pending = slices.DeleteFunc(t.pending, func(f FatalHealth) bool {
		if f.GPU != gpu.gpu.UUID {
			return false
		}
		if _, there := gpu.units[f.Unit]; there && !differ(f.Driver, t.driver) && !gpu.marks.resetSince(f.Marks) {
			gpu.marks = gpu.marks.over(f.Marks)
			o := observation{kind: reportedFatal}
			for i, reason := range f.Reasons {
				found := finding{cause: sharing.CauseRestart, text: reason}
				if len(f.XIDs) == len(f.Reasons) { // State files from before there were XIDs have none.
					found.xid = f.XIDs[i]
				}
				o.findings = append(o.findings, found)
			}
			if len(o.findings) > 0 {
				gpu.observe(f.Unit, o, at)
				// The unit has been in this state since before the restart.
				h := gpu.units[f.Unit]
				if f.Since.Before(h.since) {
					h.since = f.Since
				}
				gpu.units[f.Unit] = h
			}
		}
		return true
	})
}

// differ reports whether both values are known and different.
func differ(a, b string) bool { return a != "" && b != "" && a != b }

// fatalErrors returns the errors to store for a restart, by unit: the current ones, and those still
// pending.
func (t *tracker) fatalErrors(boot string) []FatalHealth {
	list := slices.Clone(t.pending)
	for uuid, gpu := range t.gpus {
		for unit, h := range gpu.units {
			if len(h.fatal) == 0 {
				continue
			}
			f := FatalHealth{
				GPU:    uuid,
				Unit:   unit,
				Since:  h.since.UTC().Round(0),
				Boot:   boot,
				Driver: t.driver,
				Marks:  gpu.marks,
			}
			for _, found := range h.fatal {
				f.Reasons, f.XIDs = append(f.Reasons, found.text), append(f.XIDs, found.xid)
			}
			list = append(list, f)
		}
	}
	slices.SortFunc(list, func(a, b FatalHealth) int { return cmp.Compare(a.Unit, b.Unit) })
	return list
}

// inventory returns the current GPUs, by index. The result shares nothing with the tracker.
func (t *tracker) inventory() []sharing.GPU {
	gpus := make([]sharing.GPU, 0, len(t.gpus))
	for _, gpu := range t.gpus {
		gpus = append(gpus, gpu.withHealth())
	}
	slices.SortFunc(gpus, func(a, b sharing.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	return gpus
}

// health returns every unit's health, by GPU and partition index, with the counters.
func (t *tracker) health(rules sharing.HealthRules) sharing.HealthReport {
	units := []sharing.UnitHealth{}
	for _, gpu := range t.inventory() {
		units = append(units, t.gpus[gpu.UUID].health(gpu.UUID, rules))
		for _, p := range gpu.Partitions {
			units = append(units, t.gpus[gpu.UUID].health(p.UUID, rules))
		}
	}
	return sharing.HealthReport{
		Units: units,
		Transitions: slices.SortedFunc(maps.Values(t.counters.transitions), func(a, b sharing.TransitionCount) int {
			return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To),
				cmp.Compare(a.Cause, b.Cause))
		}),
		XIDs: slices.SortedFunc(maps.Values(t.counters.xids), func(a, b sharing.XIDCount) int {
			return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.XID, b.XID), cmp.Compare(a.Action, b.Action))
		}),
	}
}

// gpuState is what the tracker knows of one GPU.
type gpuState struct {
	// resets counts how often the GPU was seen to be reset.
	resets int
	// gpu is the last reading, without faults and with the tracker's index.
	gpu sharing.GPU
	// driverIndex is the GPU's last index in the driver; listed is true while the driver still has
	// the GPU.
	driverIndex int
	listed      bool
	// units holds the health of the GPU and of its partitions, by UUID.
	units map[string]unitHealth
	// unwatchedSince is when the GPU's errors could last be seen; zero if they can since the last
	// reading.
	unwatchedSince time.Time
	// lost is true if the GPU was lost, or its driver unloaded, since the GPU was last read: when
	// it comes back, it has been reset.
	lost bool
	// hot is true if the GPU was too hot at the last reading. heat describes that, celsius is the
	// temperature, and safe is the temperature at which it is no longer too hot. slowdown is the
	// temperature at which the hardware slows the GPU down, 0 if unknown.
	hot           bool
	heat          string
	celsius, safe int
	slowdown      int
	// recovery is the last known RecoveryAction since the last reset; recoveryKnown is true if the
	// driver has reported one.
	recovery      uint32
	recoveryKnown bool
	// joining is the GPU's progress in joining the fabric of NVLinks.
	joining joining
	// marks are the last known marks, of this run or the previous one.
	marks Marks
	// unassigned holds reports for partitions that are not known yet.
	unassigned []errorReport
	counters   *counters
}

// errorReport is an error that the driver reported for a unit, classified by the rules at the time.
type errorReport struct {
	event   Event
	kind    observationKind
	finding finding
}

// unwatch records that the GPU's errors cannot be seen from then until the next reading.
func (g *gpuState) unwatch(since time.Time) {
	if g.unwatchedSince.IsZero() {
		g.unwatchedSince = since
	}
}

func (g *gpuState) addReading(r reading, at moment) {
	if !g.unwatchedSince.IsZero() {
		for unit, h := range g.units {
			g.units[unit] = h.notWatched(g.unwatchedSince, at.now)
		}
		g.unwatchedSince = time.Time{}
	}
	reset := r.reset || g.lost || r.marks.resetSince(g.marks)
	g.marks = r.marks.over(g.marks)
	g.complete(&r)
	g.gpu, g.lost = r.gpu, false
	if reset {
		g.resets++
		g.hot, g.unassigned = false, nil
		g.recovery, g.recoveryKnown = RecoverNone, false
		g.joining = joining{}
		for _, unit := range g.allUnits() {
			g.observe(unit, observation{kind: wasReset}, at)
		}
	}
	g.feel(r, at.rules)
	if r.recoveryKnown { // A value that could not be read this time has not changed.
		g.recovery, g.recoveryKnown = r.recovery, true
	}
	if advice := adviceOf(g.recovery); advice.asks != "" && !advice.harmless &&
		at.rules.XID(sharing.RecoveryActionChanged) != sharing.IgnoreError {
		r.found(r.gpu.UUID, finding{
			cause: sharing.CauseProbe,
			text:  "the driver asks for " + advice.asks,
			todo:  advice.todo,
		})
	}
	var hindrances []finding
	if r.fabricKnown {
		var wrong finding
		g.joining, wrong = g.joining.observe(r.fabric, at.now)
		if !at.rules.IgnoreFabric {
			hindrances = append(hindrances, wrong)
		}
	}
	if r.readyKnown {
		hindrances = append(hindrances, confidential(r.ready))
	}
	for _, wrong := range hindrances {
		if wrong.text == "" {
			continue
		}
		r.found(r.gpu.UUID, wrong)
	}
	if r.marks.RowRemap == waiting && at.rules.RowRemap {
		r.found(r.gpu.UUID, finding{cause: sharing.CauseMemory, text: "row remapping waits for a reset"})
	}
	for _, unit := range g.allUnits() {
		wrong := r.findings[unit]
		if unit == g.gpu.UUID && g.hot {
			wrong = append(slices.Clip(wrong), finding{cause: sharing.CauseTemperature, text: g.heat})
		}
		// The reading that shows a reset does not show that there are no faults.
		if len(wrong) > 0 || !reset {
			g.observe(unit, observation{kind: probed, findings: wrong}, at)
		}
	}
	for _, late := range g.unassigned {
		g.assign(late, at)
	}
	g.unassigned = nil
}

// feel determines whether the GPU is too hot: by its slowdown temperature, if that is known and the
// rules have no limit of their own, or else by the rules' limit.
func (g *gpuState) feel(r reading, rules sharing.HealthRules) {
	if r.celsiusKnown {
		g.celsius = r.celsius
	}
	hysteresis := rules.TemperatureLimit - rules.TemperatureSafe
	switch told := r.slowdown.told; {
	case rules.BoardTemperature && (told == slowdownThreshold || told == slowdownByMargin) &&
		(r.marginKnown || r.celsiusKnown && g.slowdown > 0):
		margin := r.margin
		switch {
		case !r.marginKnown:
			margin = g.slowdown - g.celsius // Computed from the slowdown temperature reported before.
		case r.celsiusKnown:
			g.slowdown = g.celsius + margin
		}
		g.hot = margin <= 0 || g.hot && margin < hysteresis
		g.heat, g.safe = "temperature at which the board slows it down", g.celsius+margin-hysteresis
	case r.celsiusKnown:
		g.hot = r.celsius > rules.TemperatureLimit || g.hot && r.celsius > rules.TemperatureSafe
		g.heat, g.safe = fmt.Sprintf("temperature above %d °C", rules.TemperatureLimit), rules.TemperatureSafe
	}
}

// allUnits returns the UUIDs of the GPU and of its partitions, in that order.
func (g *gpuState) allUnits() []string {
	units := []string{g.gpu.UUID}
	for _, p := range g.gpu.Partitions {
		units = append(units, p.UUID)
	}
	return units
}

// complete adds data that was known before and could not be read now, and forgets partitions that
// are gone.
func (g *gpuState) complete(r *reading) {
	// The next probe's reading starts from this one, so its maps and slices must not be changed.
	r.findings, r.gpu.Partitions = maps.Clone(r.findings), slices.Clone(r.gpu.Partitions)
	r.gpu.Memory = cmp.Or(r.gpu.Memory, g.gpu.Memory)
	for _, before := range g.gpu.Partitions {
		i := slices.IndexFunc(r.gpu.Partitions, func(p sharing.Partition) bool { return p.UUID == before.UUID })
		switch {
		case i >= 0:
			r.gpu.Partitions[i].Memory = cmp.Or(r.gpu.Partitions[i].Memory, before.Memory)
		case r.problems == nil:
			delete(g.units, before.UUID)
		default:
			// One failed call must not make a partition seem destroyed.
			r.gpu.Partitions = append(r.gpu.Partitions, before)
			if !errors.Is(r.problems, NoPermission) {
				r.found(before.UUID, notReadFinding())
			}
		}
	}
}

// assign adds the report to the units that it names, or to the GPU if the error always concerns the
// whole GPU. It returns false if the GPU has no such partition.
func (g *gpuState) assign(r errorReport, at moment) bool {
	o := observation{kind: r.kind, findings: []finding{r.finding}}
	if r.event.GI == WholeGPU || !g.gpu.MIG || r.event.Type&EventGPUUnavailable != 0 ||
		r.event.Type&EventXIDCritical != 0 && sharing.XIDOfWholeGPU(r.event.Data) {
		g.observe(g.gpu.UUID, o, at)
		return true
	}
	assigned := false
	for _, p := range g.gpu.Partitions {
		if uint32(p.GI) == r.event.GI && (r.event.CI == WholeGPU || uint32(p.CI) == r.event.CI) {
			g.observe(p.UUID, o, at)
			assigned = true
		}
	}
	return assigned
}

func (g *gpuState) addUnreadable(why finding, at moment) {
	g.lost = g.lost || why.cause == sharing.CauseLost
	g.observe(g.gpu.UUID, observation{kind: probed, findings: []finding{why}}, at)
}

func (g *gpuState) observe(unit string, o observation, at moment) {
	before, known := g.units[unit]
	if !known {
		before = newUnitHealth(at.now)
	}
	after := before.observe(o, at.rules, at.now)
	g.units[unit] = after
	if after.state == before.state {
		return
	}
	change := healthChange{
		UnitHealth: g.health(unit, at.rules),
		From:       before.state,
		Cause:      after.cause,
	}
	change.Reason = cmp.Or(change.Reason, before.reason())
	g.counters.addChange(change)
}

// health returns the unit's health as text and times.
func (g *gpuState) health(unit string, rules sharing.HealthRules) sharing.UnitHealth {
	h := g.units[unit]
	return sharing.UnitHealth{
		Unit:        unit,
		GPU:         g.gpu.UUID,
		Index:       g.index(unit),
		State:       h.state,
		Reason:      h.reason(),
		Since:       h.since,
		Explanation: h.explain(g.celsius, g.safe, rules),
	}
}

func (g *gpuState) index(unit string) string {
	for _, p := range g.gpu.Partitions {
		if p.UUID == unit {
			return g.gpu.PartitionIndex(p)
		}
	}
	return strconv.Itoa(g.gpu.Index)
}

// matching returns the GPU's units that match the selector, the GPU first.
func (g *gpuState) matching(selector sharing.Selector) []string {
	var units []string
	if selector.MatchGPU(g.gpu) {
		units = append(units, g.gpu.UUID)
	}
	for _, p := range g.gpu.Partitions {
		if selector.MatchPartition(g.gpu, p) {
			units = append(units, p.UUID)
		}
	}
	return units
}

func (g *gpuState) withHealth() sharing.GPU {
	gpu := g.gpu
	switch {
	case !g.listed:
		gpu.DriverIndex = sharing.NotListed
	case g.lost:
		gpu.DriverIndex = sharing.Lost
	case g.driverIndex != gpu.Index:
		gpu.DriverIndex = strconv.Itoa(g.driverIndex)
	}
	gpu.Health = g.units[gpu.UUID].health()
	gpu.Partitions = slices.Clone(gpu.Partitions)
	slices.SortFunc(gpu.Partitions, func(a, b sharing.Partition) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	for i := range gpu.Partitions {
		gpu.Partitions[i].Health = g.units[gpu.Partitions[i].UUID].health()
	}
	return gpu
}

// counters counts the events in the health of all GPUs.
type counters struct {
	// transitions and xids map each value with a Count of 0 to the value with its Count.
	transitions map[sharing.TransitionCount]sharing.TransitionCount
	xids        map[sharing.XIDCount]sharing.XIDCount
	// changes holds the changes that have not been reported yet.
	changes []healthChange
}

func (c *counters) addChange(change healthChange) {
	key := sharing.TransitionCount{
		GPU:   change.GPU,
		From:  change.From,
		To:    change.State,
		Cause: change.Cause,
	}
	counted := key
	counted.Count = c.transitions[key].Count + 1
	c.transitions[key] = counted
	c.changes = append(c.changes, change)
}

func (c *counters) addXID(gpu string, code uint64, action sharing.ErrorAction, rules sharing.HealthRules) {
	name := sharing.OtherXID
	if _, known := rules.XIDs[code]; known {
		name = strconv.FormatUint(code, 10)
	}
	key := sharing.XIDCount{
		GPU:    gpu,
		XID:    name,
		Action: action,
	}
	counted := key
	counted.Count = c.xids[key].Count + 1
	c.xids[key] = counted
}
