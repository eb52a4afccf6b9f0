package cdi

import (
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"
)

// merge returns made with those entries of before that it lacks and keep says
// yes to. Nil stands for no spec.
func merge(class string, made, before *specs.Spec, keep func(name string) bool) (*specs.Spec, error) {
	var devices []specs.Device
	var edits specs.ContainerEdits
	if before != nil {
		edits = before.ContainerEdits
	}
	if made != nil {
		devices, edits = slices.Clone(made.Devices), made.ContainerEdits
	}
	if before != nil {
		for _, d := range before.Devices {
			if keep(d.Name) {
				devices = append(devices, d)
			}
		}
	}
	return newSpec(class, devices, edits)
}

// entryNames are the names of the spec's entries; none of no spec.
func entryNames(spec *specs.Spec) []string {
	if spec == nil {
		return nil
	}
	names := make([]string, len(spec.Devices))
	for i, d := range spec.Devices {
		names[i] = d.Name
	}
	return names
}
