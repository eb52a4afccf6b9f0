package sharing

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// UnitUsage is a unit with the containers that hold its devices.
type UnitUsage struct {
	// Unit is the hardware. If no resource offers it any more, only ID is known.
	Unit Unit
	// Resource is the name under which the unit is offered now; empty if it is not offered. A
	// holder may hold it under another name.
	Resource string
	// Holders are the containers that hold devices of the unit, each with only those devices,
	// sorted by namespace, pod, container and resource.
	Holders []Allocation
}

// Held returns the number of the unit's devices that containers hold.
func (u UnitUsage) Held() int {
	count := 0
	for _, holder := range u.Holders {
		count += len(holder.Devices)
	}
	return count
}

// Usage joins the offered resources with the held devices. It returns every unit of the resources
// in their order, held or not, then the units that are held but not offered, by ID. It uses the
// unit in the device ID, not the resource, so a device granted under an earlier profile still
// counts. It leaves out devices that name neither a unit of the resources nor the UUID of a GPU or
// partition: they are another plugin's.
func Usage(resources []Resource, allocations []Allocation) []UnitUsage {
	holders := HoldersByUnit(allocations)
	var all []UnitUsage
	for _, resource := range resources {
		for _, unit := range resource.Units {
			all = append(all, UnitUsage{
				Unit:     unit,
				Resource: resource.Name,
				Holders:  holders[unit.ID],
			})
			delete(holders, unit.ID)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(holders)) {
		if strings.HasPrefix(id, gpuPrefix) || strings.HasPrefix(id, migPrefix) {
			all = append(all, UnitUsage{Unit: Unit{ID: id}, Holders: holders[id]})
		}
	}
	return all
}

// HoldersByUnit splits the allocations by unit, container and resource.
func HoldersByUnit(allocations []Allocation) map[string][]Allocation {
	sorted := slices.SortedFunc(slices.Values(allocations), compareHolders)
	holders := make(map[string][]Allocation)
	for _, allocation := range sorted {
		for _, id := range allocation.Devices {
			unit, _, _ := ParseDeviceID(id)
			list := holders[unit]
			if last := len(list) - 1; last < 0 || compareHolders(list[last], allocation) != 0 {
				holder := allocation
				holder.Devices = nil
				list = append(list, holder)
			}
			holder := &list[len(list)-1]
			holder.Devices = append(holder.Devices, id)
			holders[unit] = list
		}
	}
	for _, list := range holders {
		for i := range list {
			slices.Sort(list[i].Devices)
			list[i].Devices = slices.Compact(list[i].Devices)
		}
	}
	return holders
}

func compareHolders(a, b Allocation) int {
	return cmp.Or(a.holder().Compare(b.holder()), cmp.Compare(a.Resource, b.Resource))
}

// DeviceCount counts a unit's devices under one name. Each device is in one state, so the three
// counts add up to the number of listed devices.
type DeviceCount struct {
	// Resource is the name. GPU is empty for a unit that the node does not have.
	Resource, GPU, Unit string
	// Allocated counts devices that containers hold, healthy or not. Of the other devices, Free
	// counts the healthy ones and Unhealthy the rest.
	Free, Allocated, Unhealthy int
}

// CountDevices counts the listed devices by resource and unit, in the order of the lists.
func CountDevices(gpus []GPU, listed []Resource, allocations []Allocation) []DeviceCount {
	gpu := GPUByUnit(gpus)
	type device struct{ resource, id string }
	held := map[device]bool{}
	for _, a := range allocations {
		for _, id := range a.Devices {
			held[device{a.Resource, id}] = true
		}
	}
	var list []DeviceCount
	for _, resource := range listed {
		at := map[string]int{}
		for _, d := range resource.Devices {
			i, known := at[d.Unit]
			if !known {
				i = len(list)
				at[d.Unit] = i
				list = append(list, DeviceCount{
					Resource: resource.Name,
					GPU:      gpu[d.Unit],
					Unit:     d.Unit,
				})
			}
			count := &list[i]
			switch {
			case held[device{resource.Name, d.ID}]:
				count.Allocated++
			case d.Healthy:
				count.Free++
			default:
				count.Unhealthy++
			}
		}
	}
	return list
}

// GPUByUnit returns the UUID of the GPU behind each unit of the inventory.
func GPUByUnit(gpus []GPU) map[string]string {
	byUnit := map[string]string{}
	for _, gpu := range gpus {
		byUnit[gpu.UUID] = gpu.UUID
		for _, partition := range gpu.Partitions {
			byUnit[partition.UUID] = gpu.UUID
		}
	}
	return byUnit
}

// UnitsOf returns the UUIDs of the GPU with that UUID and of its partitions. For a GPU that the
// inventory lacks, it returns only that UUID.
func UnitsOf(gpus []GPU, uuid string) []string {
	units := []string{uuid}
	for _, gpu := range gpus {
		if gpu.UUID == uuid {
			for _, partition := range gpu.Partitions {
				units = append(units, partition.UUID)
			}
		}
	}
	return units
}

// Sharers returns how many containers hold devices of the unit, under any name.
func (u UnitUsage) Sharers() int {
	same := func(a, b Allocation) bool { return a.holder() == b.holder() }
	return len(slices.CompactFunc(slices.Clone(u.Holders), same))
}

// Tenants returns the number of namespaces whose containers hold devices of the unit. Holders
// without a namespace do not count, because their pods may be gone.
func (u UnitUsage) Tenants() int {
	namespaces := map[string]bool{}
	for _, holder := range u.Holders {
		if holder.Namespace != "" {
			namespaces[holder.Namespace] = true
		}
	}
	return len(namespaces)
}

// Oversubscriptions returns, by UUID of each GPU with offered units, the number of held devices
// divided by the number of offered units. Above 1, containers share.
func Oversubscriptions(usages []UnitUsage) map[string]float64 {
	held, units := map[string]int{}, map[string]int{}
	for _, usage := range usages {
		if usage.Resource != "" {
			held[usage.Unit.GPU] += usage.Held()
			units[usage.Unit.GPU]++
		}
	}
	ratios := make(map[string]float64, len(units))
	for gpu, offered := range units {
		ratios[gpu] = float64(held[gpu]) / float64(offered)
	}
	return ratios
}

// Container names a container of a pod on this node.
type Container struct{ Namespace, Pod, Name string }

// Compare orders containers by namespace, pod and name.
func (c Container) Compare(other Container) int {
	return cmp.Or(cmp.Compare(c.Namespace, other.Namespace), cmp.Compare(c.Pod, other.Pod),
		cmp.Compare(c.Name, other.Name))
}

func (a Allocation) holder() Container { return Container{a.Namespace, a.Pod, a.Container} }

// Measurement is how the node's GPUs were used shortly before one moment. In it and in a
// UtilizationReport, a nil figure is unknown: it is left out, never shown as 0.
type Measurement struct {
	// GPUs are the GPUs that could be read, sorted by UUID.
	GPUs []GPUUtilization
	// Owners are where the processes on the GPUs run, by PID; nil if that cannot be determined.
	Owners map[int]ProcessOwner
	// Unwatched is true if Owners was not requested; Owners is then nil.
	Unwatched bool
	// Errors counts errors by stage.
	Errors map[AttributionStage]int
}

// AttributionStage is a step on the way from a GPU's processes to containers.
type AttributionStage string

const (
	// StageDriver asks the driver for GPUs and processes.
	StageDriver AttributionStage = "nvml"
	// StageProcess finds the processes in /proc.
	StageProcess AttributionStage = "cgroup"
	// StagePods gets the pods of the containers and the devices that they hold.
	StagePods AttributionStage = "pods"
)

// AttributionStages returns all stages.
func AttributionStages() []AttributionStage {
	return []AttributionStage{StageDriver, StageProcess, StagePods}
}

// GPUUtilization is how a GPU is used, as the driver reports it.
type GPUUtilization struct {
	// GPU is the GPU's UUID.
	GPU string
	// Memory is the memory in use by processes and by the driver itself, in bytes.
	Memory *float64
	// SM is the fraction of time, 0 to 1, in which the GPU computed; unknown with MIG.
	SM *float64
	// Celsius is the core temperature.
	Celsius *float64
	// Throttled are the reasons why a busy GPU is slower than it could be. ThrottleKnown is true if
	// the driver reported them.
	Throttled     []ThrottleReason
	ThrottleKnown bool
	// ClockReasons are the active reasons of the function ClockReasons; known like Throttled.
	ClockReasons []string
	// Watts is the power that the GPU draws, Joules the energy it has used since the driver was
	// loaded.
	Watts, Joules *float64
	// MemoryErrors are the GPU's error counters.
	MemoryErrors []MemoryErrors
	// Rows are the remapped memory rows; nil when unknown.
	Rows *RemappedRows
	// Units are the GPU or, with MIG, its partitions, if their processes could be read.
	Units []UnitProcesses
}

// UnitProcesses are the processes on a unit.
type UnitProcesses struct {
	// Unit is the UUID of the GPU or partition.
	Unit string
	// Processes are sorted by PID, each once.
	Processes []ProcessUtilization
}

// ProcessUtilization is how a process uses a unit.
type ProcessUtilization struct {
	// PID is the process ID on the host.
	PID int
	// Memory is the memory that the process uses, in bytes.
	Memory *float64
	// SM is the fraction of the GPU's multiprocessors, 0 to 1; unknown on a partition.
	SM *float64
}

// MemoryErrors is how many errors ECC has found in a GPU's memory.
type MemoryErrors struct {
	// Kind is corrected or uncorrected. Location is the memory, such as dram.
	Kind, Location string
	// Lifetime is true if the count covers the GPU's lifetime, not only the time since the driver
	// was loaded.
	Lifetime bool
	Count    float64
}

// RemappedRows is how many memory rows of a GPU were replaced by spare ones, after corrected and
// after uncorrected errors. Failed is true if a row could not be replaced.
type RemappedRows struct {
	Correctable, Uncorrectable float64
	Failed                     bool
}

// ClockReasons returns why a GPU's clocks may be lower than they could be, by NVML's names and in
// the order of NVML's bits (nvml.h, nvmlClocksEventReasons).
func ClockReasons() []string {
	return []string{
		"gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost",
		"sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting",
	}
}

// ThrottleReason is one of the constants below.
type ThrottleReason string

const (
	// ThrottleThermal means that the GPU or its memory is too hot.
	ThrottleThermal ThrottleReason = "thermal"
	// ThrottlePower means that the GPU has reached its power limit.
	ThrottlePower ThrottleReason = "power"
	// ThrottleHardware means that the hardware has halved the clocks, because of heat or power or
	// because the power supply demanded it.
	ThrottleHardware ThrottleReason = "hw_slowdown"
)

// ThrottleReasons returns all reasons.
func ThrottleReasons() []ThrottleReason {
	return []ThrottleReason{ThrottleThermal, ThrottlePower, ThrottleHardware}
}

// ProcessOwner is where a process runs.
type ProcessOwner struct {
	// Container is the container of a pod; meaningless when Cause is set.
	Container Container
	// Cause is why there is no container; empty if there is one.
	Cause UnattributedCause
}

// UnattributedCause is why a process counts for no container.
type UnattributedCause string

const (
	// CauseNoContainer means that the process runs in no container of a pod.
	CauseNoContainer UnattributedCause = "no_container"
	// CauseNotAllocated means that the process's container holds no device of the unit.
	CauseNotAllocated UnattributedCause = "not_allocated"
	// CauseMPSServer means that the process is NVIDIA's MPS server, which holds memory for its
	// clients.
	CauseMPSServer UnattributedCause = "mps_server"
	// CauseUnreadable means that the process could not be looked up. It may have ended.
	CauseUnreadable UnattributedCause = "unreadable"
)

// UnattributedCauses returns all causes.
func UnattributedCauses() []UnattributedCause {
	return []UnattributedCause{CauseNoContainer, CauseNotAllocated, CauseMPSServer, CauseUnreadable}
}

// UtilizationReport is which containers use the node's GPUs, and how much.
type UtilizationReport struct {
	// GPUs are the measured GPUs.
	GPUs []GPUUtilization
	// Attributed is true if each process's container is known; if not, the fields below are empty.
	Attributed bool
	// Unwatched is Measurement.Unwatched.
	Unwatched bool
	// Containers are the containers that hold devices of a unit that could be read, sorted by unit,
	// namespace, pod and name.
	Containers []ContainerUtilization
	// Unattributed has an entry for each cause and each GPU that could be read, sorted by GPU and
	// in the order of UnattributedCauses.
	Unattributed []UnattributedUtilization
	// Contention has the GPUs on which containers compute, sorted by UUID.
	Contention []Contention
}

// ContainerUtilization is how a container uses a unit of which it holds a device.
type ContainerUtilization struct {
	Container
	// GPU and Unit are UUIDs.
	GPU, Unit string
	// Processes is the number of the container's processes on the unit.
	Processes int
	// Memory is in bytes. SM is the fraction of the GPU's multiprocessors, unknown on a partition.
	// Both are 0 for a container without processes.
	Memory, SM *float64
	// OverShare is the memory in bytes beyond the container's fair share: the unit's memory divided
	// by its replicas, times the devices held. It is 0 within the fair share and unknown for a unit
	// that is no longer offered.
	OverShare *float64
	// Limit is the memory in bytes that Guard allows the container; nil for a container that is not
	// guarded. OverLimit is true if it has exceeded the limit for longer than the grace period.
	Limit     *float64
	Guard     MemoryGuard
	OverLimit bool
}

// UnattributedUtilization is how much processes that belong to no holder use.
type UnattributedUtilization struct {
	GPU       string            `json:"-"`
	Cause     UnattributedCause `json:"cause"`
	Processes int               `json:"processes"`
	// Memory and SM are as in ContainerUtilization.
	Memory *float64 `json:"memory,omitempty"`
	SM     *float64 `json:"sm,omitempty"`
}

// NewUtilizationReport joins a measurement with the allocations at the time of the measurement.
// Each process counts once: for its container if the container holds a device of the unit,
// otherwise for a cause. So the sums over a GPU equal the driver's figures.
//
// known is false if the allocations could not be read; nothing is attributed then.
func NewUtilizationReport(
	m Measurement,
	gpus []GPU,
	resources []Resource,
	allocations []Allocation,
	known bool,
) UtilizationReport {
	report := UtilizationReport{GPUs: m.GPUs, Unwatched: m.Unwatched}
	if m.Owners == nil || !known {
		return report
	}
	report.Attributed = true
	shares := newFairShares(gpus, resources, allocations)
	for _, gpu := range m.GPUs {
		rest := newUnattributed(gpu)
		for _, unit := range gpu.Units {
			report.Containers = append(report.Containers, attribute(gpu.GPU, unit, m.Owners, shares, rest)...)
		}
		report.Unattributed = append(report.Unattributed, rest...)
	}
	slices.SortFunc(report.Containers, func(a, b ContainerUtilization) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Unit, b.Unit), a.Compare(b.Container))
	})
	report.Contention = contention(m.GPUs, report.Containers)
	return report
}

