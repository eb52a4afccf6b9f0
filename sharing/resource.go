package sharing

import (
	"maps"
	"slices"
	"strings"

	"github.com/virgate/virgate/mig"
)

// Plan is what a node should advertise.
type Plan struct {
	// Resources are sorted by name. Each has at least one device.
	Resources []Resource
	// Warnings name, sorted, what the profile asks for without effect and what cannot be offered.
	Warnings []string
	// Unmatched are the Warnings about names in the profile that match nothing on this node. They
	// are normal where one profile serves different kinds of nodes.
	Unmatched []string
	// LeftOut are the profile's entries whose units do not all fit into one list.
	LeftOut []LeftOut
	// Health has every unit of the inventory by ID, offered or not. A unit that is missing here is
	// gone from the node, and not only from the offer.
	Health map[string]Health
	// Grants is what a container receives for its devices, including devices of resources that the
	// plan no longer has.
	Grants Grants
	// RetireAfter is the profile's RetireAfter.
	RetireAfter RetireAfter
}

// LeftOut describes an entry with which its resource would have more than MaxDevices devices.
type LeftOut struct {
	// Path is the path of the entry: "sharing.timeSlicing.resources[0]".
	Path, Resource string
	// Units is the number of the entry's units, Replicas the number of devices of each. Most is the
	// largest number of replicas with which all of the units fit; 0 if none fits.
	Units, Replicas, Most int
}

// Resource is a name that the kubelet advertises, with its devices.
type Resource struct {
	// Name is the fully qualified name, for example "nvidia.com/gpu.shared".
	Name string
	// Units are the hardware behind the devices, sorted by GPU and partition index.
	Units []Unit
	// Devices are the kubelet's devices, in the order of Units, then by replica.
	Devices []Device
	// Policy is how devices are chosen among the available ones.
	Policy AllocationPolicy
	// SpreadStrict refuses two devices of one unit in one container.
	SpreadStrict bool
	// FailRequestsGreaterThanOne is the profile's FailRequestsGreaterThanOne.
	FailRequestsGreaterThanOne bool
	// DeviceIDs is how a grant names units.
	DeviceIDs DeviceIDStrategy
}

// Unit is hardware that a container can get, a whole GPU or a partition, with its health.
type Unit struct {
	// ID is the UUID of the GPU or partition.
	ID string
	// GPU is the UUID of the GPU: ID itself for a whole GPU.
	GPU string
	// Index is the driver's index: "2" for a whole GPU, "2:0" for a partition.
	Index string
	// Minor is the N of the GPU's /dev/nvidiaN; -1 when unknown.
	Minor int
	// Model is the GPU's product name.
	Model string
	// Profile is the partition's MIG profile; zero for a whole GPU.
	Profile mig.Profile
	// GI and CI are the partition's instance IDs; -1 for a whole GPU.
	GI, CI int
	// Memory is the unit's memory in bytes; 0 when unknown.
	Memory uint64
	// NUMANode is the NUMA node next to the GPU; -1 when it has none.
	NUMANode int
	// Links are a whole GPU's connections to the node's other GPUs; none for a partition or while
	// unknown.
	Links []Link
	// Health is whether the unit may be used in the way it is offered.
	Health Health
	// Replicas is the number of the unit's devices; 1 if one container has it alone.
	Replicas int
	// Driver are the settings that the profile asks for on a whole GPU; none for a partition.
	Driver DriverSettings
	// Guard limits the memory of each container on a shared unit.
	Guard MemoryGuard
	// MPS is how the unit is shared by MPS; zero if it is not.
	MPS MPS
}

// deviceID returns the device ID of a shared unit's replica.
func (u Unit) deviceID(replica int) string {
	if u.MPS.Shares > 0 {
		return NewMPSDeviceID(u.ID, replica, u.MPS.Shares)
	}
	return NewDeviceID(u.ID, replica)
}

// Partition reports whether the unit is a MIG device, not a whole GPU.
func (u Unit) Partition() bool { return u.ID != u.GPU }

// Device is an ID that the kubelet sees.
type Device struct {
	// ID is the unit's ID or, for a shared unit, "<unit>::<replica>" or
	// "<unit>::<replica>of<shares>"; see ParseDeviceID.
	ID string
	// Unit is the ID of the unit behind the device.
	Unit string
	// Healthy is copied from the unit's health.
	Healthy bool
	// NUMANode is the unit's NUMA node; -1 when it has none.
	NUMANode int
}

