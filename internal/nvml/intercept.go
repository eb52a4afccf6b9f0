package nvml

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/mig"
)

// Call is one call of a Library's method, as an Interceptor sees it.
type Call struct {
	// Method is the method's name in Library, for example "DeviceGetUUID".
	Method string
	// Arguments are the method's arguments, in order and with their types.
	Arguments []any
	// Answer is the type of the method's result besides the error; nil for methods that return only
	// an error.
	Answer reflect.Type
}

// String names the call for an error message: the method, with the arguments that tell more than a
// handle does, for example "DeviceGetNvLinkState(3)".
func (c Call) String() string {
	var telling []string
	for _, argument := range c.Arguments {
		switch argument.(type) {
		case int, bool, mig.Placement:
			telling = append(telling, fmt.Sprint(argument))
		}
	}
	if telling == nil {
		return c.Method
	}
	return c.Method + "(" + strings.Join(telling, ", ") + ")"
}

// Interceptor is called in place of a Library's methods. It makes the call with do, at most once
// and from any goroutine, or returns an answer of its own. Its result must have the call's Answer
// type; nil means the zero value. It may be called from several goroutines at once.
type Interceptor func(call Call, do func() (any, error)) (any, error)

// Intercept returns a library that routes calls of these methods, or of all methods if none is
// named, through the interceptor. lib may be nil if the interceptor never calls do.
func Intercept(lib Library, interceptor Interceptor, methods ...string) Library {
	return &intercepted{
		lib:         lib,
		interceptor: interceptor,
		methods:     methods,
	}
}

// intercepted routes all methods of Library through invoke.
type intercepted struct {
	lib         Library
	interceptor Interceptor
	// methods are the intercepted methods; all when empty.
	methods []string
	// deadlines is set by WithDeadlines only; nil for other interceptors.
	deadlines *deadlines
}

func invoke[T any](l *intercepted, method string, do func() (any, error), arguments ...any) (T, error) {
	var answer any
	var err error
	if l.passes(method) {
		answer, err = do()
	} else {
		answer, err = l.interceptor(Call{
			Method:    method,
			Arguments: arguments,
			Answer:    reflect.TypeFor[T](),
		}, do)
	}
	value, _ := answer.(T)
	return value, err
}

// passes reports whether calls of the method bypass the interceptor.
func (l *intercepted) passes(method string) bool {
	return len(l.methods) > 0 && !slices.Contains(l.methods, method)
}

// invoke0, invoke1 and invoke2 are for methods with that many arguments. A call that bypasses the
// interceptor allocates nothing.
func invoke0[T any](l *intercepted, method string, do func(Library) (T, error)) (T, error) {
	if l.passes(method) {
		return do(l.lib)
	}
	return invoke[T](l, method, func() (any, error) { return do(l.lib) })
}

func invoke1[A, T any](l *intercepted, method string, do func(Library, A) (T, error), a A) (T, error) {
	if l.passes(method) {
		return do(l.lib, a)
	}
	return invoke[T](l, method, func() (any, error) { return do(l.lib, a) }, a)
}

func invoke2[A, B, T any](l *intercepted, method string, do func(Library, A, B) (T, error), a A, b B) (T, error) {
	if l.passes(method) {
		return do(l.lib, a, b)
	}
	return invoke[T](l, method, func() (any, error) { return do(l.lib, a, b) }, a, b)
}

// invokeOnly is for methods that return only an error.
func invokeOnly(l *intercepted, method string, do func() error, arguments ...any) error {
	if l.passes(method) {
		return do()
	}
	_, err := l.interceptor(Call{Method: method, Arguments: arguments}, func() (any, error) { return nil, do() })
	return err
}

func (l *intercepted) Init() error {
	return invokeOnly(l, "Init", func() error { return l.lib.Init() })
}

func (l *intercepted) Shutdown() error {
	return invokeOnly(l, "Shutdown", func() error { return l.lib.Shutdown() })
}

func (l *intercepted) SystemGetDriverVersion() (string, error) {
	return invoke0(l, "SystemGetDriverVersion", Library.SystemGetDriverVersion)
}

func (l *intercepted) SystemGetCudaDriverVersion() (int, error) {
	return invoke0(l, "SystemGetCudaDriverVersion", Library.SystemGetCudaDriverVersion)
}

func (l *intercepted) SystemGetConfComputeState() (bool, error) {
	return invoke0(l, "SystemGetConfComputeState", Library.SystemGetConfComputeState)
}

