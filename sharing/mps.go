package sharing

import (
	"strconv"
	"strings"
)

// MPS says how a unit is shared by NVIDIA's Multi-Process Service. The zero value is that of a
// unit that is not.
type MPS struct {
	// Shares is the number of the unit's devices: each is such a part of the unit.
	Shares int
	// Several says that a container may have more than one of them.
	Several bool
}

// MPSLimit is what the processes of a container can use of a unit.
type MPSLimit struct {
	// ThreadPercentage is the part of the multiprocessors on which its threads run at a time.
	ThreadPercentage int `json:"threadPercentage"`
	// PinnedMemory is the memory in bytes, whole MiB; 0 for no limit.
	PinnedMemory uint64 `json:"pinnedMemory,omitempty"`
}

// NewMPSLimit is the limit of n shares of a unit that has so many, and so much memory in bytes; 0
// when that is not known. Both are rounded down, so that the limits of all containers together
// never exceed the unit; what is left over is nobody's.
func NewMPSLimit(n, shares int, memory uint64) MPSLimit {
	part, all := uint64(n), uint64(shares)
	return MPSLimit{ThreadPercentage: int(100 * part / all), PinnedMemory: memory >> 20 * part / all << 20}
}

// MPSCeiling is the most that one container can have of a unit that is shared by MPS: what the
// daemon lets a process have that changes its own limits.
func (u Unit) MPSCeiling() MPSLimit {
	if u.MPS.Several {
		return NewMPSLimit(u.MPS.Shares, u.MPS.Shares, u.Memory)
	}
	return NewMPSLimit(1, u.MPS.Shares, u.Memory)
}

// MaxMPSClients is the largest number of processes that an MPS server of any GPU serves, and so
// of shares.
const MaxMPSClients = 48

// mpsClients is how many processes an MPS server serves of a GPU, or of a partition of it:
// MaxMPSClients from compute capability 7.0 (Volta) on, 16 before (NVIDIA's MPS guide, "Limitations"),
// and of a partition the part that it has of the GPU's compute slices (NVIDIA's MIG guide). No GPU
// has more than 7; where it has fewer, this is fewer than the driver allows.
func mpsClients(gpu *GPU, partition *Partition) int {
	major, _, _ := strings.Cut(gpu.ComputeCapability, ".")
	if number, err := strconv.Atoi(major); err == nil && number < 7 {
		return 16
	}
	if partition != nil {
		return max(1, MaxMPSClients*partition.Profile.Compute/7)
	}
	return MaxMPSClients
}

// mps is how the entry shares its units.
func (e ReplicatedResource) mps() MPS {
	if !e.MPS || e.Replicas < 2 {
		return MPS{}
	}
	return MPS{Shares: e.Replicas, Several: e.SeveralShares}
}

// refuseTooManyClients leaves out the units that MPS cannot share between so many containers.
func refuseTooManyClients(units []candidate, entries []ReplicatedResource, warn *warnings) []candidate {
	var kept []candidate
	for _, u := range units {
		if u.entry != exclusive {
			entry, most := entries[u.entry], mpsClients(u.gpu, u.partition)
			if entry.mps().Shares > most {
				what := describe(u.gpu)
				if u.partition != nil {
					what += ": partition " + strconv.Itoa(u.partition.Index) + " (" + u.partition.UUID + ")"
				}
				warn.addf(
					"%s.replicas: %s not offered: its MPS server serves %d processes at most, and %d shares are wanted",
					entry.Path, what, most, entry.Replicas)
				continue
			}
		}
		kept = append(kept, u)
	}
	return kept
}
