package sharing

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Profile is the configuration in force on a node, validated and complete: no field stands
// for a default that is defined elsewhere. Package configs makes profiles from documents.
type Profile struct {
	// MIGStrategy says how GPUs with MIG enabled are offered.
	MIGStrategy MIGStrategy
	// GPUNames name whole GPUs by model; the first match wins. Package configs adds
	// {"*", "nvidia.com/gpu"} as the last entry.
	GPUNames []NamingRule
	// MIGNames name partitions by MIG profile; the first match wins. What
	// matches none is called "nvidia.com/" + mig.Profile.ResourceName().
	MIGNames []NamingRule
	// Exclude selects GPUs and partitions that are never offered.
	Exclude []Selector
	// TimeSlicing has the entries of both sections, timeSlicing and mps, in the order of the document. A unit
	// belongs to the first entry that selects it; a unit of none is exclusive.
	TimeSlicing []ReplicatedResource
	// FailRequestsGreaterThanOne refuses requests for more than one device if one is time-sliced.
	FailRequestsGreaterThanOne bool
	// Policy is how devices are chosen where no time-slicing entry says otherwise.
	Policy AllocationPolicy
	// DeviceIDs says by what a grant names units.
	DeviceIDs DeviceIDStrategy
	// Grants says what a container receives for its devices.
	Grants Grants
	// Health says what takes a unit out of use, and for how long.
	Health HealthRules
	// MIG says which partitions Virgate makes of the GPUs.
	MIG MIGConfig
	// RetireAfter says how long held devices that this profile does not want stay Healthy.
	RetireAfter RetireAfter
	// DRA says what is offered by Dynamic Resource Allocation.
	DRA DRAConfig
}

// DRAConfig says which resources are offered by Dynamic Resource Allocation and not by the
// device plugin; the zero one has none.
type DRAConfig struct {
	// All says that every resource is; else those are that Resources names as they are offered.
	All       bool
	Resources []string
	// DynamicMIG has partitions made when a claim has been given them, on the GPUs for which
	// no MIG layout is asked.
	DynamicMIG bool
}

// Offers says whether the resource is offered by Dynamic Resource Allocation.
func (d DRAConfig) Offers(resource string) bool {
	return d.All || slices.Contains(d.Resources, resource)
}

// RetireAfter says how long a device that a pod holds stays Healthy when the profile
// does not want it any more. While it is Healthy, its pod is not affected, but the next
// waiting pod gets it as soon as it is free.
type RetireAfter struct {
	// Shrink is for devices of a unit that has fewer replicas than before. Without
	// ShrinkSet, the program's own setting counts.
	Shrink    time.Duration
	ShrinkSet bool
	// Switch is for units that get another name, become shared or exclusive, are
	// excluded or are partitioned: they change when their last holder is gone.
	Switch time.Duration
}

// NamingRule gives the resource name for what matches Pattern.
type NamingRule struct {
	Pattern Pattern
	// Name is a fully qualified resource name, for example "nvidia.com/gpu".
	Name string
}

// ReplicatedResource is an entry of timeSlicing or mps: which units have how many replicas.
type ReplicatedResource struct {
	// Path is the entry's place in the document: "sharing.timeSlicing.resources[1]".
	Path string
	// Resource is the name that the units have before Rename.
	Resource string
	// Select chooses among the resource's units that belong to no earlier entry.
	Select Selection
	// Replicas is the number of devices per unit; 1 means exclusive.
	Replicas int
	// Rename is the name under which the units are offered; empty keeps Resource.
	Rename string
	// Policy is how devices of the resource are chosen.
	Policy AllocationPolicy
	// SpreadStrict refuses a request that would put two devices of one
	// container on one unit. Only with policy Spread.
	SpreadStrict bool
	// Driver are settings of the driver for whole GPUs.
	Driver DriverSettings
	// Guard limits the memory of each container.
	Guard MemoryGuard
	// MPS shares the units by MPS, and SeveralShares lets a container have several of one unit.
	MPS, SeveralShares bool
}

// DriverSettings are what the driver is told of a whole GPU. Empty ones are left as they are.
type DriverSettings struct {
	// TimeSlice is how long a process of a shared GPU computes before another one may.
	TimeSlice TimeSlice
	// ComputeMode says how many processes may compute on the GPU.
	ComputeMode ComputeMode
}

