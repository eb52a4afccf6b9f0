package main

import (
	"cmp"
	"context"
	_ "embed" // for flagFile
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/web"
)

// The flags, except those of settingFlags and of internal/simnode. It never changes.
//
//go:embed flags.txt
var flagFile string

var flagTable = command.ParseFlags(flagFile + "[node] GPUs\n" + simnode.WorldFlag + " text " + simnode.WorldUsage)

// settingFlags returns the flags of NVIDIA's device plugin and a few of Virgate's own. Their
// environment variables are read by overrides and not by the flag library, so that an error can
// name the source. If names are given, the help shows only those flags. The others have no effect,
// but are accepted, so that the command line of another command works.
func settingFlags(shown ...string) []cli.Flag { return flagsOf(configs.Settings(), shown...) }

func flagsOf(settings []configs.Setting, shown ...string) []cli.Flag {
	var flags []cli.Flag
	for _, s := range settings {
		f := command.Flag{
			Names:     append([]string{s.Flag}, s.Aliases...),
			Kind:      command.KindText,
			Choices:   s.Choices,
			Free:      true,
			Shown:     s.Default,
			Variables: variables(s),
			Usage:     s.Usage,
			Heading:   "as in NVIDIA's device plugin (flag over variable over document)",
			Hidden:    shown != nil && !slices.Contains(shown, s.Flag),
		}
		if s.Own {
			f.Heading = "beside those of NVIDIA's device plugin"
		}
		switch s.Type {
		case configs.TypeBool:
			f.Kind = command.KindBool
		case configs.TypeList, configs.TypeNumbers: // Repeatable, and separable by commas.
			f.Kind = command.KindList
		}
		flags = append(flags, f.New(func(string) (string, bool) { return "", false }))
	}
	return flags
}

// planFlags returns those of settingFlags that affect a plan.
func planFlags() []cli.Flag {
	return settingFlags("mig-strategy", "nvidia-driver-root", "container-driver-root", "device-list-strategy",
		"device-id-strategy", "shared-devices-allocation-policy")
}

// overrides returns the settings that flags and variables make, by document path.
func overrides(cmd *cli.Command, environment environment) configs.Overrides {
	return overridesOf(cmd, environment, slices.Concat(configs.Settings(), configs.EnvOnlySettings()))
}

func overridesOf(cmd *cli.Command, environment environment, settings []configs.Setting) configs.Overrides {
	overrides := configs.Overrides{}
	for _, s := range settings {
		if s.Flag != "" && cmd.IsSet(s.Flag) {
			value := fmt.Sprint(cmd.Value(s.Flag))
			if list := cmd.StringSlice(s.Flag); list != nil {
				value = strings.Join(list, ",")
			}
			overrides[s.Path] = configs.Override{Value: value, Source: "--" + s.Flag}
			continue
		}
		for _, variable := range variables(s) {
			if value, ok := environment(variable); ok && value != "" {
				overrides[s.Path] = configs.Override{Value: value, Source: "$" + variable}
				break
			}
		}
	}
	return overrides
}

func variables(s configs.Setting) []string { return append([]string{s.Env}, s.EnvAliases...) }

// checkPath returns an error if a flag has a document as its value instead of the path of one.
func checkPath(cmd *cli.Command, flag string) error {
	path := cmd.String(flag)
	if !strings.Contains(path, "\n") && !strings.HasPrefix(path, "version:") && !strings.HasPrefix(path, "{") {
		return nil
	}
	return command.Usage(fmt.Errorf(
		"--%s [$CONFIG_FILE] is a document (%.30q…), and expected is the path of a file with one: mount the "+
			"ConfigMap as a volume in place of envFrom, or name it by --config-map of virgate run", flag, path))

}

// checkFollowed is checkPath for a command that watches the file for changes.
func checkFollowed(cmd *cli.Command, flag string) error {
	if cmd.String(flag) == configsource.Stdin {
		return command.Usage(fmt.Errorf(
			"--%s - is standard input, which check, plan and mig read once; %s follows a file: name one", flag,
			cmd.FullName()))
	}
	return checkPath(cmd, flag)
}

func pluginDir(cmd *cli.Command) string {
	if socket := cmd.String("kubelet-socket"); socket != "" && !cmd.IsSet("device-plugin-dir") {
		return filepath.Dir(socket)
	}
	return cmd.String("device-plugin-dir")
}

// textLog returns the log of a command that ends by itself.
func textLog(cmd *cli.Command) *slog.Logger {
	return slog.New(slog.NewTextHandler(cmd.Root().ErrWriter, nil))
}

// profileLabel is the label by which NVIDIA's config-manager chooses a profile.
const profileLabel = "nvidia.com/device-plugin.config"

