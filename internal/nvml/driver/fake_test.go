//go:build cgo

package driver

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
)

// install compiles testdata/fake.c into the driver root as a driver of that version, like its installer: a file
// and a link to it.
func install(t *testing.T, root, version string, flags ...string) {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler named cc")
	}
	folder := filepath.Join(root, "usr/lib64")
	must(t, os.MkdirAll(folder, 0o755))
	name := "libnvidia-ml.so." + version
	arguments := append([]string{
		"-shared", "-fPIC", "-Wl,-soname," + libraryName, `-DVERSION="` + version + `"`,
		"-o", filepath.Join(folder, name), "testdata/fake.c",
	}, flags...)
	if output, err := exec.CommandContext(t.Context(), compiler, arguments...).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, output)
	}
	link := filepath.Join(folder, libraryName)
	must(t, os.Symlink(name, link+".new"))
	must(t, os.Rename(link+".new", link))
}

// TestFakeDriverThreads checks that the tests' library, like NVIDIA's, may be called from several threads: after
// the last nvmlShutdown it has no node of the driver open.
func TestFakeDriverThreads(t *testing.T) {
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler named cc")
	}
	folder := t.TempDir()
	must(t, os.Mkdir(filepath.Join(folder, "open"), 0o755))
	for _, node := range []string{"nvidia0", "nvidia1", "nvidiactl"} {
		must(t, os.WriteFile(filepath.Join(folder, "open", node), nil, 0o600))
	}
	program := filepath.Join(folder, "threads")
	arguments := []string{`-DVERSION="1"`, "-DMAJOR=241", `-DPROC="` + folder + `"`, "-o", program, "testdata/threads.c", "testdata/fake.c", "-lpthread"}
	if output, err := exec.CommandContext(t.Context(), compiler, arguments...).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, output)
	}
	output, err := exec.CommandContext(t.Context(), program).CombinedOutput()
	if got := strings.TrimSpace(string(output)); err != nil || got != "0" {
		t.Errorf("%s nodes of the driver are open at the end, %v", got, err)
	}
}

// capabilities is where fake.c looks for its folder of device nodes.
const capabilities = "NVIDIA_CAPS"

// grant gives this process the rights over MIG of these device nodes, and no others.
func grant(t *testing.T, nodes ...string) {
	t.Helper()
	folder := os.Getenv(capabilities)
	must(t, os.RemoveAll(folder))
	must(t, os.Mkdir(folder, 0o755))
	for _, node := range nodes {
		must(t, os.WriteFile(filepath.Join(folder, node), nil, 0o600))
	}
}

// lived: TestFakeDriver has run in this process.
var lived atomic.Bool

// instanceEngines are the engines of fake.c's 1g.5gb.
var instanceEngines = mig.Engines{Multiprocessors: 14, CopyEngines: 2, Decoders: 3, Encoders: 4, JPEGEngines: 5, OFAEngines: 6}

