package sharing

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
)

// resources gathers the units under their final names, by name. Units that
// come to one name from several places are one resource; what can only be said
// once of a resource, its first share in the document says.
func resources(units []candidate, p Profile, notes *warnings) []Resource {
	members := make(map[string][]candidate)
	for _, unit := range units {
		name := unit.name
		if unit.share != exclusive {
			name = cmp.Or(p.Shares[unit.share].Rename, name)
		}
		members[name] = append(members[name], unit)
	}

	var all []Resource
	for _, name := range slices.Sorted(maps.Keys(members)) {
		resource := Resource{Name: name, OneShareOnly: p.OneShareOnly, DeviceIDs: p.DeviceIDs}
		resource.Policy, resource.SpreadStrict = policy(name, members[name], p, notes)
		resource.Units = listable(name, members[name], p, notes)
		resource.Devices = devices(resource.Units)
		all = append(all, resource)
	}
	return all
}

// policy returns how the devices of a resource are chosen, and mentions the
// shares of the resource that say otherwise.
func policy(name string, units []candidate, p Profile, notes *warnings) (chosen Policy, strict bool) {
	shares := make([]int, 0, len(units))
	for _, unit := range units {
		if unit.share != exclusive {
			shares = append(shares, unit.share)
		}
	}
	slices.Sort(shares)
	shares = slices.Compact(shares)
	if len(shares) == 0 {
		return p.Policy, false
	}
	first := p.Shares[shares[0]]
	for _, i := range shares[1:] {
		if other := p.Shares[i]; other.Policy != first.Policy || other.SpreadStrict != first.SpreadStrict {
			notes.addf("%s: the policy of %s is that of %s", other.Path, name, first.Path)
		}
	}
	return first.Policy, first.SpreadStrict
}

// unit describes the candidate as it is advertised.
func (c candidate) unit(shares []Share) Unit {
	replicas := 1
	if c.share != exclusive {
		replicas = max(1, shares[c.share].Replicas)
	}
	u := Unit{
		ID:       c.board.UUID,
		GPU:      c.board.UUID,
		Index:    strconv.Itoa(c.board.Index),
		Minor:    c.board.Minor,
		Model:    c.board.Model,
		GI:       -1,
		CI:       -1,
		NUMANode: c.board.NUMANode,
		Links:    c.board.Links,
		Fault:    c.board.Fault,
		Replicas: replicas,
	}
	if part := c.partition; part != nil {
		u.ID = part.UUID
		u.Index += ":" + strconv.Itoa(part.Index)
		u.Profile = part.Profile
		u.GI, u.CI = part.GI, part.CI
		// What runs in a partition does not reach other boards directly.
		u.Links = nil
		u.Fault = cmp.Or(u.Fault, part.Fault)
	}
	return u
}

// devices returns what stands for the units: the unit itself where it is
// exclusive, else as many replicas as it has.
func devices(units []Unit) []Device {
	count := 0
	for _, unit := range units {
		count += unit.Replicas
	}
	all := make([]Device, 0, count)
	for _, unit := range units {
		device := Device{ID: unit.ID, Unit: unit.ID, Healthy: unit.Fault == "", NUMANode: unit.NUMANode}
		if unit.Replicas == 1 {
			all = append(all, device)
			continue
		}
		for replica := range unit.Replicas {
			device.ID = NewDeviceID(unit.ID, replica)
			all = append(all, device)
		}
	}
	return all
}
