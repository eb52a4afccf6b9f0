package simnode

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/virgate/virgate/internal/nvml"
)

func (n driver) Init() error {
	if err := n.node.mismatch(); err != nil {
		return err
	}
	if n.node.nodesLost && n.node.opened == 0 {
		return nvml.Unknown
	}
	if n.node.is("no-nodes") { // As R580 without /dev/nvidiactl.
		return nvml.DriverNotLoaded
	}
	n.node.opened++
	return nil
}

// Shutdown undoes one Init. The last one frees the event sets, closes the GPUs, brings back lost
// GPUs that are healed, and invalidates all handles.
func (n driver) Shutdown() error {
	n.node.opened--
	if n.node.opened == 0 {
		clear(n.node.sets)
		clear(n.node.targets)
		for _, g := range slices.Concat(n.node.gpus, n.node.removed) {
			g.opened = false
			g.lost, g.healed = g.lost && !g.healed, false
			if !g.persistence { // Nothing keeps the GPU's state.
				g.computeMode, g.timeSlice = nvml.ComputeDefault, ""
			}
			n.node.renewHandles(g)
			for _, i := range g.instances {
				n.node.newInstanceHandles(g, i)
			}
		}
		n.node.wakeWaits()
	}
	return nil
}

// driverVersion is the version of a driver that supports every model here.
const driverVersion = "580.65.06"

func (n driver) SystemGetDriverVersion() (string, error) { return driverVersion, nil }

// SystemGetCudaDriverVersion returns the CUDA version of the same driver.
func (n driver) SystemGetCudaDriverVersion() (int, error) { return 13000, nil }

// DeviceGetCount counts lost GPUs too.
func (n driver) DeviceGetCount() (int, error) { return n.node.listedGPUs(), nil }

func (n driver) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	g, err := n.node.gpu(index)
	switch {
	case err != nil || index >= n.node.listedGPUs():
		return 0, nvml.InvalidArgument
	case g.lost || g.removed:
		return 0, nvml.GPUIsLost
	case n.node.nodesLost && !g.opened:
		return 0, nvml.NoPermission
	}
	g.opened = true
	return g.handle, nil
}

func (n driver) DeviceGetUUID(d nvml.Device) (string, error) {
	if c := n.migDevice(d); c != nil {
		return c.uuid, nil
	}
	return n.gpu(d).uuid, nil
}

func (n driver) DeviceGetMinorNumber(d nvml.Device) (int, error) { return n.gpu(d).deviceMinor, nil }

func (n driver) DeviceGetPciInfo(d nvml.Device) (nvml.PCIInfo, error) {
	return nvml.PCIInfo{
		BusID:    n.gpu(d).busID(),
		DeviceID: uint32(n.gpu(d).PCI)<<16 | nvidia,
		Class:    display3D,
		Binding:  n.gpu(d).binding,
	}, nil
}

// display3D is the PCI class of a GPU without a display, like all models here.
const display3D = 0x030200

// DeviceGetGpuFabricInfo returns the value from SetFabric. After a reset, a GPU with a fabric has
// to join it again.
func (n driver) DeviceGetGpuFabricInfo(d nvml.Device) (nvml.FabricInfo, error) {
	if n.gpu(d).Architecture < nvml.Hopper || n.node.is(oldDriver) {
		return nvml.FabricInfo{}, nvml.NotSupported
	}
	info := n.gpu(d).fabric
	info.Cluster = "00000000-0000-0000-0000-000000000000"
	return info, nil
}

// SystemGetConfComputeState returns true in the world confidential.
func (n driver) SystemGetConfComputeState() (bool, error) { return n.node.is("confidential"), nil }

// SystemGetConfComputeGpusReadyState returns the value from SetReady.
func (n driver) SystemGetConfComputeGpusReadyState() (uint32, error) {
	if !n.node.is("confidential") {
		return 0, nvml.NotSupported
	}
	return n.node.ready, nil
}

func (n driver) DeviceGetName(d nvml.Device) (string, error) {
	if c := n.migDevice(d); c != nil {
		return n.gpu(d).Name + " MIG " + c.profile().String(), nil
	}
	return n.gpu(d).Name, nil
}

func (n driver) DeviceGetMemoryInfo(d nvml.Device) (nvml.MemoryInfo, error) {
	g := n.gpu(d)
	total, used := g.Mebibytes<<20, usedBy(g.allProcesses())
	if c := n.migDevice(d); c != nil {
		total, used = g.memoryOf(c.instance.placement.Size), usedBy(c.processes)
	}
	used = min(used, total)
	return nvml.MemoryInfo{
		Total: total,
		Free:  total - used,
		Used:  used,
	}, nil
}

func (n driver) DeviceGetArchitecture(d nvml.Device) (nvml.Architecture, error) {
	return n.gpu(d).Architecture, nil
}