// TestFakeDriver goes through the life of a driver: absent, broken, old, replaced by a new one. The order
// matters, as go-nvml keeps the newest version of a call that it has seen, so it is one test and runs once per
// process.
func TestFakeDriver(t *testing.T) {
	if lived.Swap(true) {
		t.Skip("this process has loaded a driver already, as with -count=2")
	}
	root, machine := t.TempDir(), t.TempDir()
	t.Setenv(capabilities, t.TempDir())
	grant(t, configure, monitor)
	bus := filepath.Join(machine, "sys/bus/pci/devices/10000:3c:00.0")
	must(t, os.MkdirAll(bus, 0o755))
	must(t, os.WriteFile(filepath.Join(bus, "numa_node"), []byte("1\n"), 0o600))
	lib, err := Open(Options{DriverRoot: root, ContainerDriverRoot: filepath.Join(root, "none"), MachineRoot: machine})
	must(t, err)

	t.Run("absent", func(t *testing.T) {
		if _, err := exec.LookPath("nvidia-smi"); err == nil {
			t.Skip("the loader finds the driver of this machine")
		}
		err := lib.Init()
		if !errors.Is(err, nvml.LibraryNotFound) {
			t.Fatalf("Init: %v, want LIBRARY_NOT_FOUND", err)
		}
		for _, want := range []string{"nvml: Init: LIBRARY_NOT_FOUND", filepath.Join(root, "lib/aarch64-linux-gnu"), "cannot open shared object file"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %q does not say %q", err, want)
			}
		}
	})
	t.Run("broken", func(t *testing.T) {
		install(t, root, "400.1", "-DBROKEN")
		for range 3 {
			if err := lib.Init(); !errors.Is(err, nvml.DriverNotLoaded) {
				t.Errorf("Init: %v, want DRIVER_NOT_LOADED", err)
			}
		}
		if got := len(lib.(*library).known); got != 1 {
			t.Errorf("%d libraries loaded, want one however often it is tried", got)
		}
		if _, err := lib.DeviceGetCount(); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("DeviceGetCount: %v, want UNINITIALIZED", err)
		}
		if err := lib.Shutdown(); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("Shutdown: %v, want UNINITIALIZED", err)
		}
	})
	t.Run("another module", func(t *testing.T) {
		module := filepath.Join(machine, "sys/module/nvidia/version")
		must(t, os.MkdirAll(filepath.Dir(module), 0o755))
		install(t, root, "403.1", fmt.Sprintf("-DMODULE=%q", module))
		must(t, os.WriteFile(module, []byte("402.7\n"), 0o600))
		err := lib.Init()
		const want = "of version 403.1 and the loaded kernel module is of 402.7: "
		if !errors.Is(err, nvml.LibRMVersionMismatch) || !strings.Contains(err.Error(), want) {
			t.Errorf("Init: %v, want %s", err, want)
		}
		must(t, os.WriteFile(module, []byte("403.1\n"), 0o600))
		must(t, lib.Init())
		must(t, lib.Shutdown())
	})
	t.Run("cannot be closed", func(t *testing.T) {
		install(t, root, "405.1", "-DSTUBBORN")
		must(t, lib.Init())
		if err := lib.Shutdown(); !errors.Is(err, nvml.Unknown) {
			t.Errorf("Shutdown: %v, want UNKNOWN", err)
		}
	})
	t.Run("old", func(t *testing.T) { install(t, root, "410.1", "-DTROUBLE"); old(t, lib) })
	t.Run("new", func(t *testing.T) { install(t, root, "580.1", "-DNEW", "-DTROUBLE"); renewed(t, lib) })
	t.Run("cutting", func(t *testing.T) { instances(t, lib) })
	t.Run("conformance", func(t *testing.T) {
		for name, nodes := range map[string][]string{"no right": nil, "to monitor": {monitor}, "both": {configure, monitor}} {
			t.Run(name, func(t *testing.T) {
				grant(t, nodes...)
				nvmltest.Run(t, func(*testing.T) nvml.Library { return lib }, nvmltest.Expect{GPUs: 2, Partitions: 2})
			})
		}
	})
	t.Run("codes", func(t *testing.T) { install(t, root, "581.1", "-DNEW"); sameCodes(t, lib); modes(t, lib) })
	t.Run("no longer a library", func(t *testing.T) {
		install(t, root, "590.1")
		must(t, os.WriteFile(filepath.Join(root, "usr/lib64/libnvidia-ml.so.590.1"), []byte("#!"), 0o600))
		if err := lib.Init(); !errors.Is(err, nvml.LibraryNotFound) || !strings.Contains(err.Error(), "590.1") {
			t.Errorf("Init: %v, want LIBRARY_NOT_FOUND and which file", err)
		}
	})
	t.Run("WSL", func(t *testing.T) {
		must(t, os.MkdirAll(filepath.Join(machine, "dev"), 0o755))
		must(t, os.WriteFile(filepath.Join(machine, "dev/dxg"), nil, 0o600))
		if err := lib.Init(); !errors.Is(err, nvml.NotSupported) || !errors.Is(err, errWSL) {
			t.Errorf("Init: %v, want NOT_SUPPORTED and why", err)
		}
	})
}

