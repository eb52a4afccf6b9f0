package cdi

import (
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Simulated is the Source of a node without a driver. Its entries are of the
// kinds that the driver's have, device nodes with their numbers, so that a
// runtime can inject them; there are no libraries to mount.
type Simulated struct{}

// The device numbers of NVIDIA's kernel modules. 195 is theirs in Linux'
// Documentation/admin-guide/devices.txt; the others a running kernel deals out,
// and these are made up.
const (
	majorNVIDIA = 195
	majorUVM    = 511
	majorCaps   = 510
)

// Version implements Source.
func (Simulated) Version() string { return "" }

// Units implements Source. A unit whose board has no minor number gets no
// entry.
func (Simulated) Units(gpus []sharing.GPU) (*specs.Spec, error) {
	var devices []specs.Device
	for _, u := range units(gpus) {
		if u.gpu.Minor < 0 {
			continue
		}
		nodes := []*specs.DeviceNode{node(fmt.Sprintf("/dev/nvidia%d", u.gpu.Minor), majorNVIDIA, u.gpu.Minor)}
		if p := u.partition; p != nil {
			gi := capabilityMinor(u.gpu.Minor, p.GI)
			for _, minor := range []int{gi, gi + 1 + p.CI} {
				nodes = append(nodes, node(fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), majorCaps, minor))
			}
		}
		edits := specs.ContainerEdits{DeviceNodes: nodes}
		devices = append(devices, specs.Device{Name: u.id, ContainerEdits: edits}, specs.Device{Name: u.index, ContainerEdits: edits})
	}
	return newSpec(plugin.CDIClass, devices, specs.ContainerEdits{
		// As in NVIDIA's specs: where CDI brings the devices, NVIDIA's runtime
		// must not bring others because of the image's variables.
		Env: []string{"NVIDIA_VISIBLE_DEVICES=void"},
		DeviceNodes: []*specs.DeviceNode{
			node("/dev/nvidia-modeset", majorNVIDIA, 254), node("/dev/nvidia-uvm", majorUVM, 0),
			node("/dev/nvidia-uvm-tools", majorUVM, 1), node("/dev/nvidiactl", majorNVIDIA, 255),
		},
	})
}

// Extra implements Source.
func (Simulated) Extra(class string) (*specs.Spec, error) {
	edits := specs.ContainerEdits{Env: []string{"VIRGATE_SIMULATED=" + class}}
	return newSpec(class, []specs.Device{{Name: "all", ContainerEdits: edits}}, specs.ContainerEdits{})
}

func node(path string, major, minor int) *specs.DeviceNode {
	return &specs.DeviceNode{Path: path, Type: "c", Major: int64(major), Minor: int64(minor)}
}

// capabilityMinor is the minor of a GPU instance's capability; those of its
// compute instances follow. The driver's table, /proc/driver/nvidia-caps/
// mig-minors, has the capabilities of 15 GPU instances of each board from 3 on,
// with 8 compute instances each.
func capabilityMinor(gpu, gi int) int {
	const first, instances, computes = 3, 15, 8
	return first + (gpu*instances+gi)*(1+computes)
}
