package nodereport

// MPSUnit is a whole GPU or a partition for which a control daemon of NVIDIA's MPS is wanted.
type MPSUnit struct {
	// ID is the UUID of the GPU or of the partition, GPU that of the GPU.
	ID  string `json:"id"`
	GPU string `json:"gpu"`
	// ThreadPercentage and PinnedMemory, in bytes, are the most that one client can have;
	// 0 for no limit.
	ThreadPercentage int    `json:"threadPercentage,omitempty"`
	PinnedMemory     uint64 `json:"pinnedMemory,omitempty"`
	// Resets is another number after each reset of the GPU that was seen, and after each start of virgate run: the
	// compute mode may be lost then.
	Resets int `json:"resets,omitempty"`
	// MemoryParts says that its /dev/shm is one of so many equal parts of half of the node's memory; 0 is
	// from a virgate run that gives clients the /dev/shm of all units.
	MemoryParts int `json:"memoryParts,omitempty"`
	// Vacant says of a unit that has the /dev/shm of all units that no pod and no claim holds a share of it.
	Vacant bool `json:"vacant,omitempty"`
}

// MPSState is how the control daemon of a unit is.
type MPSState struct {
	ID    string   `json:"id"`
	Phase MPSPhase `json:"phase"`
	// Reason says what is wrong, for people; empty when nothing is. Of a ready one it says which
	// program waits for another user's, or does not share memory with the daemon.
	Reason string `json:"reason,omitempty"`
	// Restarts is how often it was started again since virgate mps has run.
	Restarts int `json:"restarts,omitempty"`
	// CommonMemory says that its daemon and clients have the /dev/shm of all units, as before an upgrade.
	CommonMemory bool `json:"commonMemory,omitempty"`
}

// MPSPhase is how far a control daemon is.
type MPSPhase string

const (
	// MPSStarting says that it does not serve yet.
	MPSStarting MPSPhase = "starting"
	// MPSReady says that it answers and has its limits.
	MPSReady MPSPhase = "ready"
	// MPSFailed says that it could not be started, has ended or does not answer. It is tried
	// again.
	MPSFailed MPSPhase = "failed"
	// MPSStopping says that it is not wanted any more, and that it, or the compute mode that
	// it needs, is still there.
	MPSStopping MPSPhase = "stopping"
)

// MPSPhases are all of them.
func MPSPhases() []MPSPhase { return []MPSPhase{MPSStarting, MPSReady, MPSFailed, MPSStopping} }