// gpus are the GPUs of testdata/fake.c, as a scan must find them.
func gpus() []sharing.GPU {
	gpu := func(index, minor, node int, bus string) sharing.GPU {
		return sharing.GPU{
			UUID:  strings.ReplaceAll("GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", "x", string(rune('0'+index))),
			Index: index, Minor: minor, PCIBusID: bus, Model: "NVIDIA Fake A100-SXM4-40GB",
			Memory: 40 << 30, Brand: "Nvidia", Architecture: "ampere", ComputeCapability: "8.0", NUMANode: node,
		}
	}
	partition := func(index int) sharing.Partition {
		return sharing.Partition{
			UUID: "MIG-00000000-0000-0000-0000-0000000000a" + string(rune('0'+index)), Index: index,
			Profile: mig.Profile{Compute: 1, Slices: 1, MemoryGB: 5}, GI: 7 + index,
			Placement: mig.Placement{Start: index, Size: 1}, Memory: 4864 << 20,
			Attributes: sharing.PartitionAttributes{
				MemoryMiB: 4864, Multiprocessors: 14, GPUSlices: 1, ComputeSlices: 1,
				CopyEngines: 1, Decoders: 2, Encoders: 3, JPEGEngines: 4, OFAEngines: 5,
			},
		}
	}
	gpus := []sharing.GPU{gpu(0, 0, -1, "00000000:3B:00.0"), gpu(1, 1, 1, "00010000:3C:00.0")}
	gpus[0].MIGCapable, gpus[1].MIGCapable = true, true
	gpus[0].PCIDevice, gpus[1].PCIDevice = 0x20B010DE, 0x20B010DE
	gpus[1].MIG, gpus[1].MIGPending = true, true
	gpus[1].Clique = "ab000000-0000-0000-0000-0000000000cd.7"
	gpus[1].Partitions = []sharing.Partition{partition(0), partition(2)}
	return gpus
}

// scan is the GPUs that are found.
func scan(t *testing.T, lib nvml.Library) []sharing.GPU {
	t.Helper()
	gpus, err := nvml.Scan(lib)
	must(t, err)
	return gpus
}

// joinedCluster is the cluster of the second GPU's fabric.
const joinedCluster = "ab000000-0000-0000-0000-0000000000cd"

// old checks that a driver without newer calls can be read, and that a missing call is an error and does not end
// the process.
func old(t *testing.T, lib nvml.Library) {
	if diff := cmp.Diff(gpus(), scan(t, lib), cmpopts.IgnoreFields(sharing.GPU{}, "Links")); diff != "" {
		t.Errorf("inventory (-want +got):\n%s", diff)
	}
	must(t, lib.Init())
	must(t, lib.Init())
	must(t, lib.Shutdown())
	if version, err := lib.SystemGetDriverVersion(); version != "410.1" || err != nil {
		t.Errorf("version %q, %v, want 410.1 after one Shutdown of two", version, err)
	}
	if version, err := lib.SystemGetCudaDriverVersion(); version != 12080 || err != nil {
		t.Errorf("CUDA version %d, %v, want 12080", version, err)
	}
	gpu, err := lib.DeviceGetHandleByIndex(1)
	must(t, err)
	for name, call := range missing(lib, gpu) {
		if err := call(); !errors.Is(err, nvml.FunctionNotFound) {
			t.Errorf("%s: %v, want FUNCTION_NOT_FOUND", name, err)
		}
	}
	fabric, err := lib.DeviceGetGpuFabricInfo(gpu)
	if want := (nvml.FabricInfo{Cluster: joinedCluster, Clique: 7, State: nvml.FabricCompleted}); fabric != want || err != nil {
		t.Errorf("fabric %+v, %v, want %+v", fabric, err, want)
	}
	profile, err := lib.DeviceGetGpuInstanceProfileInfo(gpu, 0)
	if want := (nvml.GPUInstanceProfile{ID: 19, Slices: 1, Instances: 7, MemoryMB: 4864, Engines: instanceEngines}); profile != want || err != nil {
		t.Errorf("profile %+v, %v, want %+v", profile, err, want)
	}
	if event := event(t, lib, gpu); event.GI != nvml.WholeGPU || event.CI != nvml.WholeGPU {
		t.Errorf("event of partition %d, %d, want the whole GPU: the driver knows no partitions", event.GI, event.CI)
	}
	must(t, lib.Shutdown())
	if _, err := lib.DeviceGetUUID(gpu); !errors.Is(err, nvml.Uninitialized) {
		t.Errorf("after the last Shutdown: %v, want UNINITIALIZED", err)
	}
	must(t, lib.Init())
	defer func() { must(t, lib.Shutdown()) }()
	if _, err := lib.DeviceGetUUID(gpu); !errors.Is(err, nvml.InvalidArgument) {
		t.Errorf("a handle from before: %v, want INVALID_ARGUMENT", err)
	}
}

