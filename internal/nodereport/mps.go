package nodereport

// MPSUnit is a whole GPU or a partition for which a control daemon of NVIDIA's MPS is wanted.
type MPSUnit struct {
	// ID is the UUID of the GPU or partition. GPU is the UUID of the GPU.
	ID  string `json:"id"`
	GPU string `json:"gpu"`
	// ThreadPercentage, and PinnedMemory in bytes, are the most that one client can have; 0 for no limit.
	ThreadPercentage int    `json:"threadPercentage,omitempty"`
	PinnedMemory     uint64 `json:"pinnedMemory,omitempty"`
	// Resets changes with each reset of the GPU that was seen, and with each start of virgate run,
	// because the compute mode may be lost then.
	Resets int `json:"resets,omitempty"`
	// MemoryParts is the number of equal parts of half of the node's memory; the unit's /dev/shm is
	// one of them. 0 comes from a virgate run that gives clients the /dev/shm of all units.
	MemoryParts int `json:"memoryParts,omitempty"`
	// Vacant is true if the unit has the /dev/shm of all units, and no pod and no claim holds a
	// share of it.
	Vacant bool `json:"vacant,omitempty"`
}

// MPSState is the state of a unit's control daemon.
type MPSState struct {
	ID    string   `json:"id"`
	Phase MPSPhase `json:"phase"`
	// Reason says in words what is wrong; empty if nothing is. For a ready daemon it says which
	// program waits for another user's program, or does not share memory with the daemon.
	Reason string `json:"reason,omitempty"`
	// Restarts is how often the daemon was started again since virgate mps started.
	Restarts int `json:"restarts,omitempty"`
	// CommonMemory is true if the daemon and its clients have the /dev/shm of all units, as before
	// an upgrade.
	CommonMemory bool `json:"commonMemory,omitempty"`
}

// MPSPhase is how far a control daemon has come.
type MPSPhase string

const (
	// MPSStarting means that the daemon does not serve yet.
	MPSStarting MPSPhase = "starting"
	// MPSReady means that the daemon answers and has its limits.
	MPSReady MPSPhase = "ready"
	// MPSFailed means that the daemon could not be started, has ended or does not answer. Starting
	// it is tried again.
	MPSFailed MPSPhase = "failed"
	// MPSStopping means that the daemon is no longer wanted, but that it, or the compute mode that
	// it needs, is still there.
	MPSStopping MPSPhase = "stopping"
)

// MPSPhases returns all phases.
func MPSPhases() []MPSPhase { return []MPSPhase{MPSStarting, MPSReady, MPSFailed, MPSStopping} }
