package configs

import "github.com/virgate/virgate/sharing"

// Config is a device-plugin document, resolved: every default is filled in and
// every override applied.
type Config struct {
	// Profile is the part that can change while the program runs.
	Profile sharing.Profile
	// Process is the part that takes effect at the program's start.
	Process Process
	// Layouts are the MIG layouts that can be named, beside those built in: the
	// profile's own, then those of mig-parted documents in the same ConfigMap.
	Layouts MIGConfigs
	// Notes name what Virgate does differently from NVIDIA's plugin with the
	// same document, by line.
	Notes []Note
}

// Process has the settings that a running program cannot change.
type Process struct {
	// FailOnInitError ends the program when the driver cannot be opened; else it
	// waits for the driver. Default true.
	FailOnInitError bool
	// DriverRoot is where the driver is installed on the host. Default "/".
	DriverRoot string
	// DevRoot is the folder on the host that has the driver's dev folder.
	// Default DriverRoot.
	DevRoot string
	// ContainerDriverRoot is where DriverRoot is mounted in Virgate's own
	// container. Default "/driver-root".
	ContainerDriverRoot string
	// DeviceDiscoveryStrategy says how GPUs are found: "auto" or "nvml".
	// Default "auto".
	DeviceDiscoveryStrategy string
	// CDIHookPath is the host's program that CDI specs name as hook. Default
	// "/usr/bin/nvidia-cdi-hook".
	CDIHookPath string
	// CDIFeatures are the feature flags of the library that makes CDI specs,
	// between commas. Default none.
	CDIFeatures string
}

// Note is a place of a document at which Virgate does more or other than
// NVIDIA's plugin would, or which has no effect.
type Note struct {
	// Line is counted from 1; 0 for what a flag or a variable says.
	Line int
	// Path is the key's place, for example
	// "sharing.timeSlicing.resources[0].rename".
	Path    string
	Message string
}

// Parse reads one device-plugin document, in YAML or JSON. Empty data is a
// document without settings: everything has its default. The name of the file
// is only for messages. Overrides win over the document.
//
// The error is of type Problems and has all that is wrong. The Config is then
// zero.
func Parse(file string, data []byte, overrides Overrides) (Config, error) {
	return ParseWith(file, data, overrides, nil)
}

// ParseWith is Parse for a document that can name MIG layouts which stand
// elsewhere, as in another key of its ConfigMap.
func ParseWith(file string, data []byte, overrides Overrides, layouts MIGConfigs) (Config, error) {
	var problems Problems
	source := &source{file: file, problems: &problems}
	var config Config
	if root, ok := source.open(data); ok {
		config = readProfile(root, overrides, layouts)
	}
	if err := problems.err(); err != nil {
		return Config{}, err
	}
	return config, nil
}
