//go:build cgo

package cdi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/spec"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Driver is the Source that asks the driver, by nvcdi. It opens the driver for
// each call and closes it again.
type Driver struct {
	options DriverOptions
	// library is what nvcdi is to use in place of the driver's; nil for that.
	library []nvcdi.Option
}

// NewDriver returns a Driver, which needs none before it is asked.
func NewDriver(options DriverOptions) Driver { return Driver{options: options} }

// Version implements Source.
func (d Driver) Version() string {
	roots := d.options.Find()
	return fmt.Sprint(roots, installed(roots.Driver))
}

// Units implements Source. It asks for one unit after the other, so that a
// board that does not answer takes no other's entry.
func (d Driver) Units(gpus []sharing.GPU) (*specs.Spec, error) {
	roots := d.options.Find()
	namers, err := deviceNamers()
	if err != nil {
		return nil, err
	}
	library, err := nvcdi.New(append(d.common(roots), nvcdi.WithMode(nvcdi.ModeNvml), namers)...)
	if err != nil {
		return nil, fmt.Errorf("open nvcdi: %w", err)
	}
	var devices []specs.Device
	var problems []error
	for _, u := range units(gpus) {
		made, err := library.GetDeviceSpecsByID(u.id)
		if err == nil {
			err = complete(u, made, filepath.Join(roots.Dev, "dev"))
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("make the CDI entry of %s with the driver at %s: %w", u.id, roots.Driver, err))
			continue
		}
		devices = append(devices, made...)
	}
	if len(devices) == 0 {
		return nil, errors.Join(problems...)
	}
	edits, err := library.GetCommonEdits()
	if err != nil {
		return nil, fmt.Errorf("list what every container needs of the driver at %s: %w", roots.Driver, err)
	}
	made, err := d.finish(roots, plugin.CDIClass, devices, *edits.ContainerEdits)
	return made, errors.Join(append(problems, err)...)
}

// Extra implements Source.
func (d Driver) Extra(class string) (*specs.Spec, error) {
	roots := d.options.Find()
	library, err := nvcdi.New(append(d.common(roots), nvcdi.WithMode(class))...)
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
	return d.finish(roots, class, devices, specs.ContainerEdits{})
}

// deviceNamers give each unit two names: pods that were granted one by UUID and
// pods that were granted one by index keep theirs when the strategy changes.
func deviceNamers() (nvcdi.Option, error) {
	var namers []nvcdi.DeviceNamer
	for _, by := range []sharing.DeviceIDStrategy{sharing.ByUUID, sharing.ByIndex} {
		namer, err := nvcdi.NewDeviceNamer(string(by))
		if err != nil {
			return nil, fmt.Errorf("name CDI entries by %s: %w", by, err)
		}
		namers = append(namers, namer)
	}
	return nvcdi.WithDeviceNamers(namers...), nil
}

func (d Driver) common(roots Roots) []nvcdi.Option {
	return append([]nvcdi.Option{
		nvcdi.WithDriverRoot(roots.Driver),
		nvcdi.WithDevRoot(roots.Dev),
		nvcdi.WithNVIDIACDIHookPath(d.options.HookPath),
		nvcdi.WithFeatureFlags(d.options.Features...),
		nvcdi.WithLogger(messages{d.options.Logger}),
	}, d.library...)
}

// finish gathers what many entries have in common, and writes the host's paths.
func (d Driver) finish(roots Roots, class string, devices []specs.Device, edits specs.ContainerEdits) (*specs.Spec, error) {
	made, err := spec.New(spec.WithVendor(plugin.CDIVendor), spec.WithClass(class), spec.WithDeviceSpecs(devices), spec.WithEdits(edits))
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

// messages are nvcdi's, which repeats what it looks for at each call.
type messages struct{ log *slog.Logger }

func (m messages) Tracef(string, ...any) {}

func (m messages) Debugf(format string, args ...any) { m.say(slog.LevelDebug, format, args) }
func (m messages) Infof(format string, args ...any)  { m.say(slog.LevelDebug, format, args) }

func (m messages) Warningf(format string, args ...any) { m.say(slog.LevelDebug, format, args) }
func (m messages) Errorf(format string, args ...any)   { m.say(slog.LevelWarn, format, args) }

func (m messages) say(level slog.Level, format string, args []any) {
	m.log.Log(context.Background(), level, "nvcdi", "message", fmt.Sprintf(format, args...))
}
