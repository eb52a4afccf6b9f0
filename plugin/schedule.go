package plugin

import "time"

// reading says what of the kubelet is to be read.
type reading struct{ applied, held bool }

func (r reading) or(other reading) reading {
	return reading{r.applied || other.applied, r.held || other.held}
}

// schedule says when to make the next step, and what to read before it. What a switch
// waits for is read at once and then less and less often, the rest at fixed intervals.
type schedule struct {
	// due is what is to be read when the time has come.
	due reading
	// last is when the kubelet was last read, or was to be, or when a list last changed.
	last time.Time
	// pause is the time between readings for which a switch waits; zero after a change.
	pause time.Duration
	// grant is when to look for the holders of what was granted, after grantPause;
	// zero when all of them were seen.
	grant      time.Time
	grantPause time.Duration
	// recheck is when to read the holders after a list was sent again; zero when none was.
	recheck time.Time
}

// A list is applied within some milliseconds, and a pod holds what it was granted
// when its other devices were granted too. Where no unit waits for a list to be applied,
// only the status does, and a reading is not cheap with thousands of devices.
const (
	firstPause      = 5 * time.Millisecond
	confirmPause    = 100 * time.Millisecond
	firstGrantPause = 250 * time.Millisecond
	recheckPause    = 50 * time.Millisecond
)

// read records that the kubelet was read, or that a reading was requested.
func (s *schedule) read(most time.Duration) {
	s.last, s.pause = time.Now(), min(max(2*s.pause, firstPause), most)
	if s.recheck.Before(s.last) {
		s.recheck = time.Time{}
	}
}

// change records that a list has changed.
func (s *schedule) change() { s.last, s.pause = time.Now(), 0 }

// next returns how long to wait before the next step; false when nothing is waited for.
func (s *schedule) next(r *reconciler) (wait time.Duration, any bool) {
	now := time.Now()
	s.due = reading{}
	at := func(when time.Time, due reading) {
		if until := max(0, when.Sub(now)); !any || until < wait {
			any, wait, s.due = true, until, due
		}
	}
	switch {
	case !r.lists.settled():
		at(s.last.Add(r.options.Timing.pollInterval()), reading{applied: true, held: true})
	case r.saveFailed:
		at(now.Add(saveInterval), reading{})
	}
	urgent, closes := r.lists.awaited()
	switch {
	case urgent.held:
		at(s.last.Add(s.pause), reading{applied: urgent.applied || r.unconfirmed, held: true})
	case urgent.applied:
		at(s.last.Add(max(s.pause, firstPause)), urgent)
	case r.unconfirmed:
		at(s.last.Add(max(s.pause, confirmPause)), reading{applied: true})
	}
	if !closes.IsZero() {
		if until := closes.Add(r.options.Timing.Settle).Sub(r.options.Now()); until > 0 {
			at(now.Add(until), reading{})
		}
	}
	switch {
	case !r.unseenGrants:
		s.grant, s.grantPause = time.Time{}, 0
	case s.grant.IsZero(), !s.grant.After(s.last):
		s.grantPause = min(max(2*s.grantPause, firstGrantPause), time.Second)
		s.grant = now.Add(s.grantPause)
	}
	if !s.grant.IsZero() {
		at(s.grant, reading{held: true})
	}
	if !s.recheck.IsZero() {
		at(s.recheck, reading{held: true})
	}
	return wait, any
}

// awaited returns what has to be read for a unit to change its mode, and when the
// kubelet applied what is to be closed next; zero for nothing.
func (l Lists) awaited() (urgent reading, closes time.Time) {
	for _, list := range l {
		for _, e := range list.Entries {
			switch {
			case e.Phase != Retiring || e.Since.IsZero() || e.Vacated:
			case e.Applied.IsZero():
				urgent.applied = true
			case e.Closed:
				urgent.held = true
			case e.Switching && (closes.IsZero() || e.Applied.After(closes)):
				closes = e.Applied
			}
		}
	}
	return urgent, closes
}