// Allocation is a container that holds devices now, as the kubelet reports it.
type Allocation struct {
	Namespace, Pod, Container string
	// Resource is the name under which the devices are held; for a claim, the name of the DRA
	// driver.
	Resource string
	// Devices are the held device IDs, sorted, each once; for a claim, the UUIDs of the units.
	Devices []string
	// Claim is the ResourceClaim, in the pod's namespace, for which a DRA driver granted the
	// devices; empty for a device plugin's devices. AnyGPU is true if the claim's devices are
	// unknown; Devices are then all GPUs.
	Claim  string
	AnyGPU bool
}

// UnnamedHolder is what Holder returns if the kubelet names no pod.
const UnnamedHolder = "a pod that the kubelet does not name"

// Certain reports whether the kubelet names the pod. A pod without a name may be gone: the kubelet
// keeps its devices until the kubelet gets the next list.
func (a Allocation) Certain() bool { return a.Namespace != "" }

// OfGPU reports whether the devices are GPUs or partitions, by their UUIDs, and not devices of
// another vendor's device plugin.
func (a Allocation) OfGPU() bool {
	return a.Claim != "" || slices.ContainsFunc(a.Devices, func(device string) bool {
		return strings.HasPrefix(device, "GPU-") || strings.HasPrefix(device, "MIG-")
	})
}

// Holder describes who has the devices, for people: "namespace/pod", with the claim if there is
// one.
func (a Allocation) Holder() string {
	text := UnnamedHolder
	if a.Certain() {
		text = a.Namespace + "/" + a.Pod
	}
	if a.Claim != "" {
		text += " by the claim " + a.Claim + " of " + a.Resource
	}
	if a.AnyGPU {
		text += ", which may be of any GPU"
	}
	return text
}

// OperatorEvicts reports whether NVIDIA's GPU Operator counts pods with this resource, or with a
// claim of the DRA driver of this name, as GPU pods. Before it replaces a node's driver, it evicts
// these pods and no others (gpu-operator 26.7, cmd/gpu-operator; k8s-driver-manager v0.12,
// internal/kubernetes).
func OperatorEvicts(resource string) bool {
	return strings.HasPrefix(resource, "nvidia.com/gpu") || strings.HasPrefix(resource, "nvidia.com/mig-") ||
		resource == "gpu.nvidia.com"
}

// Evicted tells people which pods the GPU Operator evicts.
const Evicted = "the operator evicts only those with nvidia.com/gpu…, nvidia.com/mig-… or claims of gpu.nvidia.com"

// NotEvicted is the message about a name for which OperatorEvicts is false.
const NotEvicted = "on a node of the GPU Operator, pods that ask for it block a driver upgrade: " + Evicted

// Strategy returns how the resource's units are shared, for display: "exclusive" (whole GPUs, one
// container each), "time-slicing", "mps", "mig", "mig+time-slicing" (replicas of partitions) or
// "mig+mps". If several apply, they are in this order, separated by commas. It is empty for a
// resource without units.
func (r Resource) Strategy() string {
	var found []string
	for _, s := range []struct {
		name                   string
		partition, shared, mps bool
	}{
		{"exclusive", false, false, false}, {"time-slicing", false, true, false}, {"mps", false, true, true},
		{"mig", true, false, false}, {"mig+time-slicing", true, true, false}, {"mig+mps", true, true, true},
	} {
		if slices.ContainsFunc(r.Units, func(u Unit) bool {
			return u.Partition() == s.partition && (u.Replicas > 1) == s.shared && (u.MPS.Shares > 0) == s.mps
		}) {
			found = append(found, s.name)
		}
	}
	return strings.Join(found, ",")
}

// HealthyDevices returns the number of healthy devices.
func (r Resource) HealthyDevices() int {
	count := 0
	for _, device := range r.Devices {
		if device.Healthy {
			count++
		}
	}
	return count
}

// Replicas returns the smallest and the largest number of devices of a unit; 0 for a resource
// without units.
func (r Resource) Replicas() (least, most int) {
	for i, unit := range r.Units {
		if i == 0 {
			least = unit.Replicas
		}
		least = min(least, unit.Replicas)
		most = max(most, unit.Replicas)
	}
	return least, most
}

// Summary is a plan in numbers, for people and programs.
type Summary struct {
	Resources []ResourceSummary `json:"resources"`
	Warnings  []string          `json:"warnings"`
}

// ResourceSummary is a resource in numbers.
type ResourceSummary struct {
	Name string `json:"name"`
	// Strategy is Resource.Strategy.
	Strategy string `json:"strategy"`
	// Replicas is the number of devices of each unit. If units differ, it is the smallest number,
	// so Replicas times Units is never too high, and MaxReplicas is the largest. Otherwise
	// MaxReplicas is 0.
	Replicas    int `json:"replicas"`
	MaxReplicas int `json:"maxReplicas,omitempty"`
	// Units, Devices and Healthy are counts; Healthy counts devices.
	Units   int `json:"units"`
	Devices int `json:"devices"`
	Healthy int `json:"healthy"`
	// Share is the limit of one MPS share, the smallest if units differ; nil without MPS.
	Share *MPSLimit `json:"share,omitempty"`
	// GPUs are the GPUs behind the devices, sorted by index.
	GPUs []GPUSummary `json:"gpus"`
}