// missing are calls that the old driver does not have.
func missing(lib nvml.Library, gpu nvml.Device) map[string]func() error {
	return map[string]func() error{
		"DeviceGetFieldValues(230)":           func() error { _, err := lib.DeviceGetFieldValues(gpu, nvml.RecoveryAction); return err },
		"DeviceGetMarginTemperature":          func() error { _, err := lib.DeviceGetMarginTemperature(gpu); return err },
		"DeviceGetRemappedRows":               func() error { _, err := lib.DeviceGetRemappedRows(gpu); return err },
		"DeviceGetRetiredPagesPendingStatus":  func() error { _, err := lib.DeviceGetRetiredPagesPendingStatus(gpu); return err },
		"DeviceGetComputeRunningProcesses":    func() error { _, err := lib.DeviceGetComputeRunningProcesses(gpu); return err },
		"DeviceGetMPSComputeRunningProcesses": func() error { _, err := lib.DeviceGetMPSComputeRunningProcesses(gpu); return err },
		"DeviceGetUtilizationRates":           func() error { _, err := lib.DeviceGetUtilizationRates(gpu); return err },
		"DeviceGetProcessUtilization":         func() error { _, err := lib.DeviceGetProcessUtilization(gpu, 0); return err },
		"DeviceGetCurrentClocksEventReasons":  func() error { _, err := lib.DeviceGetCurrentClocksEventReasons(gpu); return err },
		"DeviceGetPowerUsage":                 func() error { _, err := lib.DeviceGetPowerUsage(gpu); return err },
		"DeviceGetTotalEnergyConsumption":     func() error { _, err := lib.DeviceGetTotalEnergyConsumption(gpu); return err },
		"DeviceGetMemoryErrorCounter":         func() error { _, err := lib.DeviceGetMemoryErrorCounter(gpu, nvml.MemoryErrorCounter{}); return err },
		"DeviceSetMigMode":                    func() error { _, err := lib.DeviceSetMigMode(gpu, true); return err },
		"DeviceGetGpuInstances(19)":           func() error { _, err := lib.DeviceGetGpuInstances(gpu, 19); return err },
		"DeviceGetTopologyCommonAncestor":     func() error { _, err := lib.DeviceGetTopologyCommonAncestor(gpu, gpu); return err },
		"DeviceGetNvLinkState(17)":            func() error { _, err := lib.DeviceGetNvLinkState(gpu, 17); return err },
		"SystemGetConfComputeState":           func() error { _, err := lib.SystemGetConfComputeState(); return err },
		"SystemGetConfComputeGpusReadyState":  func() error { _, err := lib.SystemGetConfComputeGpusReadyState(); return err },
		"DeviceGetNvLinkRemotePciInfo(0)":     func() error { _, err := lib.DeviceGetNvLinkRemotePciInfo(gpu, 0); return err },
	}
}

