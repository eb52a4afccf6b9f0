package nvmltest

import (
	"errors"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

// metering holds what is said of a board's use.
func metering(t *testing.T, lib nvml.Library, device nvml.Device) {
	t.Helper()
	if rates, err := lib.DeviceGetUtilizationRates(device); optional(t, "DeviceGetUtilizationRates", err) {
		between(t, "percent of the GPU's time", rates.GPU, 0, 100)
		between(t, "percent of the memory's time", rates.Memory, 0, 100)
	}
	_, err := lib.DeviceGetCurrentClocksEventReasons(device)
	optional(t, "DeviceGetCurrentClocksEventReasons", err)
	samples(t, lib, device)
}

// samples holds that samples are of processes, and that those which were seen do
// not come again.
func samples(t *testing.T, lib nvml.Library, device nvml.Device) {
	t.Helper()
	seen := uint64(0)
	for range 2 {
		taken, err := lib.DeviceGetProcessUtilization(device, seen)
		if errors.Is(err, nvml.NotFound) || !optional(t, "DeviceGetProcessUtilization", err) {
			return
		}
		before := seen
		for _, s := range taken {
			if s.PID <= 0 || s.Time <= before {
				t.Errorf("sample %+v, although those up to %d were seen", s, before)
			}
			between(t, "percent of the multiprocessors", s.SM, 0, 100)
			seen = max(seen, s.Time)
		}
	}
}
