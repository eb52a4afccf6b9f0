// Package nvmltest is a conformance suite for implementations of nvml.Library: the simulated node,
// traces and, on a machine with GPUs, a real driver. It only reads, so that it can run on a node in
// use.
package nvmltest

import (
	"errors"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

// Unknown in Expect accepts any number.
const Unknown = -1

// Expect has the facts about a node that the caller knows in advance.
type Expect struct {
	// GPUs and Partitions are the numbers on the whole node.
	GPUs, Partitions int
	// Event makes the GPU at that index report XID 94; nil if the test cannot cause an event. A
	// trace of such a run contains the event.
	Event func(t *testing.T, gpu int)
}

// Run checks the libraries that open returns, one for each part. open must return a library that is
// not opened yet.
func Run(t *testing.T, open func(t *testing.T) nvml.Library, expect Expect) {
	t.Run("life", func(t *testing.T) { life(t, open(t)) })
	for _, part := range []struct {
		name string
		hold func(*testing.T, nvml.Library, Expect)
	}{
		{"gpus", gpus}, {"partitions", partitions}, {"profiles", profiles}, {"instances", instances},
		{"neighbours", neighbours}, {"events", events},
	} {
		t.Run(part.name, func(t *testing.T) {
			lib := open(t)
			must(t, lib.Init())
			defer func() { must(t, lib.Shutdown()) }()
			part.hold(t, lib, expect)
		})
	}
	t.Run("scan", func(t *testing.T) { scan(t, open(t), expect) })
}

// RunOnce runs the suite on one library, opened once, and always in the same order. It makes all
// the calls of Run, so that Run passes on a trace of it.
func RunOnce(t *testing.T, lib nvml.Library, expect Expect) {
	must(t, lib.Init())
	defer func() { must(t, lib.Shutdown()) }()
	for _, hold := range []func(*testing.T, nvml.Library, Expect){gpus, partitions, profiles, instances, neighbours, events} {
		hold(t, lib, expect)
	}
}

// life checks that the library counts how often it was opened, and answers only while it is open.
func life(t *testing.T, lib nvml.Library) {
	closed := func(when string) {
		t.Helper()
		if _, err := lib.DeviceGetCount(); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("DeviceGetCount %s: %v, want UNINITIALIZED", when, err)
		}
		if err := lib.Shutdown(); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("Shutdown %s: %v, want UNINITIALIZED", when, err)
		}
	}
	closed("before Init")
	for _, times := range []int{1, 2} {
		for range times {
			must(t, lib.Init())
		}
		for range times {
			if _, err := lib.DeviceGetCount(); err != nil {
				t.Errorf("DeviceGetCount between Init and the last Shutdown: %v", err)
			}
			must(t, lib.Shutdown())
		}
		closed("after the last Shutdown")
	}
}

// scan checks that two scans give the same result.
func scan(t *testing.T, lib nvml.Library, expect Expect) {
	look := func() []sharing.GPU {
		gpus, err := nvml.Scan(lib)
		if errors.Is(err, nvml.NoPermission) {
			expect.Partitions = Unknown // Their instances cannot be read.
			return gpus
		}
		must(t, err)
		return gpus
	}
	first := look()
	if diff := cmp.Diff(first, look()); diff != "" {
		t.Errorf("the second look (-first +second):\n%s", diff)
	}
	found := 0
	for _, gpu := range first {
		found += len(gpu.Partitions)
	}
	number(t, "GPUs", len(first), expect.GPUs)
	number(t, "partitions", found, expect.Partitions)
}