// attribute counts the unit's processes for its holders, and other processes in rest.
func attribute(
	gpu string,
	unit UnitProcesses,
	owners map[int]ProcessOwner,
	shares fairShares,
	rest unattributed,
) []ContainerUtilization {
	holders := shares.holders[unit.Unit]
	uses := make(map[Container]*ContainerUtilization, len(holders))
	nothing := new(0.0)
	sm := nothing
	if unit.Unit != gpu {
		sm = nil
	}
	for container := range holders {
		uses[container] = &ContainerUtilization{
			Container: container,
			GPU:       gpu,
			Unit:      unit.Unit,
			Memory:    nothing,
			SM:        sm,
		}
	}
	for _, process := range unit.Processes {
		owner, looked := owners[process.PID]
		if !looked {
			owner.Cause = CauseUnreadable
		}
		use := uses[owner.Container]
		switch {
		case owner.Cause != "":
			rest.add(owner.Cause, process)
		case use == nil:
			rest.add(CauseNotAllocated, process)
		default:
			use.Processes++
			use.Memory, use.SM = plus(use.Memory, process.Memory), plus(use.SM, process.SM)
		}
	}
	list := make([]ContainerUtilization, 0, len(uses))
	for container, use := range uses {
		use.OverShare = shares.over(unit.Unit, holders[container], use.Memory)
		list = append(list, *use)
	}
	return list
}

