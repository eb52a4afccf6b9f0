package features

import "bytes"

// VGPU is what a virtual machine's vGPU reports about the driver of its hypervisor.
type VGPU struct {
	// HostVersion is the driver's version, for example "550.90", and HostBranch its branch, for
	// example "r550_90"; empty when unknown.
	HostVersion, HostBranch string
}

// PCIConfigSize is how much of a PCI device's configuration space ParseVGPU needs.
const PCIConfigSize = 256

// ParseVGPU reads a vendor-specific capability from the configuration space of one of NVIDIA's PCI
// devices. A vGPU has one with the signature VF. Records follow the signature; each begins with an
// identifier and a length, and the length counts these two bytes. The record of the hypervisor's
// driver has the identifier 0, and contains version and branch in 10 bytes each (k8s-device-plugin,
// internal/vgpu). A GPU that is passed through as a whole has such a capability without the
// signature.
func ParseVGPU(config []byte) (v VGPU, ok bool) {
	const status, hasCapabilities, first, vendorSpecific = 0x06, 0x10, 0x34, 0x09
	if len(config) < PCIConfigSize || config[status]&hasCapabilities == 0 {
		return VGPU{}, false
	}
	// The capabilities are a linked list within 192 bytes, each at a multiple of 4; a broken list
	// may be a ring.
	position := int(config[first] &^ 3)
	for seen := 0; position >= 0x40 && seen < 48; seen++ {
		capability := config[position:PCIConfigSize]
		if length := int(capability[2]); capability[0] == vendorSpecific && length >= 5 && length <= len(capability) &&
			string(capability[3:5]) == "VF" {
			return hostDriver(capability[5:length]), true
		}
		position = int(capability[1] &^ 3)
	}
	return VGPU{}, false
}

func hostDriver(records []byte) VGPU {
	for len(records) >= 2 {
		length := int(records[1])
		if length < 2 || length > len(records) {
			break
		}
		if records[0] == 0 && length >= 22 {
			text := func(field []byte) string { field, _, _ = bytes.Cut(field, []byte{0}); return string(field) }
			return VGPU{HostVersion: text(records[2:12]), HostBranch: text(records[12:22])}
		}
		records = records[length:]
	}
	return VGPU{}
}

func (s set) vgpus(all []VGPU) {
	if len(all) > 0 {
		s.put("vgpu.present", true)
	}
	for name, of := range map[string]func(VGPU) string{
		"vgpu.host-driver-version": func(v VGPU) string { return value(v.HostVersion) },
		"vgpu.host-driver-branch":  func(v VGPU) string { return value(v.HostBranch) },
	} {
		if values := distinct(all, of); len(values) == 1 {
			s.put(name, values[0])
		}
	}
}
