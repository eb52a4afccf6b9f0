package plugin

import (
	"slices"
	"testing"

	"github.com/virgate/virgate/sharing"
)

// TestGenerationRemembersUnits checks that a unit that is no longer planned keeps its data, as pods hold its
// devices.
func TestGenerationRemembersUnits(t *testing.T) {
	list := List{Entries: []Entry{{Device: sharing.Device{ID: "A::0", Unit: "A"}}}}
	unit := sharing.Unit{ID: "A", GPU: "A", Model: "T4", Minor: 3}
	first := newGeneration(sharing.Resource{}, list, grantTerms{}, nil, map[string]sharing.Unit{"A": unit}, nil)
	next := newGeneration(sharing.Resource{}, list, grantTerms{}, nil, nil, first)
	if got := next.units["A"]; got.Model != "T4" || got.Minor != 3 {
		t.Errorf("unit %+v, want what it was", got)
	}
}

// TestGenerationKnowsTheHardware checks that a generation's index knows the hardware of listed devices, even if
// the plan has them in another resource or in none.
func TestGenerationKnowsTheHardware(t *testing.T) {
	gpu := func(id string, peers ...string) sharing.Unit {
		unit := sharing.Unit{ID: id, GPU: id, NUMANode: -1}
		for _, peer := range peers {
			unit.Links = append(unit.Links, sharing.Link{Peer: peer, NVLinks: 4})
		}
		return unit
	}
	partition := func(id, gpu string) sharing.Unit {
		return sharing.Unit{ID: id, GPU: gpu, NUMANode: -1}
	}
	for _, test := range []struct {
		name      string
		units     []sharing.Unit
		available []string
		want      []string
	}{
		{"GPUs by links", []sharing.Unit{gpu("A"), gpu("B", "D"), gpu("C"), gpu("D", "B")},
			[]string{"A", "B", "C", "D"}, []string{"B", "D"}},
		{"partitions by GPU", []sharing.Unit{partition("A", "X"), partition("B", "Y"), partition("C", "Y"), partition("D", "Y")},
			[]string{"A", "C", "D"}, []string{"C", "D"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			resource := sharing.Resource{Name: "nvidia.com/gpu", Policy: sharing.Packed}
			units, health := map[string]sharing.Unit{}, map[string]sharing.Health{}
			var list List
			for _, unit := range test.units {
				units[unit.ID], health[unit.ID] = unit, sharing.Health{}
				list.Entries = append(list.Entries, Entry{Device: sharing.Device{ID: unit.ID, Unit: unit.ID, Healthy: true, NUMANode: -1}})
			}
			planned := newGeneration(resource, list, grantTerms{}, health, units, nil)
			dropped := newGeneration(resource, list, grantTerms{}, health, nil, planned)
			for name, g := range map[string]*generation{"planned": planned, "dropped": dropped} {
				if got := g.choices.Prefer(test.available, nil, 2); !slices.Equal(got, test.want) {
					t.Errorf("%s: Prefer = %q, want %q", name, got, test.want)
				}
			}
		})
	}
}
