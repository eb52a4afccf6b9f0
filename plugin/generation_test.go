package plugin

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

// TestGenerationRemembersUnits has a unit that the plan has no more stay as it
// last was: pods hold its devices.
func TestGenerationRemembersUnits(t *testing.T) {
	list := List{Entries: []Entry{{Device: sharing.Device{ID: "A::0", Unit: "A"}}}}
	unit := sharing.Unit{ID: "A", GPU: "A", Model: "T4", Minor: 3}
	first := newGeneration(sharing.Resource{}, list, terms{}, nil, map[string]sharing.Unit{"A": unit}, nil)
	next := newGeneration(sharing.Resource{}, list, terms{}, nil, nil, first)
	if got := next.devices["A::0"].unit; got.Model != "T4" || got.Minor != 3 {
		t.Errorf("unit %+v, want what it was", got.Unit)
	}
}