// unattributed is the use that belongs to no holder on one GPU, in the order of UnattributedCauses;
// nil for a GPU that could not be read.
type unattributed []UnattributedUtilization

func newUnattributed(gpu GPUUtilization) (list unattributed) {
	if len(gpu.Units) == 0 {
		return nil
	}
	sm := new(0.0)
	if slices.ContainsFunc(gpu.Units, func(u UnitProcesses) bool { return u.Unit != gpu.GPU }) {
		sm = nil
	}
	for _, cause := range UnattributedCauses() {
		list = append(list, UnattributedUtilization{
			GPU:    gpu.GPU,
			Cause:  cause,
			Memory: new(0.0),
			SM:     sm,
		})
	}
	return list
}

func (u unattributed) add(cause UnattributedCause, process ProcessUtilization) {
	use := &u[slices.Index(UnattributedCauses(), cause)]
	use.Processes++
	use.Memory, use.SM = plus(use.Memory, process.Memory), plus(use.SM, process.SM)
}

// fairShares is how much of each unit each container was granted.
type fairShares struct {
	// holders is the number of devices that a container holds of a unit.
	holders map[string]map[Container]int
	// replicas is the number of devices of an offered unit.
	replicas map[string]int
	// memory is the unit's memory in bytes; 0 when unknown.
	memory map[string]uint64
}

