package sharing

import (
	"cmp"
	"slices"
)

// Change is what one resource's devices do from one plan to another.
type Change struct {
	// Kind says what happens to the resource.
	Kind ChangeKind `json:"kind"`
	// Name is the resource's name, in the later plan where it is in both.
	Name string `json:"name"`
	// OldName is the name in the earlier plan of a Renamed resource.
	OldName string `json:"oldName,omitempty"`
	// Before and After are numbers of devices.
	Before int `json:"before"`
	After  int `json:"after"`
}

// ChangeKind is one of the constants below.
type ChangeKind string

// What can happen to a resource.
const (
	Appears  ChangeKind = "appears"
	Vanishes ChangeKind = "vanishes"
	Grows    ChangeKind = "grows"
	Shrinks  ChangeKind = "shrinks"
	// Renamed says that all units of a vanishing resource turn up in one new
	// resource and it has no others.
	Renamed ChangeKind = "renamed"
	// Regrouped says that as many devices stand for other units, or for the
	// same in another way.
	Regrouped ChangeKind = "regrouped"
)

// Diff says what changes for the kubelet from one plan to another, by name.
// Resources whose devices stay the same are left out; health is not compared.
func Diff(from, to Plan) []Change {
	before, after := byName(from), byName(to)
	renamed := map[string]string{} // new name → old name
	for name, old := range before {
		if _, stays := after[name]; stays {
			continue
		}
		for newName, r := range after {
			if _, existed := before[newName]; !existed && slices.Equal(unitIDs(old), unitIDs(r)) {
				renamed[newName] = name
			}
		}
	}

	var changes []Change
	for name, r := range after {
		old, existed := before[name]
		change := Change{Name: name, Before: len(old.Devices), After: len(r.Devices)}
		oldName, isRenamed := renamed[name]
		switch {
		case isRenamed:
			change.Kind, change.OldName, change.Before = Renamed, oldName, len(before[oldName].Devices)
		case !existed:
			change.Kind = Appears
		case change.After > change.Before:
			change.Kind = Grows
		case change.After < change.Before:
			change.Kind = Shrinks
		case !slices.Equal(deviceIDs(old), deviceIDs(r)):
			change.Kind = Regrouped
		default:
			continue
		}
		changes = append(changes, change)
	}
	for name, r := range before {
		if _, stays := after[name]; !stays && !hasValue(renamed, name) {
			changes = append(changes, Change{Kind: Vanishes, Name: name, Before: len(r.Devices)})
		}
	}
	slices.SortFunc(changes, func(a, b Change) int { return cmp.Compare(a.Name, b.Name) })
	return changes
}

func byName(p Plan) map[string]Resource {
	resources := make(map[string]Resource, len(p.Resources))
	for _, r := range p.Resources {
		resources[r.Name] = r
	}
	return resources
}

func unitIDs(r Resource) []string {
	ids := make([]string, len(r.Units))
	for i, u := range r.Units {
		ids[i] = u.ID
	}
	slices.Sort(ids)
	return ids
}

func deviceIDs(r Resource) []string {
	ids := make([]string, len(r.Devices))
	for i, d := range r.Devices {
		ids[i] = d.ID
	}
	slices.Sort(ids)
	return ids
}

func hasValue(m map[string]string, value string) bool {
	for _, v := range m {
		if v == value {
			return true
		}
	}
	return false
}
