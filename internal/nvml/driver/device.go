//go:build cgo

package driver

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/virgate/virgate/internal/nvml"
)

// SystemGetDriverVersion returns the driver's version, for example "580.65.06".
func (l *library) SystemGetDriverVersion() (string, error) {
	return callLibrary(l, "SystemGetDriverVersion", gonvml.Interface.SystemGetDriverVersion)
}

func (l *library) SystemGetCudaDriverVersion() (int, error) {
	return callLibrary(l, "SystemGetCudaDriverVersion", gonvml.Interface.SystemGetCudaDriverVersion)
}

func (l *library) SystemGetConfComputeState() (bool, error) {
	state, err := callLibrary(l, "SystemGetConfComputeState", gonvml.Interface.SystemGetConfComputeState)
	return state.CcFeature == gonvml.CC_SYSTEM_FEATURE_ENABLED, err
}

func (l *library) SystemGetConfComputeGpusReadyState() (uint32, error) {
	return callLibrary(l, "SystemGetConfComputeGpusReadyState", gonvml.Interface.SystemGetConfComputeGpusReadyState)
}

func (l *library) DeviceGetCount() (int, error) {
	return callLibrary(l, "DeviceGetCount", gonvml.Interface.DeviceGetCount)
}

func (l *library) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	return l.devices.numbered(callLibrary(l, with("DeviceGetHandleByIndex", index),
		func(api gonvml.Interface) (gonvml.Device, gonvml.Return) {
			if !ordinal(index) {
				return nil, gonvml.ERROR_INVALID_ARGUMENT
			}
			return api.DeviceGetHandleByIndex(index)
		}))
}

func (l *library) DeviceGetUUID(d nvml.Device) (string, error) {
	return callDevice(l, "DeviceGetUUID", d, gonvml.Device.GetUUID)
}

func (l *library) DeviceGetMinorNumber(d nvml.Device) (int, error) {
	return callDevice(l, "DeviceGetMinorNumber", d, gonvml.Device.GetMinorNumber)
}

func (l *library) DeviceGetName(d nvml.Device) (string, error) {
	return callDevice(l, "DeviceGetName", d, gonvml.Device.GetName)
}

func (l *library) DeviceGetMemoryInfo(d nvml.Device) (nvml.MemoryInfo, error) {
	memory, err := callDevice(l, "DeviceGetMemoryInfo", d, gonvml.Device.GetMemoryInfo)
	return nvml.MemoryInfo{
		Total: memory.Total,
		Free:  memory.Free,
		Used:  memory.Used,
	}, err
}

func (l *library) DeviceGetArchitecture(d nvml.Device) (nvml.Architecture, error) {
	architecture, err := callDevice(l, "DeviceGetArchitecture", d, gonvml.Device.GetArchitecture)
	return nvml.Architecture(architecture), err
}

func (l *library) DeviceGetBrand(d nvml.Device) (nvml.Brand, error) {
	brand, err := callDevice(l, "DeviceGetBrand", d, gonvml.Device.GetBrand)
	return nvml.Brand(brand), err
}

func (l *library) DeviceGetCudaComputeCapability(d nvml.Device) (nvml.ComputeCapability, error) {
	return callDevice(l, "DeviceGetCudaComputeCapability", d,
		func(d gonvml.Device) (nvml.ComputeCapability, gonvml.Return) {
			major, minor, code := d.GetCudaComputeCapability()
			return nvml.ComputeCapability{Major: major, Minor: minor}, code
		})
}

func (l *library) DeviceGetTemperature(d nvml.Device) (int, error) {
	celsius, err := callDevice(l, "DeviceGetTemperature", d, func(d gonvml.Device) (uint32, gonvml.Return) {
		return d.GetTemperature(gonvml.TEMPERATURE_GPU)
	})
	return int(celsius), err
}

func (l *library) DeviceGetTemperatureThreshold(d nvml.Device, threshold int) (int, error) {
	celsius, err := callWith(l, "DeviceGetTemperatureThreshold", &l.devices, d, threshold,
		func(d gonvml.Device, threshold int) (uint32, gonvml.Return) {
			return d.GetTemperatureThreshold(gonvml.TemperatureThresholds(threshold))
		})
	return int(celsius), err
}

func (l *library) DeviceGetMarginTemperature(d nvml.Device) (int, error) {
	margin, err := callDevice(l, "DeviceGetMarginTemperature", d, gonvml.Device.GetMarginTemperature)
	return int(margin.MarginTemperature), err
}