// newFairShares leaves out holders without a name, because their pods may be gone.
func newFairShares(gpus []GPU, resources []Resource, allocations []Allocation) fairShares {
	s := fairShares{
		holders:  map[string]map[Container]int{},
		replicas: map[string]int{},
		memory:   map[string]uint64{},
	}
	for _, resource := range resources {
		for _, unit := range resource.Units {
			s.replicas[unit.ID] = unit.Replicas
		}
	}
	for _, gpu := range gpus {
		s.memory[gpu.UUID] = gpu.Memory
		for _, partition := range gpu.Partitions {
			s.memory[partition.UUID] = partition.Memory
		}
	}
	for _, usage := range Usage(nil, allocations) {
		held := map[Container]int{}
		for _, holder := range usage.Holders {
			switch {
			case holder.Claim != "":
				held[holder.holder()] = 1 << 20 // The amount is unknown, so count all of it.
			case holder.Pod != "":
				held[holder.holder()] += len(holder.Devices)
			}
		}
		s.holders[usage.Unit.ID] = held
	}
	return s
}

// over returns ContainerUtilization.OverShare for a holder of this many devices. It matters because
// time-slicing does not limit memory: a container that uses more leaves less to the others.
func (s fairShares) over(unit string, devices int, used *float64) *float64 {
	replicas, offered := s.replicas[unit]
	total := s.memory[unit]
	if used == nil || !offered || replicas < 1 || total == 0 {
		return nil
	}
	fair := float64(total) * float64(min(devices, replicas)) / float64(replicas)
	return new(max(0, *used-fair))
}

