package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// ledger remembers every board that was ever seen, and what speaks against it.
// It asks the driver nothing; passes and events are entered into it, and it
// tells the inventory and the health that follow from them. One goroutine owns
// it.
type ledger struct {
	records map[string]*record
	tally   *tally
	// driver is the driver's version as of the last pass that told; reloaded
	// says that it was gone since.
	driver   string
	reloaded bool
	// awaited are the fatal errors of an earlier run against units that were not
	// seen yet.
	awaited []sharing.FatalHealth
}

func newLedger() *ledger {
	return &ledger{records: map[string]*record{}, tally: newTally()}
}

// enter takes in a pass that read something. A board that a full pass says
// nothing of is no longer listed by the driver, but its pods still hold it, so
// it stays.
func (l *ledger) enter(p pass, at moment) {
	if l.renewed(p.driver) {
		for _, known := range l.records {
			known.gone = true
		}
	}
	read := map[string]bool{}
	for _, r := range p.readings {
		uuid := r.gpu.UUID
		read[uuid] = true
		known := l.records[uuid]
		if known == nil {
			known = &record{units: map[string]unitHealth{}, tally: l.tally}
			l.records[uuid] = known
		}
		known.enter(r, at)
		l.remind(known, at)
	}
	for _, uuid := range l.boards() {
		why, failed := p.unreadable[uuid]
		switch {
		case read[uuid] || p.pending[uuid]:
		case failed:
			l.records[uuid].absent(why, at)
		case p.full && p.obscure:
			l.records[uuid].absent(unread(), at)
		case p.full:
			l.records[uuid].absent(lost(), at)
		}
	}
	if p.full && !p.obscure {
		l.awaited = slices.DeleteFunc(l.awaited, func(f sharing.FatalHealth) bool { return !read[f.GPU] && !p.pending[f.GPU] })
	}
}

// renewed says that another driver, or the same one after it was gone, answers
// since the last pass. Loading a driver resets the boards.
func (l *ledger) renewed(driver string) bool {
	renewed := l.reloaded || differ(driver, l.driver)
	l.reloaded, l.driver = false, cmp.Or(driver, l.driver)
	return renewed
}

// fail takes in that nothing could be read.
func (l *ledger) fail(err error) {
	if errors.Is(err, DriverNotLoaded) {
		l.reloaded = true
	}
}

// boards are the UUIDs of the known boards, sorted.
func (l *ledger) boards() []string {
	uuids := make([]string, 0, len(l.records))
	for uuid := range l.records {
		uuids = append(uuids, uuid)
	}
	slices.Sort(uuids)
	return uuids
}

// event takes in an event. It is the board's and not placed when it names a
// partition that is not known: look again, the next pass may find it. A board
// of "" says that no board has the event's handle, as after a reset.
func (l *ledger) event(e Event, at moment) (board string, r report, action sharing.ErrorAction, placed bool) {
	reason, action := judge(e, at.rules)
	r = report{event: e, kind: reportedSuspect, reason: reason}
	if action == sharing.FatalError {
		r.kind = reportedFatal
	}
	for uuid, known := range l.records {
		if known.device != e.Device {
			continue
		}
		if e.Type&EventXIDCritical != 0 {
			l.tally.xid(uuid, e.Data, at.rules)
		}
		if action == sharing.IgnoreError || known.place(r, at) {
			return uuid, r, action, true
		}
		if !slices.Contains(known.unplaced, r) {
			known.unplaced = append(known.unplaced, r)
		}
		return uuid, r, action, false
	}
	return "", r, action, true
}

// errNoUnit says that a selector names nothing on the node.
var errNoUnit = errors.New("no such GPU or partition")

// clear takes an operator's word that the units which the selector names may be
// used, and returns their health after that. A board's word is its partitions'
// too. The error says that there is no such unit.
func (l *ledger) clear(selector sharing.Selector, at moment) ([]sharing.UnitHealth, error) {
	var cleared []sharing.UnitHealth
	for _, uuid := range l.boards() {
		known := l.records[uuid]
		for _, unit := range known.named(selector) {
			known.observe(unit, observation{kind: wasCleared}, at)
			cleared = append(cleared, known.health(unit, known.units[unit].reason()))
		}
	}
	if cleared == nil {
		return nil, fmt.Errorf("%w: %s", errNoUnit, selector)
	}
	return cleared, nil
}

// named are the board's units that the selector names, the board first.
func (k *record) named(selector sharing.Selector) []string {
	var units []string
	if selector.MatchGPU(k.gpu) {
		units = append(units, k.gpu.UUID)
	}
	for _, p := range k.gpu.Partitions {
		if selector.MatchPartition(k.gpu, p) {
			units = append(units, p.UUID)
		}
	}
	return units
}
