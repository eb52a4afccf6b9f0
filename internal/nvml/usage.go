package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// Meter reads how the GPUs are used. It has its own handles, and opens the library only while it
// reads. Another part of the program that has the library open can therefore close it and open
// another version afterwards. A Meter must be used from one goroutine.
type Meter struct {
	// lib and counters have queues of their own, so that no other caller waits for a GPU that
	// answers slowly.
	lib, counters Library
	count         *pendingCall[int]
	gpus          []*gpuMeter
}

// NewMeter returns a meter that reads through the library.
func NewMeter(lib Library) *Meter {
	lib = withDeadlines(lib)
	return &Meter{
		lib:      apart(lib),
		counters: apart(lib),
		count:    newPendingCall[int](),
	}
}

// Read returns the use of each GPU that answers within two seconds, sorted by UUID. A slower GPU is
// missing, and a later Read gets its answer. Memory errors are from the last minute or two. The
// error says why GPUs or units are missing, or is ctx's error if ctx ended first. The contexts of
// all calls should end together, because the last Read waits for calls that earlier ones started.
func (m *Meter) Read(ctx context.Context) (gpus []sharing.GPUUtilization, err error) {
	enough, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	lib, counters := Until(ctx, m.lib), Until(ctx, m.counters)
	m.count.begin(func() (int, error) { return whileOpen(lib, lib.DeviceGetCount) })
	defer func() {
		if ctx.Err() != nil {
			// The calls in flight end soon after their context.
			_, _ = m.count.wait(context.Background())
			for _, g := range m.gpus {
				_, _ = g.wait(context.Background())
				_, _ = g.errors.wait(context.Background())
			}
			gpus, err = nil, ctx.Err()
		}
	}()
	count, err := m.count.wait(enough)
	if _, released := errors.AsType[*releasedError](err); released {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read use: %w", err)
	}
	for len(m.gpus) < count {
		index := len(m.gpus)
		m.gpus = append(m.gpus, &gpuMeter{
			index:       index,
			pendingCall: newPendingCall[measurement](),
			errors:      newErrorMeter(index),
		})
	}
	m.gpus = m.gpus[:count]
	for _, g := range m.gpus {
		g.begin(func() (measurement, error) {
			return whileOpen(lib, func() (measurement, error) { return g.measure(lib) })
		})
		g.errors.beginIfDue(counters)
	}
	return m.collect(enough)
}

// collect waits for the GPUs until enough ends.
func (m *Meter) collect(enough context.Context) ([]sharing.GPUUtilization, error) {
	seen := map[string]*gpuMeter{}
	var gpus []sharing.GPUUtilization
	var modes []bool
	var problems []error
	for _, g := range m.gpus {
		answer, err := g.wait(enough)
		if _, released := errors.AsType[*releasedError](err); released {
			continue
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("read use of GPU %d: %w", g.index, err))
			continue
		}
		if twin := seen[answer.use.GPU]; twin != nil {
			// The GPUs have changed places, so both must be looked up again.
			g.found, twin.found = false, false
			continue
		}
		seen[answer.use.GPU] = g
		gpus, problems = append(gpus, answer.use), append(problems, answer.problems)
		modes = append(modes, answer.mig)
	}
	for i := range gpus {
		gpus[i].MemoryErrors = seen[gpus[i].GPU].errors.of(enough, gpus[i].GPU, modes[i])
	}
	slices.SortFunc(gpus, func(a, b sharing.GPUUtilization) int { return cmp.Compare(a.GPU, b.GPU) })
	return gpus, errors.Join(problems...)
}

// whileOpen opens the library while do runs.
func whileOpen[T any](lib Library, do func() (T, error)) (value T, err error) {
	if err := lib.Init(); err != nil {
		return value, err
	}
	value, err = do()
	return value, errors.Join(err, lib.Shutdown())
}

// gpuMeter measures the GPU at an index. While its call is in flight, the call's goroutine owns it.
type gpuMeter struct {
	index int
	*pendingCall[measurement]
	// found is true if uuid and device are known; otherwise the GPU must be looked up.
	found  bool
	uuid   string
	device Device
	window sampleWindow
	errors *errorMeter
}

type measurement struct {
	use      sharing.GPUUtilization
	mig      bool
	problems error
}