// TimeSlice is a length of time that NVIDIA does not publish, by the names of its DRA driver.
type TimeSlice string

// The lengths, each longer than the one before but for the first, which is the driver's choice.
const (
	DefaultTimeSlice TimeSlice = "default"
	ShortTimeSlice   TimeSlice = "short"
	MediumTimeSlice  TimeSlice = "medium"
	LongTimeSlice    TimeSlice = "long"
)

// TimeSlices are all lengths, each at the number that nvidia-smi has for it.
func TimeSlices() []TimeSlice {
	return []TimeSlice{DefaultTimeSlice, ShortTimeSlice, MediumTimeSlice, LongTimeSlice}
}

// ComputeMode is how many processes may compute on a GPU.
type ComputeMode string

const (
	// DefaultComputeMode sets no limit.
	DefaultComputeMode ComputeMode = "default"
	// ExclusiveProcess lets one process compute. All others are refused.
	ExclusiveProcess ComputeMode = "exclusive-process"
	// ProhibitedCompute lets none. No profile asks for it.
	ProhibitedCompute ComputeMode = "prohibited"
)

// Selection is all units, the first Count by GPU and partition index, or
// those that match a selector of List. At most one of Count and List is set.
type Selection struct {
	Count int
	List  []Selector
}

// All says whether the selection takes every unit.
func (s Selection) All() bool { return s.Count == 0 && s.List == nil }

// MIGStrategy says how GPUs with MIG enabled are offered, by NVIDIA's names.
type MIGStrategy string

const (
	// MIGNone offers no GPU with MIG enabled, as it cannot run work as a whole.
	MIGNone MIGStrategy = "none"
	// MIGSingle offers the partitions of the most numerous MIG profile as if whole GPUs.
	MIGSingle MIGStrategy = "single"
	// MIGMixed offers each MIG profile under its own resource name.
	MIGMixed MIGStrategy = "mixed"
)

// AllocationPolicy says which devices a container gets when there is a choice.
type AllocationPolicy string

const (
	// Distributed takes the least used unit first.
	Distributed AllocationPolicy = "distributed"
	// Packed takes the most used unit first.
	Packed AllocationPolicy = "packed"
	// Spread takes distinct units for one container as long as there are any.
	Spread AllocationPolicy = "spread"
)

// AllocationPolicies are all policies, the default first.
func AllocationPolicies() []AllocationPolicy {
	return []AllocationPolicy{Distributed, Packed, Spread}
}

// DeviceIDStrategy says by what a grant names units.
type DeviceIDStrategy string

const (
	// ByUUID names units by UUID.
	ByUUID DeviceIDStrategy = "uuid"
	// ByIndex names whole GPUs by index and partitions by "g:i", while each has the driver's.
	ByIndex DeviceIDStrategy = "index"
)

// Pattern is a text in which each '*' stands for any characters, also for none.
// Everything else stands for itself; case matters.
//
// For product names a pattern is not anchored: "A100" matches "NVIDIA A100-SXM4-40GB". NVIDIA's device
// plugin reads those of its resources section so (api/config/v1/resources.go), and a
// profile written for it must name the same GPUs here. So a '*' at either end changes
// nothing, and the empty pattern matches everything. For MIG profiles MatchWhole is used.
type Pattern string

// Match says whether s contains the pattern, in time proportional to len(s) + len(p).
func (p Pattern) Match(s string) bool {
	// The leftmost match of each literal leaves the most room for the rest, so
	// backtracking is never needed.
	for literal := range strings.SplitSeq(string(p), "*") {
		at := strings.Index(s, literal)
		if at < 0 {
			return false
		}
		s = s[at+len(literal):]
	}
	return true
}

// MatchWhole says whether the whole of s is what the pattern stands for: 1g.24gb is not
// 1g.24gb-me, which is another profile.
func (p Pattern) MatchWhole(s string) bool {
	first, rest, star := strings.Cut(string(p), "*")
	if !star {
		return s == first
	}
	last := strings.LastIndex(rest, "*")
	s, begins := strings.CutPrefix(s, first)
	s, ends := strings.CutSuffix(s, rest[last+1:])
	return begins && ends && Pattern(rest[:max(last, 0)]).Match(s)
}

