//go:build cgo

package driver

import (
	"runtime"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
)

func (l *library) DeviceGetUtilizationRates(d nvml.Device) (nvml.Utilization, error) {
	rates, err := askDevice(l, "DeviceGetUtilizationRates", d, gonvml.Device.GetUtilizationRates)
	return nvml.Utilization{GPU: int(rates.Gpu), Memory: int(rates.Memory)}, err
}

func (l *library) DeviceGetProcessUtilization(d nvml.Device, lastSeen uint64) ([]nvml.ProcessSample, error) {
	written, err := askDevice(l, "DeviceGetProcessUtilization", d, func(d gonvml.Device) ([]gonvml.ProcessUtilizationSample, gonvml.Return) {
		return processUtilization(d, lastSeen)
	})
	var samples []nvml.ProcessSample
	for _, s := range written {
		samples = append(samples, nvml.ProcessSample{PID: int(s.Pid), Time: s.TimeStamp, SM: int(s.SmUtil), Memory: int(s.MemUtil)})
	}
	return samples, err
}

// processUtilization mends two faults of go-nvml v0.13.3, which asks for the
// size and then for the samples: where there is nothing to ask for it answers
// that the size is insufficient, and where samples came between its two
// questions it slices beyond what it has, which panics.
func processUtilization(d gonvml.Device, lastSeen uint64) (samples []gonvml.ProcessUtilizationSample, code gonvml.Return) {
	defer func() {
		switch thrown := recover().(type) {
		case nil:
		case runtime.Error:
			samples, code = nil, gonvml.ERROR_INSUFFICIENT_SIZE
		default:
			panic(thrown)
		}
	}()
	samples, code = d.GetProcessUtilization(lastSeen)
	if code == gonvml.ERROR_INSUFFICIENT_SIZE && len(samples) == 0 {
		code = gonvml.ERROR_NOT_FOUND
	}
	return samples, code
}

// DeviceGetCurrentClocksEventReasons asks under the name that drivers before 535
// know too.
func (l *library) DeviceGetCurrentClocksEventReasons(d nvml.Device) (nvml.ClockReasons, error) {
	reasons, err := askDevice(l, "DeviceGetCurrentClocksEventReasons", d, func(d gonvml.Device) (uint64, gonvml.Return) {
		return d.GetCurrentClocksThrottleReasons()
	})
	return nvml.ClockReasons(reasons), err
}
