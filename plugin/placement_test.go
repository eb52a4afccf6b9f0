package plugin

import (
	"slices"
	"testing"

	"github.com/virgate/virgate/sharing"
)

// A generation's index knows the hardware behind the list, also that of devices
// which another resource, or none, has in the plan by now.
func TestGenerationKnowsTheHardware(t *testing.T) {
	board := func(id string, peers ...string) sharing.Unit {
		unit := sharing.Unit{ID: id, GPU: id, NUMANode: -1}
		for _, peer := range peers {
			unit.Links = append(unit.Links, sharing.Link{Peer: peer, NVLinks: 4})
		}
		return unit
	}
	partition := func(id, board string) sharing.Unit {
		return sharing.Unit{ID: id, GPU: board, NUMANode: -1}
	}
	for _, test := range []struct {
		name      string
		units     []sharing.Unit
		available []string
		want      []string
	}{
		{"boards by links", []sharing.Unit{board("A"), board("B", "D"), board("C"), board("D", "B")},
			[]string{"A", "B", "C", "D"}, []string{"B", "D"}},
		{"partitions by board", []sharing.Unit{partition("A", "X"), partition("B", "Y"), partition("C", "Y"), partition("D", "Y")},
			[]string{"A", "C", "D"}, []string{"C", "D"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			resource := sharing.Resource{Name: "nvidia.com/gpu", Policy: sharing.Packed}
			units, faults := map[string]sharing.Unit{}, map[string]string{}
			var list List
			for _, unit := range test.units {
				units[unit.ID], faults[unit.ID] = unit, ""
				list.Entries = append(list.Entries, Entry{Device: sharing.Device{ID: unit.ID, Unit: unit.ID, Healthy: true, NUMANode: -1}})
			}
			planned := newGeneration(resource, list, terms{}, faults, units, nil)
			dropped := newGeneration(resource, list, terms{}, faults, nil, planned)
			for name, g := range map[string]*generation{"planned": planned, "dropped": dropped} {
				if got := g.index.Prefer(test.available, nil, 2); !slices.Equal(got, test.want) {
					t.Errorf("%s: Prefer = %q, want %q", name, got, test.want)
				}
			}
		})
	}
}