func (l *intercepted) SystemGetConfComputeGpusReadyState() (uint32, error) {
	return invoke0(l, "SystemGetConfComputeGpusReadyState", Library.SystemGetConfComputeGpusReadyState)
}

func (l *intercepted) DeviceGetCount() (int, error) {
	return invoke0(l, "DeviceGetCount", Library.DeviceGetCount)
}

func (l *intercepted) DeviceGetHandleByIndex(index int) (Device, error) {
	return invoke1(l, "DeviceGetHandleByIndex", Library.DeviceGetHandleByIndex, index)
}

func (l *intercepted) DeviceGetUUID(d Device) (string, error) {
	return invoke1(l, "DeviceGetUUID", Library.DeviceGetUUID, d)
}

func (l *intercepted) DeviceGetMinorNumber(d Device) (int, error) {
	return invoke1(l, "DeviceGetMinorNumber", Library.DeviceGetMinorNumber, d)
}

func (l *intercepted) DeviceGetPciInfo(d Device) (PCIInfo, error) {
	return invoke1(l, "DeviceGetPciInfo", Library.DeviceGetPciInfo, d)
}

func (l *intercepted) DeviceGetName(d Device) (string, error) {
	return invoke1(l, "DeviceGetName", Library.DeviceGetName, d)
}

func (l *intercepted) DeviceGetMemoryInfo(d Device) (MemoryInfo, error) {
	return invoke1(l, "DeviceGetMemoryInfo", Library.DeviceGetMemoryInfo, d)
}

func (l *intercepted) DeviceGetBrand(d Device) (Brand, error) {
	return invoke1(l, "DeviceGetBrand", Library.DeviceGetBrand, d)
}

func (l *intercepted) DeviceGetArchitecture(d Device) (Architecture, error) {
	return invoke1(l, "DeviceGetArchitecture", Library.DeviceGetArchitecture, d)
}

func (l *intercepted) DeviceGetCudaComputeCapability(d Device) (ComputeCapability, error) {
	return invoke1(l, "DeviceGetCudaComputeCapability", Library.DeviceGetCudaComputeCapability, d)
}

func (l *intercepted) DeviceGetNumaNodeId(d Device) (int, error) {
	return invoke1(l, "DeviceGetNumaNodeId", Library.DeviceGetNumaNodeId, d)
}

func (l *intercepted) DeviceGetTemperature(d Device) (int, error) {
	return invoke1(l, "DeviceGetTemperature", Library.DeviceGetTemperature, d)
}

func (l *intercepted) DeviceGetTemperatureThreshold(d Device, threshold int) (int, error) {
	return invoke2(l, "DeviceGetTemperatureThreshold", Library.DeviceGetTemperatureThreshold, d, threshold)
}

func (l *intercepted) DeviceGetMarginTemperature(d Device) (int, error) {
	return invoke1(l, "DeviceGetMarginTemperature", Library.DeviceGetMarginTemperature, d)
}

func (l *intercepted) DeviceGetComputeRunningProcesses(d Device) ([]Process, error) {
	return invoke1(l, "DeviceGetComputeRunningProcesses", Library.DeviceGetComputeRunningProcesses, d)
}

func (l *intercepted) DeviceGetGraphicsRunningProcesses(d Device) ([]Process, error) {
	return invoke1(l, "DeviceGetGraphicsRunningProcesses", Library.DeviceGetGraphicsRunningProcesses, d)
}

func (l *intercepted) DeviceGetMPSComputeRunningProcesses(d Device) ([]Process, error) {
	return invoke1(l, "DeviceGetMPSComputeRunningProcesses", Library.DeviceGetMPSComputeRunningProcesses, d)
}

func (l *intercepted) DeviceGetFieldValues(d Device, field int) (uint32, error) {
	return invoke2(l, "DeviceGetFieldValues", Library.DeviceGetFieldValues, d, field)
}

func (l *intercepted) DeviceGetRemappedRows(d Device) (RemappedRows, error) {
	return invoke1(l, "DeviceGetRemappedRows", Library.DeviceGetRemappedRows, d)
}

func (l *intercepted) DeviceGetMemoryErrorCounter(d Device, counter MemoryErrorCounter) (uint64, error) {
	return invoke2(l, "DeviceGetMemoryErrorCounter", Library.DeviceGetMemoryErrorCounter, d, counter)
}

func (l *intercepted) DeviceGetRetiredPagesPendingStatus(d Device) (bool, error) {
	return invoke1(l, "DeviceGetRetiredPagesPendingStatus", Library.DeviceGetRetiredPagesPendingStatus, d)
}

