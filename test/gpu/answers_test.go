package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/driver"
	"github.com/virgate/virgate/mig"
)

// TestAnswers notes the answer to each reading call, for each GPU, MIG device and instance: the value or
// the return code, or the course of an enumeration. docs/internals/nvml.md has what nvml.h promises, and
// docs/internals/hardware.md what the findings answer.
func TestAnswers(t *testing.T) {
	program(t)
	lib := open(t)
	var gpus []nvml.Device
	for index := range count(t, lib) {
		of := "GPU " + strconv.Itoa(index)
		gpu, err := lib.DeviceGetHandleByIndex(index)
		note(t, of, "lookup", code(err))
		if err != nil {
			continue
		}
		gpus = append(gpus, gpu)
		again, err := lib.DeviceGetHandleByIndex(index)
		note(t, of, "same handle again", err == nil && again == gpu)
		noteDevice(t, lib, of, gpu)
		noteProfiles(t, lib, of, gpu)
		note(t, of, "MIG devices", enumerate(func(i int) (any, error) {
			device, err := lib.DeviceGetMigDeviceHandleByIndex(gpu, i)
			if err != nil {
				return nil, err
			}
			of := fmt.Sprintf("MIG device %d:%d", index, i)
			again, failed := lib.DeviceGetMigDeviceHandleByIndex(gpu, i)
			note(t, of, "same handle again", failed == nil && again == device)
			noteDevice(t, lib, of, device)
			noteInstances(t, lib, of, gpu, device)
			return "there", nil
		}))
	}
	for a, gpu := range gpus {
		for b, other := range gpus[:a] {
			level, err := lib.DeviceGetTopologyCommonAncestor(gpu, other)
			note(t, fmt.Sprintf("GPUs %d and %d", a, b), "common ancestor", answer(level, err))
		}
	}
}

// noteDevice notes a GPU's or MIG device's answers to the calls that take it and at most a number.
func noteDevice(t *testing.T, lib nvml.Library, of string, device nvml.Device) {
	t.Helper()
	answers := map[string]any{}
	library := reflect.TypeFor[nvml.Library]()
	for i := range library.NumMethod() {
		method := library.Method(i)
		if !strings.HasPrefix(method.Name, "DeviceGet") || method.Type.NumIn() != 1 || method.Type.In(0) != reflect.TypeOf(device) {
			continue
		}
		out := reflect.ValueOf(lib).MethodByName(method.Name).Call([]reflect.Value{reflect.ValueOf(device)})
		err, _ := out[1].Interface().(error)
		answers[method.Name] = answer(out[0].Interface(), err)
	}
	note(t, of, "answers", answers)
	action, err := lib.DeviceGetFieldValues(device, nvml.RecoveryAction)
	note(t, of, "recovery action", answer(action, err))
	slowdown, err := lib.DeviceGetTemperatureThreshold(device, nvml.TemperatureSlowdown)
	note(t, of, "slowdown", answer(slowdown, err))
	margin, err := lib.DeviceGetFieldValues(device, nvml.SlowdownMargin)
	note(t, of, "margin of the slowdown", answer(int32(margin), err))
	counters := map[string]any{}
	for location := range nvml.SRAM + 1 {
		for _, counter := range []nvml.MemoryErrorCounter{{Location: location}, {Location: location, Uncorrected: true}, {Location: location, Aggregate: true}, {Location: location, Uncorrected: true, Aggregate: true}} {
			count, err := lib.DeviceGetMemoryErrorCounter(device, counter)
			counters[fmt.Sprintf("%+v", counter)] = answer(count, err)
		}
	}
	note(t, of, "memory errors", counters)
	seen := map[int]string{}
	for _, list := range []func(nvml.Device) ([]nvml.Process, error){
		lib.DeviceGetComputeRunningProcesses, lib.DeviceGetGraphicsRunningProcesses, lib.DeviceGetMPSComputeRunningProcesses,
	} {
		processes, _ := list(device)
		for _, p := range processes {
			seen[p.PID] = command(p.PID)
		}
	}
	note(t, of, "listed processes", seen)
	samples, err := lib.DeviceGetProcessUtilization(device, 0)
	note(t, of, "process samples", answer(samples, err))
	note(t, of, "links", enumerate(func(link int) (any, error) {
		active, err := lib.DeviceGetNvLinkState(device, link)
		if err != nil {
			return nil, err
		}
		remote, err := lib.DeviceGetNvLinkRemotePciInfo(device, link)
		return fmt.Sprintf("active %t, to %v", active, answer(remote.BusID, err)), nil
	}))
}

