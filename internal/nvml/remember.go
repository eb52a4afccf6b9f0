package nvml

import (
	"cmp"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Store keeps fatal errors for a restart of the program. A Node calls it from
// one goroutine, and not before TakeOver.
type Store interface {
	// Load returns what the last Save kept, none if there was none.
	Load() ([]sharing.FatalHealth, error)
	// Save returns when the list, which may be empty, is kept.
	Save([]sharing.FatalHealth) error
}

// restore takes over the fatal errors of an earlier run, but for those of an
// earlier boot.
func (l *ledger) restore(kept []sharing.FatalHealth, boot string, at moment) {
	l.awaited = slices.DeleteFunc(slices.Clone(kept), func(f sharing.FatalHealth) bool { return differ(f.Boot, boot) })
	for _, uuid := range l.boards() {
		l.remind(l.records[uuid], at)
	}
}

// remind enters the awaited errors of the board that was read. Those of a
// partition that it does not have are over: the partition was destroyed.
func (l *ledger) remind(known *record, at moment) {
	l.awaited = slices.DeleteFunc(l.awaited, func(f sharing.FatalHealth) bool {
		if f.GPU != known.gpu.UUID {
			return false
		}
		if _, there := known.units[f.Unit]; there && !differ(f.Driver, l.driver) {
			o := observation{kind: rememberedFatal}
			for _, reason := range f.Reasons {
				o.findings = append(o.findings, finding{sharing.CauseRestart, reason})
			}
			if len(o.findings) > 0 {
				known.observe(f.Unit, o, at)
				known.backdate(f.Unit, f.Since)
			}
		}
		return true
	})
}

// differ says that both are known and not the same.
func differ(a, b string) bool { return a != "" && b != "" && a != b }

// backdate says that the unit has been in its state for longer.
func (k *record) backdate(unit string, since time.Time) {
	h := k.units[unit]
	if since.Before(h.since) {
		h.since = since
		k.units[unit] = h
	}
}

// fatal is what to keep, by unit: what is in force, and what still waits for its
// board.
func (l *ledger) fatal(boot string) []sharing.FatalHealth {
	list := slices.Clone(l.awaited)
	for _, uuid := range l.boards() {
		for unit, h := range l.records[uuid].units {
			if len(h.fatal) == 0 {
				continue
			}
			f := sharing.FatalHealth{GPU: uuid, Unit: unit, Since: h.since.UTC().Round(0), Boot: boot, Driver: l.driver}
			for _, reason := range h.fatal {
				f.Reasons = append(f.Reasons, reason.text)
			}
			list = append(list, f)
		}
	}
	slices.SortFunc(list, func(a, b sharing.FatalHealth) int { return cmp.Compare(a.Unit, b.Unit) })
	return list
}
