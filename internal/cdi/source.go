package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/internal/driverroot"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Source makes specs for the current hardware. A Writer calls it from one goroutine. It may call
// the driver and block.
type Source interface {
	// Version changes when the same GPUs need a different spec because another driver was
	// installed. It is called often and must be fast.
	Version() string
	// Units returns the spec of the GPUs and partitions. Each has two entries, one by UUID and one
	// by index. The error says which entries could not be made. The spec has the others, and is nil
	// if there are none.
	Units(gpus []sharing.GPU) (*specs.Spec, error)
	// Extra returns the spec of one of the classes of sharing.Grants.Extras, with the single entry
	// "all", or an error if the node has no such device. For grant.IMEXClass it returns a spec
	// with channel 0, whether or not the node has that channel.
	Extra(class string) (*specs.Spec, error)
}

// Guarded is a Source that opens all GPUs to make their specs. Open decides: it calls use, which
// opens them, or it returns an error.
type Guarded struct {
	Source
	Open func(use func()) error
}

// Units implements Source. If Open refuses, it returns Open's error.
func (g Guarded) Units(gpus []sharing.GPU) (spec *specs.Spec, err error) {
	if refused := g.Open(func() { spec, err = g.Source.Units(gpus) }); refused != nil {
		return nil, &refusal{refused}
	}
	return spec, err
}

// refusal is an error of Open. It costs nothing, so the Writer may try again at once.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// Aliased is a Source whose spec has one more entry for each unit, under the name that Alias gives
// it. DRA claims use these names, because they are the same after a reboot.
type Aliased struct {
	Source
	// Alias returns the units' alternative names, by UUID; empty for none.
	Alias func(gpus []sharing.GPU) map[string]string
}

// Units implements Source.
func (a Aliased) Units(gpus []sharing.GPU) (*specs.Spec, error) {
	spec, err := a.Source.Units(gpus)
	if spec == nil {
		return nil, err
	}
	devices, aliases := slices.Clone(spec.Devices), a.Alias(gpus)
	for _, d := range spec.Devices {
		if alias := aliases[d.Name]; alias != "" {
			devices = append(devices, specs.Device{
				Name:           alias,
				Annotations:    d.Annotations,
				ContainerEdits: d.ContainerEdits,
			})
		}
	}
	aliased, failed := newSpec(grant.CDIClass, devices, spec.ContainerEdits)
	return aliased, errors.Join(err, failed)
}

// unit is a GPU or a partition that can be allocated.
type unit struct {
	id, index string
	gpu       sharing.GPU
	// partition is nil for a whole GPU.
	partition *sharing.Partition
}

// units returns the units that need entries. A GPU with MIG enabled runs nothing itself, and has
// none.
func units(gpus []sharing.GPU) []unit {
	var all []unit
	for _, g := range gpus {
		if !g.MIG {
			all = append(all, unit{
				id:    g.UUID,
				index: strconv.Itoa(g.Index),
				gpu:   g,
			})
			continue
		}
		for i := range g.Partitions {
			p := &g.Partitions[i]
			all = append(all, unit{
				id:        p.UUID,
				index:     g.PartitionIndex(*p),
				gpu:       g,
				partition: p,
			})
		}
	}
	return all
}

// fingerprint returns a text that changes when the GPUs need a different spec. Health is not part
// of it.
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

// newSpec returns a spec with sorted entries. If two entries have the same name, it keeps the
// first. It returns nil without entries, because a spec must have one.
func newSpec(class string, devices []specs.Device, edits specs.ContainerEdits) (*specs.Spec, error) {
	if len(devices) == 0 {
		return nil, nil
	}
	devices = slices.SortedStableFunc(slices.Values(devices),
		func(a, b specs.Device) int { return cmp.Compare(a.Name, b.Name) })
	devices = slices.CompactFunc(devices, func(a, b specs.Device) bool { return a.Name == b.Name })
	spec := &specs.Spec{
		Version:        specs.CurrentVersion,
		Kind:           grant.CDIVendor + "/" + class,
		Devices:        devices,
		ContainerEdits: edits,
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("tell the version of spec %s: %w", spec.Kind, err)
	}
	spec.Version = version
	return spec, nil
}

// Simulated is the Source of a simulated node. Like the driver's, its entries have device nodes
// with their numbers, so that a runtime can inject them. There are no libraries.
type Simulated struct{}

// The major numbers of NVIDIA's kernel modules: 195 is from Linux'
// Documentation/admin-guide/devices.txt; the others are examples of numbers that are assigned at
// run time.
const (
	majorNVIDIA = 195
	majorUVM    = 511
	majorCaps   = 510
	majorIMEX   = 509
)

// Version implements Source.
func (Simulated) Version() string { return "" }

