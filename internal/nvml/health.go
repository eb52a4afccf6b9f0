package nvml

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// unitHealth is what is known of one unit's health. It is an immutable value: observe derives the
// next one from it, the observation and the time. docs/reference/health.md has the states.
//
// A passed probe does not clear a unit of an error that it reported: after an XID the driver may
// well answer for a GPU that computes nothing. A suspect unit also needs time. A unit with a fatal
// error needs evidence that its GPU was reset, or an operator's confirmation.
type unitHealth struct {
	state sharing.HealthState
	// since is when the unit entered its state, and cause is the reason.
	since time.Time
	cause sharing.HealthCause
	// fatal and suspicions are the errors of each kind that the unit reported since it was last
	// healthy; failing is what the last probe found.
	fatal, suspicions, failing []finding
	// recoveringFrom is what the unit recovers from; set only while it does.
	recoveringFrom string
	// quietSince is when an error was last reported, a fault last found or ended, or the unit became
	// healthy. It is later by the time in which the unit was not watched since.
	quietSince time.Time
	// relapses counts how often the unit became unhealthy without having been healthy for long in
	// between.
	relapses int
}

// healthChange is a change of a unit's health from one state to another.
type healthChange struct {
	// UnitHealth is the unit's current health. If the unit is healthy again, Reason is what it has
	// recovered from.
	sharing.UnitHealth
	From  sharing.HealthState
	Cause sharing.HealthCause
}

type observation struct {
	kind observationKind
	// findings has one element for a report; for a probe it has all current faults.
	findings []finding
}

type observationKind int

const (
	// reportedSuspect and reportedFatal: the GPU reported an error, possibly in an earlier run of
	// the program, which stored it.
	reportedSuspect observationKind = iota
	reportedFatal
	// probed: the unit was probed, and the findings are all its faults.
	probed
	// wasReset: there is evidence that the GPU was reset.
	wasReset
	// wasCleared: an operator confirmed that the unit may be used.
	wasCleared
)

func newUnitHealth(now time.Time) unitHealth {
	return unitHealth{state: sharing.Healthy, since: now}
}

// observe returns the unit's health after the observation. It does not change h.
func (h unitHealth) observe(o observation, rules sharing.HealthRules, now time.Time) unitHealth {
	was := h.reason()
	switch o.kind {
	case reportedSuspect:
		h.suspicions = appendNew(h.suspicions, o.findings...)
		if h.state != sharing.Unhealthy {
			h = h.setState(sharing.Suspect, o.findings[0].cause, rules, now)
		}
		h.quietSince = now
	case reportedFatal:
		h.fatal = appendNew(h.fatal, o.findings...)
		h = h.setState(sharing.Unhealthy, o.findings[0].cause, rules, now)
		h.quietSince = now
	case probed:
		h.failing = o.findings
		if len(h.failing) > 0 {
			h = h.setState(sharing.Unhealthy, h.failing[0].cause, rules, now)
			h.quietSince = now
		} else {
			h = h.probePassed(was, rules, now)
		}
	case wasReset:
		h.failing = nil
		h = h.startOver(was, sharing.CauseReset, rules, now)
	case wasCleared:
		h = h.startOver(was, sharing.CauseOperator, rules, now)
	}
	return h
}