func (l *library) DeviceGetComputeRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return l.processes("DeviceGetComputeRunningProcesses", d, gonvml.Device.GetComputeRunningProcesses)
}

func (l *library) DeviceGetGraphicsRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return l.processes("DeviceGetGraphicsRunningProcesses", d, gonvml.Device.GetGraphicsRunningProcesses)
}

func (l *library) DeviceGetMPSComputeRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return l.processes("DeviceGetMPSComputeRunningProcesses", d, gonvml.Device.GetMPSComputeRunningProcesses)
}

func (l *library) processes(
	name string,
	d nvml.Device,
	get func(gonvml.Device) ([]gonvml.ProcessInfo, gonvml.Return),
) ([]nvml.Process, error) {
	running, err := callDevice(l, name, d, get)
	var processes []nvml.Process
	for _, p := range running {
		processes = append(processes, nvml.Process{PID: int(p.Pid), Memory: p.UsedGpuMemory})
	}
	return processes, err
}

func (l *library) DeviceGetFieldValues(d nvml.Device, field int) (uint32, error) {
	return callWith(l, "DeviceGetFieldValues", &l.devices, d, field,
		func(d gonvml.Device, field int) (uint32, gonvml.Return) {
			values := []gonvml.FieldValue{{FieldId: uint32(field)}}
			code := d.GetFieldValues(values)
			if code == gonvml.SUCCESS {
				code = gonvml.Return(values[0].NvmlReturn)
			}
			return binary.NativeEndian.Uint32(values[0].Value[:]), code
		})
}

func (l *library) DeviceGetRemappedRows(d nvml.Device) (nvml.RemappedRows, error) {
	return callDevice(l, "DeviceGetRemappedRows", d, func(d gonvml.Device) (nvml.RemappedRows, gonvml.Return) {
		correctable, uncorrectable, pending, failed, code := d.GetRemappedRows()
		return nvml.RemappedRows{
			Correctable:   correctable,
			Uncorrectable: uncorrectable,
			Pending:       pending,
			Failed:        failed,
		}, code
	})
}

func (l *library) DeviceGetRetiredPagesPendingStatus(d nvml.Device) (bool, error) {
	pending, err := callDevice(l, "DeviceGetRetiredPagesPendingStatus", d, gonvml.Device.GetRetiredPagesPendingStatus)
	return pending == gonvml.FEATURE_ENABLED, err
}

func (l *library) DeviceGetPciInfo(d nvml.Device) (nvml.PCIInfo, error) {
	return callDevice(l, "DeviceGetPciInfo", d, func(d gonvml.Device) (nvml.PCIInfo, gonvml.Return) {
		pci, code := d.GetPciInfo()
		info, _ := place(pci, code)
		info.Binding, info.Class = binding(l.machine, addressOf(pci)), class(l.machine, addressOf(pci))
		return info, code
	})
}

// DeviceGetNumaNodeId gets the GPU's bus address from the driver, and the NUMA node of that address
// from the kernel.
func (l *library) DeviceGetNumaNodeId(d nvml.Device) (int, error) {
	return callDevice(l, "DeviceGetNumaNodeId", d, func(d gonvml.Device) (int, gonvml.Return) {
		pci, code := d.GetPciInfo()
		return numaNode(l.machine, addressOf(pci)), code
	})
}

func (l *library) DeviceGetTopologyCommonAncestor(a, b nvml.Device) (nvml.TopologyLevel, error) {
	level, err := callDevice(l, "DeviceGetTopologyCommonAncestor", a,
		func(one gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) {
			other, known := l.devices.handle(b)
			if !known {
				return 0, gonvml.ERROR_INVALID_ARGUMENT
			}
			return one.GetTopologyCommonAncestor(other)
		})
	return nvml.TopologyLevel(level), err
}

func (l *library) DeviceGetNvLinkState(d nvml.Device, link int) (bool, error) {
	state, err := callWith(l, "DeviceGetNvLinkState", &l.devices, d, link, gonvml.Device.GetNvLinkState)
	return state == gonvml.FEATURE_ENABLED, err
}

func (l *library) DeviceGetNvLinkRemotePciInfo(d nvml.Device, link int) (nvml.PCIInfo, error) {
	return callWith(l, "DeviceGetNvLinkRemotePciInfo", &l.devices, d, link,
		func(d gonvml.Device, link int) (nvml.PCIInfo, gonvml.Return) {
			return place(d.GetNvLinkRemotePciInfo(link))
		})
}

