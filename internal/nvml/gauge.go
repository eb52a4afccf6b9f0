package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// gauge measures the board at an index. Its query's goroutine has it while it
// is away.
type gauge struct {
	index int
	*query[measured]
	// uuid and device are of the board, once it has been looked up; uuid is empty
	// when it must be.
	uuid   string
	device Device
	window window
}

// measured is what a gauge brings: the board's use, and what is missing in it.
type measured struct {
	use      sharing.BoardUse
	problems error
}

// measure reads the board. After an error its handle is looked up anew.
func (g *gauge) measure(lib Library) (m measured, err error) {
	defer func() {
		if err != nil {
			g.uuid = ""
		}
	}()
	if g.uuid == "" {
		if g.device, err = lib.DeviceGetHandleByIndex(g.index); err != nil {
			return m, err
		}
		uuid, err := lib.DeviceGetUUID(g.device)
		if err != nil {
			return m, err
		}
		g.uuid, g.window = uuid, window{}
	}
	m.use.GPU = g.uuid
	memory, err := lib.DeviceGetMemoryInfo(g.device)
	switch {
	case err == nil:
		m.use.Memory = sharing.KnownFigure(float64(memory.Used))
	case !unsupported(err):
		return m, err
	}
	if celsius, err := lib.DeviceGetTemperature(g.device); err == nil {
		m.use.Celsius = sharing.KnownFigure(float64(celsius))
	}
	if reasons, err := lib.DeviceGetCurrentClocksEventReasons(g.device); err == nil {
		m.use.Throttled, m.use.ThrottleKnown = reasons.throttles(), true
	}
	if rates, err := lib.DeviceGetUtilizationRates(g.device); err == nil && rates.GPU >= 0 && rates.GPU <= 100 {
		m.use.SM = sharing.KnownFigure(float64(rates.GPU) / 100)
	}
	cut, _, err := lib.DeviceGetMigMode(g.device)
	if err != nil && !unsupported(err) {
		return m, err
	}
	if cut {
		m.use.Units, m.problems, err = g.partitions(lib)
		return m, err
	}
	m.use.Units, m.problems = g.whole(lib, m.use.SM)
	return m, nil
}

// whole is the processes of a board that is not cut.
func (g *gauge) whole(lib Library, busy sharing.Figure) ([]sharing.UnitProcesses, error) {
	processes, err := processesOn(lib, g.device)
	if err != nil {
		return nil, err
	}
	samples, err := lib.DeviceGetProcessUtilization(g.device, g.window.seen)
	work := g.window.enter(samples, err, busy)
	for i := range processes {
		processes[i].SM = work(processes[i].PID)
	}
	return []sharing.UnitProcesses{{Unit: g.uuid, Processes: processes}}, nil
}

// partitions is the processes of each MIG device; the driver tells no more of
// them than their memory.
func (g *gauge) partitions(lib Library) (units []sharing.UnitProcesses, problems, err error) {
	count, err := lib.DeviceGetMaxMigDeviceCount(g.device)
	if err != nil {
		return nil, nil, err
	}
	for index := range count {
		device, err := lib.DeviceGetMigDeviceHandleByIndex(g.device, index)
		if errors.Is(err, NotFound) {
			continue
		}
		var uuid string
		if err == nil {
			uuid, err = lib.DeviceGetUUID(device)
		}
		var processes []sharing.ProcessUse
		if err == nil {
			processes, err = processesOn(lib, device)
		}
		if err != nil {
			problems = errors.Join(problems, fmt.Errorf("MIG device %d:%d: %w", g.index, index, err))
			continue
		}
		units = append(units, sharing.UnitProcesses{Unit: uuid, Processes: processes})
	}
	slices.SortFunc(units, func(a, b sharing.UnitProcesses) int { return cmp.Compare(a.Unit, b.Unit) })
	return units, problems, nil
}

// processesOn is who computes or draws on the device, by PID. A process that is
// in several of the driver's lists counts once: each list has all its memory
// (nvml.h).
func processesOn(lib Library, device Device) ([]sharing.ProcessUse, error) {
	listed, err := lib.DeviceGetComputeRunningProcesses(device)
	if err != nil {
		return nil, err
	}
	for _, list := range []func(Device) ([]Process, error){
		lib.DeviceGetGraphicsRunningProcesses, lib.DeviceGetMPSComputeRunningProcesses,
	} {
		more, err := list(device)
		if err != nil && !unsupported(err) && !errors.Is(err, NoPermission) && !errors.Is(err, InvalidArgument) {
			return nil, err
		}
		listed = append(listed, more...)
	}
	memory := map[int]sharing.Figure{}
	for _, p := range listed {
		if p.Memory != MemoryUnknown {
			memory[p.PID] = sharing.KnownFigure(max(float64(p.Memory), memory[p.PID].Value))
		} else if _, known := memory[p.PID]; !known {
			memory[p.PID] = sharing.Figure{}
		}
	}
	processes := make([]sharing.ProcessUse, 0, len(memory))
	for pid, used := range memory {
		processes = append(processes, sharing.ProcessUse{PID: pid, Memory: used})
	}
	slices.SortFunc(processes, func(a, b sharing.ProcessUse) int { return cmp.Compare(a.PID, b.PID) })
	return processes, nil
}

// throttles are the reasons that an operator can do something about. The
// hardware's slowdown is also set with the two reasons that it may have.
func (r ClockReasons) throttles() []sharing.ThrottleReason {
	var reasons []sharing.ThrottleReason
	if r&(SoftwareThermalSlowdown|HardwareThermalSlowdown) != 0 {
		reasons = append(reasons, sharing.ThrottleThermal)
	}
	if r&(SoftwarePowerCap|HardwarePowerBrake) != 0 {
		reasons = append(reasons, sharing.ThrottlePower)
	}
	if r&HardwareSlowdown != 0 {
		reasons = append(reasons, sharing.ThrottleHardware)
	}
	return reasons
}
