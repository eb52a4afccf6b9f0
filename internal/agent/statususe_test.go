package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestStatusSaysWhoUsesWhat(t *testing.T) {
	one := sharing.Container{Namespace: "n", Pod: "one", Name: "main"}
	status := Status{GPUs: []GPUStatus{
		{UUID: "GPU-a", Units: []UnitStatus{{ID: "GPU-a", Holders: []Holder{{Namespace: "n", Pod: "one", Container: "main"}, {Namespace: "n", Pod: "two", Container: "main"}}}}},
		{UUID: "GPU-b", Units: []UnitStatus{{ID: "GPU-b", Holders: []Holder{{Namespace: "n", Pod: "one", Container: "main"}}}}},
		{UUID: "GPU-c"},
	}}
	known := sharing.KnownFigure
	addUse(&status, sharing.UseReport{
		Attributed: true,
		Boards:     []sharing.BoardUse{{GPU: "GPU-a", Memory: known(9), SM: known(1)}, {GPU: "GPU-b", Celsius: known(40)}},
		Containers: []sharing.ContainerUse{{Container: one, GPU: "GPU-a", Unit: "GPU-a", Processes: 2, Memory: known(5), SM: known(0.75), OverShare: known(1)}},
		Unattributed: []sharing.UnattributedUse{
			{GPU: "GPU-a", Cause: sharing.CauseNoContainer, Processes: 1, Memory: known(3)}, {GPU: "GPU-a", Cause: sharing.CauseUnreadable},
			{GPU: "GPU-gone", Cause: sharing.CauseUnreadable, Processes: 1},
		},
		Contention: []sharing.Contention{{GPU: "GPU-a", MaxShare: 0.75, Contended: true}, {GPU: "GPU-b", MaxShare: 1}, {GPU: "GPU-gone", Contended: true}},
	})
	if !status.Attributed {
		t.Error("not attributed")
	}
	want := []*UseStatus{
		{
			Memory: ratio(9), SM: ratio(1), Contended: true, MaxShare: ratio(0.75),
			Unattributed: []UnattributedStatus{{Cause: sharing.CauseNoContainer, Processes: 1, Memory: ratio(3)}},
		},
		{Celsius: ratio(40)},
		nil,
	}
	for i, gpu := range status.GPUs {
		if diff := cmp.Diff(want[i], gpu.Use); diff != "" {
			t.Errorf("%s (-want +got):\n%s", gpu.UUID, diff)
		}
	}
	holders := status.GPUs[0].Units[0].Holders
	if diff := cmp.Diff(&UseStatus{Memory: ratio(5), SM: ratio(0.75), Processes: 2, OverShare: ratio(1)}, holders[0].Use); diff != "" {
		t.Error(diff)
	}
	if holders[1].Use != nil || status.GPUs[1].Units[0].Holders[0].Use != nil {
		t.Error("use of a unit that was not measured")
	}
}

func TestRefusals(t *testing.T) {
	none := plugin.ResourceStatus{Refused: map[plugin.Reason]uint64{plugin.TooMany: 0}}
	if got := refusals(none); got != nil {
		t.Errorf("%v refused, want none", got)
	}
	some := plugin.ResourceStatus{Name: "r", Refused: map[plugin.Reason]uint64{plugin.TooMany: 0, plugin.Recut: 2}}
	got := resourcesOf([]plugin.ResourceStatus{some}, sharing.Plan{}, nil, nil, false)[0].Refused
	if diff := cmp.Diff(map[plugin.Reason]uint64{plugin.Recut: 2}, got); diff != "" {
		t.Error(diff)
	}
}
