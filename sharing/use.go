package sharing

// Measurement is how the node's boards were used in the time up to one moment.
type Measurement struct {
	// Boards are those that could be read, by UUID.
	Boards []BoardUse
	// Owners say of each process on the boards where it runs, by PID; nil while
	// that cannot be found out for any.
	Owners map[int]Owner
	// Errors count what went wrong, by stage.
	Errors map[UseStage]int
}

// UseStage is a step on the way from a board's processes to containers.
type UseStage string

const (
	// StageDriver asks the driver for boards and processes.
	StageDriver UseStage = "nvml"
	// StageProcess looks the processes up in /proc.
	StageProcess UseStage = "cgroup"
	// StagePods asks who runs in a container and who holds which devices.
	StagePods UseStage = "pods"
)

// UseStages are all stages.
func UseStages() []UseStage { return []UseStage{StageDriver, StageProcess, StagePods} }

// BoardUse is what the driver says of the use of a board.
type BoardUse struct {
	// GPU is the board's UUID.
	GPU string
	// Memory is in use, in bytes, by processes and by the driver itself.
	Memory Figure
	// SM is the ratio of time, 0 to 1, in which the board computed; unknown on a
	// board with MIG enabled.
	SM Figure
	// Celsius is the core temperature.
	Celsius Figure
	// Throttled are the reasons why a busy board is slower than it could be;
	// ThrottleKnown says whether the driver told.
	Throttled     []ThrottleReason
	ThrottleKnown bool
	// Units are the board, or its partitions where MIG is enabled; those whose
	// processes could not be read are missing.
	Units []UnitProcesses
}

// UnitProcesses are the processes on a unit.
type UnitProcesses struct {
	// Unit is the UUID of the board or partition.
	Unit string
	// Processes are by PID, each once.
	Processes []ProcessUse
}

// ProcessUse is how a process uses a unit.
type ProcessUse struct {
	// PID is the process ID on the host.
	PID int
	// Memory is in bytes.
	Memory Figure
	// SM is the ratio of the board's multiprocessors, 0 to 1; unknown on a
	// partition.
	SM Figure
}

// ThrottleReason is one of the constants below.
type ThrottleReason string

const (
	// ThrottleThermal says that the board or its memory is too hot.
	ThrottleThermal ThrottleReason = "thermal"
	// ThrottlePower says that the board draws what it may draw.
	ThrottlePower ThrottleReason = "power"
	// ThrottleHardware says that the hardware halved the clocks, for heat, for
	// power, or because the supply asked for it.
	ThrottleHardware ThrottleReason = "hw_slowdown"
)

// ThrottleReasons are all reasons.
func ThrottleReasons() []ThrottleReason {
	return []ThrottleReason{ThrottleThermal, ThrottlePower, ThrottleHardware}
}

// Owner says where a process runs.
type Owner struct {
	// Container is the container of a pod; meaningless when Cause is set.
	Container Container
	// Cause says why there is none; empty when there is one.
	Cause UnattributedCause
}

// UnattributedCause says why a process's use is no container's.
type UnattributedCause string

const (
	// CauseNoContainer says that the process runs in no container of a pod.
	CauseNoContainer UnattributedCause = "no_container"
	// CauseNotAllocated says that its container holds no device of the unit.
	CauseNotAllocated UnattributedCause = "not_allocated"
	// CauseUnreadable says that the process could not be looked at, as one that
	// has just ended.
	CauseUnreadable UnattributedCause = "unreadable"
)

// UnattributedCauses are all causes.
func UnattributedCauses() []UnattributedCause {
	return []UnattributedCause{CauseNoContainer, CauseNotAllocated, CauseUnreadable}
}
