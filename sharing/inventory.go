package sharing

import (
	"errors"
	"strconv"
	"strings"

	"github.com/virgate/virgate/mig"
)

// ErrNotRead says that the node's GPUs have not been read yet, as right after the start.
var ErrNotRead = errors.New("the GPUs have not been read yet")

// GPU is a physical GPU as the driver describes it.
type GPU struct {
	// UUID names the GPU: "GPU-" and a lower-case UUID.
	UUID string `json:"uuid"`
	// Index is the driver's enumeration index when the GPU was first known. It stays when
	// the driver numbers its GPUs anew, so that another GPU's end does not change it.
	Index int `json:"index"`
	// DriverIndex is the driver's index now, where that is another one: a number, or Lost
	// or NotListed. It is empty where it is Index.
	DriverIndex string `json:"driverIndex,omitempty"`
	// Minor is the N of /dev/nvidiaN; -1 when unknown.
	Minor int `json:"minor"`
	// PCIBusID is domain:bus:device.function as NVML prints it: "00000000:3B:00.0".
	PCIBusID string `json:"pciBusID"`
	// Model is the driver's product name, for example "NVIDIA A100-SXM4-40GB".
	Model string `json:"model"`
	// Brand is what it is sold as, in the words of NVIDIA's DRA driver: "Nvidia", "Tesla"; empty when unknown.
	Brand string `json:"-"`
	// Memory is the GPU's total memory in bytes.
	Memory uint64 `json:"memory"`
	// Architecture is the lower-case family name, "ampere"; empty when unknown.
	Architecture string `json:"architecture,omitempty"`
	// ComputeCapability is the CUDA compute capability, "8.0"; empty when unknown.
	ComputeCapability string `json:"computeCapability,omitempty"`
	// PCIClass is the PCI class: 0x030200 for a GPU without a display, 0x030000 with one; 0
	// when unknown.
	PCIClass uint32 `json:"-"`
	// PCIDevice and PCISubsystem are its PCI IDs, as in GPUID; 0 when unknown.
	PCIDevice    uint32 `json:"-"`
	PCISubsystem uint32 `json:"-"`
	// Clique is "<cluster UUID>.<clique>" of the fabric of NVLinks between machines that the
	// GPU has joined; empty for none.
	Clique string `json:"-"`
	// NUMANode is the NUMA node next to the GPU; -1 when it has none.
	NUMANode int `json:"numaNode"`
	// MIGCapable says that the GPU can have MIG enabled.
	MIGCapable bool `json:"-"`
	// MIG says that MIG mode is enabled now. Such a GPU runs no work as a whole.
	MIG bool `json:"mig"`
	// MIGPending is what MIG will be after the next reset of the GPU; it
	// differs from MIG while a change waits for one.
	MIGPending bool `json:"migPending"`
	// Denied says that the driver refused to answer, for want of privilege.
	Denied bool `json:"denied,omitempty"`
	// Partitions are the GPU's MIG devices, by Index.
	Partitions []Partition `json:"partitions,omitempty"`
	// Links are the connections to the node's other GPUs, by Peer; none while unknown.
	Links []Link `json:"links,omitempty"`
	// Health says whether the whole GPU may be used.
	Health Health `json:"fault,omitzero"`
}

const (
	// Lost is the DriverIndex of a GPU that does not answer. A program that opens the
	// driver now may find others under this and all later indexes.
	Lost = "lost"
	// NotListed is that of a GPU that the driver no longer lists.
	NotListed = "none"
)

// Partition is a MIG device: a compute instance in a GPU instance of a GPU.
type Partition struct {
	// UUID names the partition: "MIG-" and a lower-case UUID.
	UUID string `json:"uuid"`
	// Index is the partition's MIG device index on its GPU, the i of "g:i".
	Index int `json:"index"`
	// Profile is the partition's MIG profile, for example 1g.5gb.
	Profile mig.Profile `json:"profile"`
	// GI and CI are the driver's GPU instance and compute instance IDs.
	GI int `json:"gi"`
	CI int `json:"ci"`
	// Placement is where the GPU instance lies on the GPU, in memory slots; zero when
	// unknown.
	Placement mig.Placement `json:"placement"`
	// Memory is the partition's memory in bytes; 0 when unknown.
	Memory uint64 `json:"memory,omitempty"`
	// Attributes say what the partition has of its GPU; zero when unknown.
	Attributes PartitionAttributes `json:"-"`
	// Health says whether this partition may be used. A fault of the GPU holds
	// for the partition too and is not repeated here.
	Health Health `json:"fault,omitzero"`
}

