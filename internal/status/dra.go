package status

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
)

// DRA is what the node offers by Dynamic Resource Allocation, and the claims on that.
type DRA struct {
	dra.DriverState
	// Paths are the units that do not belong to the device plugin, by the name of their device
	// without the part that tells how it is shared.
	Paths map[string]units.Path `json:"paths"`
	// Claims are the claims that have devices. Refused are the claims that do not get the devices
	// that the scheduler gave them.
	Claims  []dra.Claim      `json:"claims"`
	Refused []claims.Refused `json:"refused"`
}

// DRADevice is a unit from which a claim has a device, or can get one.
type DRADevice struct {
	// Name is the name of the unit's device, without the part that tells how it is shared.
	Name string
	Path units.Path
	// Claims are the claims that have the unit: "namespace/name", with the number of shares if it
	// is not one.
	Claims []string
}

// Reserved returns which units the device plugin does not offer because of DRA, and which claims
// have devices of them.
func (d DRA) Reserved() (texts []string) {
	for _, path := range []struct {
		path units.Path
		text string
	}{
		{units.DRA, "given out by DRA alone"},
		{units.LeavingDRA, "DRA's until the claims end that have devices of them"},
		{units.LeavingPlugin, "on the way to DRA, until the pods end that hold them"},
	} {
		var names, claims []string
		for _, device := range d.Devices() {
			if device.Path == path.path {
				names = append(names, device.Name)
				claims = append(claims, device.Claims...)
			}
		}
		if len(names) == 0 {
			continue
		}
		slices.Sort(claims)
		text := strings.Join(names, ", ") + ": " + path.text
		if len(claims) > 0 {
			text += "; had by " + strings.Join(slices.Compact(claims), ", ")
		}
		texts = append(texts, text)
	}
	return texts
}

// Devices returns the devices by name. A partition that was made for a claim has the path of its GPU.
func (d DRA) Devices() (list []DRADevice) {
	holders := map[string][]string{}
	for _, c := range d.Claims {
		for _, r := range c.Results {
			holder := c.String()
			if r.Shares > 1 {
				holder += fmt.Sprintf(" (%d shares)", r.Shares)
			}
			if r.Admin {
				holder += " (for monitoring)"
			}
			unitName := dra.UnitNameOf(r.Device)
			holders[unitName] = append(holders[unitName], holder)
		}
	}
	names := slices.Concat(slices.Collect(maps.Keys(d.Paths)), slices.Collect(maps.Keys(holders)))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		path := d.Paths[name]
		for gpu, of := range d.Paths {
			if path == units.Plugin && strings.HasPrefix(name, gpu+"-") {
				path = of
			}
		}
		list = append(list, DRADevice{name, path, holders[name]})
	}
	return list
}

// Unwell returns what does not work, and which claims do not get their devices.
func (d DRA) Unwell() (lines []string) {
	for _, problem := range d.Problems {
		lines = append(lines, "DRA: "+problem)
	}
	for _, refused := range d.Refused {
		lines = append(lines, "waits: "+refused.Reason)
	}
	return lines
}
