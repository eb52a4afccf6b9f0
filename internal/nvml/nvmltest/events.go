package nvmltest

import (
	"errors"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// shortWait is for waits that nothing is expected of. The driver counts in
// milliseconds.
const shortWait = 20 * time.Millisecond

// events holds the life of an event set: boards are registered, a wait ends in
// time, and a freed set is none.
func events(t *testing.T, lib nvml.Library, expect Expect) {
	set, err := lib.EventSetCreate()
	must(t, err)
	found := devices(t, lib)
	registered := Unknown
	for index, device := range found {
		supported, err := lib.DeviceGetSupportedEventTypes(device)
		if !optional(t, "DeviceGetSupportedEventTypes", err) || supported&nvml.EventXIDCritical == 0 {
			continue
		}
		if optional(t, "DeviceRegisterEvents", lib.DeviceRegisterEvents(device, nvml.EventXIDCritical, set)) {
			registered = index
		}
	}
	if expect.Event != nil && registered != Unknown {
		expect.Event(t, registered)
		event, err := lib.EventSetWait(set, 10*time.Second)
		must(t, err)
		if event.Device != found[registered] || event.Type != nvml.EventXIDCritical || event.Data != 94 {
			t.Errorf("event %+v, want XID 94 of GPU %d", event, registered)
		}
	}
	quiet(t, lib, set)
	must(t, lib.EventSetFree(set))
}

// quiet holds that a wait ends with Timeout, neither at once nor much too late.
// A node that works may have an event meanwhile.
func quiet(t *testing.T, lib nvml.Library, set nvml.EventSet) {
	t.Helper()
	for range walkLimit {
		start := time.Now()
		_, err := lib.EventSetWait(set, shortWait)
		if err == nil {
			continue
		}
		fails(t, "EventSetWait", err, nvml.Timeout)
		if took := time.Since(start); errors.Is(err, nvml.Timeout) && (took < shortWait/2 || took > 5*time.Second) {
			t.Errorf("a wait of %s took %s", shortWait, took)
		}
		return
	}
	t.Errorf("%d events: a wait never timed out", walkLimit)
}
