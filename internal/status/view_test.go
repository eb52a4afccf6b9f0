package status_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestGPUStatus(t *testing.T) {
	t.Parallel()
	small, err := mig.ParseProfile("1g.5gb")
	if err != nil {
		t.Fatal(err)
	}
	cutUp := sharing.GPU{
		UUID: "GPU-b", Index: 1, Model: "M", Memory: 40, MIG: true,
		Partitions: []sharing.Partition{{UUID: "MIG-1", Index: 0, Profile: small, Memory: 5, Placement: mig.Placement{Start: 6, Size: 1}}, {UUID: "MIG-2", Index: 1, Profile: small, Health: sharing.Faulty("XID 31")}},
	}
	whole := sharing.GPU{UUID: "GPU-a", Index: 0, Model: "M", Memory: 40, Health: sharing.Faulty("lost")}
	plan := []sharing.Resource{{Name: "r", Units: []sharing.Unit{
		{ID: "GPU-a", GPU: "GPU-a", Index: "0", Replicas: 4}, {ID: "MIG-1", GPU: "GPU-b", Index: "1:0", Replicas: 1},
	}}}
	held := []sharing.Allocation{
		{Namespace: "n", Pod: "p", Container: "c", Resource: "r", Devices: []string{"GPU-a::0", "GPU-a::1"}},
		{Namespace: "n", Pod: "q", Container: "c", Resource: "old", Devices: []string{"MIG-gone"}},
		{Namespace: "n", Pod: "q", Container: "c", Resource: "gpu", Devices: []string{"GPU-b"}},
	}
	since := time.Unix(5, 0)
	health := sharing.HealthReport{Units: []sharing.UnitHealth{{Unit: "GPU-a", GPU: "GPU-a", State: sharing.Recovering, Reason: "lost", Since: since}}}
	gpus, elsewhere := status.GPUs([]sharing.GPU{cutUp, whole}, sharing.Usage(plan, held), health)
	good := status.Health{State: sharing.Healthy}
	sick := status.Health{State: sharing.Recovering, Reason: "lost", Since: &since}
	wantGPUs := []status.GPU{
		{UUID: "GPU-a", Index: 0, Model: "M", Memory: 40, Health: sick, Units: []status.Unit{{
			ID: "GPU-a", Index: "0", Memory: 40, Resource: "r", Replicas: 4, Health: sick,
			Holders: []status.Holder{{Namespace: "n", Pod: "p", Container: "c", Resource: "r", Devices: []string{"GPU-a::0", "GPU-a::1"}}},
		}}},
		{UUID: "GPU-b", Index: 1, Model: "M", Memory: 40, MIG: true, Health: good, Units: []status.Unit{
			{ID: "MIG-1", Index: "1:0", Profile: "1g.5gb", Placement: &mig.Placement{Start: 6, Size: 1}, Memory: 5, Resource: "r", Replicas: 1, Health: good, Holders: []status.Holder{}},
			{ID: "MIG-2", Index: "1:1", Profile: "1g.5gb", Health: status.Health{State: sharing.Unhealthy, Reason: "XID 31"}, Holders: []status.Holder{}},
			// Held since before it was partitioned.
			{ID: "GPU-b", Index: "1", Memory: 40, Health: good, Holders: []status.Holder{{Namespace: "n", Pod: "q", Container: "c", Resource: "gpu", Devices: []string{"GPU-b"}}}},
		}},
	}
	if diff := cmp.Diff(wantGPUs, gpus); diff != "" {
		t.Error(diff)
	}
	wantElsewhere := []status.Unit{{ID: "MIG-gone", Health: good, Holders: []status.Holder{{Namespace: "n", Pod: "q", Container: "c", Resource: "old", Devices: []string{"MIG-gone"}}}}}
	if diff := cmp.Diff(wantElsewhere, elsewhere); diff != "" {
		t.Error(diff)
	}
	if got := gpus[0].Units[0].Held(); got != 2 {
		t.Errorf("%d devices are held", got)
	}
}

func entry(id string, healthy bool) plugin.Entry {
	unit, _, _ := sharing.ParseDeviceID(id)
	return plugin.Entry{Device: sharing.Device{ID: id, Unit: unit, Healthy: healthy}, Phase: plugin.Offered}
}