// noteProfiles notes the GPU's profiles. For each of them, and for those that are published but not listed,
// it notes the placements and numbers of instances.
func noteProfiles(t *testing.T, lib nvml.Library, of string, gpu nvml.Device) {
	t.Helper()
	var ids []int
	note(t, of, "profiles", enumerate(func(enum int) (any, error) {
		profile, err := lib.DeviceGetGpuInstanceProfileInfo(gpu, enum)
		if err != nil {
			return nil, err
		}
		ids = append(ids, profile.ID)
		return fmt.Sprintf("%+v", profile), nil
	}))
	if pci, err := lib.DeviceGetPciInfo(gpu); err == nil {
		published, _ := mig.GeometryOf(uint16(pci.DeviceID >> 16))
		for _, profile := range published.Profiles {
			ids = append(ids, profile.ID)
		}
	}
	if len(ids) == 0 {
		ids = []int{0} // To note the refusal.
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		of := fmt.Sprintf("%s, profile %d", of, id)
		places, err := lib.DeviceGetGpuInstancePossiblePlacements(gpu, id)
		note(t, of, "placements", answer(fmt.Sprint(places), err))
		instances, err := lib.DeviceGetGpuInstances(gpu, id)
		note(t, of, "instances", answer(len(instances), err))
	}
}

// noteInstances notes how a MIG device leads to its instances.
func noteInstances(t *testing.T, lib nvml.Library, of string, gpu, device nvml.Device) {
	t.Helper()
	gi, err := lib.DeviceGetGpuInstanceId(device)
	if err != nil {
		return
	}
	instance, err := lib.DeviceGetGpuInstanceById(gpu, gi)
	note(t, of, "GPU instance", answer(gi, err))
	if err != nil {
		return
	}
	again, err := lib.DeviceGetGpuInstanceById(gpu, gi)
	note(t, of, "same GPU instance again", err == nil && again == instance)
	info, err := lib.GpuInstanceGetInfo(instance)
	note(t, of, "place", answer(info, err))
	note(t, of, "compute profiles", enumerate(func(enum int) (any, error) {
		profile, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, enum)
		return fmt.Sprintf("%+v", profile), err
	}))
	note(t, of, "compute instances by profile", enumerate(func(id int) (any, error) {
		computes, err := lib.GpuInstanceGetComputeInstances(instance, id)
		return len(computes), err
	}))
	ci, err := lib.DeviceGetComputeInstanceId(device)
	if err != nil {
		return
	}
	compute, err := lib.GpuInstanceGetComputeInstanceById(instance, ci)
	note(t, of, "compute instance", answer(ci, err))
	if err == nil {
		slices, err := lib.ComputeInstanceGetInfo(compute)
		note(t, of, "slices", answer(slices, err))
	}
}