// GPUSummary is how many of a resource's devices belong to a GPU or its partitions.
type GPUSummary struct {
	UUID string `json:"uuid"`
	// Index is the driver's index.
	Index   string `json:"index"`
	Devices int    `json:"devices"`
}

// Summary returns the plan in numbers. Its slices are never nil.
func (p Plan) Summary() Summary {
	s := Summary{Resources: make([]ResourceSummary, len(p.Resources)), Warnings: append([]string{}, p.Warnings...)}
	for i, r := range p.Resources {
		least, most := r.Replicas()
		s.Resources[i] = ResourceSummary{
			Name:     r.Name,
			Strategy: r.Strategy(),
			Replicas: least,
			Units:    len(r.Units),
			Devices:  len(r.Devices),
			Healthy:  r.HealthyDevices(),
		}
		if least != most {
			s.Resources[i].MaxReplicas = most
		}
		gpus := []GPUSummary{}
		for _, u := range r.Units {
			if n := len(gpus); n == 0 || gpus[n-1].UUID != u.GPU {
				index, _, _ := strings.Cut(u.Index, ":")
				gpus = append(gpus, GPUSummary{UUID: u.GPU, Index: index})
			}
			gpus[len(gpus)-1].Devices += u.Replicas
			if u.MPS.Shares == 0 {
				continue
			}
			share := NewMPSLimit(1, u.MPS.Shares, u.Memory)
			if least := s.Resources[i].Share; least != nil {
				share = MPSLimit{
					min(share.ThreadPercentage, least.ThreadPercentage), min(share.PinnedMemory, least.PinnedMemory),
				}
			}
			s.Resources[i].Share = &share
		}
		s.Resources[i].GPUs = gpus
	}
	return s
}

// Drop returns the plan without the units for which drop returns true, which must not be offered
// now. They remain in Health, so their devices are withdrawn in the usual way. The plan itself is
// not modified.
func (p Plan) Drop(drop func(Unit) bool) Plan {
	if !slices.ContainsFunc(p.Resources, func(r Resource) bool { return slices.ContainsFunc(r.Units, drop) }) {
		return p
	}
	var resources []Resource
	for _, r := range p.Resources {
		left := map[string]bool{}
		r.Units = slices.DeleteFunc(slices.Clone(r.Units), func(unit Unit) bool {
			left[unit.ID] = !drop(unit)
			return !left[unit.ID]
		})
		r.Devices = slices.DeleteFunc(slices.Clone(r.Devices), func(device Device) bool { return !left[device.Unit] })
		if len(r.Devices) > 0 {
			resources = append(resources, r)
		}
	}
	p.Resources = resources
	return p
}

// MarkUnavailable returns the plan with faults for units that cannot be granted now. reasons are the
// faults by unit. A unit that is already faulty keeps its fault, and units that the node does not
// have are ignored. The plan itself is not modified.
func (p Plan) MarkUnavailable(reasons map[string]string) Plan {
	health := maps.Clone(p.Health)
	for unit, known := range p.Health {
		if reason := reasons[unit]; known.Healthy() && reason != "" {
			health[unit] = Faulty(reason)
		}
	}
	if maps.Equal(health, p.Health) {
		return p
	}
	p.Health = health
	return p.withHealth(health)
}

// MarkModeUnavailable is MarkUnavailable for units that cannot be granted in the way the plan offers them.
// Plan.Health does not change, so grants of the unit in another way are not affected.
func (p Plan) MarkModeUnavailable(reasons map[string]string) Plan {
	if len(reasons) == 0 {
		return p
	}
	health := maps.Clone(p.Health)
	for unit, reason := range reasons {
		if known := p.Health[unit]; known.Healthy() {
			health[unit] = Faulty(reason)
		}
	}
	return p.withHealth(health)
}

// withHealth returns the plan with this health for the units of its resources.
func (p Plan) withHealth(health map[string]Health) Plan {
	p.Resources = slices.Clone(p.Resources)
	for i := range p.Resources {
		r := &p.Resources[i]
		r.Units, r.Devices = slices.Clone(r.Units), slices.Clone(r.Devices)
		for j := range r.Units {
			r.Units[j].Health = health[r.Units[j].ID]
		}
		for j := range r.Devices {
			r.Devices[j].Healthy = health[r.Devices[j].Unit].Healthy()
		}
	}
	return p
}
