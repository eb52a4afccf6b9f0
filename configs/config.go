package configs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Config is a device-plugin document with its defaults filled in and overrides applied.
type Config struct {
	// Profile has the settings that can change while the program runs.
	Profile sharing.Profile
	// Startup has the settings that take effect when the program starts.
	Startup StartupSettings
	// Discovery has the settings that only GPU feature discovery uses.
	Discovery FeatureDiscovery
	// Layouts are the MIG layouts that can be named besides the built-in ones: the profile's own,
	// then those of mig-parted documents in the same ConfigMap.
	Layouts MIGLayouts
	// Allowed are the layouts that the node's label may choose; nil allows all, including the
	// built-in ones.
	Allowed []string
	// Notes list, by line, where NVIDIA's plugin would behave differently, and what may be a
	// mistake.
	Notes []Note
}

// StartupSettings cannot change while the program runs.
type StartupSettings struct {
	// FailOnInitError ends the program if the driver cannot be opened. Otherwise the program waits
	// for the driver. Default true.
	FailOnInitError bool
	// DriverRoot is the host directory of the driver. Default "/".
	DriverRoot string
	// DevRoot is the host directory with the driver's dev directory. Default DriverRoot.
	DevRoot string
	// ContainerDriverRoot is where DriverRoot is mounted in Virgate's own
	// container. Default "/driver-root".
	ContainerDriverRoot string
	// DeviceDiscoveryStrategy is how GPUs are found: "auto" (the default) or "nvml".
	DeviceDiscoveryStrategy string
	// CDIHookPath is the program on the host that CDI specs name as their hook; empty for the
	// host's own program.
	CDIHookPath string
	// CDIFeatures are feature flags of nvcdi, the library that makes the CDI
	// specs, separated by commas. Default none.
	CDIFeatures string
	// CDIDisableHooks are the hooks that CDI specs leave out, separated by commas, or "all".
	// Default none.
	CDIDisableHooks string
	// MPSRoot is the host directory with the files of virgate mps; empty if virgate mps does not
	// run.
	MPSRoot string
}

// FeatureDiscovery has the settings of GPU feature discovery only.
type FeatureDiscovery struct {
	// Err has type Problems and lists what is wrong with these settings. It does not concern other
	// programs.
	Err error
	// Oneshot ends GPU feature discovery when the labels are written. NoTimestamp omits the time.
	Oneshot, NoTimestamp bool
	// SleepInterval is the time between two readings of the GPUs; the longest Duration means
	// infinite. It may be unreasonably short.
	SleepInterval time.Duration
	// UseNodeFeatureAPI writes a NodeFeature object instead of OutputFile.
	UseNodeFeatureAPI           bool
	OutputFile, MachineTypeFile string
}

// CheckUnchanged returns an error that names each setting that differs, with both values.
func (s StartupSettings) CheckUnchanged(next StartupSettings) error {
	var errs []error
	for _, setting := range []struct {
		path       string
		have, want any
	}{
		{pathFailOnInitError, s.FailOnInitError, next.FailOnInitError},
		{pathDriverRoot, s.DriverRoot, next.DriverRoot},
		{pathDevRoot, s.DevRoot, next.DevRoot},
		{pathContainerDriverRoot, s.ContainerDriverRoot, next.ContainerDriverRoot},
		{pathCDIHook, s.CDIHookPath, next.CDIHookPath},
		{pathCDIFeatures, s.CDIFeatures, next.CDIFeatures},
		{pathCDIDisableHooks, s.CDIDisableHooks, next.CDIDisableHooks},
		{pathDiscovery, s.DeviceDiscoveryStrategy, next.DeviceDiscoveryStrategy},
		{pathMPSRoot, s.MPSRoot, next.MPSRoot},
	} {
		if setting.have != setting.want {
			errs = append(errs, fmt.Errorf("%s: cannot change while the program runs (is %v, wanted %v): restart it",
				setting.path, setting.have, setting.want))
		}
	}
	return errors.Join(errs...)
}

// Note is a place in a document where Virgate differs from NVIDIA's plugin, or that may be a
// mistake.
type Note struct {
	// Line is counted from 1; 0 for a note about a flag or a variable.
	Line int
	// Path is the path of the key: "sharing.timeSlicing.resources[0].rename".
	Path    string
	Message string
}

// Overrides are settings from flags and environment variables, by the Path of the Setting. They
// override the document. If both a flag and a variable set something, the caller decides between
// them.
type Overrides map[string]Override

// Override is one setting from outside the document.
type Override struct {
	// Value is the text as given: "true" or "false", or items separated by commas.
	Value string
	// Source names the flag or the variable: "--mig-strategy" or "$MIG_STRATEGY".
	Source string
}

// Parse reads one device-plugin document, in YAML or JSON. Empty data is a document without
// settings, so everything has its default. The name of the file is used only in messages. Overrides
// take precedence over the document.
//
// The error is of type Problems and complete; the Config is then zero.
func Parse(file string, data []byte, overrides Overrides) (Config, error) {
	return parseDocument(file, data, func(root value) Config { return readProfile(root, overrides, nil) })
}

// parseDocument reads the document with read. It drops the result if there is a problem.
func parseDocument[T any](file string, data []byte, read func(root value) T) (T, error) {
	var problems Problems
	var result, zero T
	source := &source{file: file, problems: &problems}
	if root, ok := source.open(data); ok {
		result = read(root)
	}
	if err := problems.err(); err != nil {
		return zero, err
	}
	return result, nil
}

