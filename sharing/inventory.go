package sharing

import (
	"errors"
	"strconv"
	"strings"

	"github.com/virgate/virgate/mig"
)

// ErrNotRead means that the node's GPUs have not been read yet, as right after the start.
var ErrNotRead = errors.New("the GPUs have not been read yet")

// ErrReleased means that the driver was not called, because this GPU or another one is released and
// must stay closed.
var ErrReleased = errors.New("a GPU is released")

// GPU is a physical GPU as the driver describes it.
type GPU struct {
	// UUID names the GPU: "GPU-" and a lower-case UUID.
	UUID string `json:"uuid"`
	// Index is the driver's index when the GPU was first seen. It stays the same when the driver
	// renumbers its GPUs, so losing another GPU does not change it.
	Index int `json:"index"`
	// DriverIndex is the driver's current index if it differs from Index: a number, Lost or
	// NotListed. It is empty if the driver still uses Index.
	DriverIndex string `json:"driverIndex,omitempty"`
	// Minor is the N of /dev/nvidiaN; -1 when unknown.
	Minor int `json:"minor"`
	// PCIBusID is domain:bus:device.function as NVML prints it: "00000000:3B:00.0".
	PCIBusID string `json:"pciBusID"`
	// Model is the driver's product name, for example "NVIDIA A100-SXM4-40GB".
	Model string `json:"model"`
	// Brand is the GPU's brand as NVIDIA's DRA driver writes it: "Nvidia", "Tesla"; empty when
	// unknown.
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
	// PCIDevice and PCISubsystem are PCI IDs as in GPUID; 0 when unknown.
	PCIDevice    uint32 `json:"-"`
	PCISubsystem uint32 `json:"-"`
	// Clique is the NVLink fabric between machines that the GPU has joined, as "<cluster
	// UUID>.<clique>"; empty for none.
	Clique string `json:"-"`
	// NUMANode is the NUMA node next to the GPU; -1 when it has none.
	NUMANode int `json:"numaNode"`
	// MIGCapable is true if MIG can be enabled on the GPU.
	MIGCapable bool `json:"-"`
	// MIG is true if MIG mode is enabled now. Such a GPU runs no work as a whole.
	MIG bool `json:"mig"`
	// MIGPending is the MIG mode after the next reset of the GPU. It differs from MIG while a
	// change waits for the reset.
	MIGPending bool `json:"migPending"`
	// Denied is true if the driver refused to answer because this program lacks a privilege.
	Denied bool `json:"denied,omitempty"`
	// Partitions are the GPU's MIG devices, sorted by Index.
	Partitions []Partition `json:"partitions,omitempty"`
	// Links are the connections to the node's other GPUs, sorted by Peer; none while unknown.
	Links []Link `json:"links,omitempty"`
	// Health is the health of the whole GPU.
	Health Health `json:"fault,omitzero"`
}

const (
	// Lost is the DriverIndex of a GPU that does not answer. For a program that opens the driver
	// now, this index and all later ones may mean other GPUs.
	Lost = "lost"
	// NotListed is the DriverIndex of a GPU that the driver no longer lists.
	NotListed = "none"
)

// PartitionIndex returns the index "g:i" of a partition of the GPU, as people write it.
func (g GPU) PartitionIndex(p Partition) string {
	return strconv.Itoa(g.Index) + ":" + strconv.Itoa(p.Index)
}

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
	// Placement is the position of the GPU instance on the GPU, in memory slots; zero when unknown.
	Placement mig.Placement `json:"placement"`
	// Memory is the partition's memory in bytes; 0 when unknown.
	Memory uint64 `json:"memory,omitempty"`
	// Attributes are the partition's part of the GPU; zero when unknown.
	Attributes PartitionAttributes `json:"-"`
	// Health is the health of this partition. A fault of the GPU applies to the partition too and
	// is not repeated here.
	Health Health `json:"fault,omitzero"`
}

// PartitionAttributes are a partition's part of its GPU. Other partitions of the same GPU instance
// may share the engines.
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

// Engines returns the partition's multiprocessors and engines.
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

// Link is the connection from a GPU to another GPU of the node.
type Link struct {
	// Peer is the UUID of the other GPU.
	Peer string `json:"peer"`
	// NVLinks is the number of active NVLinks that data can use, directly or through switches.
	NVLinks int `json:"nvlinks,omitempty"`
	// Level is the nearest common point of the two GPUs on the PCI bus, from near to far: internal,
	// single, multiple, hostbridge, node, system (nvml.h, nvmlGpuTopologyLevel_t); empty when
	// unknown.
	Level string `json:"level,omitempty"`
}

// replicaMark separates the unit and the replica in a device ID. NVIDIA's device plugin writes the
// same IDs (internal/rm/devices.go), so a pod keeps its device when Virgate replaces that plugin.
const replicaMark = "::"

// NewDeviceID returns the device ID of a replica of the unit, counted from 0:
//
//	id = unit "::" replica
//
// The device of an exclusive unit has the unit's own ID.
func NewDeviceID(unit string, replica int) string {
	return unit + replicaMark + strconv.Itoa(replica)
}

// shareMark separates the replica and the number of shares in a device ID.
const shareMark = "of"

// NewMPSDeviceID returns the device ID of an MPS share, counted from 0:
//
//	id = unit "::" replica "of" shares
//
// The ID contains the number of shares and differs from the ID of a time-slice. A reader of held
// device IDs therefore knows how a unit is shared: a container keeps the limits it was started
// with, and a unit is shared in only one way at a time.
func NewMPSDeviceID(unit string, replica, shares int) string {
	return NewDeviceID(unit, replica) + shareMark + strconv.Itoa(shares)
}

// ParseDeviceID splits a device ID. There is no error, because any text that is not the ID of a
// replica is taken as the ID of a unit: shared is then false, unit is id and replica is 0. The
// replica is a decimal number without sign and without leading zeros.
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