// measure reads the GPU. After an error its handle is looked up again.
func (g *gpuMeter) measure(lib Library) (m measurement, err error) {
	defer func() {
		if err != nil {
			g.found, g.uuid = false, ""
		}
	}()
	fresh := !g.found
	if fresh {
		g.device, err = lib.DeviceGetHandleByIndex(g.index)
		if err != nil {
			return m, err
		}
		uuid, err := lib.DeviceGetUUID(g.device)
		if err != nil {
			return m, err
		}
		if uuid != g.uuid {
			g.uuid, g.window = uuid, sampleWindow{}
		}
		g.found = true
	}
	m.use.GPU = g.uuid
	memory, err := lib.DeviceGetMemoryInfo(g.device)
	if errors.Is(err, InvalidArgument) && !fresh { // The handle is from an earlier session.
		g.found = false
		return g.measure(lib)
	}
	switch {
	case err == nil:
		m.use.Memory = new(float64(memory.Used))
	case !unsupported(err) && !errors.Is(err, NoPermission):
		return m, err
	}
	if celsius, err := lib.DeviceGetTemperature(g.device); err == nil {
		m.use.Celsius = new(float64(celsius))
	}
	if reasons, err := lib.DeviceGetCurrentClocksEventReasons(g.device); err == nil {
		m.use.Throttled = reasons.throttles()
		m.use.ThrottleKnown = true
		m.use.ClockReasons = reasons.names()
	}
	if milliwatts, err := lib.DeviceGetPowerUsage(g.device); err == nil {
		m.use.Watts = new(float64(milliwatts) / 1000)
	}
	if millijoules, err := lib.DeviceGetTotalEnergyConsumption(g.device); err == nil {
		m.use.Joules = new(float64(millijoules) / 1000)
	}
	if rows, err := lib.DeviceGetRemappedRows(g.device); err == nil {
		m.use.Rows = &sharing.RemappedRows{
			Correctable:   float64(rows.Correctable),
			Uncorrectable: float64(rows.Uncorrectable),
			Failed:        rows.Failed,
		}
	}
	if rates, err := lib.DeviceGetUtilizationRates(g.device); err == nil && rates.GPU >= 0 && rates.GPU <= 100 {
		m.use.SM = new(float64(rates.GPU) / 100)
	}
	mode, err := lib.DeviceGetMigMode(g.device)
	if err != nil && !unsupported(err) {
		return m, err
	}
	m.mig = mode.Current
	if mode.Current {
		m.use.Units, m.problems, err = g.partitions(lib)
		return m, err
	}
	m.use.Units, m.problems = g.whole(lib, m.use.SM)
	return m, nil
}

func (g *gpuMeter) whole(lib Library, busy *float64) ([]sharing.UnitProcesses, error) {
	processes, err := processesOn(lib, g.device)
	if err != nil {
		return nil, err
	}
	samples, err := lib.DeviceGetProcessUtilization(g.device, g.window.seen)
	sm := g.window.add(samples, err, busy)
	for i := range processes {
		processes[i].SM = sm(processes[i].PID)
	}
	return []sharing.UnitProcesses{{Unit: g.uuid, Processes: processes}}, nil
}

// partitions returns the processes of each MIG device. The driver reports only their memory.
func (g *gpuMeter) partitions(lib Library) (units []sharing.UnitProcesses, problems, err error) {
	err = eachMIGDevice(lib, g.device, func(index int, device Device, err error) error {
		var uuid string
		if err == nil {
			uuid, err = lib.DeviceGetUUID(device)
		}
		var processes []sharing.ProcessUtilization
		if err == nil {
			processes, err = processesOn(lib, device)
		}
		if err != nil {
			problems = errors.Join(problems, fmt.Errorf("MIG device %d:%d: %w", g.index, index, err))
		} else {
			units = append(units, sharing.UnitProcesses{Unit: uuid, Processes: processes})
		}
		return nil
	})
	slices.SortFunc(units, func(a, b sharing.UnitProcesses) int { return cmp.Compare(a.Unit, b.Unit) })
	return units, problems, err
}

// listProcesses lists the compute and graphics processes on the device, some of them more than
// once. Only the list of compute processes is required: a driver may not know the other lists, may
// not have them for a MIG device (INVALID_ARGUMENT), or may refuse them.
func listProcesses(lib Library, device Device) ([]Process, error) {
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
	return listed, nil
}

