package sharing

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Profile is the configuration in force on a node, validated and complete: no field relies on a
// default that is defined elsewhere. Package configs makes profiles from documents.
type Profile struct {
	// MIGStrategy is how GPUs with MIG enabled are offered.
	MIGStrategy MIGStrategy
	// GPUNames gives names to whole GPUs by model; the first match wins. Package configs adds {"*",
	// "nvidia.com/gpu"} as the last entry.
	GPUNames []NamingRule
	// MIGNames gives names to partitions by MIG profile; the first match wins. Without a match, the
	// name is "nvidia.com/" + mig.Profile.ResourceName().
	MIGNames []NamingRule
	// Exclude selects GPUs and partitions that are never offered.
	Exclude []Selector
	// TimeSlicing has the entries of both sections, timeSlicing and mps, in the order of the
	// document. A unit belongs to the first entry that selects it; a unit without an entry is
	// exclusive.
	TimeSlicing []ReplicatedResource
	// FailRequestsGreaterThanOne refuses requests for more than one device if any of them is
	// time-sliced.
	FailRequestsGreaterThanOne bool
	// Policy is how devices are chosen unless a time-slicing entry sets another policy.
	Policy AllocationPolicy
	// DeviceIDs is how a grant names units.
	DeviceIDs DeviceIDStrategy
	// Grants is what a container receives for its devices.
	Grants Grants
	// Health decides what takes a unit out of use, and for how long.
	Health HealthRules
	// MIG is which partitions Virgate makes of the GPUs.
	MIG MIGConfig
	// RetireAfter is how long held devices that this profile no longer wants stay Healthy.
	RetireAfter RetireAfter
	// DRA is what is offered by Dynamic Resource Allocation.
	DRA DRAConfig
}

// DRAConfig selects the resources that are offered by Dynamic Resource Allocation instead of the
// device plugin; the zero value selects none.
type DRAConfig struct {
	// All selects every resource. Otherwise Resources has the names of the selected resources, as
	// they are offered.
	All       bool
	Resources []string
	// DynamicMIG makes a partition once it has been allocated to a claim, on GPUs for which no MIG
	// layout is set.
	DynamicMIG bool
}

// Offers reports whether the resource is offered by Dynamic Resource Allocation.
func (d DRAConfig) Offers(resource string) bool {
	return d.All || slices.Contains(d.Resources, resource)
}

// RetireAfter is how long a device that a pod holds stays Healthy when the profile no longer wants
// it. While it is Healthy, its pod is not affected, but the next waiting pod gets it as soon as it
// is free.
type RetireAfter struct {
	// Shrink is for devices of a unit that has fewer replicas than before. Without ShrinkSet, the
	// program's own setting applies.
	Shrink    time.Duration
	ShrinkSet bool
	// Switch is for units that get another name, become shared or exclusive, are excluded or are
	// partitioned. They change when their last holder is gone.
	Switch time.Duration
}

// NamingRule is the resource name for models or MIG profiles that match Pattern.
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
	// Policy is how the resource's devices are chosen.
	Policy AllocationPolicy
	// SpreadStrict refuses a request that would put two devices of one
	// container on one unit. Only with policy Spread.
	SpreadStrict bool
	// Driver is the driver's settings for whole GPUs.
	Driver DriverSettings
	// Guard limits the memory of each container.
	Guard MemoryGuard
	// MPS shares the units by MPS, and SeveralShares lets a container have several of one unit.
	MPS, SeveralShares bool
}

// DriverSettings are driver settings for a whole GPU. Empty ones are left unchanged.
type DriverSettings struct {
	// TimeSlice is how long a process of a shared GPU computes before another process may.
	TimeSlice TimeSlice
	// ComputeMode is how many processes may compute on the GPU.
	ComputeMode ComputeMode
}

// TimeSlice is a length of time, by the names of NVIDIA's DRA driver. NVIDIA does not publish the
// lengths.
type TimeSlice string

// The time-slices from short to long, after the driver's default.
const (
	DefaultTimeSlice TimeSlice = "default"
	ShortTimeSlice   TimeSlice = "short"
	MediumTimeSlice  TimeSlice = "medium"
	LongTimeSlice    TimeSlice = "long"
)

// TimeSlices returns all time-slices; the index of each is nvidia-smi's number for it.
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
	// ProhibitedCompute lets no process compute. No profile asks for it.
	ProhibitedCompute ComputeMode = "prohibited"
)

// Selection is all units, the first Count units by GPU and partition index, or the units that match
// a selector of List. At most one of Count and List is set.
type Selection struct {
	Count int
	List  []Selector
}

// All reports whether the selection takes every unit.
func (s Selection) All() bool { return s.Count == 0 && s.List == nil }

// MIGStrategy is how GPUs with MIG enabled are offered, by NVIDIA's names.
type MIGStrategy string

const (
	// MIGNone does not offer GPUs with MIG enabled, because they cannot run work as a whole.
	MIGNone MIGStrategy = "none"
	// MIGSingle offers the partitions of the most common MIG profile as if they were whole GPUs.
	MIGSingle MIGStrategy = "single"
	// MIGMixed offers each MIG profile under its own resource name.
	MIGMixed MIGStrategy = "mixed"
)

