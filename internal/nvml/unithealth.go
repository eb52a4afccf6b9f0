package nvml

import (
	"time"

	"github.com/virgate/virgate/sharing"
)

// unitHealth is what is known of one unit's health. It is a value: observe, a
// pure function of it, of what was observed, and of the time, makes the next.
// docs/health.md has the picture.
//
// A unit that reported an error is not trusted because a probe passes: after an
// XID the driver may well answer for a board that computes nothing. So a
// suspect unit needs time as well, and one with a fatal error needs evidence
// that its board was reset, or an operator's word.
type unitHealth struct {
	state sharing.HealthState
	// since is when it came into its state, and cause why.
	since time.Time
	cause sharing.HealthCause
	// fatal and suspicions are the errors that it reported, of either kind, since
	// it was last healthy; failing is what the last probe found.
	fatal, suspicions, failing []finding
	// past is, while it recovers, what it recovers from.
	past string
	// trouble is when it last reported or showed something, or when that ended.
	trouble time.Time
	// strikes counts how often it has become sick without having been healthy for
	// long in between.
	strikes int
}

// observation is what happened to a unit.
type observation struct {
	kind observationKind
	// findings is one for reports; for a probe all that is wrong now.
	findings []finding
}

type observationKind int

const (
	// reportedSuspect and reportedFatal: the board reported an error.
	reportedSuspect observationKind = iota
	reportedFatal
	// rememberedFatal: an earlier run of the program kept it.
	rememberedFatal
	// probed: the unit was looked at, and nothing is wrong but findings.
	probed
	// wasReset: there is evidence that the board was reset.
	wasReset
	// wasCleared: an operator says that the unit may be used.
	wasCleared
)

func newUnitHealth(now time.Time) unitHealth {
	return unitHealth{state: sharing.Healthy, since: now}
}

// observe is the unit's health after the observation. It does not change h.
func (h unitHealth) observe(o observation, rules sharing.HealthRules, now time.Time) unitHealth {
	was := h.reason()
	switch o.kind {
	case reportedSuspect:
		h.suspicions, h.trouble = with(h.suspicions, o.findings...), now
		if h.state != sharing.Unhealthy {
			h = h.enter(sharing.Suspect, o.findings[0].cause, rules, now)
		}
	case reportedFatal, rememberedFatal:
		h.fatal, h.trouble = with(h.fatal, o.findings...), now
		cause := o.findings[0].cause
		if o.kind == rememberedFatal {
			cause = sharing.CauseRestart
		}
		h = h.enter(sharing.Unhealthy, cause, rules, now)
	case probed:
		h.failing = o.findings
		if len(h.failing) > 0 {
			h.trouble = now
			h = h.enter(sharing.Unhealthy, h.failing[0].cause, rules, now)
		} else {
			h = h.pass(was, rules, now)
		}
	case wasReset:
		h.failing = nil
		h = h.forgive(was, sharing.CauseReset, rules, now)
	case wasCleared:
		h = h.forgive(was, sharing.CauseOperator, rules, now)
	}
	return h
}

// pass is the way on after a probe that found nothing.
func (h unitHealth) pass(was string, rules sharing.HealthRules, now time.Time) unitHealth {
	switch {
	case h.state == sharing.Suspect && now.Sub(h.trouble) >= rules.Quiet(h.strikes):
		return h.enter(sharing.Healthy, sharing.CauseQuiet, rules, now)
	case h.state == sharing.Unhealthy && len(h.fatal) == 0:
		h.past, h.trouble = was, now
		return h.enter(sharing.Recovering, sharing.CauseProbe, rules, now)
	case h.state == sharing.Recovering:
		// What a probe saw, a probe may see the end of, but only once in a row.
		quiet, cause := rules.Quiet(h.strikes-1), sharing.CauseProbe
		if len(h.suspicions) > 0 {
			quiet = rules.Quiet(h.strikes)
		}
		if quiet > 0 {
			cause = sharing.CauseQuiet
		}
		if now.Sub(h.trouble) >= quiet {
			return h.enter(sharing.Healthy, cause, rules, now)
		}
	}
	return h
}

// forgive forgets what the unit reported, and that it did so often. What the
// last probe found stays.
func (h unitHealth) forgive(was string, cause sharing.HealthCause, rules sharing.HealthRules, now time.Time) unitHealth {
	h.fatal, h.suspicions, h.strikes = nil, nil, 0
	if h.state == sharing.Healthy || len(h.failing) > 0 {
		return h
	}
	h.past, h.trouble = was, now
	return h.enter(sharing.Recovering, cause, rules, now)
}

// enter is the unit in the state, which may be the one that it is in.
func (h unitHealth) enter(state sharing.HealthState, cause sharing.HealthCause, rules sharing.HealthRules, now time.Time) unitHealth {
	if state == h.state {
		return h
	}
	sick := state == sharing.Suspect || state == sharing.Unhealthy
	switch {
	case state == sharing.Healthy:
		h.suspicions, h.past = nil, ""
	case sick && h.state == sharing.Healthy && now.Sub(h.since) >= rules.MaxQuietTime:
		h.strikes = 1
	case sick && h.state != sharing.Suspect:
		h.strikes++
	}
	if sick {
		h.past = ""
	}
	h.state, h.cause, h.since = state, cause, now
	return h
}

// reason is what is wrong with the unit, or what it recovers from; "" for a
// healthy one.
func (h unitHealth) reason() string {
	if h.state == sharing.Recovering {
		return h.past
	}
	return describe(h.fatal, h.suspicions, h.failing)
}

// fault is the unit's fault in the inventory.
func (h unitHealth) fault() string {
	if h.state == sharing.Recovering {
		return "recovering from " + h.past
	}
	return h.reason()
}