// event waits for the fake's only event, and then without one.
func event(t *testing.T, lib nvml.Library, gpu nvml.Device) nvml.Event {
	t.Helper()
	set, err := lib.EventSetCreate()
	must(t, err)
	must(t, lib.DeviceRegisterEvents(gpu, nvml.EventXIDCritical, set))
	event, err := lib.EventSetWait(set, time.Microsecond)
	must(t, err)
	if event.Device != gpu || event.Type != nvml.EventXIDCritical || event.Data != 94 {
		t.Errorf("event %+v, want XID 94 of GPU 1", event)
	}
	if _, err := lib.EventSetWait(set, time.Second); !errors.Is(err, nvml.Timeout) {
		t.Errorf("EventSetWait: %v, want TIMEOUT", err)
	}
	must(t, lib.EventSetFree(set))
	if err := lib.EventSetFree(set); !errors.Is(err, nvml.InvalidArgument) {
		t.Errorf("EventSetFree again: %v, want INVALID_ARGUMENT", err)
	}
	return event
}

// renewed checks that the next Init opens the driver that was installed in place of the current one.
func renewed(t *testing.T, lib nvml.Library) {
	if diff := cmp.Diff(gpus(), scan(t, lib), cmpopts.IgnoreFields(sharing.GPU{}, "Links", "Health")); diff != "" {
		t.Errorf("inventory (-want +got):\n%s", diff)
	}
	must(t, lib.Init())
	defer func() { must(t, lib.Shutdown()) }()
	if version, err := lib.SystemGetDriverVersion(); version != "580.1" || err != nil {
		t.Errorf("version %q, %v, want 580.1", version, err)
	}
	first, err := lib.DeviceGetHandleByIndex(0)
	must(t, err)
	gpu, err := lib.DeviceGetHandleByIndex(1)
	must(t, err)
	rows, err := lib.DeviceGetRemappedRows(first)
	if want := (nvml.RemappedRows{Correctable: 1, Uncorrectable: 2, Pending: true}); rows != want || err != nil {
		t.Errorf("rows %+v, %v, want %+v", rows, err, want)
	}
	if _, err := lib.DeviceGetRemappedRows(gpu); err == nil || err.Error() != "nvml: DeviceGetRemappedRows: NOT_SUPPORTED" {
		t.Errorf("error %v, want the driver's code with the call", err)
	}
	if action, err := lib.DeviceGetFieldValues(gpu, nvml.RecoveryAction); action != nvml.RecoverReset || err != nil {
		t.Errorf("recovery action %d, %v, want a reset", action, err)
	}
	if margin, err := lib.DeviceGetMarginTemperature(gpu); margin != -5 || err != nil {
		t.Errorf("margin of temperature %d, %v, want -5", margin, err)
	}
	if margin, err := lib.DeviceGetFieldValues(gpu, nvml.SlowdownMargin); int32(margin) != -2 || err != nil {
		t.Errorf("margin of the slowdown %d, %v, want -2", int32(margin), err)
	}
	if _, err := lib.DeviceGetTemperatureThreshold(gpu, nvml.TemperatureSlowdown); !errors.Is(err, nvml.NotSupported) {
		t.Errorf("threshold of the slowdown: %v, want NOT_SUPPORTED", err)
	}
	if _, err := lib.DeviceGetFieldValues(gpu, 1); !errors.Is(err, nvml.NotSupported) {
		t.Errorf("a field that the driver does not have: %v, want NOT_SUPPORTED", err)
	}
	fabric, err := lib.DeviceGetGpuFabricInfo(gpu)
	if want := (nvml.FabricInfo{Cluster: joinedCluster, Clique: 7, State: nvml.FabricCompleted, HealthMask: 0xaa, HealthSummary: nvml.FabricHealthy}); fabric != want || err != nil {
		t.Errorf("fabric %+v, %v, want %+v", fabric, err, want)
	}
	fabric, err = lib.DeviceGetGpuFabricInfo(first) // By version 2.
	if fabric.State != nvml.FabricNotSupported || fabric.HealthMask != 5 || err != nil {
		t.Errorf("fabric of the first GPU %+v, %v", fabric, err)
	}
	if on, err := lib.SystemGetConfComputeState(); !on || err != nil {
		t.Errorf("confidential computing %t, %v", on, err)
	}
	if ready, err := lib.SystemGetConfComputeGpusReadyState(); ready != nvml.ConfComputeReady || err != nil {
		t.Errorf("ready state %d, %v", ready, err)
	}
	processes, err := lib.DeviceGetComputeRunningProcesses(first)
	must(t, err)
	if diff := cmp.Diff([]nvml.Process{{PID: 4711, Memory: 1 << 20}, {PID: 4712, Memory: nvml.MemoryUnknown}}, processes); diff != "" {
		t.Errorf("processes (-want +got):\n%s", diff)
	}
	metered(t, lib, first, gpu)
	profile, err := lib.DeviceGetGpuInstanceProfileInfo(gpu, 0)
	must(t, err)
	if want := (nvml.GPUInstanceProfile{ID: 19, Slices: 1, Instances: 7, MemoryMB: 4864, Engines: instanceEngines, Name: "MIG 1g.5gb"}); profile != want {
		t.Errorf("profile %+v, want %+v", profile, want)
	}
	grant(t)
	set, err := lib.EventSetCreate()
	must(t, err)
	must(t, lib.DeviceRegisterEvents(gpu, nvml.EventXIDCritical, set))
	if event, err := lib.EventSetWait(set, time.Millisecond); !errors.Is(err, nvml.Timeout) {
		t.Errorf("an event of a partition, without the right to monitor: %+v, %v, want TIMEOUT", event, err)
	}
	must(t, lib.EventSetFree(set))
	grant(t, configure, monitor)
	if event := event(t, lib, gpu); event.GI != 9 || event.CI != 0 {
		t.Errorf("event of partition %d, %d, want 9, 0", event.GI, event.CI)
	}
	if _, err := lib.DeviceGetHandleByIndex(-1); !errors.Is(err, nvml.InvalidArgument) || !bytes.Contains([]byte(err.Error()), []byte("(-1)")) {
		t.Errorf("index -1: %v, want INVALID_ARGUMENT", err)
	}
}

