package configs

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
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

const versionV1 = "v1"

// profileKeys are the top-level keys of a device-plugin document.
var profileKeys = []string{
	"version", "flags", "resources", "sharing", "imex", "exclude", pathRetireAfter, "mig", "health", "dra",
}

// readProfile reads a device-plugin document. Its result must not be used if a problem was
// reported. The layouts come from other documents; this document can name them.
func readProfile(root value, overrides Overrides, layouts MIGLayouts) Config {
	document := root.mapping(profileKeys...)
	// NVIDIA's plugin also reads a missing version as v1.
	document.field("version").oneOf(versionV1)
	set, discoveryErr := readSettings(document, overrides)
	profile := sharing.Profile{
		MIGStrategy: sharing.MIGStrategy(set[pathMIGStrategy]),
		Policy:      sharing.AllocationPolicy(set[pathPolicy]),
		DeviceIDs:   sharing.DeviceIDStrategy(set["flags.plugin.deviceIDStrategy"]),
		Grants: sharing.Grants{
			DeviceNodes:         set.on("flags.plugin.passDeviceSpecs"),
			GDRCopy:             set.on("flags.gdrcopyEnabled"),
			GDS:                 set.on("flags.gdsEnabled"),
			MOFED:               set.on("flags.mofedEnabled"),
			IMEXChannels:        listItems(set["imex.channelIDs"]),
			IMEXRequired:        set.on("imex.required"),
			AnnotationPrefix:    set["flags.plugin.cdiAnnotationPrefix"],
			MPSRoot:             set["flags.mpsRoot"],
			DriverHostPath:      set["flags.plugin.driverMounts.hostPath"],
			DriverContainerPath: set["flags.plugin.driverMounts.containerPath"],
		},
		Exclude:     readExclude(document.field("exclude")),
		RetireAfter: readRetireAfter(document.field(pathRetireAfter)),
		Health:      readHealth(document.field("health"), overrides),
	}
	for _, item := range listItems(set["flags.plugin.deviceListStrategy"]) {
		if strategy := sharing.DeviceListStrategy(item); !slices.Contains(profile.Grants.Strategies, strategy) {
			profile.Grants.Strategies = append(profile.Grants.Strategies, strategy)
		}
	}
	profile.GPUNames, profile.MIGNames = readNames(document.field("resources"))
	readSharing(document.field("sharing"), &profile)
	var allowed []string
	profile.MIG, layouts, allowed = readMIG(document.field("mig"), layouts)
	profile.DRA = readDRA(document.field("dra"), profile)

	notes := root.source.notes
	slices.SortStableFunc(notes, func(a, b Note) int { return cmp.Compare(a.Line, b.Line) })
	interval, _ := parseInterval(set["flags.gfd.sleepInterval"]) // Err has the problem of an invalid one.
	discovery := FeatureDiscovery{
		Err:               discoveryErr,
		Oneshot:           set.on("flags.gfd.oneshot"),
		NoTimestamp:       set.on("flags.gfd.noTimestamp"),
		SleepInterval:     interval,
		UseNodeFeatureAPI: set.on("flags.useNodeFeatureAPI"),
		OutputFile:        set["flags.gfd.outputFile"],
		MachineTypeFile:   set["flags.gfd.machineTypeFile"],
	}
	return Config{
		Profile:   profile,
		Layouts:   layouts,
		Allowed:   allowed,
		Notes:     notes,
		Discovery: discovery,
		Startup: StartupSettings{
			FailOnInitError:         set.on(pathFailOnInitError),
			DriverRoot:              set[pathDriverRoot],
			DevRoot:                 cmp.Or(set[pathDevRoot], set[pathDriverRoot]),
			ContainerDriverRoot:     set[pathContainerDriverRoot],
			DeviceDiscoveryStrategy: set[pathDiscovery],
			CDIHookPath:             cmp.Or(set[pathCDIHook], set["flags.plugin.nvidiaCDIHookPath"]),
			CDIFeatures:             set[pathCDIFeatures],
			CDIDisableHooks:         set[pathCDIDisableHooks],
			MPSRoot:                 set[pathMPSRoot],
		},
	}
}

// readRetireAfter reads how long held devices stay Healthy when the profile no longer wants them.
func readRetireAfter(v value) (after sharing.RetireAfter) {
	f := v.mapping(keysOf(pathRetireAfter)...)
	if len(f.entries) > 0 {
		v.note("Virgate's own; NVIDIA's plugin drops such devices from its list at once")
	}
	const expected = "expected a duration from 0s, such as 10m"
	after.Shrink, after.ShrinkSet = f.field("shrink").duration(0, math.MaxInt64, expected)
	after.Switch, _ = f.field("switch").duration(0, math.MaxInt64, expected)
	return after
}
