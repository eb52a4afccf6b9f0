package trace

import "github.com/virgate/virgate/internal/nvml"

func (r *replay) DeviceGetUtilizationRates(device nvml.Device) (nvml.Utilization, error) {
	return play[nvml.Utilization](r, "DeviceGetUtilizationRates", uint64(device))
}

// DeviceGetProcessUtilization leaves out what the caller has seen, so that the
// last answer, which is given again and again, is not taken for news.
func (r *replay) DeviceGetProcessUtilization(device nvml.Device, lastSeen uint64) ([]nvml.ProcessSample, error) {
	samples, err := play[[]nvml.ProcessSample](r, "DeviceGetProcessUtilization", uint64(device))
	var news []nvml.ProcessSample
	for _, s := range samples {
		if s.Time > lastSeen {
			news = append(news, s)
		}
	}
	if err == nil && len(news) == 0 {
		err = &nvml.Error{Call: "DeviceGetProcessUtilization", Return: nvml.NotFound}
	}
	return news, err
}

func (r *replay) DeviceGetCurrentClocksEventReasons(device nvml.Device) (nvml.ClockReasons, error) {
	return play[nvml.ClockReasons](r, "DeviceGetCurrentClocksEventReasons", uint64(device))
}
