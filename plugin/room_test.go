package plugin_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// boardsAs plans some boards, from the first on, with IDs as long as real ones
// and a NUMA node.
func boardsAs(first, count, replicas int) sharing.Plan {
	var gpus []sharing.GPU
	for i := range count {
		uuid := "GPU-" + string(rune('a'+first+i)) + strings.Repeat("0", 35)
		gpus = append(gpus, sharing.GPU{UUID: uuid, Index: first + i, Model: "Test", NUMANode: 1})
	}
	return sharing.NewPlan(gpus, sharing.Profile{
		MIGStrategy: sharing.MIGNone, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames: []sharing.Naming{{Pattern: "*", Name: gpu}},
		Shares:   []sharing.Share{{Path: "s", Resource: gpu, Replicas: replicas, Policy: sharing.Distributed}},
	})
}

// TestLongestList: the kubelet takes the longest list that a plan can have,
// healthy and unhealthy.
func TestLongestList(t *testing.T) {
	b := newBench(t, nil)
	const boards, replicas = 16, sharing.MostDevices / 16
	longest := boardsAs(0, boards, replicas)
	b.manager.Apply(longest)
	b.shows(gpu, boards*replicas, boards*replicas)
	for _, unit := range longest.Resources[0].Units {
		withFault(longest, unit.ID, "broken")
	}
	b.manager.Apply(longest)
	b.shows(gpu, boards*replicas, 0)
}

// TestLongestListsChange: in passing from one board to another, with the most
// devices that each can have, the list never grows beyond what the kubelet
// takes: it would drop the stream. The old ones retire before all of the new ones
// come, and the same stream has both.
func TestLongestListsChange(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(boardsAs(0, 1, sharing.MostDevices))
	b.shows(gpu, sharing.MostDevices, sharing.MostDevices)
	b.manager.Apply(boardsAs(1, 1, sharing.MostDevices))
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[gpu]
		return r.Connected && r.Allocatable == sharing.MostDevices && strings.HasPrefix(r.Devices[0].ID, "GPU-b")
	})
	if r := b.kubelet.Snapshot().Resources[gpu]; r.StreamsOpened != 1 || r.Registrations != 1 {
		t.Errorf("%d streams and %d registrations, want one of each", r.StreamsOpened, r.Registrations)
	}
}

// TestRoom: what was listed stays, what is new comes in the plan's order as far
// as there is room.
func TestRoom(t *testing.T) {
	old, next := boardsAs(0, 2, 3000), boardsAs(1, 3, sharing.MostDevices/3)
	lists := plugin.Next(nil, old, plugin.Sight{}, plugin.Calls{}, time.Unix(1000, 0), plugin.Timing{})
	lists = plugin.Next(lists, next, plugin.Sight{}, plugin.Calls{}, time.Unix(1001, 0), plugin.Timing{})
	devices := map[byte]int{} // by the board's letter
	for _, e := range lists[gpu].Entries {
		devices[e.ID[4]]++
	}
	// Of board a all stay for now; b, c and d are wanted, and d is the last.
	const each = sharing.MostDevices / 3
	want := map[byte]int{'a': 3000, 'b': each, 'c': each, 'd': sharing.MostDevices - 3000 - 2*each}
	if diff := cmp.Diff(want, devices); diff != "" {
		t.Error(diff)
	}
}
