package trace

import "github.com/virgate/virgate/internal/nvml"

func (r *recorder) Init() error {
	err := r.lib.Init()
	r.note("Init", nil, err)
	return err
}

func (r *recorder) Shutdown() error {
	err := r.lib.Shutdown()
	r.note("Shutdown", nil, err)
	return err
}

func (r *recorder) SystemGetDriverVersion() (string, error) {
	answer, err := r.lib.SystemGetDriverVersion()
	r.note("SystemGetDriverVersion", answer, err)
	return answer, err
}

func (r *recorder) DeviceGetCount() (int, error) {
	answer, err := r.lib.DeviceGetCount()
	r.note("DeviceGetCount", answer, err)
	return answer, err
}

func (r *recorder) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	answer, err := r.lib.DeviceGetHandleByIndex(index)
	r.note("DeviceGetHandleByIndex", answer, err, uint64(index))
	return answer, err
}

func (r *recorder) DeviceGetUUID(device nvml.Device) (string, error) {
	answer, err := r.lib.DeviceGetUUID(device)
	r.note("DeviceGetUUID", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetMinorNumber(device nvml.Device) (int, error) {
	answer, err := r.lib.DeviceGetMinorNumber(device)
	r.note("DeviceGetMinorNumber", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetPciInfo(device nvml.Device) (nvml.PCIInfo, error) {
	answer, err := r.lib.DeviceGetPciInfo(device)
	r.note("DeviceGetPciInfo", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetName(device nvml.Device) (string, error) {
	answer, err := r.lib.DeviceGetName(device)
	r.note("DeviceGetName", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetMemoryInfo(device nvml.Device) (nvml.MemoryInfo, error) {
	answer, err := r.lib.DeviceGetMemoryInfo(device)
	r.note("DeviceGetMemoryInfo", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetArchitecture(device nvml.Device) (nvml.Architecture, error) {
	answer, err := r.lib.DeviceGetArchitecture(device)
	r.note("DeviceGetArchitecture", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetCudaComputeCapability(device nvml.Device) (major, minor int, err error) {
	major, minor, err = r.lib.DeviceGetCudaComputeCapability(device)
	r.note("DeviceGetCudaComputeCapability", capability{major, minor}, err, uint64(device))
	return major, minor, err
}

func (r *recorder) DeviceGetNumaNodeId(device nvml.Device) (int, error) {
	answer, err := r.lib.DeviceGetNumaNodeId(device)
	r.note("DeviceGetNumaNodeId", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetTemperature(device nvml.Device) (int, error) {
	answer, err := r.lib.DeviceGetTemperature(device)
	r.note("DeviceGetTemperature", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetComputeRunningProcesses(device nvml.Device) ([]nvml.Process, error) {
	answer, err := r.lib.DeviceGetComputeRunningProcesses(device)
	r.note("DeviceGetComputeRunningProcesses", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetGraphicsRunningProcesses(device nvml.Device) ([]nvml.Process, error) {
	answer, err := r.lib.DeviceGetGraphicsRunningProcesses(device)
	r.note("DeviceGetGraphicsRunningProcesses", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetMPSComputeRunningProcesses(device nvml.Device) ([]nvml.Process, error) {
	answer, err := r.lib.DeviceGetMPSComputeRunningProcesses(device)
	r.note("DeviceGetMPSComputeRunningProcesses", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetRemappedRows(device nvml.Device) (nvml.RemappedRows, error) {
	answer, err := r.lib.DeviceGetRemappedRows(device)
	r.note("DeviceGetRemappedRows", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetRetiredPagesPendingStatus(device nvml.Device) (bool, error) {
	answer, err := r.lib.DeviceGetRetiredPagesPendingStatus(device)
	r.note("DeviceGetRetiredPagesPendingStatus", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetTopologyCommonAncestor(a, b nvml.Device) (nvml.TopologyLevel, error) {
	answer, err := r.lib.DeviceGetTopologyCommonAncestor(a, b)
	r.note("DeviceGetTopologyCommonAncestor", answer, err, uint64(a), uint64(b))
	return answer, err
}

func (r *recorder) DeviceGetNvLinkState(device nvml.Device, link int) (bool, error) {
	answer, err := r.lib.DeviceGetNvLinkState(device, link)
	r.note("DeviceGetNvLinkState", answer, err, uint64(device), uint64(link))
	return answer, err
}

func (r *recorder) DeviceGetNvLinkRemotePciInfo(device nvml.Device, link int) (nvml.PCIInfo, error) {
	answer, err := r.lib.DeviceGetNvLinkRemotePciInfo(device, link)
	r.note("DeviceGetNvLinkRemotePciInfo", answer, err, uint64(device), uint64(link))
	return answer, err
}

func (r *recorder) EventSetCreate() (nvml.EventSet, error) {
	answer, err := r.lib.EventSetCreate()
	r.note("EventSetCreate", answer, err)
	return answer, err
}

func (r *recorder) DeviceGetSupportedEventTypes(device nvml.Device) (nvml.EventTypes, error) {
	answer, err := r.lib.DeviceGetSupportedEventTypes(device)
	r.note("DeviceGetSupportedEventTypes", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceRegisterEvents(device nvml.Device, types nvml.EventTypes, set nvml.EventSet) error {
	err := r.lib.DeviceRegisterEvents(device, types, set)
	r.note("DeviceRegisterEvents", nil, err, uint64(device), uint64(types), uint64(set))
	return err
}

func (r *recorder) EventSetFree(set nvml.EventSet) error {
	err := r.lib.EventSetFree(set)
	r.note("EventSetFree", nil, err, uint64(set))
	return err
}
