//go:build cgo

package driver

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
)

func (l *library) DeviceGetPciInfo(d nvml.Device) (nvml.PCIInfo, error) {
	pci, err := askDevice(l, "DeviceGetPciInfo", d, gonvml.Device.GetPciInfo)
	if err != nil {
		return nvml.PCIInfo{}, err
	}
	return place(pci), nil
}

// DeviceGetNumaNodeId asks the driver where the board is on the bus, and the
// kernel which node that is.
func (l *library) DeviceGetNumaNodeId(d nvml.Device) (int, error) {
	pci, err := askDevice(l, "DeviceGetNumaNodeId", d, gonvml.Device.GetPciInfo)
	if err != nil {
		return 0, err
	}
	return numaNode(l.machine, addressOf(pci)), nil
}

func (l *library) DeviceGetTopologyCommonAncestor(a, b nvml.Device) (nvml.TopologyLevel, error) {
	const call = "DeviceGetTopologyCommonAncestor"
	level, err := askDevice(l, call, a, func(one gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) {
		other, known := l.devices.handle(b)
		if !known {
			return 0, gonvml.ERROR_INVALID_ARGUMENT
		}
		return one.GetTopologyCommonAncestor(other)
	})
	return nvml.TopologyLevel(level), err
}

func (l *library) DeviceGetNvLinkState(d nvml.Device, link int) (bool, error) {
	state, err := askWith(l, "DeviceGetNvLinkState", &l.devices, d, link, gonvml.Device.GetNvLinkState)
	return state == gonvml.FEATURE_ENABLED, err
}

func (l *library) DeviceGetNvLinkRemotePciInfo(d nvml.Device, link int) (nvml.PCIInfo, error) {
	pci, err := askWith(l, "DeviceGetNvLinkRemotePciInfo", &l.devices, d, link, gonvml.Device.GetNvLinkRemotePciInfo)
	if err != nil {
		return nvml.PCIInfo{}, err
	}
	return place(pci), nil
}

// place writes the bus ID from its parts: drivers before 390 fill in only a
// text of another form.
func place(pci gonvml.PciInfo) nvml.PCIInfo {
	return nvml.PCIInfo{BusID: addressOf(pci).String(), DeviceID: pci.PciDeviceId, SubsystemID: pci.PciSubSystemId}
}

func addressOf(pci gonvml.PciInfo) address {
	return address{domain: pci.Domain, bus: pci.Bus, device: pci.Device}
}
