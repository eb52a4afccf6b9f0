//go:build cgo

package cdi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"
	"slices"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/spec"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/internal/driverroot"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// Driver is the Source that calls the driver through nvcdi, which opens and closes the driver for
// each call.
type Driver struct {
	options DriverOptions
	// library replaces the driver's library in tests; nil for the driver's.
	library []nvcdi.Option
}

// NewDriver returns a Driver. The driver need not be installed yet.
func NewDriver(options DriverOptions) Driver { return Driver{options: options} }

// Version implements Source.
func (d Driver) Version() string {
	roots := d.options.Find()
	major, _ := d.options.Capabilities.Major() // 0 without MIG. It may change when the driver is reloaded.
	return fmt.Sprint(roots, driverFingerprint(roots.Driver), major)
}

// Units implements Source. It makes the entries one by one, so that the failure of one GPU does not
// affect the entries of others.
//
// A partition's entry is its GPU's entry, plus the nodes of its capabilities with their device
// numbers, as in NVIDIA's DRA driver (cmd/gpu-kubelet-plugin/cdi.go). nvcdi's own entry leaves out
// nodes that do not exist yet, but a runtime creates nodes that are listed with their numbers.
func (d Driver) Units(gpus []sharing.GPU) (*specs.Spec, error) {
	roots := d.options.Find()
	library, err := nvcdi.New(append(d.common(roots), nvcdi.WithMode(nvcdi.ModeNvml))...)
	if err != nil {
		return nil, fmt.Errorf("open nvcdi: %w", err)
	}
	var devices []specs.Device
	var problems []error
	ofGPU, capabilities := map[string][]specs.Device{}, map[string][]*specs.DeviceNode{}
	for _, u := range units(gpus) {
		nodes, err := d.capabilities(u)
		made := ofGPU[u.gpu.UUID]
		if err == nil && made == nil {
			made, err = library.GetDeviceSpecsByID(u.gpu.UUID)
			if err == nil {
				err = checkDeviceNodes(made, filepath.Join(roots.Dev, "dev"))
			}
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("make the CDI entry of %s with the driver at %s: %w", u.id,
				roots.Driver, err))
			continue
		}
		ofGPU[u.gpu.UUID] = made
		// Each unit has an entry by UUID and one by index. A pod keeps its unit, granted by either
		// name, when the strategy or the driver's indexes change. nvcdi uses these indexes.
		for _, name := range []string{u.id, u.index} {
			capabilities[name] = nodes
			for _, entry := range made {
				entry.Name = name
				devices = append(devices, entry)
			}
		}
	}
	if len(devices) == 0 {
		return nil, errors.Join(problems...)
	}
	edits, err := library.GetCommonEdits()
	if err != nil {
		return nil, fmt.Errorf("list what every container needs of the driver at %s: %w", roots.Driver, err)
	}
	made, err := d.finish(roots, grant.CDIClass, devices, *edits.ContainerEdits)
	if made != nil {
		var notThere error
		made, notThere = d.onHost(made)
		if notThere != nil {
			problems = append(problems, notThere)
		}
	}
	if made != nil {
		// These nodes have no path on the host, so they are added after the steps that handle host
		// paths.
		for i := range made.Devices {
			device := &made.Devices[i]
			device.ContainerEdits.DeviceNodes = slices.Concat(device.ContainerEdits.DeviceNodes,
				capabilities[device.Name])
		}
	}
	return made, errors.Join(append(problems, err)...)
}

// capabilities returns the nodes of the partition's two capabilities; none for a whole GPU.
func (d Driver) capabilities(u unit) ([]*specs.DeviceNode, error) {
	if u.partition == nil {
		return nil, nil
	}
	read, err := d.options.Capabilities.Partition(u.gpu.Minor, u.partition.GI, u.partition.CI)
	if err != nil {
		return nil, err
	}
	var nodes []*specs.DeviceNode
	for _, each := range read {
		nodes = append(nodes, &specs.DeviceNode{
			Path:     each.Path,
			Type:     "c",
			Major:    int64(each.Major),
			Minor:    int64(each.Minor),
			FileMode: &each.Mode,
		})
	}
	return nodes, nil
}