// ContendedFrom is the fraction of busy time from which a shared GPU counts as contended.
const ContendedFrom = 0.9

// Contention is how much the containers on a GPU slow each other down.
type Contention struct {
	GPU string
	// MaxShare is the most active container's share, 0 to 1, of what all containers compute. If it
	// is near 1 and several are active, the others get little.
	MaxShare float64
	// Contended is true if at least two containers compute and the GPU is busy for at least
	// ContendedFrom of its time.
	Contended bool
}

// contention returns an entry for each GPU on which containers compute, if the use of all of them
// is known.
func contention(gpus []GPUUtilization, containers []ContainerUtilization) []Contention {
	var list []Contention
	for _, gpu := range gpus {
		var most float64
		active, sum := 0, new(0.0)
		for _, c := range containers {
			if c.GPU != gpu.GPU {
				continue
			}
			sum = plus(sum, c.SM)
			if c.SM != nil && *c.SM > 0 {
				most = max(most, *c.SM)
				active++
			}
		}
		if sum == nil || *sum == 0 {
			continue
		}
		list = append(list, Contention{
			GPU:       gpu.GPU,
			MaxShare:  most / *sum,
			Contended: active >= 2 && gpu.SM != nil && *gpu.SM >= ContendedFrom,
		})
	}
	slices.SortFunc(list, func(a, b Contention) int { return cmp.Compare(a.GPU, b.GPU) })
	return list
}

// plus returns the sum; unknown if either is.
func plus(a, b *float64) *float64 {
	if a == nil || b == nil {
		return nil
	}
	return new(*a + *b)
}