// AllocationPolicy is which devices a container gets when there is a choice.
type AllocationPolicy string

const (
	// Distributed takes the least used unit first.
	Distributed AllocationPolicy = "distributed"
	// Packed takes the most used unit first.
	Packed AllocationPolicy = "packed"
	// Spread takes distinct units for one container while there are any.
	Spread AllocationPolicy = "spread"
)

// AllocationPolicies returns all policies, the default first.
func AllocationPolicies() []AllocationPolicy {
	return []AllocationPolicy{Distributed, Packed, Spread}
}

// DeviceIDStrategy is how a grant names units.
type DeviceIDStrategy string

const (
	// ByUUID names units by UUID.
	ByUUID DeviceIDStrategy = "uuid"
	// ByIndex names whole GPUs by index and partitions by "g:i", while all indexes are the
	// driver's.
	ByIndex DeviceIDStrategy = "index"
)

// Pattern is a text in which each '*' stands for any characters, including none. Everything else
// stands for itself; case matters.
//
// For product names a pattern is not anchored: "A100" matches "NVIDIA A100-SXM4-40GB". NVIDIA's
// device plugin reads the patterns of its resources section this way (api/config/v1/resources.go),
// and a profile written for it must name the same GPUs here. So a '*' at either end changes
// nothing, and the empty pattern matches everything. For MIG profiles, MatchWhole is used.
type Pattern string

// Match reports whether s contains the pattern, in time proportional to len(s) + len(p).
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

// MatchWhole reports whether the pattern matches the whole of s: 1g.24gb does not match 1g.24gb-me,
// which is another profile.
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

// Grants is what a container receives for its devices.
type Grants struct {
	// Strategies are the ways in which a container learns its devices, in the order of the
	// document, each once; none means Envvar.
	Strategies []DeviceListStrategy
	// DeviceNodes also grants the units' device nodes (passDeviceSpecs). With OnlyCDI it has no
	// effect, because CDI entries include them.
	DeviceNodes bool
	// GDRCopy, GDS and MOFED enable GDRCopy, GPUDirect Storage and Mellanox's network stack.
	GDRCopy, GDS, MOFED bool
	// IMEXChannels are the numbers of the IMEX channels that every container gets, if the node has
	// them. With IMEXRequired, a grant fails while the node lacks one of them.
	IMEXChannels []string
	IMEXRequired bool
	// AnnotationPrefix begins the key of a CDI annotation: "cdi.k8s.io/".
	AnnotationPrefix string
	// DriverHostPath is the driver's directory on the host for DriverMounts; DriverContainerPath is
	// its mount point in the container.
	DriverHostPath, DriverContainerPath string
	// MPSRoot is the host directory with the files of the MPS daemons.
	MPSRoot string
	// Claims is true if claims are served too, which always requires CDI entries.
	Claims bool
}

// DeviceListStrategy is a way to tell a container its devices. The names are those of
// NVIDIA's device plugin, except for DriverMounts.
type DeviceListStrategy string

const (
	// Envvar lists the devices in NVIDIA_VISIBLE_DEVICES, for NVIDIA's runtime.
	Envvar DeviceListStrategy = "envvar"
	// VolumeMounts lists them as mounts below /var/run/nvidia-container-devices, for the same
	// runtime. Unlike the variable, a pod cannot set these mounts itself.
	VolumeMounts DeviceListStrategy = "volume-mounts"
	// CDIAnnotations lists their CDI entries in an annotation.
	CDIAnnotations DeviceListStrategy = "cdi-annotations"
	// CDICRI lists their CDI entries in the kubelet's request to the runtime.
	CDICRI DeviceListStrategy = "cdi-cri"
	// DriverMounts mounts the driver and the device nodes, without help from the runtime. GKE's
	// plugin works like this; the name is Virgate's.
	DriverMounts DeviceListStrategy = "driver-mounts"
)

// Uses reports whether the strategy is in force.
func (g Grants) Uses(s DeviceListStrategy) bool {
	return slices.Contains(g.Strategies, s) || s == Envvar && len(g.Strategies) == 0
}

// CDI reports whether a strategy needs CDI entries.
func (g Grants) CDI() bool { return g.Uses(CDIAnnotations) || g.Uses(CDICRI) }

// OnlyCDI reports whether all strategies need CDI entries.
func (g Grants) OnlyCDI() bool {
	return g.CDI() && !g.Uses(Envvar) && !g.Uses(VolumeMounts) && !g.Uses(DriverMounts)
}

// Nodes reports whether containers receive device nodes.
func (g Grants) Nodes() bool { return g.DeviceNodes && !g.OnlyCDI() || g.Uses(DriverMounts) }

// Extras returns the CDI classes of GDRCopy, GDS and MOFED that are enabled, in NVIDIA's order.
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

// Conflicts returns a hint if two of the resources would conflict in one container, else none. Of
// two values for one variable, the kubelet picks one at random at each start of the container. The
// plan does not warn about it, because most nodes with two resource names have no such container.
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
