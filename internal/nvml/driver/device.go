//go:build cgo

package driver

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
)

// SystemGetDriverVersion is the driver's version, for example "580.65.06".
func (l *library) SystemGetDriverVersion() (string, error) {
	return asked(l, "SystemGetDriverVersion", gonvml.Interface.SystemGetDriverVersion)
}

func (l *library) DeviceGetCount() (int, error) {
	return asked(l, "DeviceGetCount", gonvml.Interface.DeviceGetCount)
}

func (l *library) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	return asked(l, with("DeviceGetHandleByIndex", index), func(api gonvml.Interface) (nvml.Device, gonvml.Return) {
		if !ordinal(index) {
			return 0, gonvml.ERROR_INVALID_ARGUMENT
		}
		return l.devices.numbered(api.DeviceGetHandleByIndex(index))
	})
}

func (l *library) DeviceGetUUID(d nvml.Device) (string, error) {
	return askDevice(l, "DeviceGetUUID", d, gonvml.Device.GetUUID)
}

func (l *library) DeviceGetMinorNumber(d nvml.Device) (int, error) {
	return askDevice(l, "DeviceGetMinorNumber", d, gonvml.Device.GetMinorNumber)
}

func (l *library) DeviceGetName(d nvml.Device) (string, error) {
	return askDevice(l, "DeviceGetName", d, gonvml.Device.GetName)
}

func (l *library) DeviceGetMemoryInfo(d nvml.Device) (nvml.MemoryInfo, error) {
	memory, err := askDevice(l, "DeviceGetMemoryInfo", d, gonvml.Device.GetMemoryInfo)
	return nvml.MemoryInfo{Total: memory.Total, Free: memory.Free, Used: memory.Used}, err
}

func (l *library) DeviceGetArchitecture(d nvml.Device) (nvml.Architecture, error) {
	architecture, err := askDevice(l, "DeviceGetArchitecture", d, gonvml.Device.GetArchitecture)
	return nvml.Architecture(architecture), err
}

func (l *library) DeviceGetCudaComputeCapability(d nvml.Device) (major, minor int, err error) {
	capability, err := askDevice(l, "DeviceGetCudaComputeCapability", d, func(d gonvml.Device) ([2]int, gonvml.Return) {
		major, minor, code := d.GetCudaComputeCapability()
		return [2]int{major, minor}, code
	})
	return capability[0], capability[1], err
}

func (l *library) DeviceGetTemperature(d nvml.Device) (int, error) {
	celsius, err := askDevice(l, "DeviceGetTemperature", d, func(d gonvml.Device) (uint32, gonvml.Return) {
		return d.GetTemperature(gonvml.TEMPERATURE_GPU)
	})
	return int(celsius), err
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

func (l *library) processes(call string, d nvml.Device, get func(gonvml.Device) ([]gonvml.ProcessInfo, gonvml.Return)) ([]nvml.Process, error) {
	running, err := askDevice(l, call, d, get)
	var processes []nvml.Process
	for _, p := range running {
		processes = append(processes, nvml.Process{PID: int(p.Pid), Memory: p.UsedGpuMemory})
	}
	return processes, err
}

func (l *library) DeviceGetRemappedRows(d nvml.Device) (nvml.RemappedRows, error) {
	return askDevice(l, "DeviceGetRemappedRows", d, func(d gonvml.Device) (nvml.RemappedRows, gonvml.Return) {
		correctable, uncorrectable, pending, failed, code := d.GetRemappedRows()
		return nvml.RemappedRows{Correctable: correctable, Uncorrectable: uncorrectable, Pending: pending, Failed: failed}, code
	})
}

func (l *library) DeviceGetRetiredPagesPendingStatus(d nvml.Device) (bool, error) {
	pending, err := askDevice(l, "DeviceGetRetiredPagesPendingStatus", d, gonvml.Device.GetRetiredPagesPendingStatus)
	return pending == gonvml.FEATURE_ENABLED, err
}
