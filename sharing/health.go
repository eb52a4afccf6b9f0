package sharing

import (
	"cmp"
	_ "embed" // for xidTable
	"strconv"
	"strings"
	"time"
)

// Health is whether a GPU or partition may be used. The zero Health is healthy. In JSON and YAML it
// is the reason alone, left out when healthy.
type Health struct {
	// Reason is why it must not be used; empty if it may be used.
	Reason string
}

// Faulty returns the health of a GPU or partition that must not be used, with the reason.
func Faulty(reason string) Health {
	if reason == "" {
		reason = "unknown fault"
	}
	return Health{Reason: reason}
}

// Healthy reports whether the GPU or partition may be used.
func (h Health) Healthy() bool { return h == Health{} }

// MarshalText implements encoding.TextMarshaler.
func (h Health) MarshalText() ([]byte, error) { return []byte(h.Reason), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Health) UnmarshalText(text []byte) error {
	h.Reason = string(text)
	return nil
}

// HealthState is the state of a unit. Only a healthy unit is Healthy for the kubelet.
type HealthState string

const (
	// Healthy means that no fault of the unit is known.
	Healthy HealthState = "healthy"
	// Suspect means that the unit reported an error that may be harmless. The unit becomes healthy
	// after some time without errors.
	Suspect HealthState = "suspect"
	// Unhealthy means that the unit is faulty now, or that it reported an error that only a reset
	// or an operator clears.
	Unhealthy HealthState = "unhealthy"
	// Recovering means that the fault is gone. The unit becomes healthy after some time without
	// errors.
	Recovering HealthState = "recovering"
)

// HealthStates returns all states, in the order in which a unit goes through them.
func HealthStates() []HealthState {
	return []HealthState{Healthy, Suspect, Unhealthy, Recovering}
}

// HealthCause is why a unit changed its state. The values are few, for metrics.
type HealthCause string

const (
	// CauseXID is an error that the GPU reported.
	CauseXID HealthCause = "xid"
	// CauseECC is a memory error that the GPU reported and could not correct.
	CauseECC HealthCause = "ecc"
	// CauseLost means that the GPU is gone or does not answer.
	CauseLost HealthCause = "lost"
	// CauseTemperature means that the GPU is too hot.
	CauseTemperature HealthCause = "temperature"
	// CauseMemory means that a memory query or a row remapping failed, or that a remapping waits
	// for a reset.
	CauseMemory HealthCause = "memory"
	// CauseProbe means that a probe found another fault, or that an earlier finding is gone.
	CauseProbe HealthCause = "probe"
	// CauseQuiet means that the recovery delay has passed without an error.
	CauseQuiet HealthCause = "quiet"
	// CauseReset means that the GPU was reset.
	CauseReset HealthCause = "reset"
	// CauseOperator means that an operator has cleared the unit.
	CauseOperator HealthCause = "operator"
	// CauseRestart means that an earlier run of the program found the fault.
	CauseRestart HealthCause = "restart"
)

// UnitHealth is the health of one unit, with its history. A GPU's health applies to
// its partitions too and is not repeated there.
type UnitHealth struct {
	// Unit is the UUID of the GPU or partition, GPU the UUID of its GPU.
	Unit string `json:"unit"`
	GPU  string `json:"gpu"`
	// Index is the driver's index: "2" for a whole GPU, "2:0" for a partition.
	Index string      `json:"index"`
	State HealthState `json:"state"`
	// Reason is what is or was wrong; empty for a healthy unit.
	Reason string `json:"reason,omitempty"`
	// Explanation is what the XIDs in Reason mean and what ends the fault; empty for a healthy
	// unit. Unlike Reason, it may change while the fault stays the same.
	Explanation string `json:"explanation,omitempty"`
	// Since is when the unit entered its state.
	Since time.Time `json:"since"`
}

// HealthMonitor is whether the driver reports a GPU's errors as they happen, and what it reports
// that is not a fault.
type HealthMonitor struct {
	GPU string `json:"gpu"`
	// Degraded is why the driver does not report errors as they happen, so that only probes watch
	// the GPU; empty if it does.
	Degraded string `json:"degraded,omitempty"`
	// RowRemapPending is true if a memory row will be remapped at the next reset; nil if the driver
	// has never reported this.
	RowRemapPending *bool `json:"rowRemapPending,omitempty"`
	// Advice is a request of the driver that is not a fault; empty for none.
	Advice string `json:"advice,omitempty"`
}

// NoEvents is the value of Degraded for a GPU that never sends events.
const NoEvents = "the GPU has no events"

// HealthReport is the sorted health of a node's units, with counters since the start.
type HealthReport struct {
	// Units are sorted by GPU and partition index.
	Units    []UnitHealth    `json:"units"`
	Monitors []HealthMonitor `json:"monitors"`
	// Transitions and XIDs never decrease, even when a GPU is gone.
	Transitions []TransitionCount `json:"-"`
	XIDs        []XIDCount        `json:"-"`
}

// TransitionCount counts state changes of a GPU's units.
type TransitionCount struct {
	GPU      string
	From, To HealthState
	Cause    HealthCause
	Count    int
}