func TestResourceStatus(t *testing.T) {
	t.Parallel()
	plan := sharing.Plan{Resources: []sharing.Resource{
		{Name: "a", Units: []sharing.Unit{{ID: "GPU-a", GPU: "GPU-a", Replicas: 9}, {ID: "GPU-b", GPU: "GPU-b", Replicas: 9}}},
		{Name: "waits", Units: []sharing.Unit{{ID: "GPU-c", GPU: "GPU-c", Replicas: 1}}},
	}}
	units := []sharing.Unit{{ID: "GPU-a", GPU: "GPU-a", Replicas: 1}, {ID: "GPU-b", Replicas: 4}}
	served := []plugin.ResourceStatus{
		{Name: "old", Streams: 1, Devices: 1, Leaving: 1, Dropped: true, Listed: []plugin.Entry{entry("GPU-c", false)}},
		{Name: "a", Streams: 1, Devices: 4, Healthy: 3, Applied: true, Units: units, Listed: []plugin.Entry{
			entry("GPU-a", true), entry("GPU-b::0", true), entry("GPU-b::1", true), entry("GPU-b::2", false),
		}},
	}
	held := []sharing.Allocation{
		{Resource: "a", Devices: []string{"GPU-a", "GPU-b::2"}}, {Resource: "old", Devices: []string{"GPU-c"}},
	}
	n := func(n int) *int { return &n }
	for _, test := range []struct {
		name  string
		known bool
		want  []status.Resource
	}{
		{"holders known", true, []status.Resource{
			{Name: "a", Strategy: "exclusive,time-slicing", Streams: 1, Devices: 4, Healthy: 3, Held: n(2), Free: n(2)},
			{Name: "old", Dropped: true, Streams: 1, Devices: 1, Leaving: 1, Held: n(1), Free: n(0)},
			{Name: "waits", Strategy: "exclusive", Held: n(0), Free: n(0)},
		}},
		{"holders not known", false, []status.Resource{
			{Name: "a", Strategy: "exclusive,time-slicing", Streams: 1, Devices: 4, Healthy: 3},
			{Name: "old", Dropped: true, Streams: 1, Devices: 1, Leaving: 1},
			{Name: "waits", Strategy: "exclusive"},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := status.Resources(served, status.Listed(served, []sharing.GPU{{UUID: "GPU-b"}}), plan, held, test.known)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestStatusSaysWhoUsesWhat(t *testing.T) {
	t.Parallel()
	one := sharing.Container{Namespace: "n", Pod: "one", Name: "main"}
	node := status.Status{GPUs: []status.GPU{
		{UUID: "GPU-a", Units: []status.Unit{{ID: "GPU-a", Holders: []status.Holder{{Namespace: "n", Pod: "one", Container: "main"}, {Namespace: "n", Pod: "two", Container: "main"}}}}},
		{UUID: "GPU-b", Units: []status.Unit{{ID: "GPU-b", Holders: []status.Holder{{Namespace: "n", Pod: "one", Container: "main"}}}}},
		{UUID: "GPU-c"},
	}}
	known := func(v float64) *float64 { return &v }
	node.AddUtilization(sharing.UtilizationReport{
		Attributed: true,
		GPUs:       []sharing.GPUUtilization{{GPU: "GPU-a", Memory: known(9), SM: known(1)}, {GPU: "GPU-b", Celsius: known(40)}},
		Containers: []sharing.ContainerUtilization{{Container: one, GPU: "GPU-a", Unit: "GPU-a", Processes: 2, Memory: known(5), SM: known(0.75), OverShare: known(1)}},
		Unattributed: []sharing.UnattributedUtilization{
			{GPU: "GPU-a", Cause: sharing.CauseNoContainer, Processes: 1, Memory: known(3)}, {GPU: "GPU-a", Cause: sharing.CauseUnreadable},
			{GPU: "GPU-gone", Cause: sharing.CauseUnreadable, Processes: 1},
		},
		Contention: []sharing.Contention{{GPU: "GPU-a", MaxShare: 0.75, Contended: true}, {GPU: "GPU-b", MaxShare: 1}, {GPU: "GPU-gone", Contended: true}},
	})
	if !node.Attributed {
		t.Error("not attributed")
	}
	want := []*status.Use{
		{
			Memory: known(9), SM: known(1), Contended: true, MaxShare: known(0.75),
			Unattributed: []sharing.UnattributedUtilization{{GPU: "GPU-a", Cause: sharing.CauseNoContainer, Processes: 1, Memory: known(3)}},
		},
		{Celsius: known(40)},
		nil,
	}
	for i, gpu := range node.GPUs {
		if diff := cmp.Diff(want[i], gpu.Use); diff != "" {
			t.Errorf("%s (-want +got):\n%s", gpu.UUID, diff)
		}
	}
	holders := node.GPUs[0].Units[0].Holders
	if diff := cmp.Diff(&status.Use{Memory: known(5), SM: known(0.75), Processes: 2, OverShare: known(1)}, holders[0].Use); diff != "" {
		t.Error(diff)
	}
	if holders[1].Use != nil || node.GPUs[1].Units[0].Holders[0].Use != nil {
		t.Error("use of a unit that was not measured")
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	some := plugin.ResourceStatus{Name: "r", Refused: map[plugin.RefusalReason]uint64{plugin.TooMany: 0, plugin.MIGChange: 2}}
	got := status.Resources([]plugin.ResourceStatus{some}, make([]sharing.Resource, 1), sharing.Plan{}, nil, false)[0].Refused
	if diff := cmp.Diff(map[plugin.RefusalReason]uint64{plugin.MIGChange: 2}, got); diff != "" {
		t.Error(diff)
	}
}
