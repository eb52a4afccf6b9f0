package plugin

import (
	"strings"

	"github.com/virgate/virgate/sharing"
)

// Host is what a node has ready for containers. It is gathered before anything
// is allocated, because Allocate looks at no file, and must not be changed once
// it was handed over.
type Host struct {
	// Nodes are the device nodes of each unit, by its ID: "/dev/nvidia0", and a
	// partition's capabilities.
	Nodes map[string][]string
	// ControlNodes are those that every container needs, as far as they exist.
	ControlNodes []string
	// DevRoot is the folder on the host below which the nodes lie; empty and "/"
	// are the same.
	DevRoot string
	// Extras are the qualified CDI names of what Grants.Extras ask for and the
	// node has.
	Extras []string
	// Obstacles say why a unit cannot be granted now, by its ID.
	Obstacles map[string]string
}

// CDIVendor is the vendor of the CDI entries that NVIDIA's device plugin makes.
// Ours have the same names, so that a container that was granted one can
// restart after either plugin has taken the other's place
// (k8s-device-plugin, cmd/nvidia-device-plugin/plugin-manager.go).
const CDIVendor = "k8s.device-plugin.nvidia.com"

// CDIClass is the class of GPUs and partitions.
const CDIClass = "gpu"

// CDIName is the qualified name of a CDI entry.
func CDIName(class, name string) string { return CDIVendor + "/" + class + "=" + name }

// unitName is what a container knows the unit by. The index of a unit that has
// left the plan may be unknown; its UUID never is.
func unitName(u sharing.Unit, by sharing.DeviceIDStrategy) string {
	if by == sharing.ByIndex && u.Index != "" {
		return u.Index
	}
	return u.ID
}

// unitNames lists the units, each once.
func unitNames(units []sharing.Unit, by sharing.DeviceIDStrategy) []string {
	names := make([]string, len(units))
	for i, u := range units {
		names[i] = unitName(u, by)
	}
	return names
}

// onHost is where the host has what a container sees at path.
func (h *Host) onHost(path string) string {
	return strings.TrimSuffix(h.DevRoot, "/") + path
}
