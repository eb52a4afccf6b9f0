package sharing

import "github.com/virgate/virgate/mig"

// Plan is what a node should advertise.
type Plan struct {
	// Resources by name. None is without devices.
	Resources []Resource
	// Warnings name what the profile asked for and the node does not have, and
	// what the node has and the profile does not offer. Sorted.
	Warnings []string
	// Faults has every unit of the inventory, offered or not, and says why it
	// must not be used; "" for a healthy one. It tells a unit that is no longer
	// offered from one that is gone.
	Faults map[string]string
	// Grants says what a container receives for its devices, also for those of
	// resources that the plan does not have any more.
	Grants Grants
}

// Resource is a name that the kubelet advertises, with its devices.
type Resource struct {
	// Name is fully qualified, for example "nvidia.com/gpu.shared".
	Name string
	// Units are the hardware behind the devices, by board and partition index.
	Units []Unit
	// Devices are what the kubelet sees, in the order of Units, then by replica.
	Devices []Device
	// Policy is how devices are chosen among those available.
	Policy Policy
	// SpreadStrict refuses two devices of one unit in one container.
	SpreadStrict bool
	// OneShareOnly refuses more than one device in one container where any of
	// them is a replica.
	OneShareOnly bool
	// DeviceIDs says by what a grant names units.
	DeviceIDs DeviceIDStrategy
}

// Unit is hardware that can be handed out: a whole GPU or a partition. Health
// belongs to units.
type Unit struct {
	// ID is the UUID of the GPU or of the partition.
	ID string
	// GPU is the UUID of the board: ID itself for a whole GPU.
	GPU string
	// Index is the driver's index: "2" for a whole GPU, "2:0" for a partition.
	Index string
	// Minor is the N of the board's /dev/nvidiaN; -1 when unknown.
	Minor int
	// Model is the board's product name.
	Model string
	// Profile is the partition's MIG profile; zero for a whole GPU.
	Profile mig.Profile
	// GI and CI are the partition's instance IDs; -1 for a whole GPU.
	GI, CI int
	// NUMANode is the NUMA node next to the board; -1 when it has none.
	NUMANode int
	// Links are the ways from a whole GPU to the node's other boards; none for
	// a partition, and while they are unknown.
	Links []Link
	// Fault says why the unit must not be used; empty when healthy.
	Fault string
	// Replicas is the number of devices that stand for the unit; 1 when a
	// container has it alone.
	Replicas int
}

// Partition says that the unit is a MIG device and not a whole GPU.
func (u Unit) Partition() bool { return u.ID != u.GPU }

// Device is an ID that the kubelet sees.
type Device struct {
	// ID is the unit's ID for an exclusive unit and "<unit>::<replica>" for a
	// shared one; see ParseDeviceID.
	ID string
	// Unit is the ID of the unit behind the device.
	Unit string
	// Healthy is the unit's health, copied.
	Healthy bool
	// NUMANode is the unit's, -1 when it has none.
	NUMANode int
}

// Allocation is a container that holds devices now, as the kubelet reports it.
type Allocation struct {
	Namespace, Pod, Container string
	// Resource is the name under which the devices are held.
	Resource string
	// Devices are the held device IDs, sorted, each once.
	Devices []string
}
