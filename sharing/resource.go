package sharing

import (
	"maps"
	"slices"
	"strings"

	"github.com/virgate/virgate/mig"
)

// Plan is what a node should advertise.
type Plan struct {
	// Resources by name. None is without devices.
	Resources []Resource
	// Warnings name what the profile asks for in vain and what cannot be offered. Sorted.
	Warnings []string
	// Unmatched are those of Warnings that are as it should be where one profile serves unlike
	// nodes: they name what the profile speaks of and this node does not have.
	Unmatched []string
	// LeftOut are the entries of the profile whose units do not all fit into one list.
	LeftOut []LeftOut
	// Health has every unit of the inventory by ID, offered or not. A unit that is
	// missing here is gone, and not just no longer offered.
	Health map[string]Health
	// Grants says what a container receives for its devices, also for those of
	// resources that the plan does not have any more.
	Grants Grants
	// RetireAfter is that of the profile.
	RetireAfter RetireAfter
}

// LeftOut is about a resource that would have more than MaxDevices of these units.
type LeftOut struct {
	// Path is that of the entry: "sharing.timeSlicing.resources[0]".
	Path, Resource string
	// Units have so many Replicas each, and all of them fit with no more than Most; 0 where none does.
	Units, Replicas, Most int
}

// Resource is a name that the kubelet advertises, with its devices.
type Resource struct {
	// Name is fully qualified, for example "nvidia.com/gpu.shared".
	Name string
	// Units are the hardware behind the devices, by GPU and partition index.
	Units []Unit
	// Devices are what the kubelet sees, in the order of Units, then by replica.
	Devices []Device
	// Policy is how devices are chosen among those available.
	Policy AllocationPolicy
	// SpreadStrict refuses two devices of one unit in one container.
	SpreadStrict bool
	// FailRequestsGreaterThanOne is the profile's.
	FailRequestsGreaterThanOne bool
	// DeviceIDs says by what a grant names units.
	DeviceIDs DeviceIDStrategy
}

// Unit is hardware that can be handed out, a whole GPU or a partition, with its health.
type Unit struct {
	// ID is the UUID of the GPU or of the partition.
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
	// Links are a whole GPU's connections to the node's other GPUs; none for a
	// partition, or while they are unknown.
	Links []Link
	// Health says whether the unit may be used in the way in which it is offered.
	Health Health
	// Replicas is the unit's number of devices; 1 when a container has it alone.
	Replicas int
	// Driver are the settings of a whole GPU that the profile asks for; none for a partition.
	Driver DriverSettings
	// Guard limits the memory of each container on a shared unit.
	Guard MemoryGuard
	// MPS says how the unit is shared, if by MPS.
	MPS MPS
}

// deviceID is the ID of a shared unit's replica.
func (u Unit) deviceID(replica int) string {
	if u.MPS.Shares > 0 {
		return NewMPSDeviceID(u.ID, replica, u.MPS.Shares)
	}
	return NewDeviceID(u.ID, replica)
}

// Partition says whether the unit is a MIG device and not a whole GPU.
func (u Unit) Partition() bool { return u.ID != u.GPU }

// Device is an ID that the kubelet sees.
type Device struct {
	// ID is the unit's ID, or "<unit>::<replica>" or "<unit>::<replica>of<shares>" of a shared
	// unit; see ParseDeviceID.
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
	// Resource is the name under which the devices are held: for a claim's, the DRA driver's.
	Resource string
	// Devices are the held device IDs, sorted, each once; for a claim's, units' UUIDs.
	Devices []string
	// Claim is the ResourceClaim by which a DRA driver gave them, in the pod's namespace;
	// empty for those of a device plugin. AnyGPU says that nobody can tell which they are,
	// so that Devices are all GPUs.
	Claim  string
	AnyGPU bool
}

// UnnamedHolder is Holder's text where the kubelet names no pod.
const UnnamedHolder = "a pod that the kubelet does not name"

// Certain is true if the kubelet names the pod. A pod without a name may be gone: the kubelet forgets
// what it held when it next gets a list.
func (a Allocation) Certain() bool { return a.Namespace != "" }

