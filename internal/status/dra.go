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

// DRA is what the node has by Dynamic Resource Allocation.
type DRA struct {
	dra.DriverState
	// Paths are the units that are not the device plugin's, by the name of their device, however
	// it is shared.
	Paths map[string]units.Path `json:"paths"`
	// Claims have devices; Refused were given some by the scheduler and do not get them.
	Claims  []dra.Claim      `json:"claims"`
	Refused []claims.Refused `json:"refused"`
}

// DRADevice is a unit of which a claim can have a device, or has one.
type DRADevice struct {
	// Name is that of its device, however it is shared.
	Name string
	Path units.Path
	// Claims are who has it: "namespace/name", and how many shares where it is not one.
	Claims []string
}

// Reserved says which units the device plugin does not offer because of DRA, and which claims have
// devices of them.
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

// Devices are by name. A partition that was made for a claim has the path of its GPU.
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
			place := dra.PlaceOf(r.Device)
			holders[place] = append(holders[place], holder)
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

// Unwell says what does not work, and which claims do not get their devices.
func (d DRA) Unwell() (lines []string) {
	for _, problem := range d.Problems {
		lines = append(lines, "DRA: "+problem)
	}
	for _, refused := range d.Refused {
		lines = append(lines, "waits: "+refused.Reason)
	}
	return lines
}