// XIDCount counts XIDs of a GPU, by their action at the time of the report.
type XIDCount struct {
	GPU string
	// XID is the number, or OtherXID for an XID that no rule names.
	XID    string
	Action ErrorAction
	Count  int
}

// OtherXID stands for all XIDs that no rule names, which keeps the number of series small.
const OtherXID = "other"

// HealthRules decide what takes a unit out of use, and for how long. All defaults are filled in.
type HealthRules struct {
	// XIDs is the action for each XID, OtherXIDs the action for all others.
	XIDs      map[uint64]ErrorAction
	OtherXIDs ErrorAction
	// LeftToDriver are XIDs that only make a unit suspect on a GPU for which the driver reports a
	// recovery action. The recovery action then decides.
	LeftToDriver map[uint64]bool
	// DoubleBitECC is the action for an event of an uncorrectable memory error. An accompanying XID
	// tells how serious the error is.
	DoubleBitECC ErrorAction
	// RowRemap makes it a fault when a memory row waits for a reset to be remapped. Work continues
	// unharmed meanwhile (nvml.h, nvmlDeviceGetRemappedRows).
	RowRemap bool
	// IgnoreFabric makes it no fault when a GPU has not joined its fabric of NVLinks, because
	// another system runs the NVSwitches.
	IgnoreFabric bool
	// RecoverAfter is how long a suspect unit must be without errors before it is healthy again. It
	// doubles each time the unit fails again, up to MaxRecoverAfter.
	RecoverAfter, MaxRecoverAfter time.Duration
	// TemperatureLimit is the core temperature in degrees Celsius above which a GPU is faulty,
	// until it has cooled down to TemperatureSafe. The two differ so that a GPU near the limit does
	// not change its state with every reading.
	TemperatureLimit, TemperatureSafe int
	// BoardTemperature uses the temperature at which the GPU slows itself down as the limit, if the
	// GPU reports it. The distance to the safe temperature stays the same.
	BoardTemperature bool
}

// DefaultHealthRules returns a fresh copy of the rules for a profile without a health section.
func DefaultHealthRules() HealthRules {
	actions, leftToDriver := map[uint64]ErrorAction{}, map[uint64]bool{}
	for code, rule := range xidRules {
		actions[code] = rule.action
		if rule.leftToDriver {
			leftToDriver[code] = true
		}
	}
	return HealthRules{
		XIDs:             actions,
		OtherXIDs:        SuspectError,
		LeftToDriver:     leftToDriver,
		DoubleBitECC:     SuspectError,
		RecoverAfter:     5 * time.Minute,
		MaxRecoverAfter:  time.Hour,
		TemperatureLimit: 90,
		TemperatureSafe:  85,
		BoardTemperature: true,
	}
}

// XID returns the action for the XID.
func (r HealthRules) XID(code uint64) ErrorAction {
	if action, known := r.XIDs[code]; known {
		return action
	}
	return r.OtherXIDs
}

// RecoverAfterFailures returns how long a unit must be without errors after failing this many times in a
// row.
func (r HealthRules) RecoverAfterFailures(times int) time.Duration {
	if times <= 0 {
		return 0
	}
	quiet := r.RecoverAfter
	for ; times > 1 && quiet < r.MaxRecoverAfter; times-- {
		quiet *= 2
	}
	return min(quiet, r.MaxRecoverAfter)
}

// ErrorAction is what an error reported by a GPU does to the affected units.
type ErrorAction string

const (
	// IgnoreError counts the error and does nothing else.
	IgnoreError ErrorAction = "ignore"
	// SuspectError withdraws the unit until some time has passed without errors.
	SuspectError ErrorAction = "suspect"
	// FatalError withdraws the unit until its GPU is reset or an operator clears it.
	FatalError ErrorAction = "fatal"
)

// xidTable has the default action for each XID, and explains how its columns were decided.
//
//go:embed xids.txt
var xidTable string

// xidRule is a line of xidTable.
type xidRule struct {
	action       ErrorAction
	leftToDriver bool
	wholeGPU     bool
	meaning      string
}

var xidRules = readXIDs(xidTable)

func readXIDs(table string) map[uint64]xidRule {
	rules := map[uint64]xidRule{}
	for line := range strings.Lines(table) {
		if code, err := strconv.ParseUint(strings.Fields(line)[0], 10, 64); err == nil {
			f := strings.Fields(line)
			rule := xidRule{
				action:   ErrorAction(f[1]),
				wholeGPU: f[2] == "gpu",
				meaning:  strings.Join(f[3:], " "),
			}
			if f[1] == "driver" {
				rule.action, rule.leftToDriver = FatalError, true
			}
			rules[code] = rule
		}
	}
	return rules
}

// RecoveryActionChanged is the XID by which the driver reports that it now asks for another
// recovery action. A profile that ignores the XID ignores the action too.
const RecoveryActionChanged = 154

// XIDOfWholeGPU reports whether the XID concerns the whole GPU even if its event names one of the
// GPU's instances.
func XIDOfWholeGPU(code uint64) bool { return xidRules[code].wholeGPU }

// XIDMeaning returns what the XID means, for people.
func XIDMeaning(code uint64) string {
	return cmp.Or(xidRules[code].meaning, "an error that only NVIDIA's catalogue of XIDs explains")
}
