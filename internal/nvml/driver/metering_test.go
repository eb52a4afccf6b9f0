//go:build cgo

package driver

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
)

// metered holds what the fake says of the use of its boards, the second of which
// has MIG enabled.
func metered(t *testing.T, lib nvml.Library, whole, cut nvml.Device) {
	t.Helper()
	rates, err := lib.DeviceGetUtilizationRates(whole)
	if want := (nvml.Utilization{GPU: 42, Memory: 7}); rates != want || err != nil {
		t.Errorf("rates %+v, %v, want %+v", rates, err, want)
	}
	reasons, err := lib.DeviceGetCurrentClocksEventReasons(whole)
	if want := nvml.SoftwarePowerCap | nvml.HardwareThermalSlowdown; reasons != want || err != nil {
		t.Errorf("clocks %#x, %v, want %#x", reasons, err, want)
	}
	samples, err := lib.DeviceGetProcessUtilization(whole, 0)
	must(t, err)
	want := []nvml.ProcessSample{{PID: 4711, Time: 1000, SM: 30, Memory: 3}, {PID: 4711, Time: 2000, SM: 50, Memory: 5}}
	if diff := cmp.Diff(want, samples); diff != "" {
		t.Errorf("samples (-want +got):\n%s", diff)
	}
	for name, test := range map[string]struct {
		device   nvml.Device
		lastSeen uint64
		want     nvml.Return
	}{
		"more came while it was asked": {whole, 1000, nvml.InsufficientSize},
		"no room needed":               {whole, 1500, nvml.NotFound},
		"nothing new":                  {whole, 2000, nvml.NotFound},
		"MIG enabled":                  {cut, 0, nvml.NotSupported},
	} {
		if _, err := lib.DeviceGetProcessUtilization(test.device, test.lastSeen); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %s", name, err, test.want)
		}
	}
}