// PartitionAttributes say what a partition has of its GPU. Engines may be shared with
// other partitions of the same GPU instance.
type PartitionAttributes struct {
	MemoryMiB       uint64 `json:"memoryMiB"`
	Multiprocessors int    `json:"multiprocessors"`
	GPUSlices       int    `json:"gpuSlices"`
	ComputeSlices   int    `json:"computeSlices"`
	CopyEngines     int    `json:"copyEngines"`
	Decoders        int    `json:"decoders"`
	Encoders        int    `json:"encoders"`
	JPEGEngines     int    `json:"jpegEngines"`
	OFAEngines      int    `json:"ofaEngines"`
}

// Engines are the partition's multiprocessors and engines.
func (a PartitionAttributes) Engines() mig.Engines {
	return mig.Engines{
		Multiprocessors: a.Multiprocessors,
		CopyEngines:     a.CopyEngines,
		Decoders:        a.Decoders,
		Encoders:        a.Encoders,
		JPEGEngines:     a.JPEGEngines,
		OFAEngines:      a.OFAEngines,
	}
}

// Link is the connection from a GPU to another one of the node.
type Link struct {
	// Peer is the UUID of the other GPU.
	Peer string `json:"peer"`
	// NVLinks is how many active NVLinks data can use, directly or through switches.
	NVLinks int `json:"nvlinks,omitempty"`
	// Level is the nearest thing that the two share on the PCI bus, from near to far:
	// internal, single, multiple, hostbridge, node, system (nvml.h,
	// nvmlGpuTopologyLevel_t); empty when unknown.
	Level string `json:"level,omitempty"`
}

// replicaMark stands between the unit and the replica in a device ID. NVIDIA's
// device plugin writes the same IDs (internal/rm/devices.go), so a pod that
// holds one keeps it when Virgate takes the plugin's place.
const replicaMark = "::"

// NewDeviceID returns the device ID of the unit's replica, counted from 0:
//
//	id = unit "::" replica
//
// The device of an exclusive unit has the unit's own ID.
func NewDeviceID(unit string, replica int) string {
	return unit + replicaMark + strconv.Itoa(replica)
}

// shareMark stands between the replica and the number of shares in a device ID.
const shareMark = "of"

// NewMPSDeviceID returns the device ID of a share by MPS, counted from 0:
//
//	id = unit "::" replica "of" shares
//
// It says of how many, and differs from a time-slice's, so that whoever reads who holds what
// knows how: a container keeps the limits of its start, and a unit is shared in one way at a time.
func NewMPSDeviceID(unit string, replica, shares int) string {
	return NewDeviceID(unit, replica) + shareMark + strconv.Itoa(shares)
}

// ParseDeviceID splits a device ID. What is not the ID of a replica is that of a unit, so
// there is no error: shared is then false, unit is id and replica is 0. The replica is a
// decimal number without sign and without leading zeros.
func ParseDeviceID(id string) (unit string, replica int, shared bool) {
	unit, replica, _, shared = parseDeviceID(id)
	return unit, replica, shared
}

func parseDeviceID(id string) (unit string, replica, mpsShares int, shared bool) {
	at := strings.LastIndex(id, replicaMark)
	if at <= 0 {
		return id, 0, 0, false
	}
	number, of, mps := strings.Cut(id[at+len(replicaMark):], shareMark)
	replica, ok := parseIndex(number)
	if mps && ok {
		mpsShares, ok = parseIndex(of)
		ok = ok && replica < mpsShares
	}
	if !ok {
		return id, 0, 0, false
	}
	return id[:at], replica, mpsShares, true
}