func (n driver) DeviceGetBrand(d nvml.Device) (nvml.Brand, error) {
	if strings.Contains(n.gpu(d).Name, " RTX ") {
		return nvml.BrandNVIDIARTX, nil
	}
	return nvml.BrandNVIDIA, nil
}

func (n driver) DeviceGetCudaComputeCapability(d nvml.Device) (nvml.ComputeCapability, error) {
	return n.gpu(d).Compute, nil
}

func (n driver) DeviceGetNumaNodeId(d nvml.Device) (int, error) { return n.gpu(d).numaNode, nil }

func (n driver) DeviceGetTemperature(d nvml.Device) (int, error) { return n.gpu(d).temperature, nil }

// slowdowns are the temperatures at which GPUs of an architecture slow down. The values from Ada on
// are those of the mock in NVIDIA's k8s-test-infra for L40S, H100 and B200; there is no public
// table for the others.
var slowdowns = map[nvml.Architecture]int{
	nvml.Volta:     87,
	nvml.Turing:    93,
	nvml.Ampere:    89,
	nvml.Ada:       93,
	nvml.Hopper:    87,
	nvml.Blackwell: 90,
}

// slowdownMargin is the margin at which an H100 slows down (NVSentinel#1371).
const slowdownMargin = -2

// tellsMargin reports whether the driver gives the GPU's temperature limits as margins instead of
// thresholds.
func (n driver) tellsMargin(g *simGPU) bool {
	return g.Architecture >= nvml.Ada && !n.node.is(oldDriver)
}

func (n driver) DeviceGetTemperatureThreshold(d nvml.Device, threshold int) (int, error) {
	switch g := n.gpu(d); {
	case threshold < 0 || threshold > 7:
		return 0, nvml.InvalidArgument
	case threshold != nvml.TemperatureSlowdown || n.tellsMargin(g):
		return 0, nvml.NotSupported
	default:
		return slowdowns[g.Architecture], nil
	}
}

func (n driver) DeviceGetMarginTemperature(d nvml.Device) (int, error) {
	g := n.gpu(d)
	if !n.tellsMargin(g) {
		return 0, nvml.NotSupported
	}
	return slowdowns[g.Architecture] + slowdownMargin - g.temperature, nil
}

func (n driver) DeviceGetUtilizationRates(d nvml.Device) (nvml.Utilization, error) {
	return nvml.Utilization{GPU: n.gpu(d).utilization.total()}, nil
}

// DeviceGetProcessUtilization takes a sample if one is due.
func (n driver) DeviceGetProcessUtilization(d nvml.Device, lastSeen uint64) ([]nvml.ProcessSample, error) {
	samples := n.gpu(d).utilization.since(lastSeen)
	if len(samples) == 0 {
		return nil, nvml.NotFound
	}
	return samples, nil
}

func (n driver) DeviceGetCurrentClocksEventReasons(d nvml.Device) (nvml.ClockReasons, error) {
	return n.gpu(d).clockReasons, nil
}

func (n driver) DeviceGetPowerUsage(d nvml.Device) (int, error) {
	return n.gpu(d).meter.milliwatts, nil
}

// DeviceGetTotalEnergyConsumption supports every model here. Before Volta it would return
// NOT_SUPPORTED.
func (n driver) DeviceGetTotalEnergyConsumption(d nvml.Device) (uint64, error) {
	return n.gpu(d).meter.read(), nil
}

// DeviceGetMemoryErrorCounter returns the counters that GPUs have from Turing on. With MIG enabled,
// only MIG devices have counts since the driver was loaded, and only of uncorrected errors outside
// of the DRAM (nvml.h).
func (n driver) DeviceGetMemoryErrorCounter(d nvml.Device, counter nvml.MemoryErrorCounter) (uint64, error) {
	g := n.gpu(d)
	counted := counter.Location == nvml.DRAM || counter.Location == nvml.SRAM
	switch {
	case n.migDevice(d) != nil:
		counted = counter == nvml.MemoryErrorCounter{Uncorrected: true, Location: nvml.SRAM}
	case g.mig:
		counted = counted && counter.Aggregate
	}
	switch {
	case counter.Location < 0 || counter.Location > nvml.SRAM:
		return 0, nvml.InvalidArgument
	case !counted:
		return 0, nvml.NotSupported
	}
	return g.errors[counter], nil
}

// DeviceGetComputeRunningProcesses returns, for a GPU with MIG enabled, the processes of all its
// MIG devices. All processes belong to other PID namespaces.
func (n driver) DeviceGetComputeRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return n.listed(n.processes(d), false), nil
}

// listed returns either the processes that are clients of an MPS server, or the others.
func (n driver) listed(processes []nvml.Process, clients bool) (list []nvml.Process) {
	for _, p := range processes {
		if !n.node.is("own-pids") && clients == (n.node.mps[p.PID] == mpsClient) {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b nvml.Process) int { return cmp.Compare(a.PID, b.PID) })
	return list
}