// notWatched returns the unit's health after a time in which its errors were not seen, which is no
// recovery delay.
func (h unitHealth) notWatched(since, now time.Time) unitHealth {
	if from := later(since, h.quietSince); now.After(from) {
		h.quietSince = h.quietSince.Add(now.Sub(from))
	}
	return h
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (h unitHealth) probePassed(was string, rules sharing.HealthRules, now time.Time) unitHealth {
	quiet, cause := h.recoverAfter(rules), sharing.CauseProbe
	if quiet > 0 {
		cause = sharing.CauseQuiet
	}
	switch {
	case h.state == sharing.Unhealthy && len(h.fatal) == 0:
		h.recoveringFrom, h.quietSince = was, now
		return h.setState(sharing.Recovering, sharing.CauseProbe, rules, now)
	case (h.state == sharing.Suspect || h.state == sharing.Recovering) && now.Sub(h.quietSince) >= quiet:
		return h.setState(sharing.Healthy, cause, rules, now)
	}
	return h
}

// recoverAfter returns how long the unit, suspect or recovering, must be without trouble. A fault that
// a probe found may end at once when a probe no longer finds it, but not if it keeps coming back.
func (h unitHealth) recoverAfter(rules sharing.HealthRules) time.Duration {
	if h.state == sharing.Recovering && len(h.suspicions) == 0 {
		return rules.RecoverAfterFailures(h.relapses - 1)
	}
	return rules.RecoverAfterFailures(h.relapses)
}

// explain describes what the unit's reported XIDs mean, what to do, and what ends the fault.
func (h unitHealth) explain(celsius, safe int, rules sharing.HealthRules) string {
	var texts []string
	for _, f := range slices.Concat(h.fatal, h.suspicions) {
		if meaning := sharing.XIDMeaning(f.xid); f.xid != 0 && !slices.Contains(texts, meaning) {
			texts = append(texts, meaning)
		}
	}
	for _, f := range h.failing {
		if f.todo != "" {
			texts = append(texts, f.todo)
		}
	}
	quiet, ends := h.recoverAfter(rules), ""
	switch n := len(h.failing); {
	case h.state == sharing.Healthy:
		return ""
	case len(h.fatal) > 0:
		ends = "with a reset of the GPU, or with virgate health clear"
	case n > 0 && h.failing[n-1].cause == sharing.CauseTemperature:
		ends = fmt.Sprintf("at %d °C, it has %d °C", safe, celsius)
	case n > 0 || quiet == 0:
		ends = "with the next probe that finds nothing wrong"
	default:
		ends = "when it stays quiet until " + h.quietSince.Add(quiet).UTC().Format("15:04 MST")
	}
	return strings.Join(append(texts, "ends "+ends), "; ")
}

// startOver forgets the unit's reported errors and its relapses. The findings of the last probe
// stay.
func (h unitHealth) startOver(
	was string,
	cause sharing.HealthCause,
	rules sharing.HealthRules,
	now time.Time,
) unitHealth {
	h.fatal = nil
	h.suspicions = nil
	h.relapses = 0
	if h.state == sharing.Healthy || len(h.failing) > 0 {
		return h
	}
	h.recoveringFrom, h.quietSince = was, now
	return h.setState(sharing.Recovering, cause, rules, now)
}

// setState returns the unit in that state, which may be its current one.
func (h unitHealth) setState(
	state sharing.HealthState,
	cause sharing.HealthCause,
	rules sharing.HealthRules,
	now time.Time,
) unitHealth {
	if state == h.state {
		return h
	}
	unhealthy := state == sharing.Suspect || state == sharing.Unhealthy
	switch {
	case state == sharing.Healthy:
		h.suspicions, h.recoveringFrom = nil, ""
		h.quietSince = now
	case unhealthy && h.state == sharing.Healthy && now.Sub(h.quietSince) >= rules.MaxRecoverAfter:
		h.relapses = 1
	case unhealthy && h.state != sharing.Suspect:
		h.relapses++
	}
	if unhealthy {
		h.recoveringFrom = ""
	}
	h.state = state
	h.cause = cause
	h.since = now
	return h
}

// reason returns the fault of the unit, or what it recovers from; empty for a healthy unit.
func (h unitHealth) reason() string {
	if h.state == sharing.Recovering {
		return h.recoveringFrom
	}
	var texts []string
	for _, f := range appendNew(h.fatal, slices.Concat(h.suspicions, h.failing)...) {
		texts = append(texts, f.text)
	}
	return strings.Join(texts, ", ")
}

// health returns the unit's health in the inventory.
func (h unitHealth) health() sharing.Health {
	switch h.state {
	case sharing.Healthy:
		return sharing.Health{}
	case sharing.Recovering:
		return sharing.Faulty("recovering from " + h.recoveringFrom)
	}
	return sharing.Faulty(h.reason())
}

// Marks are values read from a GPU that show later, even in another session or run, whether it was
// reset in between; docs/reference/health.md explains them. The zero value means that nothing is
// known.
type Marks struct {
	// Binding is PCIInfo's Binding.
	Binding uint64 `json:"binding,omitempty"`
	// ResetAdvised is whether the driver advises to reset the GPU. RowRemap is whether a memory row
	// waits for a reset to be remapped.
	ResetAdvised resetWait `json:"resetAdvised,omitempty"`
	RowRemap     resetWait `json:"rowRemap,omitempty"`
}

// resetWait is whether something waits for a reset; empty if unknown.
type resetWait string

const (
	waiting    resetWait = "waiting"
	notWaiting resetWait = "not waiting"
)

func waits(so bool) resetWait {
	if so {
		return waiting
	}
	return notWaiting
}

// over returns these marks, with unknown ones replaced by those before.
func (m Marks) over(before Marks) Marks {
	return Marks{
		Binding:      cmp.Or(m.Binding, before.Binding),
		ResetAdvised: cmp.Or(m.ResetAdvised, before.ResetAdvised),
		RowRemap:     cmp.Or(m.RowRemap, before.RowRemap),
	}
}

// resetSince reports whether the GPU was reset after the marks before were read.
func (m Marks) resetSince(before Marks) bool {
	return m.Binding != before.Binding && m.Binding != 0 && before.Binding != 0 ||
		m.ResetAdvised == notWaiting && before.ResetAdvised == waiting ||
		m.RowRemap == notWaiting && before.RowRemap == waiting
}

// finding is one fault of a unit.
type finding struct {
	cause sharing.HealthCause
	// text stays the same while the fault lasts: if it changed with every reading, each reading
	// would look like a new fault.
	text string
	// xid is the reported XID; 0 for none.
	xid uint64
	// todo is what an operator can do about it; empty if the only remedy is to wait.
	todo string
}

// advice is what a driver asks to do with a GPU, and what an operator should do then. The zero
// value means that it asks for nothing.
type advice struct {
	asks, todo string
	// harmless is true if the GPU may get new work meanwhile.
	harmless bool
}

// adviceOf returns the advice for a recovery action. It does not guess the meaning of an action
// that nvml.h does not have: the GPU then gets no new work.
func adviceOf(action uint32) advice {
	switch action {
	case RecoverNone:
		return advice{}
	case RecoverReset:
		return advice{asks: "a reset of the GPU", todo: "reset it: virgate gpu reset"}
	case RecoverReboot:
		return advice{asks: "a reboot of the node", todo: "drain the node and reboot it"}
	case RecoverDrainP2P:
		return advice{asks: "the end of peer-to-peer traffic", harmless: true}
	case RecoverDrainAndReset:
		return advice{asks: "no new work, and a reset", todo: "reset it when its pods have ended: virgate gpu reset"}
	case RecoverIMEXDomain:
		return advice{asks: "a recovery of the IMEX domain", todo: "recover the IMEX domain that the node is in"}
	case RecoverBusReset:
		return advice{asks: "a reset of the PCIe bus", todo: "reset the PCIe bus that it is on, or reboot the node"}
	case RecoverSystemReboot:
		return advice{asks: "a reboot of the system", todo: "drain the node and reboot the whole system"}
	}
	return advice{
		asks: fmt.Sprintf("recovery action %d", action),
		todo: "look up nvmlDeviceGpuRecoveryAction_t of this driver's nvml.h",
	}
}

// lostFinding is the finding for a GPU that no longer answers or that the driver no longer lists.
func lostFinding() finding { return finding{cause: sharing.CauseLost, text: "lost"} }

// notReadFinding is the finding for a GPU or partition that may exist but was not found.
func notReadFinding() finding { return finding{cause: sharing.CauseProbe, text: "cannot be read"} }

func unreadableFinding(err error) finding {
	return finding{cause: sharing.CauseProbe, text: "cannot be read: " + cause(err)}
}

// classify returns what an event reports about its unit, and the action that follows. It ignores an
// event that is not about the health of the hardware.
func classify(e Event, rules sharing.HealthRules) (finding, sharing.ErrorAction) {
	switch {
	case e.Type&EventXIDCritical != 0:
		return finding{
			cause: sharing.CauseXID,
			text:  "XID " + strconv.FormatUint(e.Data, 10),
			xid:   e.Data,
		}, rules.XID(e.Data)
	case e.Type&EventDoubleBitECC != 0:
		return finding{cause: sharing.CauseECC, text: "double-bit ECC error"}, rules.DoubleBitECC
	case e.Type&EventGPUUnavailable != 0:
		// As with XID 154, what follows depends on the driver's advice.
		return finding{cause: sharing.CauseLost, text: "the driver reports it as unavailable"},
			rules.XID(sharing.RecoveryActionChanged)
	}
	return finding{}, sharing.IgnoreError
}

// appendNew returns a copy of the list with the findings whose text it does not have yet. An error
// that an earlier run stored and that the GPU reports again is the same error, whatever its cause.
func appendNew(list []finding, more ...finding) []finding {
	list = slices.Clone(list)
	for _, f := range more {
		if !slices.ContainsFunc(list, func(known finding) bool { return known.text == f.text }) {
			list = append(list, f)
		}
	}
	return list
}
