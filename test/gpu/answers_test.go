package gpu

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// TestAnswers notes how each call that reads is answered, for each GPU, MIG device and
// instance: the return code, or how an enumeration goes. docs/nvml.md says what nvml.h
// promises, and docs/hardware.md what is to be learnt from it.
func TestAnswers(t *testing.T) {
	program(t)
	lib := open(t)
	namespace, err := os.Readlink("/proc/self/ns/pid")
	note(t, "PID namespace (4026531836 is the host's)", fmt.Sprint(namespace, " ", err))
	count, err := lib.DeviceGetCount()
	must(t, err)
	for index := range count {
		gpu, err := lib.DeviceGetHandleByIndex(index)
		if err != nil {
			note(t, fmt.Sprintf("GPU %d", index), err.Error())
			continue
		}
		again, err := lib.DeviceGetHandleByIndex(index)
		note(t, fmt.Sprintf("GPU %d has the same handle again", index), err == nil && again == gpu)
		note(t, fmt.Sprintf("GPU %d", index), codes(lib, gpu))
		note(t, fmt.Sprintf("GPU %d, links", index), enumerate(func(link int) error { _, err := lib.DeviceGetNvLinkState(gpu, link); return err }))
		note(t, fmt.Sprintf("GPU %d, profiles", index), enumerate(func(enum int) error {
			profile, err := lib.DeviceGetGpuInstanceProfileInfo(gpu, enum)
			if err == nil {
				_, placements := lib.DeviceGetGpuInstancePossiblePlacements(gpu, profile.ID)
				_, instances := lib.DeviceGetGpuInstances(gpu, profile.ID)
				note(t, fmt.Sprintf("GPU %d, profile %d", index, profile.ID), fmt.Sprintf("%+v, placements %s, instances %s", profile, code(placements), code(instances)))
			}
			return err
		}))
		note(t, fmt.Sprintf("GPU %d, MIG devices", index), enumerate(func(i int) error {
			device, err := lib.DeviceGetMigDeviceHandleByIndex(gpu, i)
			if err == nil {
				note(t, fmt.Sprintf("MIG device %d:%d", index, i), codes(lib, device))
				noteInstances(t, lib, gpu, device)
			}
			return err
		}))
	}
}

// TestWaitEnds notes whether a wait for events, of which there should be none, ends
// before its time: nvml.h allows that.
func TestWaitEnds(t *testing.T) {
	program(t)
	lib := open(t)
	set, err := lib.EventSetCreate()
	must(t, err)
	defer func() { must(t, lib.EventSetFree(set)) }()
	gpu, err := lib.DeviceGetHandleByIndex(0)
	must(t, err)
	supported, err := lib.DeviceGetSupportedEventTypes(gpu)
	note(t, "events of GPU 0", fmt.Sprintf("%#x, %s", supported, code(err)))
	note(t, "registered", code(lib.DeviceRegisterEvents(gpu, supported&(nvml.EventXIDCritical|nvml.EventDoubleBitECC), set)))
	for range 5 {
		start := time.Now()
		_, err := lib.EventSetWait(set, 200*time.Millisecond)
		note(t, "a wait of 200ms", fmt.Sprintf("%s after %s", code(err), time.Since(start)))
	}
}

// noteInstances notes the way from a MIG device to its instances.
func noteInstances(t *testing.T, lib nvml.Library, gpu, device nvml.Device) {
	t.Helper()
	gi, err := lib.DeviceGetGpuInstanceId(device)
	if err != nil {
		return
	}
	instance, err := lib.DeviceGetGpuInstanceById(gpu, gi)
	note(t, "GPU instance "+fmt.Sprint(gi), code(err))
	if err != nil {
		return
	}
	again, err := lib.DeviceGetGpuInstanceById(gpu, gi)
	note(t, "the same handle again", err == nil && again == instance)
	info, err := lib.GpuInstanceGetInfo(instance)
	note(t, "its place", fmt.Sprintf("%+v, %s", info, code(err)))
	note(t, "its profiles", enumerate(func(enum int) error {
		_, err := lib.GpuInstanceGetComputeInstanceProfileInfo(instance, enum)
		return err
	}))
	ci, err := lib.DeviceGetComputeInstanceId(device)
	if err != nil {
		return
	}
	compute, err := lib.GpuInstanceGetComputeInstanceById(instance, ci)
	note(t, "compute instance "+fmt.Sprint(ci), code(err))
	if err == nil {
		slices, err := lib.ComputeInstanceGetInfo(compute)
		note(t, "its slices", fmt.Sprintf("%+v, %s", slices, code(err)))
	}
}

// codes are the return codes of all calls that take a device and nothing else.
func codes(lib nvml.Library, device nvml.Device) map[string]string {
	answers := map[string]string{}
	library := reflect.TypeFor[nvml.Library]()
	for i := range library.NumMethod() {
		method := library.Method(i)
		if !strings.HasPrefix(method.Name, "DeviceGet") || method.Type.NumIn() != 1 || method.Type.In(0) != reflect.TypeOf(device) {
			continue
		}
		out := reflect.ValueOf(lib).MethodByName(method.Name).Call([]reflect.Value{reflect.ValueOf(device)})
		err, _ := out[len(out)-1].Interface().(error)
		answers[method.Name] = code(err)
	}
	return answers
}

// enumerate is how a call answers for 0, 1, …, without what follows when the same
// code comes again and again.
func enumerate(get func(int) error) []string {
	var answers []string
	for i := range 40 {
		answers = append(answers, code(get(i)))
	}
	for len(answers) > 1 && answers[len(answers)-1] == answers[len(answers)-2] {
		answers = answers[:len(answers)-1]
	}
	return answers
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
