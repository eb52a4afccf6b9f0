package plugin_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// TestCallsAreCounted holds that each call is counted once, by what became of it.
func TestCallsAreCounted(t *testing.T) {
	oneShare := plan(gpu, 2, 4)
	oneShare.Resources[0].OneShareOnly = true
	strict := plan(gpu, 2, 4)
	strict.Resources[0].SpreadStrict = true
	for _, test := range []struct {
		name     string
		refused  plugin.Reason // empty when it is granted
		sameUnit uint64
		call     func(t *testing.T) plugin.ResourceStatus
	}{
		{name: "granted", call: allocating(plan(gpu, 2, 4), "GPU-0001::0", "GPU-0000::0")},
		{name: "granted twice the same unit", sameUnit: 1, call: allocating(plan(gpu, 2, 4), "GPU-0001::0", "GPU-0001::1", "GPU-0001::2")},
		{name: "unknown", refused: plugin.UnknownDevice, call: allocating(plan(gpu, 2, 4), "GPU-0001::9")},
		{name: "faulty", refused: plugin.UnhealthyDevice, call: allocating(withFault(plan(gpu, 2, 4), "GPU-0001", "XID 79"), "GPU-0001::0")},
		{name: "two shares", refused: plugin.TooMany, call: allocating(oneShare, "GPU-0001::0", "GPU-0000::0")},
		{name: "no spread", refused: plugin.SameUnit, call: allocating(strict, "GPU-0001::0", "GPU-0001::1")},
		{name: "nothing", refused: plugin.Internal, call: allocating(plan(gpu, 2, 4))},
		{name: "being cut", refused: plugin.Recut, call: func(t *testing.T) plugin.ResourceStatus {
			client, manager := dialManager(t, plan(gpu, 2, 4))
			manager.Close("is being cut", "GPU-0001")
			_, _ = client.Allocate(t.Context(), allocate("GPU-0001::0"))
			return manager.Status().Resources[0]
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			status := test.call(t)
			want := map[plugin.Reason]uint64{}
			for _, reason := range plugin.Reasons() {
				want[reason] = 0
			}
			granted := uint64(1)
			if test.refused != "" {
				granted, want[test.refused] = 0, 1
			}
			if diff := cmp.Diff(want, status.Refused); diff != "" {
				t.Errorf("refused (-want +got):\n%s", diff)
			}
			if status.Granted != granted || status.SameUnit != test.sameUnit {
				t.Errorf("%d granted, %d on one unit; want %d, %d", status.Granted, status.SameUnit, granted, test.sameUnit)
			}
			if status.Allocated.Count != granted || status.Failed.Count != 1-granted {
				t.Errorf("%d granted and %d refused took time, want %d and %d", status.Allocated.Count, status.Failed.Count, granted, 1-granted)
			}
		})
	}
}

// allocating asks a plugin with the plan for the devices, and returns its status.
func allocating(p sharing.Plan, ids ...string) func(*testing.T) plugin.ResourceStatus {
	return func(t *testing.T) plugin.ResourceStatus {
		client, manager := dialManager(t, p)
		_, _ = client.Allocate(t.Context(), allocate(ids...))
		return manager.Status().Resources[0]
	}
}

// TestPreferredAllocationIsTimed holds the same of the other call.
func TestPreferredAllocationIsTimed(t *testing.T) {
	client, manager := dialManager(t, plan(gpu, 2, 4))
	if _, err := client.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{}); err != nil {
		t.Fatal(err)
	}
	if status := manager.Status().Resources[0]; status.Preferred.Count != 1 || status.Allocated.Count+status.Failed.Count != 0 {
		t.Errorf("calls %+v", status)
	}
}

// TestStatusLists holds that the list is shown as it is.
func TestStatusLists(t *testing.T) {
	_, manager := dialManager(t, plan(gpu, 2, 4))
	status := manager.Status().Resources[0]
	if len(status.Listed) != 8 || status.Listed[0].Unit != "GPU-0000" || !status.Listed[0].Healthy {
		t.Errorf("listed %+v", status.Listed)
	}
}