func (l *intercepted) DeviceGetUtilizationRates(d Device) (Utilization, error) {
	return invoke1(l, "DeviceGetUtilizationRates", Library.DeviceGetUtilizationRates, d)
}

func (l *intercepted) DeviceGetProcessUtilization(d Device, lastSeen uint64) ([]ProcessSample, error) {
	return invoke2(l, "DeviceGetProcessUtilization", Library.DeviceGetProcessUtilization, d, lastSeen)
}

func (l *intercepted) DeviceGetCurrentClocksEventReasons(d Device) (ClockReasons, error) {
	return invoke1(l, "DeviceGetCurrentClocksEventReasons", Library.DeviceGetCurrentClocksEventReasons, d)
}

func (l *intercepted) DeviceGetPowerUsage(d Device) (int, error) {
	return invoke1(l, "DeviceGetPowerUsage", Library.DeviceGetPowerUsage, d)
}

func (l *intercepted) DeviceGetTotalEnergyConsumption(d Device) (uint64, error) {
	return invoke1(l, "DeviceGetTotalEnergyConsumption", Library.DeviceGetTotalEnergyConsumption, d)
}

func (l *intercepted) DeviceGetTopologyCommonAncestor(a, b Device) (TopologyLevel, error) {
	return invoke2(l, "DeviceGetTopologyCommonAncestor", Library.DeviceGetTopologyCommonAncestor, a, b)
}

func (l *intercepted) DeviceGetNvLinkState(d Device, link int) (bool, error) {
	return invoke2(l, "DeviceGetNvLinkState", Library.DeviceGetNvLinkState, d, link)
}

func (l *intercepted) DeviceGetNvLinkRemotePciInfo(d Device, link int) (PCIInfo, error) {
	return invoke2(l, "DeviceGetNvLinkRemotePciInfo", Library.DeviceGetNvLinkRemotePciInfo, d, link)
}

func (l *intercepted) DeviceGetGpuFabricInfo(d Device) (FabricInfo, error) {
	return invoke1(l, "DeviceGetGpuFabricInfo", Library.DeviceGetGpuFabricInfo, d)
}

func (l *intercepted) DeviceGetVirtualizationMode(d Device) (VirtualizationMode, error) {
	return invoke1(l, "DeviceGetVirtualizationMode", Library.DeviceGetVirtualizationMode, d)
}

func (l *intercepted) DeviceGetComputeMode(d Device) (ComputeMode, error) {
	return invoke1(l, "DeviceGetComputeMode", Library.DeviceGetComputeMode, d)
}

func (l *intercepted) DeviceSetComputeMode(d Device, mode ComputeMode) error {
	return invokeOnly(l, "DeviceSetComputeMode", func() error { return l.lib.DeviceSetComputeMode(d, mode) }, d, mode)
}

func (l *intercepted) DeviceGetMigMode(d Device) (MIGMode, error) {
	return invoke1(l, "DeviceGetMigMode", Library.DeviceGetMigMode, d)
}

func (l *intercepted) DeviceGetMaxMigDeviceCount(d Device) (int, error) {
	return invoke1(l, "DeviceGetMaxMigDeviceCount", Library.DeviceGetMaxMigDeviceCount, d)
}

func (l *intercepted) DeviceGetMigDeviceHandleByIndex(d Device, index int) (Device, error) {
	return invoke2(l, "DeviceGetMigDeviceHandleByIndex", Library.DeviceGetMigDeviceHandleByIndex, d, index)
}

func (l *intercepted) DeviceGetGpuInstanceId(d Device) (int, error) {
	return invoke1(l, "DeviceGetGpuInstanceId", Library.DeviceGetGpuInstanceId, d)
}

func (l *intercepted) DeviceGetComputeInstanceId(d Device) (int, error) {
	return invoke1(l, "DeviceGetComputeInstanceId", Library.DeviceGetComputeInstanceId, d)
}

func (l *intercepted) DeviceGetAttributes(d Device) (Attributes, error) {
	return invoke1(l, "DeviceGetAttributes", Library.DeviceGetAttributes, d)
}

func (l *intercepted) DeviceGetGpuInstanceById(d Device, id int) (GPUInstance, error) {
	return invoke2(l, "DeviceGetGpuInstanceById", Library.DeviceGetGpuInstanceById, d, id)
}