// profileOptions returns where the profile is: --config, a ConfigMap or a directory.
func profileOptions(cmd *cli.Command, overrides configs.Overrides, log *slog.Logger) (daemon.ProfileOptions, error) {
	options := daemon.ProfileOptions{
		Path:      cmd.String("config"),
		Key:       cmd.String("config-key"),
		Default:   cmd.String("default-config"),
		Overrides: overrides,
	}
	err := oneSource(cmd)
	if err != nil {
		return options, err
	}
	if cmd.String("config-map") == "" && cmd.String("config-dir") == "" {
		options.Labels, err = newLabels(cmd, nil, log)
		if err != nil {
			log.Info("no label is looked at", "because", err)
		}
		return options, nil
	}
	options.Fallbacks, err = configsource.ParseFallbacks(cmd.String("fallback-strategies"))
	if err != nil {
		return options, command.Usage(fmt.Errorf("--fallback-strategies: %w", err))
	}
	var api *kube.Client
	if configMap := cmd.String("config-map"); configMap == "" {
		options.Source = &configsource.Directory{Path: cmd.String("config-dir")}
	} else {
		namespace, name, err := configsource.ParseConfigMapName(configMap)
		if err != nil {
			return options, command.Usage(fmt.Errorf("--config-map: %w", err))
		}
		api, err = newAPI(cmd)
		if err != nil {
			return options, err
		}
		options.Source = configsource.NewConfigMap(api, namespace, name, log)
	}
	options.Labels, err = newLabels(cmd, api, log)
	if err != nil {
		return options, err
	}
	if options.Labels == nil {
		log.Info("no label is looked at", "because", "no node name")
	}
	return options, nil
}

func newAPI(cmd *cli.Command) (*kube.Client, error) {
	config, err := kube.RESTConfig(cmd.String("kubeconfig"))
	if err != nil {
		return nil, err
	}
	return kube.NewClient(config)
}

// newLabels returns the labels of this Node, or nil if its name is not known. Without an api it
// makes a client of its own; it returns an error if there is no API server.
func newLabels(cmd *cli.Command, api *kube.Client, log *slog.Logger) (*configsource.NodeLabels, error) {
	name := cmd.String("node-name")
	if name == "" {
		return nil, nil
	}
	if api == nil {
		var err error
		api, err = newAPI(cmd)
		if err != nil {
			return nil, err
		}
	}
	return configsource.NewNodeLabels(api, name, cmp.Or(cmd.String("node-label"), profileLabel), log), nil
}

// newClientLabels returns the writer of the labels that pause other programs, or nil if the Node's
// labels are not watched. It is made even without --mig-pause-clients, because an earlier run with
// that flag may have been killed.
func newClientLabels(cmd *cli.Command, labels *configsource.NodeLabels) (*nodestatus.ClientLabels, error) {
	if labels == nil {
		if cmd.Bool("mig-pause-clients") {
			return nil, command.Usage(errors.New("--mig-pause-clients: needs --node-name and an API server"))
		}
		return nil, nil
	}
	config, err := kube.RESTConfig(cmd.String("kubeconfig"))
	if err != nil {
		return nil, err
	}
	return nodestatus.NewClientLabels(config, cmd.String("node-name"))
}

// oneSource returns an error if several sources of the profile are named.
func oneSource(cmd *cli.Command) error {
	if err := checkFollowed(cmd, "config"); err != nil {
		return err
	}
	var named []string
	for _, name := range []string{"config", "config-map", "config-dir"} {
		if cmd.String(name) != "" {
			named = append(named, fmt.Sprintf("--%s %s", name, cmd.String(name)))
		}
	}
	if len(named) > 1 {
		return command.Usage(fmt.Errorf("%s exclude each other", strings.Join(named, " and ")))
	}
	if cmd.String("config-key") != "" && cmd.String("config") == "" {
		return command.Usage(errors.New("--config-key goes with --config"))
	}
	return nil
}

// watchedPods returns this node's pods at the API server, or nil if they are not to be watched.
func watchedPods(cmd *cli.Command, log *slog.Logger) (*configsource.Pods, error) {
	if !cmd.Bool("watch-pods") {
		return nil, nil
	}
	node := cmd.String("node-name")
	if node == "" {
		return nil, command.Usage(errors.New("--watch-pods: --node-name is missing"))
	}
	api, err := newAPI(cmd)
	if err != nil {
		return nil, err
	}
	return configsource.NewPods(api, node, log), nil
}

// evictor returns the function that evicts pods, or nil if the command line does not allow
// evictions.
func evictor(cmd *cli.Command) (func(ctx context.Context, namespace, pod, uid string) error, error) {
	if !cmd.Bool("evict-over-limit") {
		return nil, nil
	}
	if !cmd.Bool("watch-pods") {
		return nil, command.Usage(errors.New(
			"--evict-over-limit: set --watch-pods too: Virgate needs it to measure what each pod uses"))
	}
	config, err := kube.RESTConfig(cmd.String("kubeconfig"))
	if err != nil {
		return nil, fmt.Errorf("--evict-over-limit: %w", err)
	}
	evictor, err := nodestatus.NewEvictor(config, cmd.String("node-name"))
	if err != nil {
		return nil, err
	}
	return evictor.Evict, nil
}