// Units implements Source. A unit whose GPU has no minor number has no entry.
func (Simulated) Units(gpus []sharing.GPU) (*specs.Spec, error) {
	var devices []specs.Device
	for _, u := range units(gpus) {
		if u.gpu.Minor < 0 {
			continue
		}
		nodes := []*specs.DeviceNode{node(grant.GPUNode(u.gpu.Minor), majorNVIDIA, u.gpu.Minor)}
		if p := u.partition; p != nil {
			gi := capabilityMinor(u.gpu.Minor, p.GI)
			for _, minor := range []int{gi, gi + 1 + p.CI} {
				nodes = append(nodes, node(fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), majorCaps, minor))
			}
		}
		edits := specs.ContainerEdits{DeviceNodes: nodes}
		devices = append(devices, specs.Device{Name: u.id, ContainerEdits: edits},
			specs.Device{Name: u.index, ContainerEdits: edits})
	}
	return newSpec(grant.CDIClass, devices, specs.ContainerEdits{
		// As in NVIDIA's specs: NVIDIA's runtime must not add devices because of the image's
		// variables.
		Env: []string{"NVIDIA_VISIBLE_DEVICES=void"},
		DeviceNodes: []*specs.DeviceNode{
			node("/dev/nvidia-modeset", majorNVIDIA, 254), node("/dev/nvidia-uvm", majorUVM, 0),
			node("/dev/nvidia-uvm-tools", majorUVM, 1), node("/dev/nvidiactl", majorNVIDIA, 255),
		},
	})
}

// Extra implements Source.
func (Simulated) Extra(class string) (*specs.Spec, error) {
	if class == grant.IMEXClass {
		edits := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{node(grant.IMEXNode("0"), majorIMEX, 0)}}
		return newSpec(class, []specs.Device{{Name: "0", ContainerEdits: edits}}, specs.ContainerEdits{})
	}
	edits := specs.ContainerEdits{Env: []string{"VIRGATE_SIMULATED=" + class}}
	return newSpec(class, []specs.Device{{Name: "all", ContainerEdits: edits}}, specs.ContainerEdits{})
}

func node(path string, major, minor int) *specs.DeviceNode {
	return &specs.DeviceNode{
		Path:  path,
		Type:  "c",
		Major: int64(major),
		Minor: int64(minor),
	}
}

// capabilityMinor returns the minor number of a GPU instance's capability; the numbers of its
// compute instances follow. As in the driver's /proc/driver/nvidia-caps/mig-minors, the numbers
// start at 3, and each GPU has 15 GPU instances with 8 compute instances each.
func capabilityMinor(gpu, gi int) int {
	const first, instances, computes = 3, 15, 8
	return first + (gpu*instances+gi)*(1+computes)
}

// DriverOptions says where the driver is. A spec contains the host's paths, but it is made from
// files that may be mounted elsewhere for this process.
type DriverOptions struct {
	// Find returns where this process finds the driver and its dev. It is called each time, because
	// a driver may be installed after this program has started.
	Find func() Roots
	// Host is where the driver and its dev are on the host.
	Host Roots
	// Mounts returns the host's folders that this process sees; the first one that contains a path
	// applies. A file in none of them is assumed to exist. If Mounts is nil, all files are.
	Mounts func() []Mount
	// Capabilities reads the device nodes of partitions.
	Capabilities migcaps.Reader
	// HookPath is the hook program that specs name, by its path on the host:
	// "/usr/bin/nvidia-cdi-hook".
	HookPath string
	// Features are nvcdi's feature flags.
	Features []string
	// DisabledHooks are the hooks that specs leave out, by nvcdi's names; "all" disables every
	// hook.
	DisabledHooks []string
	Logger        *slog.Logger
}

// Roots are the folder with the driver and the folder with its dev; often they are the same.
type Roots struct{ Driver, Dev string }

// ErrNoDriver is the error of a Driver in a program without cgo, which nvcdi needs.
var ErrNoDriver = errors.New(
	"this program was built without cgo and cannot make CDI specs of a real driver; use another deviceListStrategy " +
		"than cdi-annotations and cdi-cri, or a program with cgo")

// libraryName is the library that identifies the folder of the driver's libraries.
const libraryName = "libnvidia-ml.so.1"

// libraryFolder returns the first of the usual folders below the root that has the driver's
// libraries; empty if none has.
func libraryFolder(root string) string {
	for _, folder := range driverroot.LibraryFolders() {
		if _, err := os.Lstat(filepath.Join(root, folder, libraryName)); err == nil {
			return folder
		}
	}
	return ""
}

// driverFingerprint returns a text that changes when a file is installed or removed in the folder
// of the driver's libraries. The spec contains the names of these libraries, with the driver's
// version. The text is empty if the libraries are in none of the usual folders.
func driverFingerprint(root string) string {
	path := filepath.Join(root, libraryFolder(root), libraryName)
	library, err := os.Lstat(path)
	if err != nil {
		return ""
	}
	around, err := os.Stat(filepath.Dir(path))
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s %d %d", path, library.ModTime().UnixNano(), around.ModTime().UnixNano())
}

// checkDeviceNodes checks that each entry has the device node of its GPU. nvcdi leaves out nodes
// that are missing in dev and only logs that. Without the check, a container would start without
// its GPU, and an empty entry would make the whole spec invalid.
func checkDeviceNodes(entries []specs.Device, dev string) error {
	for _, entry := range entries {
		if !slices.ContainsFunc(entry.ContainerEdits.DeviceNodes, func(node *specs.DeviceNode) bool {
			number, ok := strings.CutPrefix(node.Path, "/dev/nvidia")
			return ok && number != "" && strings.Trim(number, "0123456789") == ""
		}) {
			return fmt.Errorf("no node of the GPU in %s", dev)
		}
	}
	return nil
}
