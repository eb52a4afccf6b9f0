package nvml

import (
	"fmt"
	"time"
)

// askLibrary makes a call that concerns no board.
func askLibrary[T any](d *deadlined, call string, do func() (T, error)) (T, error) {
	return limited(d.lanes.library, call, d.limits.Call, do)
}

// askDevice makes a call for a board or a MIG device.
func askDevice[T any](d *deadlined, call string, device Device, do func(Device) (T, error)) (T, error) {
	l := of(d.lanes, d.lanes.devices, device)
	return limited(l, call, d.limits.Call, func() (T, error) { return do(device) })
}

func (d *deadlined) Init() error {
	open := func() (struct{}, error) { return struct{}{}, d.lib.Init() }
	_, err := undoable(d.lanes.library, "Init", d.limits.Lookup, open, func(struct{}) { _ = d.lib.Shutdown() })
	return err
}

func (d *deadlined) Shutdown() error {
	return limitedDo(d.lanes.library, "Shutdown", d.limits.Call, d.lib.Shutdown)
}

func (d *deadlined) SystemGetDriverVersion() (string, error) {
	return askLibrary(d, "SystemGetDriverVersion", d.lib.SystemGetDriverVersion)
}

func (d *deadlined) DeviceGetCount() (int, error) {
	return askLibrary(d, "DeviceGetCount", d.lib.DeviceGetCount)
}

func (d *deadlined) DeviceGetHandleByIndex(index int) (Device, error) {
	call := fmt.Sprintf("DeviceGetHandleByIndex(%d)", index)
	device, err := limited(d.lanes.lookUp(index), call, d.limits.Lookup, func() (Device, error) { return d.lib.DeviceGetHandleByIndex(index) })
	if err == nil {
		err = d.lanes.found(device).blocked()
	}
	return device, err
}

func (d *deadlined) DeviceGetUUID(device Device) (string, error) {
	return askDevice(d, "DeviceGetUUID", device, d.lib.DeviceGetUUID)
}

func (d *deadlined) DeviceGetMinorNumber(device Device) (int, error) {
	return askDevice(d, "DeviceGetMinorNumber", device, d.lib.DeviceGetMinorNumber)
}

func (d *deadlined) DeviceGetPciInfo(device Device) (PCIInfo, error) {
	return askDevice(d, "DeviceGetPciInfo", device, d.lib.DeviceGetPciInfo)
}

func (d *deadlined) DeviceGetName(device Device) (string, error) {
	return askDevice(d, "DeviceGetName", device, d.lib.DeviceGetName)
}

func (d *deadlined) DeviceGetMemoryInfo(device Device) (MemoryInfo, error) {
	return askDevice(d, "DeviceGetMemoryInfo", device, d.lib.DeviceGetMemoryInfo)
}

func (d *deadlined) DeviceGetArchitecture(device Device) (Architecture, error) {
	return askDevice(d, "DeviceGetArchitecture", device, d.lib.DeviceGetArchitecture)
}

func (d *deadlined) DeviceGetCudaComputeCapability(device Device) (major, minor int, err error) {
	version, err := askDevice(d, "DeviceGetCudaComputeCapability", device, func(device Device) ([2]int, error) {
		major, minor, err := d.lib.DeviceGetCudaComputeCapability(device)
		return [2]int{major, minor}, err
	})
	return version[0], version[1], err
}

func (d *deadlined) DeviceGetNumaNodeId(device Device) (int, error) {
	return askDevice(d, "DeviceGetNumaNodeId", device, d.lib.DeviceGetNumaNodeId)
}

func (d *deadlined) DeviceGetTemperature(device Device) (int, error) {
	return askDevice(d, "DeviceGetTemperature", device, d.lib.DeviceGetTemperature)
}

func (d *deadlined) DeviceGetComputeRunningProcesses(device Device) ([]Process, error) {
	return askDevice(d, "DeviceGetComputeRunningProcesses", device, d.lib.DeviceGetComputeRunningProcesses)
}

func (d *deadlined) DeviceGetGraphicsRunningProcesses(device Device) ([]Process, error) {
	return askDevice(d, "DeviceGetGraphicsRunningProcesses", device, d.lib.DeviceGetGraphicsRunningProcesses)
}

func (d *deadlined) DeviceGetMPSComputeRunningProcesses(device Device) ([]Process, error) {
	return askDevice(d, "DeviceGetMPSComputeRunningProcesses", device, d.lib.DeviceGetMPSComputeRunningProcesses)
}

func (d *deadlined) DeviceGetRemappedRows(device Device) (RemappedRows, error) {
	return askDevice(d, "DeviceGetRemappedRows", device, d.lib.DeviceGetRemappedRows)
}

func (d *deadlined) DeviceGetRetiredPagesPendingStatus(device Device) (bool, error) {
	return askDevice(d, "DeviceGetRetiredPagesPendingStatus", device, d.lib.DeviceGetRetiredPagesPendingStatus)
}

// DeviceGetTopologyCommonAncestor waits its turn with the first board. That the
// second is stuck is an answer too, and keeps the first from it.
func (d *deadlined) DeviceGetTopologyCommonAncestor(a, b Device) (TopologyLevel, error) {
	if err := of(d.lanes, d.lanes.devices, b).blocked(); err != nil {
		return 0, err
	}
	return askDevice(d, "DeviceGetTopologyCommonAncestor", a, func(a Device) (TopologyLevel, error) {
		return d.lib.DeviceGetTopologyCommonAncestor(a, b)
	})
}

func (d *deadlined) DeviceGetNvLinkState(device Device, link int) (bool, error) {
	return askDevice(d, fmt.Sprintf("DeviceGetNvLinkState(%d)", link), device, func(device Device) (bool, error) {
		return d.lib.DeviceGetNvLinkState(device, link)
	})
}

func (d *deadlined) DeviceGetNvLinkRemotePciInfo(device Device, link int) (PCIInfo, error) {
	return askDevice(d, fmt.Sprintf("DeviceGetNvLinkRemotePciInfo(%d)", link), device, func(device Device) (PCIInfo, error) {
		return d.lib.DeviceGetNvLinkRemotePciInfo(device, link)
	})
}

func (d *deadlined) EventSetCreate() (EventSet, error) {
	free := func(set EventSet) { _ = d.lib.EventSetFree(set) }
	return undoable(d.lanes.library, "EventSetCreate", d.limits.Call, d.lib.EventSetCreate, free)
}

func (d *deadlined) DeviceGetSupportedEventTypes(device Device) (EventTypes, error) {
	return askDevice(d, "DeviceGetSupportedEventTypes", device, d.lib.DeviceGetSupportedEventTypes)
}

func (d *deadlined) DeviceRegisterEvents(device Device, types EventTypes, set EventSet) error {
	l := of(d.lanes, d.lanes.devices, device)
	return limitedDo(l, "DeviceRegisterEvents", d.limits.Call, func() error { return d.lib.DeviceRegisterEvents(device, types, set) })
}

func (d *deadlined) EventSetWait(set EventSet, timeout time.Duration) (Event, error) {
	return d.lib.EventSetWait(set, timeout)
}

func (d *deadlined) EventSetFree(set EventSet) error {
	return limitedDo(d.lanes.library, "EventSetFree", d.limits.Call, func() error { return d.lib.EventSetFree(set) })
}