// processesOn returns the compute and graphics processes on the device, sorted by PID. A process
// that is in several of the driver's lists counts once, because each list has all its memory
// (nvml.h).
func processesOn(lib Library, device Device) ([]sharing.ProcessUtilization, error) {
	listed, err := listProcesses(lib, device)
	if err != nil {
		return nil, err
	}
	memory := map[int]*float64{}
	for _, p := range listed {
		used := memory[p.PID]
		if p.Memory != MemoryUnknown && (used == nil || *used < float64(p.Memory)) {
			used = new(float64(p.Memory))
		}
		memory[p.PID] = used
	}
	processes := make([]sharing.ProcessUtilization, 0, len(memory))
	for pid, used := range memory {
		processes = append(processes, sharing.ProcessUtilization{PID: pid, Memory: used})
	}
	slices.SortFunc(processes, func(a, b sharing.ProcessUtilization) int { return cmp.Compare(a.PID, b.PID) })
	return processes, nil
}

// throttles returns the reasons that an operator can act on. A hardware slowdown is also set along
// with the thermal or power reason that caused it.
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

// names returns the names that sharing.ClockReasons has for the bits.
func (r ClockReasons) names() (names []string) {
	for bit, name := range sharing.ClockReasons() {
		if r&(1<<bit) != 0 {
			names = append(names, name)
		}
	}
	return names
}

var errSlow = errors.New("no answer yet")

// pendingCall is work with the driver that a goroutine does, and that may take longer than any
// caller waits.
type pendingCall[T any] struct {
	answers  chan answer[T]
	inFlight bool
}

func newPendingCall[T any]() *pendingCall[T] {
	return &pendingCall[T]{answers: make(chan answer[T], 1)}
}

// begin starts the work, unless the previous work is still in flight.
func (c *pendingCall[T]) begin(do func() (T, error)) {
	if c.inFlight {
		return
	}
	c.inFlight = true
	go func() {
		value, err := do()
		c.answers <- answer[T]{value, err}
	}()
}

// wait returns errSlow if enough ends before there is an answer, or if nothing is in flight.
func (c *pendingCall[T]) wait(enough context.Context) (nothing T, _ error) {
	if !c.inFlight {
		return nothing, errSlow
	}
	var a answer[T]
	select {
	case a = <-c.answers:
	case <-enough.Done():
		select {
		case a = <-c.answers: // The answer came while the caller waited for others.
		default:
			return nothing, errSlow
		}
	}
	c.inFlight = false
	return a.value, a.err
}

// sampleWindow is the time between two readings of a GPU's process samples.
type sampleWindow struct {
	// seen is the time of the latest sample, in the driver's microseconds.
	seen uint64
	// begun is true if there was an earlier reading, so that new samples are from the time since
	// then.
	begun bool
}

// add adds the samples since the last reading. It returns how busy each process was in that time:
// the mean of its samples, as a ratio.
//
// A process without a sample did nothing (nvml.h). If there are no samples at all, either the GPU
// was idle or the driver took none; this counts as idle only if the GPU's own utilization is 0 too.
// In the first reading everything is unknown, because its samples may be of any age.
func (w *sampleWindow) add(samples []ProcessSample, err error, busy *float64) func(pid int) *float64 {
	begun := w.begun
	if err == nil || errors.Is(err, NotFound) {
		w.begun = true
	}
	type mean struct{ sum, count int }
	means := map[int]mean{}
	before := w.seen
	for _, s := range samples {
		// Some drivers return samples that are unset or implausible.
		if s.Time <= before || s.SM < 0 || s.SM > 100 {
			continue
		}
		w.seen = max(w.seen, s.Time)
		m := means[s.PID]
		means[s.PID] = mean{m.sum + s.SM, m.count + 1}
	}
	idle := len(means) == 0 && errors.Is(err, NotFound) && busy != nil && *busy == 0
	known := begun && (len(means) > 0 || idle)
	return func(pid int) *float64 {
		m := means[pid]
		switch {
		case !known:
			return nil
		case m.count == 0:
			return new(0.0)
		}
		return new(float64(m.sum) / float64(m.count) / 100)
	}
}