// readProfile reads a device-plugin document. Its result must not be used if a problem was
// reported. The layouts come from other documents; this document can name them.
func readProfile(root value, overrides Overrides, layouts MIGLayouts) Config {
	d, discoveryErr := readKeys(root, overrides)
	profile := sharing.Profile{
		MIGStrategy: sharing.MIGStrategy(get[string](d, pathMIGStrategy)),
		Policy:      sharing.AllocationPolicy(get[string](d, pathPolicy)),
		DeviceIDs:   sharing.DeviceIDStrategy(get[string](d, "flags.plugin.deviceIDStrategy")),
		Grants: sharing.Grants{
			DeviceNodes:         get[bool](d, "flags.plugin.passDeviceSpecs"),
			GDRCopy:             get[bool](d, "flags.gdrcopyEnabled"),
			GDS:                 get[bool](d, "flags.gdsEnabled"),
			MOFED:               get[bool](d, "flags.mofedEnabled"),
			IMEXChannels:        get[[]string](d, "imex.channelIDs"),
			IMEXRequired:        get[bool](d, "imex.required"),
			AnnotationPrefix:    get[string](d, "flags.plugin.cdiAnnotationPrefix"),
			MPSRoot:             get[string](d, pathMPSRoot),
			DriverHostPath:      get[string](d, "flags.plugin.driverMounts.hostPath"),
			DriverContainerPath: get[string](d, "flags.plugin.driverMounts.containerPath"),
		},
		Exclude: readSelectors(d.at("exclude").items, make(map[sharing.Selector]int)),
		RetireAfter: sharing.RetireAfter{
			Shrink:    get[time.Duration](d, "retireAfter.shrink"),
			ShrinkSet: !d.at("retireAfter.shrink").absent(),
			Switch:    get[time.Duration](d, "retireAfter.switch"),
		},
		Health: readHealth(d.at("health"), overrides),
	}
	for _, item := range get[[]string](d, "flags.plugin.deviceListStrategy") {
		if strategy := sharing.DeviceListStrategy(item); !slices.Contains(profile.Grants.Strategies, strategy) {
			profile.Grants.Strategies = append(profile.Grants.Strategies, strategy)
		}
	}
	profile.GPUNames, profile.MIGNames = readNames(d.at("resources"))
	readSharing(d.at("sharing"), &profile)
	var allowed []string
	profile.MIG, layouts, allowed = readMIG(d.at("mig"), layouts)
	profile.DRA = readDRA(d.at("dra"), profile)

	notes := root.source.notes
	slices.SortStableFunc(notes, func(a, b Note) int { return cmp.Compare(a.Line, b.Line) })
	discovery := FeatureDiscovery{
		Err:               discoveryErr,
		Oneshot:           get[bool](d, "flags.gfd.oneshot"),
		NoTimestamp:       get[bool](d, "flags.gfd.noTimestamp"),
		SleepInterval:     get[time.Duration](d, "flags.gfd.sleepInterval"),
		UseNodeFeatureAPI: get[bool](d, "flags.useNodeFeatureAPI"),
		OutputFile:        get[string](d, "flags.gfd.outputFile"),
		MachineTypeFile:   get[string](d, "flags.gfd.machineTypeFile"),
	}
	return Config{
		Profile:   profile,
		Layouts:   layouts,
		Allowed:   allowed,
		Notes:     notes,
		Discovery: discovery,
		Startup: StartupSettings{
			FailOnInitError:         get[bool](d, pathFailOnInitError),
			DriverRoot:              get[string](d, pathDriverRoot),
			DevRoot:                 cmp.Or(get[string](d, pathDevRoot), get[string](d, pathDriverRoot)),
			ContainerDriverRoot:     get[string](d, pathContainerDriverRoot),
			DeviceDiscoveryStrategy: get[string](d, pathDiscovery),
			CDIHookPath: cmp.Or(get[string](d, pathCDIHook),
				get[string](d, "flags.plugin.nvidiaCDIHookPath")),
			CDIFeatures:     strings.Join(get[[]string](d, pathCDIFeatures), ","),
			CDIDisableHooks: strings.Join(get[[]string](d, pathCDIDisableHooks), ","),
			MPSRoot:         get[string](d, pathMPSRoot),
		},
	}
}

// readKeys reads all keys of a device-plugin document and applies the overrides. An invalid inert
// setting must not withdraw GPUs: its problem becomes a note, and is returned for GPU feature
// discovery, which uses the setting.
func readKeys(root value, overrides Overrides) (value, error) {
	var wrong Problems
	from := root.source
	inert := *from
	inert.problems, inert.notes = &wrong, nil
	document := walker{overrides, &inert}.read(root, profileKeys)
	for _, path := range slices.Sorted(maps.Keys(overrides)) {
		known := func(s Setting) bool { return s.Path == path && s.overridable() }
		if !slices.ContainsFunc(keyTable.Profile, known) && !slices.ContainsFunc(keyTable.Variables, known) {
			at := position{file: overrides[path].Source, path: path}
			from.problem(at, quote(overrides[path].Value), "no such setting")
		}
	}
	from.notes = append(from.notes, inert.notes...)
	for _, p := range wrong {
		message := "has no effect here; virgate gpu-feature-discovery refuses it: " + p.Reason()
		if p.Line == 0 {
			message = p.File + ": " + message
		}
		from.notes = append(from.notes, Note{
			Line:    p.Line,
			Path:    p.Path,
			Message: message,
		})
	}
	return document, wrong.err()
}
