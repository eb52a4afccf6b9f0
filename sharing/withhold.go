package sharing

import (
	"maps"
	"slices"
)

// Withhold returns the plan with the units that cannot be granted now, by the
// reasons why, made faulty. A unit that is faulty already keeps its fault, and
// a reason for a unit that the node does not have is ignored. The plan itself
// is not modified.
func (p Plan) Withhold(reasons map[string]string) Plan {
	faults := maps.Clone(p.Faults)
	for unit, fault := range p.Faults {
		if reason := reasons[unit]; fault == "" && reason != "" {
			faults[unit] = reason
		}
	}
	if maps.Equal(faults, p.Faults) {
		return p
	}
	p.Faults = faults
	p.Resources = slices.Clone(p.Resources)
	for i := range p.Resources {
		r := &p.Resources[i]
		r.Units, r.Devices = slices.Clone(r.Units), slices.Clone(r.Devices)
		for j := range r.Units {
			r.Units[j].Fault = faults[r.Units[j].ID]
		}
		for j := range r.Devices {
			r.Devices[j].Healthy = faults[r.Devices[j].Unit] == ""
		}
	}
	return p
}
