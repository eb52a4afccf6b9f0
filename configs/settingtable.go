package configs

// The places of the settings that the program reads.
const (
	pathMIGStrategy         = "flags.migStrategy"
	pathFailOnInitError     = "flags.failOnInitError"
	pathDriverRoot          = "flags.nvidiaDriverRoot"
	pathDevRoot             = "flags.nvidiaDevRoot"
	pathDiscovery           = "flags.deviceDiscoveryStrategy"
	pathDeviceIDs           = "flags.plugin.deviceIDStrategy"
	pathPolicy              = "flags.plugin.sharedDevicesAllocationPolicy"
	pathContainerDriverRoot = "flags.plugin.containerDriverRoot"

	pathGDRCopy             = "flags.gdrcopyEnabled"
	pathGDS                 = "flags.gdsEnabled"
	pathMOFED               = "flags.mofedEnabled"
	pathDeviceNodes         = "flags.plugin.passDeviceSpecs"
	pathDeviceList          = "flags.plugin.deviceListStrategy"
	pathAnnotationPrefix    = "flags.plugin.cdiAnnotationPrefix"
	pathCTK                 = "flags.plugin.nvidiaCTKPath"
	pathCDIHook             = "flags.plugin.nvidiaCDIHookPath"
	pathCDIFeatures         = "flags.plugin.cdiFeatureFlags"
	pathDriverHostPath      = "flags.plugin.driverMounts.hostPath"
	pathDriverContainerPath = "flags.plugin.driverMounts.containerPath"
)

const (
	inertCTK     = "has no effect: nvidiaCDIHookPath has taken its place"
	inertNoMPS   = "has no effect: Virgate runs no MPS daemon"
	inertNotHere = "has no effect: it configures GPU feature discovery, not the device plugin"
	inertSocket  = "has no effect: Virgate finds the kubelet's socket in its --device-plugin-dir"
)

