package plugin

import (
	"maps"
	"slices"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// domain is that of the resource names under which GPUs are held that this
// program, or NVIDIA's plugin before it, has granted.
const domain = "nvidia.com/"

// adopt returns have with the devices that pods hold and that no list has. It
// must not be trusted with other plugins' devices: the resource has to be one
// of ours or NVIDIA's, and the ID that of a GPU or partition.
func (s *step) adopt(have Lists, want sharing.Plan) Lists {
	var adopted Lists
	for _, resource := range slices.Sorted(maps.Keys(s.seen.held)) {
		list, had := have[resource]
		planned := slices.ContainsFunc(want.Resources, func(r sharing.Resource) bool { return r.Name == resource })
		if !had && !planned && !strings.HasPrefix(resource, domain) {
			continue
		}
		listed := make(map[string]struct{}, len(list.Entries))
		for _, e := range list.Entries {
			listed[e.ID] = struct{}{}
		}
		entries := slices.Clip(list.Entries)
		for _, id := range slices.Sorted(maps.Keys(s.seen.held[resource])) {
			unit, _, _ := sharing.ParseDeviceID(id)
			if _, ok := listed[id]; ok || !s.isUnit(unit) {
				continue
			}
			entries = append(entries, Entry{Device: sharing.Device{ID: id, Unit: unit, NUMANode: numaNode(want, unit)}, Phase: Offered})
		}
		if len(entries) == len(list.Entries) {
			continue
		}
		if adopted == nil {
			adopted = maps.Clone(have)
			if adopted == nil {
				adopted = Lists{}
			}
		}
		list.Entries = entries
		adopted[resource] = list
	}
	if adopted == nil {
		return have
	}
	return adopted
}

// isUnit says that the name is that of a GPU or partition, of this node now or
// of one that has left it.
func (s *step) isUnit(unit string) bool {
	_, present := s.faults[unit]
	return present || strings.HasPrefix(unit, "GPU-") || strings.HasPrefix(unit, "MIG-")
}

func numaNode(want sharing.Plan, unit string) int {
	for _, r := range want.Resources {
		for _, u := range r.Units {
			if u.ID == unit {
				return u.NUMANode
			}
		}
	}
	return -1
}