// instances checks the calls that list and change MIG instances, on the fake that has them.
func instances(t *testing.T, lib nvml.Library) {
	must(t, lib.Init())
	defer func() { must(t, lib.Shutdown()) }()
	first, err := lib.DeviceGetHandleByIndex(0)
	must(t, err)
	gpu, err := lib.DeviceGetHandleByIndex(1)
	must(t, err)

	// The status of the activation and the status of the call must not be mixed up. The mode is pending either way.
	for _, test := range []struct {
		gpu        nvml.Device
		on         bool
		activation nvml.Return
	}{{first, true, nvml.InUse}, {first, false, nvml.Success}, {gpu, false, nvml.ResetRequired}, {gpu, true, nvml.Success}} {
		activation, err := lib.DeviceSetMigMode(test.gpu, test.on)
		if activation != test.activation || err != nil {
			t.Errorf("MIG %t: %v, %v, want %v and no error", test.on, activation, err, test.activation)
		}
		if mode, err := lib.DeviceGetMigMode(test.gpu); mode != (nvml.MIGMode{Current: test.gpu == gpu, Pending: test.on}) || err != nil {
			t.Errorf("MIG %t: then the mode is %+v, %v", test.on, mode, err)
		}
	}

	placements, err := lib.DeviceGetGpuInstancePossiblePlacements(gpu, 19)
	must(t, err)
	if len(placements) != 7 || placements[6] != (mig.Placement{Start: 6, Size: 1}) {
		t.Errorf("placements %v, want 0:1 to 6:1", placements)
	}
	instances, err := lib.DeviceGetGpuInstances(gpu, 19)
	must(t, err)
	known, err := lib.DeviceGetGpuInstanceById(gpu, 9)
	must(t, err)
	if len(instances) != 2 || instances[1] != known {
		t.Errorf("instances %v, want two, the second %d", instances, known)
	}
	if _, err := lib.DeviceGetGpuInstances(gpu, -1); !errors.Is(err, nvml.InvalidArgument) {
		t.Errorf("profile -1: %v, want INVALID_ARGUMENT", err)
	}
	if err := lib.GpuInstanceDestroy(known); !errors.Is(err, nvml.InUse) {
		t.Errorf("destroy one in use: %v, want IN_USE", err)
	}
	processes, err := lib.DeviceGetMPSComputeRunningProcesses(first)
	must(t, err)
	if diff := cmp.Diff([]nvml.Process{{PID: 4713}}, processes); diff != "" {
		t.Errorf("MPS clients (-want +got):\n%s", diff)
	}
	if processes, err = lib.DeviceGetGraphicsRunningProcesses(first); len(processes) > 0 || err != nil {
		t.Errorf("graphics processes %v, %v, want none", processes, err)
	}
	instanceHole(t, lib, gpu)
}

