package nvml

// TopologyLevel is what two boards have in common on the bus; more is farther.
type TopologyLevel int

// The levels that NVML's header names (nvml.h, nvmlGpuTopologyLevel_t).
const (
	TopologyInternal   TopologyLevel = 0
	TopologySingle     TopologyLevel = 10
	TopologyMultiple   TopologyLevel = 20
	TopologyHostBridge TopologyLevel = 30
	TopologyNode       TopologyLevel = 40
	TopologySystem     TopologyLevel = 50
)

// String is the level in one word, "" for one that is not in this list.
func (l TopologyLevel) String() string {
	switch l {
	case TopologyInternal:
		return "internal"
	case TopologySingle:
		return "single"
	case TopologyMultiple:
		return "multiple"
	case TopologyHostBridge:
		return "hostbridge"
	case TopologyNode:
		return "node"
	case TopologySystem:
		return "system"
	}
	return ""
}

// RemappedRows is the state of a board's spare memory rows.
type RemappedRows struct {
	// Correctable and Uncorrectable count the rows that were replaced after
	// errors of that kind.
	Correctable, Uncorrectable int
	// Pending says that a row waits for a reset to be replaced, Failed that one
	// could not be.
	Pending, Failed bool
}