// DeviceGetGpuFabricInfo uses the newest version of the call that the driver has, up to v3. v4 has
// several cliques, and tells no more of the GPU's health than v3.
func (l *library) DeviceGetGpuFabricInfo(d nvml.Device) (nvml.FabricInfo, error) {
	return callDevice(l, "DeviceGetGpuFabricInfo", d, func(d gonvml.Device) (nvml.FabricInfo, gonvml.Return) {
		older := func(code gonvml.Return) bool {
			return code == gonvml.ERROR_FUNCTION_NOT_FOUND || code == gonvml.ERROR_ARGUMENT_VERSION_MISMATCH
		}
		v3, code := d.GetGpuFabricInfoV().V3()
		if !older(code) {
			info := fabricInfo(v3.ClusterUuid, v3.CliqueId, v3.State, v3.Status)
			info.HealthMask, info.HealthSummary = v3.HealthMask, int(v3.HealthSummary)
			return info, code
		}
		v2, code := d.GetGpuFabricInfoV().V2()
		if !older(code) {
			info := fabricInfo(v2.ClusterUuid, v2.CliqueId, v2.State, v2.Status)
			info.HealthMask = v2.HealthMask
			return info, code
		}
		v1, code := d.GetGpuFabricInfo()
		return fabricInfo(v1.ClusterUuid, v1.CliqueId, v1.State, v1.Status), code
	})
}