func number(t *testing.T, what string, got, want int) {
	t.Helper()
	if want != Unknown && got != want {
		t.Errorf("%d %s, want %d", got, what, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fails checks that the error is one of NVML's, with its code and its call.
func fails(t *testing.T, call string, err error, codes ...nvml.Return) {
	t.Helper()
	failed, ok := errors.AsType[*nvml.Error](err)
	if !ok {
		t.Errorf("%s: %v is no *nvml.Error", call, err)
		return
	}
	if failed.Call == "" || failed.Return == nvml.Success {
		t.Errorf("%s: %#v does not tell the call and a code", call, failed)
	}
	if len(codes) > 0 && !slices.Contains(codes, failed.Return) {
		t.Errorf("%s: %v, want one of %v", call, err, codes)
	}
}

// optional checks a call that a GPU or a driver may lack: if it fails, the error must be one of
// those for a missing call.
func optional(t *testing.T, call string, err error) bool {
	t.Helper()
	if err != nil {
		fails(t, call, err, nvml.NotSupported, nvml.FunctionNotFound, nvml.NoPermission, nvml.InvalidArgument)
	}
	return err == nil
}

// The formats of names in NVML's header and nvidia-smi.
var (
	gpuUUID     = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	migUUID     = regexp.MustCompile(`^MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	clusterUUID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	busID       = regexp.MustCompile(`^[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]$`)
	release     = regexp.MustCompile(`^[0-9]+(\.[0-9]+)+$`)
)

// devices returns the handles of all GPUs that this process may open.
func devices(t *testing.T, lib nvml.Library) []nvml.Device {
	t.Helper()
	found, _ := counted(t, lib)
	return found
}

// counted returns the devices and the number of GPUs. The number includes GPUs that may not be
// opened (nvml.h).
func counted(t *testing.T, lib nvml.Library) (found []nvml.Device, count int) {
	t.Helper()
	count, err := lib.DeviceGetCount()
	must(t, err)
	for index := range count {
		device, err := lib.DeviceGetHandleByIndex(index)
		if errors.Is(err, nvml.NoPermission) {
			continue
		}
		must(t, err)
		found = append(found, device)
	}
	return found, count
}

// gpus checks the values of each GPU.
func gpus(t *testing.T, lib nvml.Library, expect Expect) {
	version, err := lib.SystemGetDriverVersion()
	must(t, err)
	matches(t, "driver version", version, release)
	if cuda, err := lib.SystemGetCudaDriverVersion(); optional(t, "SystemGetCudaDriverVersion", err) {
		between(t, "CUDA version", cuda, 1000, 99999)
	}
	found, count := counted(t, lib)
	number(t, "GPUs", count, expect.GPUs)
	_, err = lib.DeviceGetHandleByIndex(count)
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
			t.Error("a GPU without a name")
		}
		gpu(t, lib, device)
	}
}

// gpu checks the numbers of one GPU.
func gpu(t *testing.T, lib nvml.Library, device nvml.Device) {
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
	if celsius, err := lib.DeviceGetTemperatureThreshold(device, nvml.TemperatureSlowdown); optional(t, "DeviceGetTemperatureThreshold", err) {
		between(t, "slowdown", celsius, 50, 150)
	}
	if margin, err := lib.DeviceGetMarginTemperature(device); optional(t, "DeviceGetMarginTemperature", err) {
		between(t, "margin of temperature", margin, -100, 150)
	}
	if margin, err := lib.DeviceGetFieldValues(device, nvml.SlowdownMargin); optional(t, "DeviceGetFieldValues", err) {
		between(t, "margin of the slowdown", int(int32(margin)), -100, 100)
	}
	if mode, err := lib.DeviceGetComputeMode(device); optional(t, "DeviceGetComputeMode", err) {
		between(t, "compute mode", int(mode), int(nvml.ComputeDefault), int(nvml.ComputeExclusiveProcess))
	}
	if architecture, err := lib.DeviceGetArchitecture(device); optional(t, "DeviceGetArchitecture", err) {
		between(t, "architecture", int(architecture), int(nvml.Kepler), 255)
	}
	if brand, err := lib.DeviceGetBrand(device); optional(t, "DeviceGetBrand", err) {
		between(t, "brand", int(brand), 0, 255)
	}
	if capability, err := lib.DeviceGetCudaComputeCapability(device); optional(t, "DeviceGetCudaComputeCapability", err) {
		between(t, "compute capability", capability.Major, 3, 99)
		between(t, "compute capability after the dot", capability.Minor, 0, 9)
	}
	if action, err := lib.DeviceGetFieldValues(device, nvml.RecoveryAction); optional(t, "DeviceGetFieldValues", err) {
		between(t, "recovery action", int(action), 0, 255)
	}
	if rows, err := lib.DeviceGetRemappedRows(device); optional(t, "DeviceGetRemappedRows", err) {
		between(t, "remapped rows", min(rows.Correctable, rows.Uncorrectable), 0, 1<<20)
	}
	if fabric, err := lib.DeviceGetGpuFabricInfo(device); optional(t, "DeviceGetGpuFabricInfo", err) {
		matches(t, "cluster", fabric.Cluster, clusterUUID)
	}
	_, err := lib.DeviceGetAttributes(device)
	fails(t, "DeviceGetAttributes of a GPU", err, nvml.NotSupported, nvml.FunctionNotFound, nvml.InvalidArgument)
	metering(t, lib, device)
	_, err = lib.DeviceGetRetiredPagesPendingStatus(device)
	optional(t, "DeviceGetRetiredPagesPendingStatus", err)
	if processes, err := lib.DeviceGetComputeRunningProcesses(device); optional(t, "DeviceGetComputeRunningProcesses", err) {
		for _, p := range processes {
			if p.PID <= 0 || p.Memory != nvml.MemoryUnknown && total > 0 && p.Memory > total {
				t.Errorf("process %+v on a GPU of %d bytes", p, total)
			}
		}
	}
}

// memory checks that the used memory exists, and returns the total in bytes; 0 for a device without
// memory of its own.
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

// walkLimit is larger than the number of steps of any walk in this suite.
const walkLimit = 128

// partitions checks that the walk over a GPU's MIG devices ends and has holes but no other errors,
// and that each device leads to its instances.
func partitions(t *testing.T, lib nvml.Library, expect Expect) {
	found := 0
	uuids := map[string]bool{}
	for _, parent := range devices(t, lib) {
		mode, err := lib.DeviceGetMigMode(parent)
		if !optional(t, "DeviceGetMigMode", err) {
			continue
		}
		most, err := lib.DeviceGetMaxMigDeviceCount(parent)
		if !optional(t, "DeviceGetMaxMigDeviceCount", err) {
			continue
		}
		between(t, "MIG devices at most", most, 0, walkLimit)
		for index := range most {
			device, err := lib.DeviceGetMigDeviceHandleByIndex(parent, index)
			if err != nil {
				// NVIDIA's go-nvlib treats both as a hole.
				fails(t, "DeviceGetMigDeviceHandleByIndex", err, nvml.NotFound, nvml.InvalidArgument)
				continue
			}
			if !mode.Current {
				t.Errorf("MIG device %d of a GPU without MIG", index)
			}
			found++
			partition(t, lib, parent, device, uuids)
		}
	}
	number(t, "partitions", found, expect.Partitions)
}

// partition checks the values of one MIG device.
func partition(t *testing.T, lib nvml.Library, parent, device nvml.Device, uuids map[string]bool) {
	t.Helper()
	uuid, err := lib.DeviceGetUUID(device)
	must(t, err)
	matches(t, "UUID", uuid, migUUID)
	unique(t, "UUID", uuid, uuids)
	memory(t, lib, device)
	_, err = lib.DeviceGetName(device)
	must(t, err)

	if attributes, err := lib.DeviceGetAttributes(device); optional(t, "DeviceGetAttributes", err) {
		between(t, "compute slices", attributes.ComputeSlices, 1, 8)
		between(t, "GPU slices", attributes.GPUSlices, attributes.ComputeSlices, 8)
		between(t, "multiprocessors", attributes.Multiprocessors, 1, 1024)
		between(t, "memory of a partition in MiB", int(attributes.MemoryMiB), 1, 1<<20)
	}

	gi, err := lib.DeviceGetGpuInstanceId(device)
	must(t, err)
	// Instances require root; any of these calls may fail without it.
	instance, err := lib.DeviceGetGpuInstanceById(parent, gi)
	if errors.Is(err, nvml.NoPermission) {
		return
	}
	must(t, err)
	info, err := lib.GpuInstanceGetInfo(instance)
	if errors.Is(err, nvml.NoPermission) {
		return
	}
	must(t, err)
	if info.ID != gi || info.Size < 1 || info.Start < 0 {
		t.Errorf("GPU instance %+v, want ID %d and a place", info, gi)
	}
	ci, err := lib.DeviceGetComputeInstanceId(device)
	must(t, err)
	compute, err := lib.GpuInstanceGetComputeInstanceById(instance, ci)
	if errors.Is(err, nvml.NoPermission) {
		return
	}
	must(t, err)
	slices, err := lib.ComputeInstanceGetInfo(compute)
	if errors.Is(err, nvml.NoPermission) {
		return
	}
	must(t, err)
	if slices.ID != ci || slices.Slices < 1 {
		t.Errorf("compute instance %+v, want ID %d and slices", slices, ci)
	}
}

// profiles checks that the enumeration of GPU instance profiles ends.
func profiles(t *testing.T, lib nvml.Library, _ Expect) {
	for _, device := range devices(t, lib) {
		for enum := range walkLimit + 1 {
			profile, err := lib.DeviceGetGpuInstanceProfileInfo(device, enum)
			if errors.Is(err, nvml.InvalidArgument) || errors.Is(err, nvml.FunctionNotFound) || errors.Is(err, nvml.NoPermission) {
				break
			}
			switch {
			case enum == walkLimit:
				t.Errorf("no end of profiles after %d", enum)
			case err != nil:
				fails(t, "DeviceGetGpuInstanceProfileInfo", err, nvml.NotSupported)
			case profile.Slices < 1 || profile.Instances < 1 || profile.MemoryMB == 0:
				t.Errorf("profile %d: %+v is of nothing", enum, profile)
			}
		}
	}
}

// neighbours checks the values for pairs of GPUs and for links.
func neighbours(t *testing.T, lib nvml.Library, _ Expect) {
	found := devices(t, lib)
	for i, a := range found {
		for _, b := range found[i+1:] {
			there, err := lib.DeviceGetTopologyCommonAncestor(a, b)
			if !optional(t, "DeviceGetTopologyCommonAncestor", err) {
				continue
			}
			back, err := lib.DeviceGetTopologyCommonAncestor(b, a)
			must(t, err)
			if there != back || there.String() == "" {
				t.Errorf("levels %d there and %d back", there, back)
			}
		}
		links(t, lib, a)
	}
}

// links checks that the enumeration of a GPU's links ends, and that an active link leads somewhere.
func links(t *testing.T, lib nvml.Library, device nvml.Device) {
	t.Helper()
	for link := range walkLimit + 1 {
		active, err := lib.DeviceGetNvLinkState(device, link)
		if !optional(t, "DeviceGetNvLinkState", err) {
			return
		}
		if link == walkLimit {
			t.Errorf("no end of links after %d", link)
		}
		if !active {
			continue
		}
		if remote, err := lib.DeviceGetNvLinkRemotePciInfo(device, link); optional(t, "DeviceGetNvLinkRemotePciInfo", err) {
			matches(t, "bus ID at the other end", remote.BusID, busID)
		}
	}
}

// metering checks the values of a GPU's use.
func metering(t *testing.T, lib nvml.Library, device nvml.Device) {
	t.Helper()
	if rates, err := lib.DeviceGetUtilizationRates(device); optional(t, "DeviceGetUtilizationRates", err) {
		between(t, "percent of the GPU's time", rates.GPU, 0, 100)
		between(t, "percent of the memory's time", rates.Memory, 0, 100)
	}
	_, err := lib.DeviceGetCurrentClocksEventReasons(device)
	optional(t, "DeviceGetCurrentClocksEventReasons", err)
	if milliwatts, err := lib.DeviceGetPowerUsage(device); optional(t, "DeviceGetPowerUsage", err) {
		between(t, "milliwatts", milliwatts, 0, 10_000_000)
	}
	if before, err := lib.DeviceGetTotalEnergyConsumption(device); optional(t, "DeviceGetTotalEnergyConsumption", err) {
		after, err := lib.DeviceGetTotalEnergyConsumption(device)
		must(t, err)
		if after < before {
			t.Errorf("%d mJ were used, after %d", after, before)
		}
	}
	for location := range nvml.SRAM + 2 {
		_, err := lib.DeviceGetMemoryErrorCounter(device, nvml.MemoryErrorCounter{Location: location, Aggregate: true})
		if optional(t, "DeviceGetMemoryErrorCounter", err) && location > nvml.SRAM {
			t.Errorf("errors of location %d, which no header has", location)
		}
	}
	samples(t, lib, device)
}

// samples checks that samples belong to processes, and that samples that were returned once do not
// come again.
func samples(t *testing.T, lib nvml.Library, device nvml.Device) {
	t.Helper()
	seen := uint64(0)
	for range 2 {
		taken, err := lib.DeviceGetProcessUtilization(device, seen)
		if errors.Is(err, nvml.NotFound) || !optional(t, "DeviceGetProcessUtilization", err) {
			return
		}
		before := seen
		for _, s := range taken {
			if s.PID <= 0 || s.Time <= before {
				t.Errorf("sample %+v, although those up to %d were seen", s, before)
			}
			between(t, "percent of the multiprocessors", s.SM, 0, 100)
			seen = max(seen, s.Time)
		}
	}
}

// instances checks that the exact listing of a GPU's instances agrees with its profiles, and that
// each placement lies on the GPU. The listing requires root.
func instances(t *testing.T, lib nvml.Library, _ Expect) {
	for _, device := range devices(t, lib) {
		for enum := range walkLimit {
			profile, err := lib.DeviceGetGpuInstanceProfileInfo(device, enum)
			if errors.Is(err, nvml.InvalidArgument) {
				break
			}
			if err != nil {
				continue
			}
			placements, err := lib.DeviceGetGpuInstancePossiblePlacements(device, profile.ID)
			if !optional(t, "DeviceGetGpuInstancePossiblePlacements", err) {
				continue
			}
			for _, at := range placements {
				if at.Start < 0 || at.Size < 1 || at.Start+at.Size > walkLimit {
					t.Errorf("profile %d can lie at %s", profile.ID, at)
				}
			}
			instances, err := lib.DeviceGetGpuInstances(device, profile.ID)
			if !optional(t, "DeviceGetGpuInstances", err) {
				continue
			}
			for _, instance := range instances {
				listed(t, lib, instance, profile.ID)
			}
		}
	}
}

// listed checks that an instance that was listed by its profile has that profile, and that the same
// is true of its compute instances.
func listed(t *testing.T, lib nvml.Library, instance nvml.GPUInstance, profile int) {
	t.Helper()
	info, err := lib.GpuInstanceGetInfo(instance)
	must(t, err)
	if info.ProfileID != profile {
		t.Errorf("GPU instance %d is of profile %d and listed by %d", info.ID, info.ProfileID, profile)
	}
	for enum := range walkLimit {
		profile, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, enum)
		if errors.Is(err, nvml.InvalidArgument) || errors.Is(err, nvml.NoPermission) {
			return
		}
		if !optional(t, "GpuInstanceGetComputeInstanceProfileInfo", err) {
			continue
		}
		computes, err := lib.GpuInstanceGetComputeInstances(instance, profile.ID)
		if !optional(t, "GpuInstanceGetComputeInstances", err) {
			continue
		}
		for _, compute := range computes {
			info, err := lib.ComputeInstanceGetInfo(compute)
			must(t, err)
			if info.Slices != profile.Slices {
				t.Errorf("compute instance %d has %d slices and is listed by %d", info.ID, info.Slices, profile.Slices)
			}
		}
	}
}

// shortWait is the length of waits that should end without an event. The driver counts in
// milliseconds.
const shortWait = 20 * time.Millisecond

// events checks the life of an event set: GPUs are registered, a wait ends in time, and a freed set
// is invalid.
func events(t *testing.T, lib nvml.Library, expect Expect) {
	set, err := lib.EventSetCreate()
	must(t, err)
	found := devices(t, lib)
	registered := Unknown
	for index, device := range found {
		supported, err := lib.DeviceGetSupportedEventTypes(device)
		if !optional(t, "DeviceGetSupportedEventTypes", err) || supported&nvml.EventXIDCritical == 0 {
			continue
		}
		if optional(t, "DeviceRegisterEvents", lib.DeviceRegisterEvents(device, nvml.EventXIDCritical, set)) {
			registered = index
		}
	}
	if expect.Event != nil && registered != Unknown {
		expect.Event(t, registered)
		event, err := lib.EventSetWait(set, 10*time.Second)
		must(t, err)
		if event.Device != found[registered] || event.Type != nvml.EventXIDCritical || event.Data != 94 {
			t.Errorf("event %+v, want XID 94 of GPU %d", event, registered)
		}
	}
	quiet(t, lib, set)
	must(t, lib.EventSetFree(set))
}

// quiet checks that a wait ends with Timeout, and that not every wait returns at once: an interrupt
// may end one early (nvml.h). A wait that never ends hangs the test. A node in use may have an
// event meanwhile.
func quiet(t *testing.T, lib nvml.Library, set nvml.EventSet) {
	t.Helper()
	for range walkLimit {
		start := time.Now()
		_, err := lib.EventSetWait(set, shortWait)
		if err == nil {
			continue
		}
		fails(t, "EventSetWait", err, nvml.Timeout)
		if time.Now().After(start.Add(shortWait / 2)) {
			return
		}
	}
	t.Errorf("%d events or early ends: a wait never timed out", walkLimit)
}