// Extra implements Source.
func (d Driver) Extra(class string) (*specs.Spec, error) {
	roots := d.options.Find()
	if class == grant.IMEXClass {
		// nvcdi makes no entry before the channel exists. A profile can request only channel 0.
		path := grant.IMEXNode("0")
		channel := &specs.DeviceNode{Path: path, HostPath: filepath.Join(roots.Dev, path)}
		devices := []specs.Device{{
			Name:           "0",
			ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{channel}},
		}}
		return d.finish(roots, class, devices, specs.ContainerEdits{})
	}
	library, err := nvcdi.New(append(d.common(roots), nvcdi.WithMode(nvcdi.Mode(class)))...)
	if err != nil {
		return nil, fmt.Errorf("open nvcdi for %s: %w", class, err)
	}
	devices, err := library.GetDeviceSpecsByID("all")
	if err != nil {
		return nil, fmt.Errorf("make the CDI entry of %s: %w", class, err)
	}
	for _, device := range devices {
		if reflect.ValueOf(device.ContainerEdits).IsZero() {
			return nil, fmt.Errorf("%s: this node has nothing of it", class)
		}
	}
	made, err := d.finish(roots, class, devices, specs.ContainerEdits{})
	if made != nil && err == nil {
		made, err = d.onHost(made)
	}
	return made, err
}

// onHost returns the spec without the entries whose files are not on the host; nil if no entry is
// left. The error names the missing files.
func (d Driver) onHost(spec *specs.Spec) (*specs.Spec, error) {
	if d.options.Mounts == nil {
		return spec, nil
	}
	mounts := d.options.Mounts()
	if err := missing(mounts, spec.ContainerEdits); err != nil {
		return nil, err
	}
	var problems []error
	devices := slices.DeleteFunc(slices.Clone(spec.Devices), func(device specs.Device) bool {
		err := missing(mounts, device.ContainerEdits)
		if err != nil {
			problems = append(problems, fmt.Errorf("entry %s: %w", device.Name, err))
		}
		return err != nil
	})
	if len(devices) == 0 {
		return nil, errors.Join(problems...)
	}
	spec.Devices = devices
	return spec, errors.Join(problems...)
}

// memoryLimitsHook limits a container's GPU memory by its cgroup, from toolkit 1.20.1 and R615 on.
// Virgate sets no such limits, and a host with an older hook program would start no container.
const memoryLimitsHook = "apply-cuda-memory-limits"

func (d Driver) common(roots Roots) []nvcdi.Option {
	var elsewhere []string
	if folder := libraryFolder(roots.Driver); folder != "" && !slices.Contains(driverroot.SearchedByNVIDIA(), folder) {
		elsewhere = []string{filepath.Join(roots.Driver, folder)}
	}
	return append([]nvcdi.Option{
		nvcdi.WithLibrarySearchPaths(elsewhere),
		nvcdi.WithDriverRoot(roots.Driver),
		nvcdi.WithDevRoot(roots.Dev),
		nvcdi.WithNVIDIACDIHookPath(d.options.HookPath),
		nvcdi.WithFeatureFlags(d.options.Features...),
		nvcdi.WithDisabledHooks(d.options.DisabledHooks...),
		nvcdi.WithDisabledHooks(memoryLimitsHook),
		nvcdi.WithLogger(nvcdiLogger{d.options.Logger}),
	}, d.library...)
}

// finish makes the spec and translates its paths into the host's.
func (d Driver) finish(
	roots Roots,
	class string,
	devices []specs.Device,
	edits specs.ContainerEdits,
) (*specs.Spec, error) {
	made, err := spec.New(spec.WithVendor(grant.CDIVendor), spec.WithClass(class), spec.WithDeviceSpecs(devices),
		spec.WithEdits(edits))
	if err != nil {
		return nil, fmt.Errorf("make the CDI spec of %s: %w", class, err)
	}
	raw := made.Raw()
	transformer := root.NewDriverTransformer(
		root.WithDriverRoot(roots.Driver), root.WithTargetDriverRoot(d.options.Host.Driver),
		root.WithDevRoot(roots.Dev), root.WithTargetDevRoot(d.options.Host.Dev),
	)
	if err := transformer.Transform(raw); err != nil {
		return nil, fmt.Errorf("write the CDI spec of %s for the host: %w", class, err)
	}
	return newSpec(class, raw.Devices, raw.ContainerEdits)
}

// nvcdiLogger lowers the level of nvcdi's messages, which are repeated at each call.
type nvcdiLogger struct{ log *slog.Logger }

func (l nvcdiLogger) Tracef(string, ...any) {}

func (l nvcdiLogger) Debugf(format string, args ...any) { l.logf(slog.LevelDebug, format, args) }
func (l nvcdiLogger) Infof(format string, args ...any)  { l.logf(slog.LevelDebug, format, args) }

func (l nvcdiLogger) Warningf(format string, args ...any) { l.logf(slog.LevelDebug, format, args) }
func (l nvcdiLogger) Errorf(format string, args ...any)   { l.logf(slog.LevelWarn, format, args) }

func (l nvcdiLogger) logf(level slog.Level, format string, args []any) {
	l.log.Log(context.Background(), level, "nvcdi", "message", fmt.Sprintf(format, args...))
}
