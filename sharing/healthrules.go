package sharing

import "time"

// HealthRules say what takes a unit out of use, and for how long. They are
// complete: defaults are filled in.
type HealthRules struct {
	// XIDs has what each XID means; OtherXIDs is for those that are missing.
	XIDs      map[uint64]ErrorAction
	OtherXIDs ErrorAction
	// DoubleBitECC is what the event of a memory error that could not be
	// corrected means. An XID that comes with it says how bad it is.
	DoubleBitECC ErrorAction
	// QuietTime is how long a suspect unit must be quiet. It doubles when the
	// unit flaps, up to MaxQuietTime.
	QuietTime, MaxQuietTime time.Duration
	// TemperatureLimit is the core temperature in degrees Celsius above which a
	// board is faulty, TemperatureSafe the one down to which it must cool before
	// it no longer is. Two figures, so that a board near the limit does not come
	// and go with every reading.
	TemperatureLimit, TemperatureSafe int
}

// DefaultHealthRules are those of a profile without the section health. The
// caller may change the result.
func DefaultHealthRules() HealthRules {
	return HealthRules{
		XIDs: xidActions(), OtherXIDs: SuspectError, DoubleBitECC: SuspectError,
		QuietTime: 5 * time.Minute, MaxQuietTime: time.Hour,
		TemperatureLimit: 90, TemperatureSafe: 85,
	}
}

// XID is what the XID means.
func (r HealthRules) XID(code uint64) ErrorAction {
	if action, known := r.XIDs[code]; known {
		return action
	}
	return r.OtherXIDs
}

// Quiet is how long a unit must be quiet that has become sick so many times in
// a row; 0 for 0 times.
func (r HealthRules) Quiet(times int) time.Duration {
	if times <= 0 {
		return 0
	}
	quiet := r.QuietTime
	for range times - 1 {
		if quiet >= r.MaxQuietTime/2 {
			return r.MaxQuietTime
		}
		quiet *= 2
	}
	return min(quiet, r.MaxQuietTime)
}