func fabricInfo(id [16]uint8, clique uint32, state uint8, status uint32) nvml.FabricInfo {
	return nvml.FabricInfo{
		Cluster: fmt.Sprintf("%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:]),
		Clique:  clique,
		State:   int(state),
		Status:  nvml.Return(status),
	}
}

// place builds the bus ID from its parts: drivers before 390 fill in only a text in another format.
func place(pci gonvml.PciInfo, code gonvml.Return) (nvml.PCIInfo, gonvml.Return) {
	return nvml.PCIInfo{
		BusID:       addressOf(pci).String(),
		DeviceID:    pci.PciDeviceId,
		SubsystemID: pci.PciSubSystemId,
	}, code
}

func addressOf(pci gonvml.PciInfo) address {
	return address{
		domain: pci.Domain,
		bus:    pci.Bus,
		device: pci.Device,
	}
}

func (l *library) DeviceGetUtilizationRates(d nvml.Device) (nvml.Utilization, error) {
	rates, err := callDevice(l, "DeviceGetUtilizationRates", d, gonvml.Device.GetUtilizationRates)
	return nvml.Utilization{GPU: int(rates.Gpu), Memory: int(rates.Memory)}, err
}

func (l *library) DeviceGetProcessUtilization(d nvml.Device, lastSeen uint64) ([]nvml.ProcessSample, error) {
	written, err := callDevice(l, "DeviceGetProcessUtilization", d,
		func(d gonvml.Device) ([]gonvml.ProcessUtilizationSample, gonvml.Return) {
			return processUtilization(d, lastSeen)
		})
	var samples []nvml.ProcessSample
	for _, s := range written {
		samples = append(samples, nvml.ProcessSample{
			PID:    int(s.Pid),
			Time:   s.TimeStamp,
			SM:     int(s.SmUtil),
			Memory: int(s.MemUtil),
		})
	}
	return samples, err
}

// processUtilization works around two faults of go-nvml v0.13.3, which first asks for the number of
// samples and then for the samples. If there are none, it returns an error that the size is
// insufficient. If samples are added between the two calls, it slices beyond its buffer and panics.
func processUtilization(
	d gonvml.Device,
	lastSeen uint64,
) (samples []gonvml.ProcessUtilizationSample, code gonvml.Return) {
	defer func() {
		switch thrown := recover().(type) {
		case nil:
		case runtime.Error:
			samples, code = nil, gonvml.ERROR_INSUFFICIENT_SIZE
		default:
			panic(thrown)
		}
	}()
	samples, code = d.GetProcessUtilization(lastSeen)
	if code == gonvml.ERROR_INSUFFICIENT_SIZE && len(samples) == 0 {
		code = gonvml.ERROR_NOT_FOUND
	}
	return samples, code
}

// DeviceGetCurrentClocksEventReasons uses the older name of the call, which drivers before 535 also
// know.
func (l *library) DeviceGetCurrentClocksEventReasons(d nvml.Device) (nvml.ClockReasons, error) {
	reasons, err := callDevice(l, "DeviceGetCurrentClocksEventReasons", d,
		func(d gonvml.Device) (uint64, gonvml.Return) {
			return d.GetCurrentClocksThrottleReasons()
		})
	return nvml.ClockReasons(reasons), err
}

func (l *library) DeviceGetComputeMode(d nvml.Device) (nvml.ComputeMode, error) {
	mode, err := callDevice(l, "DeviceGetComputeMode", d, gonvml.Device.GetComputeMode)
	return nvml.ComputeMode(mode), err
}

func (l *library) DeviceSetComputeMode(d nvml.Device, mode nvml.ComputeMode) error {
	_, err := callDevice(l, "DeviceSetComputeMode", d, func(d gonvml.Device) (struct{}, gonvml.Return) {
		return struct{}{}, d.SetComputeMode(gonvml.ComputeMode(mode))
	})
	return err
}

func (l *library) DeviceGetPowerUsage(d nvml.Device) (int, error) {
	milliwatts, err := callDevice(l, "DeviceGetPowerUsage", d, gonvml.Device.GetPowerUsage)
	return int(milliwatts), err
}

func (l *library) DeviceGetTotalEnergyConsumption(d nvml.Device) (uint64, error) {
	return callDevice(l, "DeviceGetTotalEnergyConsumption", d, gonvml.Device.GetTotalEnergyConsumption)
}

func (l *library) DeviceGetMemoryErrorCounter(d nvml.Device, counter nvml.MemoryErrorCounter) (uint64, error) {
	return callDevice(l, "DeviceGetMemoryErrorCounter", d, func(d gonvml.Device) (uint64, gonvml.Return) {
		kind, since := gonvml.MEMORY_ERROR_TYPE_CORRECTED, gonvml.VOLATILE_ECC
		if counter.Uncorrected {
			kind = gonvml.MEMORY_ERROR_TYPE_UNCORRECTED
		}
		if counter.Aggregate {
			since = gonvml.AGGREGATE_ECC
		}
		return d.GetMemoryErrorCounter(kind, since, gonvml.MemoryLocation(counter.Location))
	})
}

func (l *library) EventSetCreate() (nvml.EventSet, error) {
	return l.sets.numbered(callLibrary(l, "EventSetCreate", gonvml.Interface.EventSetCreate))
}

func (l *library) DeviceGetSupportedEventTypes(d nvml.Device) (nvml.EventTypes, error) {
	types, err := callDevice(l, "DeviceGetSupportedEventTypes", d, gonvml.Device.GetSupportedEventTypes)
	return nvml.EventTypes(types), err
}

func (l *library) DeviceRegisterEvents(d nvml.Device, types nvml.EventTypes, set nvml.EventSet) error {
	_, err := callDevice(l, "DeviceRegisterEvents", d, func(d gonvml.Device) (struct{}, gonvml.Return) {
		handle, known := l.sets.handle(set)
		if !known {
			return struct{}{}, gonvml.ERROR_INVALID_ARGUMENT
		}
		return struct{}{}, d.RegisterEvents(uint64(types), handle)
	})
	return err
}

func (l *library) EventSetWait(set nvml.EventSet, timeout time.Duration) (nvml.Event, error) {
	event, err := call(l, "EventSetWait", &l.sets, set, func(set gonvml.EventSet) (gonvml.EventData, gonvml.Return) {
		return set.Wait(milliseconds(timeout))
	})
	if err != nil {
		return nvml.Event{}, err
	}
	partitions, err := callLibrary(l, "EventSetWait", func(api gonvml.Interface) (bool, gonvml.Return) {
		return api.Extensions().LookupSymbol("nvmlEventSetWait_v2") == nil, gonvml.SUCCESS
	})
	if !partitions {
		// The wait call of drivers before 450 does not fill these in.
		event.GpuInstanceId, event.ComputeInstanceId = nvml.WholeGPU, nvml.WholeGPU
	}
	return nvml.Event{
		Device: l.devices.number(event.Device),
		Type:   nvml.EventTypes(event.EventType),
		Data:   event.EventData,
		GI:     event.GpuInstanceId,
		CI:     event.ComputeInstanceId,
	}, err
}

// milliseconds returns the timeout in the driver's unit, rounded up: repeated waits of 0 ms would
// spin.
func milliseconds(timeout time.Duration) uint32 {
	const unit = time.Millisecond
	whole := (max(timeout, 0) + unit - 1) / unit
	return uint32(min(whole, math.MaxUint32))
}

func (l *library) EventSetFree(set nvml.EventSet) error {
	return free(l, "EventSetFree", &l.sets, set, gonvml.EventSet.Free)
}
