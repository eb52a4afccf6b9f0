package simnode

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

var errNoVerb = errors.New("no verb")

// values reads a verb's arguments and collects what is wrong with them.
type values struct {
	arguments map[string]string
	problems  []error
}

// run does the work if every argument could be read.
func (v *values) run(work func() error) {
	if len(v.problems) > 0 {
		return
	}
	if err := work(); err != nil {
		v.problems = append(v.problems, err)
	}
}

func (v *values) err() error { return errors.Join(v.problems...) }

// text is "" for an argument that was left out.
func (v *values) text(name string) string { return v.arguments[name] }

// number is a whole number from 0 on.
func (v *values) number(name string) int {
	number, err := strconv.ParseUint(v.arguments[name], 10, 63)
	if err != nil {
		v.problems = append(v.problems, fmt.Errorf("%s: %q is no whole number from 0 on", name, v.arguments[name]))
	}
	return int(number)
}

// count is 0 when left out.
func (v *values) count(name string) int {
	if v.arguments[name] == "" {
		return 0
	}
	return v.number(name)
}

// instance is an instance ID, nvml.WholeBoard when left out.
func (v *values) instance(name string) uint32 {
	if v.arguments[name] == "" {
		return nvml.WholeBoard
	}
	id := v.number(name)
	if id >= int(nvml.WholeBoard) {
		v.problems = append(v.problems, fmt.Errorf("%s: %d is no instance ID", name, id))
	}
	return uint32(id)
}

// device is a MIG device index, WholeGPU when left out.
func (v *values) device(name string) int {
	if v.arguments[name] == "" {
		return WholeGPU
	}
	return v.number(name)
}

// container is NAMESPACE/POD/CONTAINER, none when left out.
func (v *values) container(name string) sharing.Container {
	written := v.arguments[name]
	if written == "" {
		return sharing.Container{}
	}
	parts := strings.Split(written, "/")
	if len(parts) != 3 || slices.Contains(parts, "") {
		v.problems = append(v.problems, fmt.Errorf("%s: %q is not NAMESPACE/POD/CONTAINER", name, written))
		return sharing.Container{}
	}
	return sharing.Container{Namespace: parts[0], Pod: parts[1], Name: parts[2]}
}

// reason is a reason for lower clocks.
func (v *values) reason(name string) nvml.ClockReasons {
	reasons := map[string]nvml.ClockReasons{
		"thermal": nvml.HardwareThermalSlowdown, "power": nvml.SoftwarePowerCap, "hw_slowdown": nvml.HardwareSlowdown, "none": 0,
	}
	reason, known := reasons[v.arguments[name]]
	if !known {
		v.problems = append(v.problems, fmt.Errorf("%s: %q is none of thermal, power, hw_slowdown, none", name, v.arguments[name]))
	}
	return reason
}

// call is a call of the library that this package simulates.
func (v *values) call(name string) string {
	written := v.arguments[name]
	if _, ok := reflect.TypeFor[nvml.Library]().MethodByName(written); !ok {
		v.problems = append(v.problems, fmt.Errorf("%s: %q is no call, such as DeviceGetMemoryInfo", name, written))
	}
	return written
}

// code is an NVML return code, UNKNOWN when left out.
func (v *values) code(name string) nvml.Return {
	written := v.arguments[name]
	if written == "" {
		return nvml.Unknown
	}
	code, ok := nvml.ParseReturn(written)
	if !ok {
		v.problems = append(v.problems, fmt.Errorf("%s: %q is no NVML return code, such as GPU_IS_LOST", name, written))
	}
	return code
}

func sortedKeys(arguments map[string]string) []string {
	return slices.Sorted(maps.Keys(arguments))
}
