package sharing

import (
	"strconv"
	"strings"
)

// MPS is how a unit is shared by NVIDIA's Multi-Process Service. The zero value is for a unit that
// is not shared by MPS.
type MPS struct {
	// Shares is the number of the unit's devices, each an equal part of the unit.
	Shares int
	// Several is true if a container may have more than one of them.
	Several bool
}

// MPSLimit is the part of a unit that a container's processes can use.
type MPSLimit struct {
	// ThreadPercentage is the percentage of the multiprocessors on which the container's threads
	// run at a time.
	ThreadPercentage int `json:"threadPercentage"`
	// PinnedMemory is the memory limit in bytes, whole MiB; 0 for no limit.
	PinnedMemory uint64 `json:"pinnedMemory,omitempty"`
}

// NewMPSLimit returns the limit for n of a unit's shares. memory is the unit's memory in bytes; 0
// if unknown. The limits are rounded down, so the limits of all containers together never exceed
// the unit. The remainder stays unused.
func NewMPSLimit(n, shares int, memory uint64) MPSLimit {
	part, all := uint64(n), uint64(shares)
	return MPSLimit{ThreadPercentage: int(100 * part / all), PinnedMemory: memory >> 20 * part / all << 20}
}

// MPSCeiling returns the most that one container can have of a unit shared by MPS. The daemon
// enforces it on a process that changes its own limits.
func (u Unit) MPSCeiling() MPSLimit {
	if u.MPS.Several {
		return NewMPSLimit(u.MPS.Shares, u.MPS.Shares, u.Memory)
	}
	return NewMPSLimit(1, u.MPS.Shares, u.Memory)
}

// MaxMPSClients is the largest number of processes that an MPS server of any GPU serves, and so the
// largest number of shares.
const MaxMPSClients = 48

// mpsClients returns how many processes an MPS server serves on a GPU or on one of its partitions.
// A GPU has MaxMPSClients from compute capability 7.0 (Volta) on and 16 before (NVIDIA's MPS guide,
// "Limitations"). A partition has as large a part of that as it has of the GPU's compute slices
// (NVIDIA's MIG guide). The result assumes 7 slices, the most of any GPU; for a GPU with fewer
// slices it is lower than the driver's limit.
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

// mps returns how the entry shares its units.
func (e ReplicatedResource) mps() MPS {
	if !e.MPS || e.Replicas < 2 {
		return MPS{}
	}
	return MPS{Shares: e.Replicas, Several: e.SeveralShares}
}

// refuseTooManyClients leaves out units with more shares than MPS serves processes there.
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