// OfGPU says that the devices are GPUs or partitions, by their UUIDs, and not those of another vendor's device plugin.
func (a Allocation) OfGPU() bool {
	return a.Claim != "" || slices.ContainsFunc(a.Devices, func(device string) bool {
		return strings.HasPrefix(device, "GPU-") || strings.HasPrefix(device, "MIG-")
	})
}

// Holder says who has the devices, for people: "namespace/pod", or that and by which claim.
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

// OperatorEvicts says whether NVIDIA's GPU Operator counts pods with the resource, or with a claim of
// the DRA driver of that name, as GPU pods: it evicts those and no others before it replaces a node's
// driver (gpu-operator 26.7, cmd/gpu-operator; k8s-driver-manager v0.12, internal/kubernetes).
func OperatorEvicts(resource string) bool {
	return strings.HasPrefix(resource, "nvidia.com/gpu") || strings.HasPrefix(resource, "nvidia.com/mig-") ||
		resource == "gpu.nvidia.com"
}

// Evicted says which pods the GPU Operator evicts.
const Evicted = "the operator evicts only those with nvidia.com/gpu…, nvidia.com/mig-… or claims of gpu.nvidia.com"

// NotEvicted is what is said of a name for which OperatorEvicts is false.
const NotEvicted = "on a node of the GPU Operator, pods that ask for it block a driver upgrade: " + Evicted

// Strategy is how the resource's units are handed out, for display: "exclusive" (whole
// GPUs, one container each), "time-slicing", "mps", "mig", "mig+time-slicing" (replicas of
// partitions) or "mig+mps". If several apply, they are in this order, separated by commas. It
// is empty for a resource without units.
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

// HealthyDevices is the number of healthy devices.
func (r Resource) HealthyDevices() int {
	count := 0
	for _, device := range r.Devices {
		if device.Healthy {
			count++
		}
	}
	return count
}

// Replicas are the smallest and the largest number of devices of a unit; 0 for a resource without
// units.
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

// Summary is a plan in numbers, as it is shown to people and programs.
type Summary struct {
	Resources []ResourceSummary `json:"resources"`
	Warnings  []string          `json:"warnings"`
}

// ResourceSummary is a resource in numbers.
type ResourceSummary struct {
	Name string `json:"name"`
	// Strategy is Resource.Strategy.
	Strategy string `json:"strategy"`
	// Replicas is how many devices each unit has. Where units differ it is the smallest number, so
	// that Replicas times Units is never too many, and MaxReplicas is the largest; else
	// MaxReplicas is 0.
	Replicas    int `json:"replicas"`
	MaxReplicas int `json:"maxReplicas,omitempty"`
	// Units, Devices and Healthy are counts; Healthy is of devices.
	Units   int `json:"units"`
	Devices int `json:"devices"`
	Healthy int `json:"healthy"`
	// Share is the limit of one share by MPS, of several units the smallest; nil without MPS.
	Share *MPSLimit `json:"share,omitempty"`
	// GPUs are those behind the devices, by index.
	GPUs []GPUSummary `json:"gpus"`
}

// GPUSummary says how many of a resource's devices are a GPU's, or its partitions'.
type GPUSummary struct {
	UUID string `json:"uuid"`
	// Index is the driver's.
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

// Without returns the plan without the units that are not to be offered now. They stay
// known, so that their devices are withdrawn in the usual way. The plan itself is not
// modified.
func (p Plan) Without(held func(Unit) bool) Plan {
	if !slices.ContainsFunc(p.Resources, func(r Resource) bool { return slices.ContainsFunc(r.Units, held) }) {
		return p
	}
	var resources []Resource
	for _, r := range p.Resources {
		left := map[string]bool{}
		r.Units = slices.DeleteFunc(slices.Clone(r.Units), func(unit Unit) bool {
			left[unit.ID] = !held(unit)
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

// Withhold returns the plan with faults for units that cannot be granted now: reasons
// says why, by unit. A unit that is already faulty keeps its fault, and a unit that
// the node does not have is ignored. The plan itself is not modified.
func (p Plan) Withhold(reasons map[string]string) Plan {
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

// WithholdModes is Withhold for units that cannot be granted in the way in which the plan
// offers them. Health stays as it is, so that what a pod may still be granted of the unit in
// another way is not concerned.
func (p Plan) WithholdModes(reasons map[string]string) Plan {
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

// withHealth returns the plan with this health of the units of its resources.
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
