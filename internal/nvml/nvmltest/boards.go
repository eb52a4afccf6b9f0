package nvmltest

import (
	"regexp"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

// The names of things, as NVML's header and nvidia-smi have them.
var (
	gpuUUID = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	migUUID = regexp.MustCompile(`^MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	busID   = regexp.MustCompile(`^[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]$`)
	release = regexp.MustCompile(`^[0-9]+(\.[0-9]+)+$`)
)

// devices are the handles of all boards.
func devices(t *testing.T, lib nvml.Library) []nvml.Device {
	t.Helper()
	count, err := lib.DeviceGetCount()
	must(t, err)
	var found []nvml.Device
	for index := range count {
		device, err := lib.DeviceGetHandleByIndex(index)
		must(t, err)
		found = append(found, device)
	}
	return found
}

// boards holds what is said of each board.
func boards(t *testing.T, lib nvml.Library, expect Expect) {
	version, err := lib.SystemGetDriverVersion()
	must(t, err)
	matches(t, "driver version", version, release)
	found := devices(t, lib)
	number(t, "GPUs", len(found), expect.GPUs)
	_, err = lib.DeviceGetHandleByIndex(len(found))
	fails(t, "DeviceGetHandleByIndex past the last", err, nvml.InvalidArgument)

	uuids, buses := map[string]bool{}, map[string]bool{}
	for _, device := range found {
		uuid, err := lib.DeviceGetUUID(device)
		must(t, err)
		matches(t, "UUID", uuid, gpuUUID)
		unique(t, "UUID", uuid, uuids)
		pci, err := lib.DeviceGetPciInfo(device)
		must(t, err)
		matches(t, "bus ID", pci.BusID, busID)
		unique(t, "bus ID", pci.BusID, buses)
		if vendor := pci.DeviceID & 0xffff; vendor != 0x10de {
			t.Errorf("PCI vendor %#x, want NVIDIA's", vendor)
		}
		name, err := lib.DeviceGetName(device)
		must(t, err)
		if name == "" {
			t.Error("a board without a name")
		}
		board(t, lib, device)
	}
}

// board holds what is said in numbers.
func board(t *testing.T, lib nvml.Library, device nvml.Device) {
	total := memory(t, lib, device)
	if minor, err := lib.DeviceGetMinorNumber(device); optional(t, "DeviceGetMinorNumber", err) {
		between(t, "minor number", minor, 0, 255)
	}
	if node, err := lib.DeviceGetNumaNodeId(device); optional(t, "DeviceGetNumaNodeId", err) {
		between(t, "NUMA node", node, -1, 1023)
	}
	if celsius, err := lib.DeviceGetTemperature(device); optional(t, "DeviceGetTemperature", err) {
		between(t, "temperature", celsius, 1, 119)
	}
	if architecture, err := lib.DeviceGetArchitecture(device); optional(t, "DeviceGetArchitecture", err) {
		between(t, "architecture", int(architecture), int(nvml.Kepler), 255)
	}
	if major, minor, err := lib.DeviceGetCudaComputeCapability(device); optional(t, "DeviceGetCudaComputeCapability", err) {
		between(t, "compute capability", major, 3, 99)
		between(t, "compute capability after the dot", minor, 0, 9)
	}
	if rows, err := lib.DeviceGetRemappedRows(device); optional(t, "DeviceGetRemappedRows", err) {
		between(t, "remapped rows", min(rows.Correctable, rows.Uncorrectable), 0, 1<<20)
	}
	metering(t, lib, device)
	_, err := lib.DeviceGetRetiredPagesPendingStatus(device)
	optional(t, "DeviceGetRetiredPagesPendingStatus", err)
	if processes, err := lib.DeviceGetComputeRunningProcesses(device); optional(t, "DeviceGetComputeRunningProcesses", err) {
		for _, p := range processes {
			if p.PID <= 0 || p.Memory != nvml.MemoryUnknown && total > 0 && p.Memory > total {
				t.Errorf("process %+v on a board of %d bytes", p, total)
			}
		}
	}
}

// memory holds that what is used is there, and returns the total in bytes; 0
// for a device without memory of its own.
func memory(t *testing.T, lib nvml.Library, device nvml.Device) uint64 {
	t.Helper()
	info, err := lib.DeviceGetMemoryInfo(device)
	if !optional(t, "DeviceGetMemoryInfo", err) {
		return 0
	}
	if info.Total == 0 || info.Used > info.Total || info.Free > info.Total {
		t.Errorf("memory %+v: more than there is, or none", info)
	}
	return info.Total
}

func between(t *testing.T, what string, got, least, most int) {
	t.Helper()
	if got < least || got > most {
		t.Errorf("%s %d, want %d to %d", what, got, least, most)
	}
}

func matches(t *testing.T, what, got string, grammar *regexp.Regexp) {
	t.Helper()
	if !grammar.MatchString(got) {
		t.Errorf("%s %q is not of the form %s", what, got, grammar)
	}
}

func unique(t *testing.T, what, got string, seen map[string]bool) {
	t.Helper()
	if seen[got] {
		t.Errorf("%s %s: two have it", what, got)
	}
	seen[got] = true
}
