package trace

import "github.com/virgate/virgate/internal/nvml"

func (r *replay) SystemGetDriverVersion() (string, error) {
	return play[string](r, "SystemGetDriverVersion")
}

func (r *replay) DeviceGetCount() (int, error) {
	return play[int](r, "DeviceGetCount")
}

func (r *replay) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	return play[nvml.Device](r, "DeviceGetHandleByIndex", uint64(index))
}

func (r *replay) DeviceGetUUID(device nvml.Device) (string, error) {
	return play[string](r, "DeviceGetUUID", uint64(device))
}

func (r *replay) DeviceGetMinorNumber(device nvml.Device) (int, error) {
	return play[int](r, "DeviceGetMinorNumber", uint64(device))
}

func (r *replay) DeviceGetPciInfo(device nvml.Device) (nvml.PCIInfo, error) {
	return play[nvml.PCIInfo](r, "DeviceGetPciInfo", uint64(device))
}

func (r *replay) DeviceGetName(device nvml.Device) (string, error) {
	return play[string](r, "DeviceGetName", uint64(device))
}

func (r *replay) DeviceGetMemoryInfo(device nvml.Device) (nvml.MemoryInfo, error) {
	return play[nvml.MemoryInfo](r, "DeviceGetMemoryInfo", uint64(device))
}

func (r *replay) DeviceGetArchitecture(device nvml.Device) (nvml.Architecture, error) {
	return play[nvml.Architecture](r, "DeviceGetArchitecture", uint64(device))
}

func (r *replay) DeviceGetCudaComputeCapability(device nvml.Device) (major, minor int, err error) {
	version, err := play[capability](r, "DeviceGetCudaComputeCapability", uint64(device))
	return version.Major, version.Minor, err
}

func (r *replay) DeviceGetNumaNodeId(device nvml.Device) (int, error) {
	return play[int](r, "DeviceGetNumaNodeId", uint64(device))
}

func (r *replay) DeviceGetTemperature(device nvml.Device) (int, error) {
	return play[int](r, "DeviceGetTemperature", uint64(device))
}

func (r *replay) DeviceGetComputeRunningProcesses(device nvml.Device) ([]nvml.Process, error) {
	return play[[]nvml.Process](r, "DeviceGetComputeRunningProcesses", uint64(device))
}

func (r *replay) DeviceGetGraphicsRunningProcesses(device nvml.Device) ([]nvml.Process, error) {
	return play[[]nvml.Process](r, "DeviceGetGraphicsRunningProcesses", uint64(device))
}

func (r *replay) DeviceGetMPSComputeRunningProcesses(device nvml.Device) ([]nvml.Process, error) {
	return play[[]nvml.Process](r, "DeviceGetMPSComputeRunningProcesses", uint64(device))
}

func (r *replay) DeviceGetRemappedRows(device nvml.Device) (nvml.RemappedRows, error) {
	return play[nvml.RemappedRows](r, "DeviceGetRemappedRows", uint64(device))
}

func (r *replay) DeviceGetRetiredPagesPendingStatus(device nvml.Device) (bool, error) {
	return play[bool](r, "DeviceGetRetiredPagesPendingStatus", uint64(device))
}

func (r *replay) DeviceGetTopologyCommonAncestor(a, b nvml.Device) (nvml.TopologyLevel, error) {
	return play[nvml.TopologyLevel](r, "DeviceGetTopologyCommonAncestor", uint64(a), uint64(b))
}

func (r *replay) DeviceGetNvLinkState(device nvml.Device, link int) (bool, error) {
	return play[bool](r, "DeviceGetNvLinkState", uint64(device), uint64(link))
}

func (r *replay) DeviceGetNvLinkRemotePciInfo(device nvml.Device, link int) (nvml.PCIInfo, error) {
	return play[nvml.PCIInfo](r, "DeviceGetNvLinkRemotePciInfo", uint64(device), uint64(link))
}

func (r *replay) EventSetCreate() (nvml.EventSet, error) {
	return play[nvml.EventSet](r, "EventSetCreate")
}

func (r *replay) DeviceGetSupportedEventTypes(device nvml.Device) (nvml.EventTypes, error) {
	return play[nvml.EventTypes](r, "DeviceGetSupportedEventTypes", uint64(device))
}

func (r *replay) DeviceRegisterEvents(device nvml.Device, types nvml.EventTypes, set nvml.EventSet) error {
	_, err := play[struct{}](r, "DeviceRegisterEvents", uint64(device), uint64(types), uint64(set))
	return err
}

func (r *replay) EventSetFree(set nvml.EventSet) error {
	_, err := play[struct{}](r, "EventSetFree", uint64(set))
	return err
}