func (l *intercepted) GpuInstanceGetInfo(gi GPUInstance) (GPUInstanceInfo, error) {
	return invoke1(l, "GpuInstanceGetInfo", Library.GpuInstanceGetInfo, gi)
}

func (l *intercepted) DeviceGetGpuInstanceProfileInfo(d Device, profile int) (GPUInstanceProfile, error) {
	return invoke2(l, "DeviceGetGpuInstanceProfileInfo", Library.DeviceGetGpuInstanceProfileInfo, d, profile)
}

func (l *intercepted) GpuInstanceGetComputeInstanceById(gi GPUInstance, id int) (ComputeInstance, error) {
	return invoke2(l, "GpuInstanceGetComputeInstanceById", Library.GpuInstanceGetComputeInstanceById, gi, id)
}

func (l *intercepted) ComputeInstanceGetInfo(ci ComputeInstance) (ComputeInstanceInfo, error) {
	return invoke1(l, "ComputeInstanceGetInfo", Library.ComputeInstanceGetInfo, ci)
}

func (l *intercepted) DeviceSetMigMode(d Device, on bool) (Return, error) {
	return invoke2(l, "DeviceSetMigMode", Library.DeviceSetMigMode, d, on)
}

func (l *intercepted) DeviceGetGpuInstancePossiblePlacements(d Device, profile int) ([]mig.Placement, error) {
	return invoke2(l, "DeviceGetGpuInstancePossiblePlacements", Library.DeviceGetGpuInstancePossiblePlacements, d,
		profile)
}

func (l *intercepted) DeviceGetGpuInstances(d Device, profile int) ([]GPUInstance, error) {
	return invoke2(l, "DeviceGetGpuInstances", Library.DeviceGetGpuInstances, d, profile)
}

func (l *intercepted) DeviceCreateGpuInstanceWithPlacement(
	d Device,
	profile int,
	at mig.Placement,
) (GPUInstance, error) {
	return invoke[GPUInstance](l, "DeviceCreateGpuInstanceWithPlacement",
		func() (any, error) { return l.lib.DeviceCreateGpuInstanceWithPlacement(d, profile, at) }, d, profile, at)
}

func (l *intercepted) GpuInstanceDestroy(gi GPUInstance) error {
	return invokeOnly(l, "GpuInstanceDestroy", func() error { return l.lib.GpuInstanceDestroy(gi) }, gi)
}

func (l *intercepted) GpuInstanceGetComputeInstanceProfileInfo(
	gi GPUInstance,
	profile int,
) (ComputeInstanceProfile, error) {
	return invoke2(l, "GpuInstanceGetComputeInstanceProfileInfo", Library.GpuInstanceGetComputeInstanceProfileInfo, gi,
		profile)
}

func (l *intercepted) GpuInstanceGetComputeInstances(gi GPUInstance, profile int) ([]ComputeInstance, error) {
	return invoke2(l, "GpuInstanceGetComputeInstances", Library.GpuInstanceGetComputeInstances, gi, profile)
}

func (l *intercepted) GpuInstanceCreateComputeInstance(gi GPUInstance, profile int) (ComputeInstance, error) {
	return invoke2(l, "GpuInstanceCreateComputeInstance", Library.GpuInstanceCreateComputeInstance, gi, profile)
}

func (l *intercepted) ComputeInstanceDestroy(ci ComputeInstance) error {
	return invokeOnly(l, "ComputeInstanceDestroy", func() error { return l.lib.ComputeInstanceDestroy(ci) }, ci)
}

func (l *intercepted) EventSetCreate() (EventSet, error) {
	return invoke0(l, "EventSetCreate", Library.EventSetCreate)
}

func (l *intercepted) DeviceGetSupportedEventTypes(d Device) (EventTypes, error) {
	return invoke1(l, "DeviceGetSupportedEventTypes", Library.DeviceGetSupportedEventTypes, d)
}

func (l *intercepted) DeviceRegisterEvents(d Device, types EventTypes, set EventSet) error {
	return invokeOnly(l, "DeviceRegisterEvents", func() error { return l.lib.DeviceRegisterEvents(d, types, set) }, d,
		types, set)
}

func (l *intercepted) EventSetWait(set EventSet, timeout time.Duration) (Event, error) {
	return invoke2(l, "EventSetWait", Library.EventSetWait, set, timeout)
}

func (l *intercepted) EventSetFree(set EventSet) error {
	return invokeOnly(l, "EventSetFree", func() error { return l.lib.EventSetFree(set) }, set)
}