// instanceHole makes an instance, with a compute instance, and destroys both.
func instanceHole(t *testing.T, lib nvml.Library, gpu nvml.Device) {
	t.Helper()
	if _, err := lib.DeviceCreateGpuInstanceWithPlacement(gpu, 19, mig.Placement{Start: 0, Size: 1}); !errors.Is(err, nvml.InsufficientResources) {
		t.Errorf("create where there is no room: %v, want INSUFFICIENT_RESOURCES", err)
	}
	instance, err := lib.DeviceCreateGpuInstanceWithPlacement(gpu, 19, mig.Placement{Start: 1, Size: 1})
	must(t, err)
	profile, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, 0)
	if want := (nvml.ComputeInstanceProfile{ID: 5, Slices: 1, Instances: 1}); profile != want || err != nil {
		t.Errorf("profile %+v, %v, want %+v", profile, err, want)
	}
	if _, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, 9); !errors.Is(err, nvml.InvalidArgument) {
		t.Errorf("profile 9: %v, want INVALID_ARGUMENT", err)
	}
	compute, err := lib.GpuInstanceCreateComputeInstance(instance, profile.ID)
	must(t, err)
	listed, err := lib.GpuInstanceGetComputeInstances(instance, profile.ID)
	if err != nil || len(listed) != 1 || listed[0] != compute {
		t.Errorf("compute instances %v, %v, want %d", listed, err, compute)
	}
	device, err := lib.DeviceGetMigDeviceHandleByIndex(gpu, 1)
	must(t, err)
	must(t, lib.ComputeInstanceDestroy(compute))
	if uuid, err := lib.DeviceGetUUID(device); !errors.Is(err, nvml.InvalidArgument) {
		t.Errorf("UUID of a MIG device that is gone: %s, %v, want INVALID_ARGUMENT", uuid, err)
	}
	if err := lib.GpuInstanceDestroy(instance); !errors.Is(err, nvml.InUse) {
		t.Errorf("destroy just after the compute instance: %v, want IN_USE", err)
	}
	must(t, lib.GpuInstanceDestroy(instance))
	for name, err := range map[string]error{
		"ComputeInstanceDestroy": lib.ComputeInstanceDestroy(compute), "GpuInstanceDestroy": lib.GpuInstanceDestroy(instance),
	} {
		if !errors.Is(err, nvml.InvalidArgument) {
			t.Errorf("%s again: %v, want INVALID_ARGUMENT: the handle may be another's by now", name, err)
		}
	}
}

