package trace

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// version is of the format; a reader refuses others.
const version = 1

// header is a trace's first line.
type header struct {
	Trace  int  `json:"trace"`
	Masked bool `json:"masked"`
}

// line is a call. Of Answer and Error one is there; neither for a call that
// answers nothing.
type line struct {
	Call      string          `json:"call"`
	Arguments []uint64        `json:"arguments,omitempty"`
	Answer    json.RawMessage `json:"answer,omitempty"`
	Error     *failure        `json:"error,omitempty"`
}

// failure is an *nvml.Error.
type failure struct {
	Call   string      `json:"call"`
	Return nvml.Return `json:"return"`
}

// key says which calls are the same: those of one name with the same arguments.
func key(call string, arguments []uint64) string {
	var text strings.Builder
	text.WriteString(call)
	for _, argument := range arguments {
		text.WriteByte(' ')
		text.WriteString(strconv.FormatUint(argument, 10))
	}
	return text.String()
}

// The answers of calls that return two values.
type (
	capability struct{ Major, Minor int }
	mode       struct{ Current, Pending bool }
)

// call is what is known of a method: how many arguments are written down, and
// whether an answer is one of this method's.
type call struct {
	name      string
	arguments int
	answers   func(json.RawMessage) error
}

// calls are the methods of nvml.Library. Of DeviceRegisterEvents the arguments
// are the device, the types and the set; of EventSetWait the set alone, and of
// DeviceGetProcessUtilization the device.
func calls() []call {
	return []call{
		{"Init", 0, nothing},
		{"Shutdown", 0, nothing},
		{"SystemGetDriverVersion", 0, is[string]},
		{"DeviceGetCount", 0, is[int]},
		{"DeviceGetHandleByIndex", 1, is[nvml.Device]},
		{"DeviceGetUUID", 1, is[string]},
		{"DeviceGetMinorNumber", 1, is[int]},
		{"DeviceGetPciInfo", 1, is[nvml.PCIInfo]},
		{"DeviceGetName", 1, is[string]},
		{"DeviceGetMemoryInfo", 1, is[nvml.MemoryInfo]},
		{"DeviceGetArchitecture", 1, is[nvml.Architecture]},
		{"DeviceGetCudaComputeCapability", 1, is[capability]},
		{"DeviceGetNumaNodeId", 1, is[int]},
		{"DeviceGetTemperature", 1, is[int]},
		{"DeviceGetComputeRunningProcesses", 1, is[[]nvml.Process]},
		{"DeviceGetUtilizationRates", 1, is[nvml.Utilization]},
		{"DeviceGetProcessUtilization", 1, is[[]nvml.ProcessSample]},
		{"DeviceGetCurrentClocksEventReasons", 1, is[nvml.ClockReasons]},
		{"DeviceGetRemappedRows", 1, is[nvml.RemappedRows]},
		{"DeviceGetRetiredPagesPendingStatus", 1, is[bool]},
		{"DeviceGetTopologyCommonAncestor", 2, is[nvml.TopologyLevel]},
		{"DeviceGetNvLinkState", 2, is[bool]},
		{"DeviceGetNvLinkRemotePciInfo", 2, is[nvml.PCIInfo]},
		{"DeviceGetMigMode", 1, is[mode]},
		{"DeviceGetMaxMigDeviceCount", 1, is[int]},
		{"DeviceGetMigDeviceHandleByIndex", 2, is[nvml.Device]},
		{"DeviceGetGpuInstanceId", 1, is[int]},
		{"DeviceGetComputeInstanceId", 1, is[int]},
		{"DeviceGetGpuInstanceById", 2, is[nvml.GPUInstance]},
		{"GpuInstanceGetInfo", 1, is[nvml.GPUInstanceInfo]},
		{"DeviceGetGpuInstanceProfileInfo", 2, is[nvml.GPUInstanceProfile]},
		{"GpuInstanceGetComputeInstanceById", 2, is[nvml.ComputeInstance]},
		{"ComputeInstanceGetInfo", 1, is[nvml.ComputeInstanceInfo]},
		{"DeviceGetGraphicsRunningProcesses", 1, is[[]nvml.Process]},
		{"DeviceGetMPSComputeRunningProcesses", 1, is[[]nvml.Process]},
		{"DeviceSetMigMode", 2, is[nvml.Return]},
		{"DeviceGetGpuInstancePossiblePlacements", 2, is[[]mig.Placement]},
		{"DeviceGetGpuInstances", 2, is[[]nvml.GPUInstance]},
		{"DeviceCreateGpuInstanceWithPlacement", 4, is[nvml.GPUInstance]},
		{"GpuInstanceDestroy", 1, nothing},
		{"GpuInstanceGetComputeInstanceProfileInfo", 2, is[nvml.ComputeInstanceProfile]},
		{"GpuInstanceGetComputeInstances", 2, is[[]nvml.ComputeInstance]},
		{"GpuInstanceCreateComputeInstance", 2, is[nvml.ComputeInstance]},
		{"ComputeInstanceDestroy", 1, nothing},
		{"EventSetCreate", 0, is[nvml.EventSet]},
		{"DeviceGetSupportedEventTypes", 1, is[nvml.EventTypes]},
		{"DeviceRegisterEvents", 3, nothing},
		{waitCall, 1, is[nvml.Event]},
		{"EventSetFree", 1, nothing},
	}
}

const waitCall = "EventSetWait"

func callOf(name string) (call, bool) {
	all := calls()
	i := slices.IndexFunc(all, func(c call) bool { return c.name == name })
	if i < 0 {
		return call{}, false
	}
	return all[i], true
}
