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
	// MIGPending is what MIG will be after the next reset of the board; it
	// differs from MIG while a change waits for one.
	MIGPending bool `json:"migPending"`
	// Partitions are the board's MIG devices, by Index.
	Partitions []Partition `json:"partitions,omitempty"`
	// Links are the ways to the node's other boards, by Peer; none while they are
	// unknown.
	Links []Link `json:"links,omitempty"`
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

// Link is the way from a board to another one of the node.
type Link struct {
	// Peer is the UUID of the other board.
	Peer string `json:"peer"`
	// NVLinks is the number of active NVLinks that data between the two can use,
	// directly or through switches.
	NVLinks int `json:"nvlinks,omitempty"`
	// Level is what the two have in common on the PCI bus, from near to far:
	// internal, single, multiple, hostbridge, node, system (nvml.h,
	// nvmlGpuTopologyLevel_t); empty when unknown.
	Level string `json:"level,omitempty"`
}
