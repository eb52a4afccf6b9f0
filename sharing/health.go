package sharing

import "time"

// HealthState is how much a unit is trusted. Only a healthy one is offered as
// Healthy.
type HealthState string

const (
	// Healthy says that nothing speaks against the unit.
	Healthy HealthState = "healthy"
	// Suspect says that it reported an error that it may get over, and must be
	// quiet for a time.
	Suspect HealthState = "suspect"
	// Unhealthy says that something is wrong with it now, or that it reported an
	// error that only a reset or an operator ends.
	Unhealthy HealthState = "unhealthy"
	// Recovering says that what was wrong is over, and that it must still prove
	// itself.
	Recovering HealthState = "recovering"
)

// HealthStates are all states, in the order in which a unit goes through them.
func HealthStates() []HealthState {
	return []HealthState{Healthy, Suspect, Unhealthy, Recovering}
}

// HealthCause is why a unit changed its state, in one word of few, for metrics.
type HealthCause string

const (
	// CauseXID is an error that the board reported.
	CauseXID HealthCause = "xid"
	// CauseECC is a memory error that it reported and could not correct.
	CauseECC HealthCause = "ecc"
	// CauseLost says that the board is gone or does not answer.
	CauseLost HealthCause = "lost"
	// CauseTemperature says that it is too hot.
	CauseTemperature HealthCause = "temperature"
	// CauseMemory says that a memory query fails, or that a repair waits for a
	// reset or failed.
	CauseMemory HealthCause = "memory"
	// CauseProbe says that a probe found something else, or nothing any more.
	CauseProbe HealthCause = "probe"
	// CauseQuiet says that the quiet time is over.
	CauseQuiet HealthCause = "quiet"
	// CauseReset says that the board was reset.
	CauseReset HealthCause = "reset"
	// CauseOperator says that somebody said that the unit may be used.
	CauseOperator HealthCause = "operator"
	// CauseRestart says that an earlier run of the program has found out.
	CauseRestart HealthCause = "restart"
)

// UnitHealth is the health of one unit. A board's holds for its partitions too
// and is not repeated there.
type UnitHealth struct {
	// Unit is the UUID of the GPU or of the partition, GPU that of the board.
	Unit string `json:"unit"`
	GPU  string `json:"gpu"`
	// Index is the driver's: "2" for a whole GPU, "2:0" for a partition.
	Index string      `json:"index"`
	State HealthState `json:"state"`
	// Reason says what is or was wrong; empty for a healthy unit.
	Reason string `json:"reason,omitempty"`
	// Since is when the unit came into its state.
	Since time.Time `json:"since"`
}

// HealthChange is a unit's way from one state to another.
type HealthChange struct {
	// UnitHealth is the unit as it is now, but for a Reason of what it recovered
	// from when it is healthy again.
	UnitHealth
	From  HealthState
	Cause HealthCause
}

// HealthMonitor says whether a board's errors are heard of as they happen.
type HealthMonitor struct {
	GPU string `json:"gpu"`
	// Degraded says why not, so that only probes watch the board; empty when
	// all is well.
	Degraded string `json:"degraded,omitempty"`
}

// HealthReport is the health of a node's units, with counters since the program
// started. Everything is sorted.
type HealthReport struct {
	// Units by board and partition index.
	Units    []UnitHealth    `json:"units"`
	Monitors []HealthMonitor `json:"monitors"`
	// Transitions and XIDs are never taken back, also when a board is gone.
	Transitions []TransitionCount `json:"-"`
	XIDs        []XIDCount        `json:"-"`
}

// TransitionCount counts changes of state of a board's units.
type TransitionCount struct {
	GPU      string
	From, To HealthState
	Cause    HealthCause
	Count    int
}

// XIDCount counts XIDs of a board, with what they meant when they came.
type XIDCount struct {
	GPU string
	// XID is the number, or OtherXID for one that no rule names.
	XID    string
	Action ErrorAction
	Count  int
}

// OtherXID stands for XIDs that no rule names, so that a broken driver cannot
// make metrics without end.
const OtherXID = "other"

// FatalHealth is a unit's fatal errors, as they are kept for a restart of the
// program.
type FatalHealth struct {
	// GPU is the board's UUID, Unit the UUID of the board or of its partition.
	GPU, Unit string
	// Reasons are at least one, in the order in which they came.
	Reasons []string
	Since   time.Time
	// Boot is the boot ID of the machine, Driver the version of the driver; "" for
	// unknown. A boot or another driver has reset the board.
	Boot, Driver string
}