// processes returns the processes of the MIG device, or those of the GPU and all its MIG devices.
func (n driver) processes(d nvml.Device) []nvml.Process {
	if c := n.migDevice(d); c != nil {
		return c.processes
	}
	return n.gpu(d).allProcesses()
}

// DeviceGetGraphicsRunningProcesses returns none: simulated processes only compute.
func (n driver) DeviceGetGraphicsRunningProcesses(nvml.Device) ([]nvml.Process, error) {
	return nil, nil
}

// DeviceGetMPSComputeRunningProcesses returns the clients of MPS; their server is a compute
// process.
func (n driver) DeviceGetMPSComputeRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return n.listed(n.processes(d), true), nil
}

// DeviceGetFieldValues supports the recovery action that XID 154 and Advise set, and the slowdown
// margin.
func (n driver) DeviceGetFieldValues(d nvml.Device, field int) (uint32, error) {
	if margin := int32(slowdownMargin); field == nvml.SlowdownMargin && n.tellsMargin(n.gpu(d)) {
		return uint32(margin), nil
	}
	if field != nvml.RecoveryAction || n.node.is(oldDriver) {
		return 0, nvml.NotSupported
	}
	return n.gpu(d).recovery, nil
}

// DeviceGetRemappedRows returns NOT_SUPPORTED before Ampere, and while there are instances.
func (n driver) DeviceGetRemappedRows(d nvml.Device) (nvml.RemappedRows, error) {
	g := n.gpu(d)
	if g.Architecture < nvml.Ampere || len(g.instances) > 0 {
		return nvml.RemappedRows{}, nvml.NotSupported
	}
	return g.rows, nil
}

// DeviceGetRetiredPagesPendingStatus returns NOT_SUPPORTED from Ampere on.
func (n driver) DeviceGetRetiredPagesPendingStatus(d nvml.Device) (bool, error) {
	if n.gpu(d).Architecture >= nvml.Ampere {
		return false, nvml.NotSupported
	}
	return n.gpu(d).pagesPending, nil
}

// DeviceGetComputeMode and DeviceSetComputeMode return NOT_SUPPORTED for a GPU with MIG, and for
// its MIG devices. A real driver supports them for MIG devices.
func (n driver) DeviceGetComputeMode(d nvml.Device) (nvml.ComputeMode, error) {
	if n.gpu(d).mig {
		return 0, nvml.NotSupported
	}
	return n.gpu(d).computeMode, nil
}

func (n driver) DeviceSetComputeMode(d nvml.Device, mode nvml.ComputeMode) error {
	switch {
	case mode != nvml.ComputeDefault && mode != nvml.ComputeProhibited && mode != nvml.ComputeExclusiveProcess:
		return nvml.InvalidArgument
	case n.gpu(d).mig:
		return nvml.NotSupported
	}
	n.gpu(d).computeMode = mode
	return nil
}

// DeviceGetTopologyCommonAncestor considers NUMA nodes only.
func (n driver) DeviceGetTopologyCommonAncestor(a, b nvml.Device) (nvml.TopologyLevel, error) {
	g, other := n.gpu(a), n.gpu(b)
	switch {
	case g == other:
		return nvml.TopologyInternal, nil
	case g.numaNode == other.numaNode && g.numaNode >= 0:
		return nvml.TopologyNode, nil
	}
	return nvml.TopologySystem, nil
}

const (
	// nvSwitches is the number of NVSwitches on a simulated fabric; a GPU's links are spread over
	// all of them. (A DGX A100 has six, later ones have fewer.)
	nvSwitches = 6
	// switchDomain is the PCI domain of the switches. It has no GPUs.
	switchDomain = 0x100
)

// DeviceGetNvLinkState returns NOT_SUPPORTED on a model without NVLink. The links are inactive if
// no other GPU of the node has any.
func (n driver) DeviceGetNvLinkState(d nvml.Device, link int) (bool, error) {
	g := n.gpu(d)
	switch {
	case g.Links == 0:
		return false, nvml.NotSupported
	case link < 0 || link >= g.Links:
		return false, nvml.InvalidArgument
	}
	return slices.ContainsFunc(n.node.gpus, func(other *simGPU) bool { return other != g && other.Links > 0 }), nil
}

// DeviceGetNvLinkRemotePciInfo returns the switch at the other end of the link, or NOT_FOUND for an
// inactive link.
func (n driver) DeviceGetNvLinkRemotePciInfo(d nvml.Device, link int) (nvml.PCIInfo, error) {
	active, err := n.DeviceGetNvLinkState(d, link)
	switch {
	case err != nil:
		return nvml.PCIInfo{}, err
	case !active:
		return nvml.PCIInfo{}, nvml.NotFound
	}
	return nvml.PCIInfo{BusID: fmt.Sprintf("%08X:%02X:00.0", switchDomain, link%nvSwitches)}, nil
}