// modes checks how a change of MIG mode affects an unused GPU.
func modes(t *testing.T, lib nvml.Library) {
	grant(t, configure, monitor)
	must(t, lib.Init())
	defer func() { must(t, lib.Shutdown()) }()
	gpu, err := lib.DeviceGetHandleByIndex(0)
	must(t, err)
	before, err := lib.DeviceGetMinorNumber(gpu)
	must(t, err)
	if _, err := lib.DeviceGetGpuInstanceProfileInfo(gpu, 0); !errors.Is(err, nvml.NotSupported) {
		t.Errorf("profile while MIG is off: %v, want NOT_SUPPORTED", err)
	}
	activation, err := lib.DeviceSetMigMode(gpu, true)
	mode, _ := lib.DeviceGetMigMode(gpu)
	if want := (nvml.MIGMode{Current: true, Pending: true}); activation != nvml.Success || err != nil || mode != want {
		t.Errorf("MIG on: %v, %v, then %+v", activation, err, mode)
	}
	if minor, err := lib.DeviceGetMinorNumber(gpu); minor == before || err != nil {
		t.Errorf("minor number %d before and %d after, %v", before, minor, err)
	}
	if _, err := lib.DeviceGetGpuInstanceProfileInfo(gpu, 0); err != nil {
		t.Errorf("profile with MIG on: %v", err)
	}
}

// metered checks the fake's use of its GPUs. The second one has MIG enabled.
func metered(t *testing.T, lib nvml.Library, whole, partitioned nvml.Device) {
	t.Helper()
	rates, err := lib.DeviceGetUtilizationRates(whole)
	if want := (nvml.Utilization{GPU: 42, Memory: 7}); rates != want || err != nil {
		t.Errorf("rates %+v, %v, want %+v", rates, err, want)
	}
	reasons, err := lib.DeviceGetCurrentClocksEventReasons(whole)
	if want := nvml.SoftwarePowerCap | nvml.HardwareThermalSlowdown; reasons != want || err != nil {
		t.Errorf("clocks %#x, %v, want %#x", reasons, err, want)
	}
	if milliwatts, err := lib.DeviceGetPowerUsage(partitioned); milliwatts != 61250 || err != nil {
		t.Errorf("power %d, %v, want 61250 mW", milliwatts, err)
	}
	if millijoules, err := lib.DeviceGetTotalEnergyConsumption(partitioned); millijoules != 5_000_000_000_500 || err != nil {
		t.Errorf("energy %d, %v, want 5000000000500 mJ", millijoules, err)
	}
	// The driver gets three numbers; they must not be swapped.
	for counter, want := range map[nvml.MemoryErrorCounter]uint64{
		{Location: nvml.DRAM}: 2, {Location: nvml.SRAM}: 7, {Location: nvml.DRAM, Uncorrected: true}: 102, {Location: nvml.DRAM, Aggregate: true}: 12,
	} {
		if count, err := lib.DeviceGetMemoryErrorCounter(whole, counter); count != want || err != nil {
			t.Errorf("%+v: %d, %v, want %d", counter, count, err, want)
		}
	}
	samples, err := lib.DeviceGetProcessUtilization(whole, 0)
	must(t, err)
	want := []nvml.ProcessSample{{PID: 4711, Time: 1000, SM: 30, Memory: 3}, {PID: 4711, Time: 2000, SM: 50, Memory: 5}}
	if diff := cmp.Diff(want, samples); diff != "" {
		t.Errorf("samples (-want +got):\n%s", diff)
	}
	for name, test := range map[string]struct {
		device   nvml.Device
		lastSeen uint64
		want     nvml.Return
	}{
		"more came while it was asked": {whole, 1000, nvml.InsufficientSize},
		"no room needed":               {whole, 1500, nvml.NotFound},
		"nothing new":                  {whole, 2000, nvml.NotFound},
		"MIG enabled":                  {partitioned, 0, nvml.NotSupported},
	} {
		if _, err := lib.DeviceGetProcessUtilization(test.device, test.lastSeen); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %s", name, err, test.want)
		}
	}
}
