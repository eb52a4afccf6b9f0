package trace

import "github.com/virgate/virgate/internal/nvml"

func (r *recorder) DeviceGetUtilizationRates(device nvml.Device) (nvml.Utilization, error) {
	answer, err := r.lib.DeviceGetUtilizationRates(device)
	r.note("DeviceGetUtilizationRates", answer, err, uint64(device))
	return answer, err
}

// DeviceGetProcessUtilization leaves out since when: a replay is asked with
// other times.
func (r *recorder) DeviceGetProcessUtilization(device nvml.Device, lastSeen uint64) ([]nvml.ProcessSample, error) {
	answer, err := r.lib.DeviceGetProcessUtilization(device, lastSeen)
	r.note("DeviceGetProcessUtilization", answer, err, uint64(device))
	return answer, err
}

func (r *recorder) DeviceGetCurrentClocksEventReasons(device nvml.Device) (nvml.ClockReasons, error) {
	answer, err := r.lib.DeviceGetCurrentClocksEventReasons(device)
	r.note("DeviceGetCurrentClocksEventReasons", answer, err, uint64(device))
	return answer, err
}
