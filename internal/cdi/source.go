package cdi

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Source makes specs for the hardware as it is now. A Writer calls it from one
// goroutine; it may ask the driver and block.
type Source interface {
	// Version changes when the same boards need another spec because another
	// driver was installed. It is asked often, and is quick.
	Version() string
	// Units returns the spec of these boards and partitions. Each has two
	// entries: one by UUID, one by index. An error says which could not be made;
	// the others are there all the same. Without any the spec is nil.
	Units(gpus []sharing.GPU) (*specs.Spec, error)
	// Extra returns the spec of one of the classes of sharing.Grants.Extras,
	// with one entry, "all"; an error when the node has none of it.
	Extra(class string) (*specs.Spec, error)
}

// unit is a board or a partition that containers can be given.
type unit struct {
	id, index string
	gpu       sharing.GPU
	// partition is nil for a whole board.
	partition *sharing.Partition
}

// units are what needs entries: a board with MIG enabled runs nothing as a
// whole, and has none.
func units(gpus []sharing.GPU) []unit {
	var all []unit
	for _, g := range gpus {
		index := strconv.Itoa(g.Index)
		if !g.MIG {
			all = append(all, unit{id: g.UUID, index: index, gpu: g})
			continue
		}
		for i := range g.Partitions {
			p := &g.Partitions[i]
			all = append(all, unit{id: p.UUID, index: index + ":" + strconv.Itoa(p.Index), gpu: g, partition: p})
		}
	}
	return all
}

// fingerprint changes whenever the boards need another spec. Health is not in
// it.
func fingerprint(gpus []sharing.GPU) string {
	var lines []string
	for _, u := range units(gpus) {
		line := fmt.Sprintf("%s %s %d", u.id, u.index, u.gpu.Minor)
		if p := u.partition; p != nil {
			line += fmt.Sprintf(" %d %d", p.GI, p.CI)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// newSpec makes a spec with sorted entries. Of two entries with one name the
// first stays. It is nil without entries, which a spec must have.
func newSpec(class string, devices []specs.Device, edits specs.ContainerEdits) (*specs.Spec, error) {
	seen := map[string]bool{}
	devices = slices.DeleteFunc(slices.Clone(devices), func(d specs.Device) bool {
		again := seen[d.Name]
		seen[d.Name] = true
		return again
	})
	if len(devices) == 0 {
		return nil, nil
	}
	slices.SortFunc(devices, func(a, b specs.Device) int { return cmp.Compare(a.Name, b.Name) })
	spec := &specs.Spec{Version: specs.CurrentVersion, Kind: plugin.CDIVendor + "/" + class, Devices: devices, ContainerEdits: edits}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("tell the version of spec %s: %w", spec.Kind, err)
	}
	spec.Version = version
	return spec, nil
}
