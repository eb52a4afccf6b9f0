package sharing

import "github.com/virgate/virgate/mig"

// GPU is a physical board as the driver describes it.
type GPU struct {
	// UUID names the board: "GPU-" and a lower-case UUID.
	UUID string `json:"uuid"`
	// Index is the driver's enumeration index, the one nvidia-smi prints.
	Index int `json:"index"`
	// Minor is the N of /dev/nvidiaN; -1 when unknown.
	Minor int `json:"minor"`
	// PCIBusID is domain:bus:device.function as NVML prints it, for example
	// "00000000:3B:00.0".
	PCIBusID string `json:"pciBusID"`
	// Model is the driver's product name, for example "NVIDIA A100-SXM4-40GB".
	Model string `json:"model"`
	// Memory is the board's total memory in bytes.
	Memory uint64 `json:"memory"`
	// Architecture is the lower-case family name, for example "ampere"; empty
	// when unknown.
	Architecture string `json:"architecture,omitempty"`
	// ComputeCapability is the CUDA compute capability, for example "8.0";
	// empty when unknown.
	ComputeCapability string `json:"computeCapability,omitempty"`
	// NUMANode is the NUMA node next to the board; -1 when it has none.
	NUMANode int `json:"numaNode"`
	// MIG says that MIG mode is enabled now. Such a board runs no work as a
	// whole, whether or not it has partitions.
	MIG bool `json:"mig"`
	// Partitions are the board's MIG devices, by Index.
	Partitions []Partition `json:"partitions,omitempty"`
	// Fault says why the whole board must not be used; empty when healthy.
	Fault string `json:"fault,omitempty"`
}

// Partition is a MIG device: a compute instance in a GPU instance of a board.
type Partition struct {
	// UUID names the partition: "MIG-" and a lower-case UUID.
	UUID string `json:"uuid"`
	// Index is the partition's MIG device index on its board, the i of "g:i".
	Index int `json:"index"`
	// Profile is what the partition was cut as, for example 1g.5gb.
	Profile mig.Profile `json:"profile"`
	// GI and CI are the driver's GPU instance and compute instance IDs.
	GI int `json:"gi"`
	CI int `json:"ci"`
	// Placement is where the GPU instance lies on the board, in memory slots.
	Placement mig.Placement `json:"placement"`
	// Memory is the partition's memory in bytes; 0 when unknown.
	Memory uint64 `json:"memory,omitempty"`
	// Fault says why this partition must not be used; empty when healthy. A
	// fault of the board holds for the partition too and is not repeated here.
	Fault string `json:"fault,omitempty"`
}
