package metrics

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/virgate/virgate/sharing"
)

type fixedHealth sharing.HealthReport

func (f fixedHealth) Health() sharing.HealthReport { return sharing.HealthReport(f) }

func TestHealthExposition(t *testing.T) {
	collector := NewHealthCollector(fixedHealth{
		Units: []sharing.UnitHealth{
			{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: sharing.Healthy},
			{Unit: "MIG-a", GPU: "GPU-a", Index: "0:0", State: sharing.Suspect, Reason: "XID 94"},
		},
		Monitors: []sharing.HealthMonitor{{GPU: "GPU-a"}, {GPU: "GPU-b", Degraded: "the board has no events"}},
		Transitions: []sharing.TransitionCount{
			{GPU: "GPU-a", From: sharing.Healthy, To: sharing.Suspect, Cause: sharing.CauseXID, Count: 2},
		},
		XIDs: []sharing.XIDCount{
			{GPU: "GPU-a", XID: "94", Action: sharing.SuspectError, Count: 3},
			{GPU: "GPU-a", XID: sharing.OtherXID, Action: sharing.SuspectError, Count: 1},
		},
	})
	checkExposition(t, collector, "health.prom")
	if n := testutil.CollectAndCount(NewHealthCollector(fixedHealth{})); n != 0 {
		t.Errorf("%d series of a node without GPUs", n)
	}
}