// settingTable has every key of the sections flags and imex, as
// k8s-device-plugin v0.20 knows them, and Virgate's own. It is a function so
// that no caller can change another's copy.
func settingTable() []Setting {
	return []Setting{
		{Path: pathMIGStrategy, Flag: "mig-strategy", Env: "MIG_STRATEGY", Kind: KindEnum, Default: "none",
			Choices: []string{"none", "single", "mixed"}, Usage: "how GPUs with MIG enabled are offered",
			differs: map[string]string{
				"none":   "GPUs with MIG enabled are not offered; NVIDIA's plugin offers them as whole GPUs, on which nothing runs",
				"single": "GPUs that do not conform are left out with a warning; NVIDIA's plugin does not start",
			}},
		{Path: pathFailOnInitError, Flag: "fail-on-init-error", Env: "FAIL_ON_INIT_ERROR", Kind: KindBool, Default: "true",
			Usage: "end when the driver cannot be opened at the start; false waits for it"},
		{Path: "flags.mpsRoot", Flag: "mps-root", Env: "MPS_ROOT", Kind: KindString,
			Usage: "where an MPS daemon has its files (no effect)", inert: inertNoMPS},
		{Path: pathDriverRoot, Flag: "nvidia-driver-root", Env: "NVIDIA_DRIVER_ROOT", Aliases: []string{"driver-root"},
			Kind: KindPath, Default: "/", Usage: "where the driver is installed on the host"},
		{Path: pathDevRoot, Flag: "dev-root", Env: "NVIDIA_DEV_ROOT", Aliases: []string{"nvidia-dev-root"},
			Kind: KindPath, Usage: "the host folder with the driver's dev folder; the driver root if empty"},
		{Path: pathGDRCopy, Flag: "gdrcopy-enabled", Env: "GDRCOPY_ENABLED", Kind: KindBool, Default: "false",
			Usage: "start containers with GDRCopy"},
		{Path: pathGDS, Flag: "gds-enabled", Env: "GDS_ENABLED", Kind: KindBool, Default: "false",
			Usage: "start containers with GPUDirect Storage"},
		{Path: pathMOFED, Flag: "mofed-enabled", Env: "MOFED_ENABLED", Kind: KindBool, Default: "false",
			Usage: "start containers with MOFED"},
		{Path: "flags.useNodeFeatureAPI", Flag: "use-node-feature-api", Env: "USE_NODE_FEATURE_API", Kind: KindBool, Default: "false",
			Usage: "for GPU feature discovery (no effect)", inert: inertNotHere},
		{Path: pathDiscovery, Flag: "device-discovery-strategy", Env: "DEVICE_DISCOVERY_STRATEGY", Kind: KindEnum, Default: "auto",
			Choices: []string{"auto", "nvml", "tegra"}, Usage: "how GPUs are found (tegra is not supported yet)", only: []string{"auto", "nvml"}},

		{Path: pathDeviceNodes, Flag: "pass-device-specs", Env: "PASS_DEVICE_SPECS", Kind: KindBool, Default: "false",
			Usage: "grant device nodes too"},
		{Path: pathDeviceList, Flag: "device-list-strategy", Env: "DEVICE_LIST_STRATEGY", Kind: KindList, Default: "envvar",
			Choices: []string{"envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "driver-mounts"},
			Usage:   "how a container is told its devices",
			differs: map[string]string{"driver-mounts": "Virgate's own value; NVIDIA's plugin refuses it"}},
		{Path: pathDeviceIDs, Flag: "device-id-strategy", Env: "DEVICE_ID_STRATEGY", Kind: KindEnum, Default: "uuid",
			Choices: []string{"uuid", "index"}, Usage: "by what a container's devices are named"},
		{Path: pathPolicy, Flag: "shared-devices-allocation-policy", Env: "SHARED_DEVICES_ALLOCATION_POLICY", Kind: KindEnum, Default: "distributed",
			Choices: []string{"distributed", "packed", "spread"}, Usage: "which shared devices a container gets when there is a choice",
			differs: map[string]string{"spread": "Virgate's own value; NVIDIA's plugin refuses it"}},
		{Path: pathAnnotationPrefix, Flag: "cdi-annotation-prefix", Env: "CDI_ANNOTATION_PREFIX", Kind: KindKeyPrefix, Default: "cdi.k8s.io/",
			Usage: "prefix of CDI annotations"},
		{Path: pathCTK, Kind: KindString, Default: "/usr/bin/nvidia-ctk", Usage: "older key for nvidiaCDIHookPath", inert: inertCTK},
		{Path: pathCDIHook, Flag: "nvidia-cdi-hook-path", Env: "NVIDIA_CDI_HOOK_PATH",
			Aliases: []string{"nvidia-ctk-path"}, EnvAliases: []string{"NVIDIA_CTK_PATH"}, Kind: KindString, Default: "/usr/bin/nvidia-cdi-hook",
			Usage: "the host's program that CDI specs name as hook"},
		{Path: pathContainerDriverRoot, Flag: "container-driver-root", Env: "CONTAINER_DRIVER_ROOT",
			Aliases: []string{"driver-root-ctr-path"}, EnvAliases: []string{"DRIVER_ROOT_CTR_PATH"}, Kind: KindPath, Default: "/driver-root",
			Usage: "where the driver root is mounted in this container"},
		{Path: pathCDIFeatures, Flag: "cdi-feature-flags", Env: "CDI_FEATURE_FLAGS", Kind: KindList,
			Usage: "nvcdi's feature flags for making CDI specs"},
		{Path: "flags.plugin.kubeletSocket", Kind: KindString, Default: "/var/lib/kubelet/device-plugins/kubelet.sock",
			Usage: "the kubelet's socket", inert: inertSocket},
		{Path: pathDriverHostPath, Flag: "driver-mounts-host-path", Env: "DRIVER_MOUNTS_HOST_PATH", Kind: KindPath, Default: "/usr/local/nvidia",
			Usage: "driver-mounts: the host's folder with the driver", Own: true},
		{Path: pathDriverContainerPath, Flag: "driver-mounts-container-path", Env: "DRIVER_MOUNTS_CONTAINER_PATH", Kind: KindPath, Default: "/usr/local/nvidia",
			Usage: "driver-mounts: where a container sees it", Own: true},

		{Path: "flags.gfd.oneshot", Kind: KindBool, Default: "false", Usage: "for GPU feature discovery", inert: inertNotHere},
		{Path: "flags.gfd.noTimestamp", Kind: KindBool, Default: "false", Usage: "for GPU feature discovery", inert: inertNotHere},
		{Path: "flags.gfd.sleepInterval", Kind: KindDuration, Default: "60s", Usage: "for GPU feature discovery", inert: inertNotHere},
		{Path: "flags.gfd.outputFile", Kind: KindString, Default: "/etc/kubernetes/node-feature-discovery/features.d/gfd",
			Usage: "for GPU feature discovery", inert: inertNotHere},
		{Path: "flags.gfd.machineTypeFile", Kind: KindString, Default: "/sys/class/dmi/id/product_name",
			Usage: "for GPU feature discovery", inert: inertNotHere},

		{Path: "imex.channelIDs", Flag: "imex-channel-ids", Env: "IMEX_CHANNEL_IDS", Kind: KindNumbers,
			Usage: "IMEX channels for every container (not supported yet)", only: []string{}},
		{Path: "imex.required", Flag: "imex-required", Env: "IMEX_REQUIRED", Kind: KindBool, Default: "false",
			Usage:   "whether a missing IMEX channel is an error (no effect without channels)",
			differs: map[string]string{"true": "has no effect without channels"}},
	}
}