// featureOutput returns where feature labels go: nowhere unless they are requested.
func featureOutput(cmd *cli.Command, environment environment) (nodestatus.FeatureOutput, error) {
	var output nodestatus.FeatureOutput
	if !cmd.Bool("feature-labels") {
		return output, nil
	}
	pod, _ := environment("POD_NAME")
	output = nodestatus.FeatureOutput{
		Kind:      cmd.String("feature-output"),
		File:      cmd.String("feature-file"),
		Namespace: cmd.String("feature-namespace"),
		Name:      nodestatus.NodeFeatureName(cmd.String("node-name")),
		Pod:       pod,
	}
	switch {
	case output.Kind == nodestatus.FeaturesToFile && output.File == "":
		return output, command.Usage(errors.New("--feature-output nfd-file needs --feature-file"))
	case output.Kind == nodestatus.FeaturesToNFD && output.Namespace == "":
		return output, command.Usage(errors.New("--feature-output nfd-api needs --feature-namespace"))
	}
	return output, nil
}

// machineTypeFile has the machine's name from its firmware.
const machineTypeFile = "/sys/class/dmi/id/product_name"

// machineName returns the machine's name from the file; empty when unknown.
func machineName(path string, log *slog.Logger) string {
	data, err := os.ReadFile(path)
	if err != nil && path != "" {
		log.Info("machine's name not read", "error", err)
	}
	return string(data)
}

// pciDevices is the folder that contains a folder for each PCI device.
const pciDevices = "/sys/bus/pci/devices"

// vgpus returns the vGPUs among NVIDIA's PCI devices in the folder. The kernel shows the first 64
// bytes of the configuration space to every process, the rest only with SYS_ADMIN.
func vgpus(devices fs.FS, log *slog.Logger) []features.VGPU {
	var found []features.VGPU
	names, _ := fs.Glob(devices, "*/vendor") // A machine may have no PCI.
	for _, name := range names {
		if vendor, err := fs.ReadFile(devices, name); err != nil || strings.TrimSpace(string(vendor)) != "0x10de" {
			continue
		}
		config, err := fs.ReadFile(devices, path.Join(path.Dir(name), "config"))
		if vgpu, ok := features.ParseVGPU(config); ok {
			found = append(found, vgpu)
		} else if len(config) < features.PCIConfigSize {
			log.Info(
				"whether a GPU is a vGPU is not known: its PCI configuration space cannot be read, which requires "+
					"SYS_ADMIN", "device", path.Dir(name), "bytes", len(config), "error", err)
		}
	}
	return found
}

// newReporter returns the reporter to Kubernetes, or nil if nothing is to be reported. A missing
// API server is an error only if a flag requests a report.
func newReporter(cmd *cli.Command, features nodestatus.FeatureOutput, log *slog.Logger) (*nodestatus.Reporter, error) {
	if beat := cmd.Duration("node-heartbeat"); beat < 0 {
		return nil, command.Usage(fmt.Errorf("--node-heartbeat must not be less than 0, got %s", beat))
	}
	options := nodestatus.Options{
		Node:        cmd.String("node-name"),
		Events:      cmd.Bool("node-events"),
		Condition:   cmd.Bool("node-condition"),
		Heartbeat:   cmd.Duration("node-heartbeat"),
		Annotations: cmd.Bool("node-annotations"),
		RemoveStale: cmd.Bool("remove-stale-resources"),
		Features:    features,
		Logger:      log,
	}
	if !options.Events && !options.Condition && !options.Annotations && !options.RemoveStale && features.Kind == "" {
		return nil, nil
	}
	asked := ""
	for _, name := range []string{
		"node-events", "node-condition", "node-annotations", "remove-stale-resources", "feature-labels",
	} {
		if cmd.IsSet(name) && cmd.Bool(name) && (name != "feature-labels" || features.NeedsAPI()) {
			asked = name
		}
	}
	var err error
	if options.Node == "" {
		err = errors.New("no --node-name")
	} else {
		options.Config, err = kube.RESTConfig(cmd.String("kubeconfig"))
	}
	switch {
	case err == nil:
		return nodestatus.New(options)
	case asked != "":
		return nil, command.Usage(fmt.Errorf("--%s: %w", asked, err))
	default:
		log.Info("nothing is reported to Kubernetes", "because", err)
		if features.Kind == nodestatus.FeaturesToFile {
			return nodestatus.New(nodestatus.Options{Features: features, Logger: log})
		}
		return nil, nil
	}
}

func httpOptions(cmd *cli.Command) (web.HTTP, error) {
	if most := cmd.Int("metrics-max-series"); most <= 0 {
		return web.HTTP{}, command.Usage(fmt.Errorf("--metrics-max-series must be more than 0, got %d", most))
	}
	options := web.HTTP{
		ConfigFile:   cmd.String("web-config-file"),
		HealthListen: cmd.String("health-listen"),
		Profiling:    cmd.Bool("pprof"),
		NoContainers: !cmd.Bool("metrics-per-container"),
		MaxSeries:    cmd.Int("metrics-max-series"),
	}
	return options, options.Validate()
}