// Grants says what a container receives for its devices.
type Grants struct {
	// Strategies are the ways in which a container learns its devices, in the order of
	// the document, each once; none means Envvar.
	Strategies []DeviceListStrategy
	// DeviceNodes grants the units' device nodes too (passDeviceSpecs). With OnlyCDI
	// it has no effect, as CDI entries include them.
	DeviceNodes bool
	// GDRCopy, GDS and MOFED ask for GDRCopy, GPUDirect Storage and Mellanox's network stack.
	GDRCopy, GDS, MOFED bool
	// IMEXChannels are the numbers of the IMEX channels that every container is given, as far as
	// the node has them. With IMEXRequired nothing is granted while it lacks one.
	IMEXChannels []string
	IMEXRequired bool
	// AnnotationPrefix begins the key of a CDI annotation: "cdi.k8s.io/".
	AnnotationPrefix string
	// DriverHostPath is the host's directory of the driver for DriverMounts,
	// DriverContainerPath where it is mounted in the container.
	DriverHostPath, DriverContainerPath string
	// MPSRoot is the host's directory of the MPS daemons' files.
	MPSRoot string
	// Claims says that claims are served too, which always takes CDI entries.
	Claims bool
}

// DeviceListStrategy is a way to tell a container its devices. The names are those of
// NVIDIA's device plugin, except for DriverMounts.
type DeviceListStrategy string

const (
	// Envvar names the devices in NVIDIA_VISIBLE_DEVICES, for NVIDIA's runtime.
	Envvar DeviceListStrategy = "envvar"
	// VolumeMounts names them by mounts below /var/run/nvidia-container-devices, for
	// the same runtime. Unlike a variable, a pod cannot set them itself.
	VolumeMounts DeviceListStrategy = "volume-mounts"
	// CDIAnnotations names their CDI entries in an annotation.
	CDIAnnotations DeviceListStrategy = "cdi-annotations"
	// CDICRI names their CDI entries in the kubelet's request to the runtime.
	CDICRI DeviceListStrategy = "cdi-cri"
	// DriverMounts mounts the driver and the device nodes, without help from the
	// runtime. It is what GKE's plugin does; the name is Virgate's.
	DriverMounts DeviceListStrategy = "driver-mounts"
)

// Uses says that the strategy is one of those in force.
func (g Grants) Uses(s DeviceListStrategy) bool {
	return slices.Contains(g.Strategies, s) || s == Envvar && len(g.Strategies) == 0
}

// CDI says whether a strategy needs CDI entries.
func (g Grants) CDI() bool { return g.Uses(CDIAnnotations) || g.Uses(CDICRI) }

// OnlyCDI says whether all strategies need CDI entries.
func (g Grants) OnlyCDI() bool {
	return g.CDI() && !g.Uses(Envvar) && !g.Uses(VolumeMounts) && !g.Uses(DriverMounts)
}

// Nodes says whether containers receive device nodes.
func (g Grants) Nodes() bool { return g.DeviceNodes && !g.OnlyCDI() || g.Uses(DriverMounts) }

// Extras are the CDI classes of GDRCopy, GDS and MOFED as far as on, in NVIDIA's order.
func (g Grants) Extras() []string {
	var extras []string
	for _, extra := range []struct {
		on    bool
		class string
	}{{g.GDRCopy, "gdrcopy"}, {g.GDS, "gds"}, {g.MOFED, "mofed"}} {
		if extra.on {
			extras = append(extras, extra.class)
		}
	}
	return extras
}

// Conflicts returns a hint if two of the resources would conflict in one container, else none:
// of two values of one variable, the kubelet takes either one at random at each start of the
// container. It is no warning of the plan, because most nodes with two names have no such
// container.
func (g Grants) Conflicts(resources []Resource) []string {
	alone := slices.Contains(g.Strategies, Envvar) && !g.Uses(VolumeMounts) && !g.CDI() && !g.Uses(DriverMounts)
	if !alone || len(resources) < 2 {
		return nil
	}
	return []string{fmt.Sprintf(
		"deviceListStrategy %s: a container that asks for two resources of this node sees the devices of one of "+
			"them, another one at every start; %s and %s have no such limit",
		Envvar, VolumeMounts, CDICRI)}
}
