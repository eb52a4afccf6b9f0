package sharing

import (
	"cmp"
	_ "embed" // for xidTable
	"strconv"
	"strings"
	"time"
)

// Health says whether a GPU or partition may be used. The zero Health is
// healthy. In JSON and YAML it is the reason alone, left out when healthy.
type Health struct {
	// Reason says why it must not be used. It is empty only when it may.
	Reason string
}

// Faulty is the health of something that must not be used, for that reason.
func Faulty(reason string) Health {
	if reason == "" {
		reason = "unknown fault"
	}
	return Health{Reason: reason}
}

// Healthy says whether it may be used.
func (h Health) Healthy() bool { return h == Health{} }

// MarshalText implements encoding.TextMarshaler.
func (h Health) MarshalText() ([]byte, error) { return []byte(h.Reason), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Health) UnmarshalText(text []byte) error {
	h.Reason = string(text)
	return nil
}

// HealthState is a state of a unit. The kubelet is told Healthy only of a healthy one.
type HealthState string

const (
	// Healthy says that nothing is known to be wrong with the unit.
	Healthy HealthState = "healthy"
	// Suspect says that an error may be harmless: after a time without one it is healthy.
	Suspect HealthState = "suspect"
	// Unhealthy says that something is wrong with it now, or that it reported an error
	// that only a reset or an operator clears.
	Unhealthy HealthState = "unhealthy"
	// Recovering says that the fault is gone, and that time without errors must pass.
	Recovering HealthState = "recovering"
)

// HealthStates are all states, in the order in which a unit goes through them.
func HealthStates() []HealthState {
	return []HealthState{Healthy, Suspect, Unhealthy, Recovering}
}

// HealthCause is why a unit changed its state: one of a few words, for metrics.
type HealthCause string

const (
	// CauseXID is an error that the GPU reported.
	CauseXID HealthCause = "xid"
	// CauseECC is a memory error that it reported and could not correct.
	CauseECC HealthCause = "ecc"
	// CauseLost says that the GPU is gone or does not answer.
	CauseLost HealthCause = "lost"
	// CauseTemperature says that it is too hot.
	CauseTemperature HealthCause = "temperature"
	// CauseMemory says that a memory query or a row remapping failed, or waits for a reset.
	CauseMemory HealthCause = "memory"
	// CauseProbe says that a probe found something else, or what it had found gone.
	CauseProbe HealthCause = "probe"
	// CauseQuiet says that the quiet time has passed without an error.
	CauseQuiet HealthCause = "quiet"
	// CauseReset says that the GPU was reset.
	CauseReset HealthCause = "reset"
	// CauseOperator says that an operator has cleared the unit.
	CauseOperator HealthCause = "operator"
	// CauseRestart says that an earlier run of the program found the fault.
	CauseRestart HealthCause = "restart"
)

// UnitHealth is the health of one unit, with its history. A GPU's health applies to
// its partitions too and is not repeated there.
type UnitHealth struct {
	// Unit is the UUID of the GPU or of the partition, GPU that of the GPU.
	Unit string `json:"unit"`
	GPU  string `json:"gpu"`
	// Index is the driver's: "2" for a whole GPU, "2:0" for a partition.
	Index string      `json:"index"`
	State HealthState `json:"state"`
	// Reason says what is or was wrong; empty for a healthy unit.
	Reason string `json:"reason,omitempty"`
	// Explanation says what the XIDs among the reasons mean, and what ends the fault; empty
	// for a healthy unit. Unlike Reason it may change while the fault stays the same.
	Explanation string `json:"explanation,omitempty"`
	// Since is when the unit came into its state.
	Since time.Time `json:"since"`
}

// HealthMonitor says whether the driver reports a GPU's errors as they happen, and what it
// tells that is no fault.
type HealthMonitor struct {
	GPU string `json:"gpu"`
	// Degraded says why not, so that only probes watch the GPU; empty when it does.
	Degraded string `json:"degraded,omitempty"`
	// RowRemapPending says whether a memory row waits for a reset to be remapped; nil when
	// the driver has never told.
	RowRemapPending *bool `json:"rowRemapPending,omitempty"`
	// Advice is what the driver asks for that is no fault; empty for nothing.
	Advice string `json:"advice,omitempty"`
}

// NoEvents is why a GPU is Degraded for good: it never sends any.
const NoEvents = "the GPU has no events"