// TestRights notes the process's rights, on which the meaning of the other findings depends.
func TestRights(t *testing.T) {
	program(t)
	note(t, "", "user", os.Geteuid())
	// 4026531836 is the host's PID namespace.
	namespace, err := os.Readlink("/proc/self/ns/pid")
	note(t, "", "PID namespace", answer(namespace, err))
	status, err := os.ReadFile("/proc/self/status")
	must(t, err)
	for line := range strings.Lines(string(status)) {
		if set, found := strings.CutPrefix(line, "CapEff:"); found {
			bits, err := strconv.ParseUint(strings.TrimSpace(set), 16, 64)
			note(t, "", "SYS_ADMIN", answer(bits>>21&1 == 1, err))
		}
	}
	for n := range 2 {
		file, err := os.Open(fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", n+1))
		note(t, "", fmt.Sprintf("nvidia-cap%d", n+1), answer("can be opened", err))
		_ = file.Close()
	}
	for _, name := range []string{"NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES", "NVIDIA_VISIBLE_DEVICES"} {
		note(t, "", name, os.Getenv(name))
	}
	module, err := os.ReadFile("/proc/driver/nvidia/version")
	note(t, "", "kernel module", answer(string(module), err))
}

// TestEvents notes the events that each GPU supports, whether it can be registered for them, and whether a
// wait without events ends early, which nvml.h allows.
func TestEvents(t *testing.T) {
	program(t)
	lib := open(t)
	set, err := lib.EventSetCreate()
	must(t, err)
	defer func() { must(t, lib.EventSetFree(set)) }()
	for index := range count(t, lib) {
		gpu, err := lib.DeviceGetHandleByIndex(index)
		if err != nil {
			continue
		}
		of := "GPU " + strconv.Itoa(index)
		supported, err := lib.DeviceGetSupportedEventTypes(gpu)
		note(t, of, "event types", answer(fmt.Sprintf("%#x", uint64(supported)), err))
		note(t, of, "registering", code(lib.DeviceRegisterEvents(gpu, supported&(nvml.EventXIDCritical|nvml.EventDoubleBitECC), set)))
	}
	for range 5 {
		start := time.Now()
		_, err := lib.EventSetWait(set, 200*time.Millisecond)
		note(t, "", "wait of 200ms", fmt.Sprintf("%s after %s", code(err), elapsed(start)))
	}
}

// TestOpenFiles notes which of the driver's device nodes this process has open at each stage of a session:
// an open node prevents a reset of the GPU. It also notes which other processes have them open, as far as
// /proc shows it.
func TestOpenFiles(t *testing.T) {
	program(t)
	open := func(stage string) { note(t, "", "open files "+stage, driverFiles("self")) }
	open("before Init")
	lib := bare(t)
	open("after Init")
	for index := range count(t, lib) {
		gpu, err := lib.DeviceGetHandleByIndex(index)
		if err != nil {
			continue
		}
		_, _ = lib.DeviceGetMemoryInfo(gpu)
		open(fmt.Sprintf("after looking up GPU %d", index))
		set, err := lib.EventSetCreate()
		must(t, err)
		_ = lib.DeviceRegisterEvents(gpu, nvml.EventXIDCritical, set)
		open(fmt.Sprintf("with an event set of GPU %d", index))
		must(t, lib.EventSetFree(set))
		open(fmt.Sprintf("after the event set of GPU %d", index))
	}
	must(t, lib.Shutdown())
	open("after Shutdown")
	folders, err := filepath.Glob("/proc/[0-9]*")
	must(t, err)
	clients := map[string][]string{}
	for _, folder := range folders {
		pid, _ := strconv.Atoi(filepath.Base(folder))
		if files := driverFiles(filepath.Base(folder)); len(files) > 0 && pid != os.Getpid() {
			clients[fmt.Sprint(pid, " ", command(pid))] = files
		}
	}
	note(t, "", "programs that have the driver open", clients)
	gpus, err := filepath.Glob("/proc/driver/nvidia/gpus/*/information")
	must(t, err)
	for _, path := range gpus {
		information, err := os.ReadFile(path)
		note(t, "", path, answer(string(information), err))
	}
}

// TestRelease checks that a running Node closes the device node of a GPU that it has released, and notes
// what else it has open.
func TestRelease(t *testing.T) {
	program(t)
	lib, err := driver.Open(driver.Options{})
	must(t, err)
	node := nvml.NewNode(lib, nvml.Options{Kernel: driver.Kernel{}})
	ctx, cancel := context.WithCancel(t.Context())
	read, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		ended <- node.Watch(ctx, func() {
			select {
			case read <- struct{}{}:
			default:
			}
		})
	}()
	<-read
	gpus, err := node.Inventory()
	must(t, err)
	for _, gpu := range gpus {
		of, path := "GPU "+strconv.Itoa(gpu.Index), fmt.Sprint("/dev/nvidia", gpu.Minor)
		began := time.Now()
		_, err := node.Release(ctx, gpu.UUID)
		note(t, of, "release", answer(elapsed(began).String(), err))
		files := driverFiles("self")
		note(t, of, "open files while it is released", files)
		if slices.Contains(files, path) {
			t.Errorf("%s is released, and %s is open", of, path)
		}
		must(t, node.Restore(ctx, gpu.UUID, false))
		note(t, of, "open files when it is restored", driverFiles("self"))
	}
	cancel()
	must(t, <-ended)
}

// driverFiles returns the driver's device nodes that the process of /proc has open, sorted.
func driverFiles(process string) []string {
	files := []string{}
	descriptors, _ := filepath.Glob("/proc/" + process + "/fd/*")
	for _, descriptor := range descriptors {
		if path, err := os.Readlink(descriptor); err == nil && strings.HasPrefix(path, "/dev/nvidia") {
			files = append(files, path)
		}
	}
	slices.Sort(files)
	return files
}

// command returns the name of the process's program, in the PID namespace of these tests.
func command(pid int) string {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "not in /proc"
	}
	return strings.TrimSpace(string(name))
}

// enumerate returns a call's answers for 0, 1, …, each a value or a code. It drops repeats of the last one.
func enumerate(get func(int) (any, error)) []any {
	var answers []any
	for i := range 40 {
		answers = append(answers, answer(get(i)))
	}
	for len(answers) > 1 && answers[len(answers)-1] == answers[len(answers)-2] {
		answers = answers[:len(answers)-1]
	}
	return answers
}

// answer returns the value, or the return code of the failed call.
func answer(value any, err error) any {
	if err != nil {
		return code(err)
	}
	return value
}

func code(err error) string {
	if err == nil {
		return nvml.Success.String()
	}
	if code, ok := errors.AsType[nvml.Return](err); ok {
		return code.String()
	}
	return err.Error()
}

func count(t *testing.T, lib nvml.Library) int {
	t.Helper()
	count, err := lib.DeviceGetCount()
	must(t, err)
	return count
}