// HealthReport is the health of a node's units, with counters since the start. Sorted.
type HealthReport struct {
	// Units by GPU and partition index.
	Units    []UnitHealth    `json:"units"`
	Monitors []HealthMonitor `json:"monitors"`
	// Transitions and XIDs never decrease, not even when a GPU is gone.
	Transitions []TransitionCount `json:"-"`
	XIDs        []XIDCount        `json:"-"`
}

// TransitionCount counts changes of state of a GPU's units.
type TransitionCount struct {
	GPU      string
	From, To HealthState
	Cause    HealthCause
	Count    int
}

// XIDCount counts XIDs of a GPU, by what they meant when they were reported.
type XIDCount struct {
	GPU string
	// XID is the number, or OtherXID for one that no rule names.
	XID    string
	Action ErrorAction
	Count  int
}

// OtherXID stands for XIDs that no rule names, so that the series stay few.
const OtherXID = "other"

// HealthRules say what takes a unit out of use, and for how long. Defaults are filled in.
type HealthRules struct {
	// XIDs says what each XID means, OtherXIDs what all the others do.
	XIDs      map[uint64]ErrorAction
	OtherXIDs ErrorAction
	// LeftToDriver are the XIDs that are only suspect on a GPU of which the driver reports a
	// recovery action, which then decides.
	LeftToDriver map[uint64]bool
	// DoubleBitECC is what the event of an uncorrectable memory error means. An XID
	// that comes with it says how bad it is.
	DoubleBitECC ErrorAction
	// RowRemap says that a memory row which waits for a reset to be remapped is a fault.
	// Work goes on unharmed (nvml.h, nvmlDeviceGetRemappedRows).
	RowRemap bool
	// IgnoreFabric says that a GPU which has not joined its fabric of NVLinks is no faulty one: somebody
	// else runs the NVSwitches.
	IgnoreFabric bool
	// QuietTime is how long a suspect unit must be without errors until it is healthy
	// again. It doubles each time the unit fails again, up to MaxQuietTime.
	QuietTime, MaxQuietTime time.Duration
	// TemperatureLimit is the core temperature in degrees Celsius above which a GPU is
	// faulty; it must cool down to TemperatureSafe before it no longer is. There are
	// two so that a GPU near the limit does not change with every reading.
	TemperatureLimit, TemperatureSafe int
	// BoardTemperature says that the limit is where the board slows the GPU down, if it tells
	// that, with the same distance to what is safe.
	BoardTemperature bool
}

// DefaultHealthRules are those of a profile without a health section, as a fresh copy.
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
		QuietTime:        5 * time.Minute,
		MaxQuietTime:     time.Hour,
		TemperatureLimit: 90,
		TemperatureSafe:  85,
		BoardTemperature: true,
	}
}

// XID is what the XID means.
func (r HealthRules) XID(code uint64) ErrorAction {
	if action, known := r.XIDs[code]; known {
		return action
	}
	return r.OtherXIDs
}

// QuietTimeAfter is how long a unit must be without errors after failing so often in a row.
func (r HealthRules) QuietTimeAfter(times int) time.Duration {
	if times <= 0 {
		return 0
	}
	quiet := r.QuietTime
	for ; times > 1 && quiet < r.MaxQuietTime; times-- {
		quiet *= 2
	}
	return min(quiet, r.MaxQuietTime)
}

// ErrorAction is what an error that a GPU reports means for the affected units.
type ErrorAction string

const (
	// IgnoreError counts the error and does nothing else.
	IgnoreError ErrorAction = "ignore"
	// SuspectError withdraws the unit until it has been without errors for a time.
	SuspectError ErrorAction = "suspect"
	// FatalError withdraws the unit until its GPU is reset or an operator clears it.
	FatalError ErrorAction = "fatal"
)

// xidTable says of each XID what it means unless the profile says otherwise, and how the
// columns are decided.
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

// RecoveryActionChanged is the XID by which the driver reports that it asks for another
// recovery action. A profile that ignores it ignores the action, too.
const RecoveryActionChanged = 154

// XIDOfWholeGPU says that the XID concerns the whole GPU even when its event names one of
// the GPU's instances.
func XIDOfWholeGPU(code uint64) bool { return xidRules[code].wholeGPU }

// XIDMeaning is what the XID says, for people.
func XIDMeaning(code uint64) string {
	return cmp.Or(xidRules[code].meaning, "an error that only NVIDIA's catalogue of XIDs explains")
}
