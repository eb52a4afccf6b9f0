package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Options are everything in which one run of the program may differ from another. A duration of 0
// selects the default of the part that uses it.
type Options struct {
	agent.Settings

	// GPUs opens the node's GPUs, once, with the settings that the process starts with.
	GPUs    func(configs.StartupSettings) (GPUs, error)
	Profile ProfileOptions

	// PluginDir is the kubelet's device-plugins directory, which also holds the lock.
	PluginDir string
	// StateDir holds the state file; empty for PluginDir.
	StateDir string
	// PodResourcesSocket is the kubelet's; if empty, its checkpoint must do.
	PodResourcesSocket string
	Timing             plugin.Timing

	// Rescan, Probe and DriverBackoff are as in nvml.Options.
	Rescan, Probe, DriverBackoff time.Duration
	// BootID is the machine's. Fatal errors that were stored under another one are cleared.
	BootID string
	// HealthRules adjusts a profile's health rules; nil leaves them.
	HealthRules func(sharing.HealthRules) sharing.HealthRules

	// HostRoot is the path of the host's "/" in this process; empty for "/".
	HostRoot string
	// CDIDir is where runtimes search for CDI specs; empty for PluginDir/cdi, where no runtime
	// does.
	CDIDir string
	// HostInterval is as in host.Options, CDIRetry the Retry of cdi.Options.
	HostInterval, CDIRetry time.Duration

	// Pods maps processes to containers; nil if pods are not watched.
	Pods *configsource.Pods
	// Guard evicts pods that use too much memory. If its UID is nil, Pods provides it.
	Guard memoryguard.Pods

	// MPSSocket is where virgate mps listens. It is used if the settings have an MPS directory.
	MPSSocket string

	// DRA serves claims; nil disables it. It has PodUID, RegistryDir, Config and, in Dir, the
	// kubelet's plugins directory. It requires the NodeName.
	DRA *dradriver.Options

	// ControlSocket is the path of the control socket; empty for none. With ControlRequired, the
	// program does not start without it.
	ControlSocket   string
	ControlRequired bool
	// AllowReset permits the program to reset GPUs.
	AllowReset bool

	// ClientLabels pauses other programs that have GPUs open; nil if the Node's labels are not
	// read. With PauseClients it is used for MIG changes.
	ClientLabels *nodestatus.ClientLabels
	PauseClients bool

	// Features provides the facts for the node's labels that do not change while the program runs;
	// nil disables the labels. The Reporter writes them.
	Features *features.Node
	// RuleFeatures are the facts for rules that do not change while the program runs: the machine
	// and its vGPUs.
	RuleFeatures features.Node
	// Reporter writes to the Node; nil disables it.
	Reporter *nodestatus.Reporter
}

// Run runs the program until ctx ends. An error means that it could not start or continue.
func Run(ctx context.Context, o Options) error {
	log := o.Logger
	if o.HealthRules == nil {
		o.HealthRules = func(rules sharing.HealthRules) sharing.HealthRules { return rules }
	}
	file := state.NewFile(cmp.Or(o.StateDir, o.PluginDir), log)
	profile, err := openProfile(ctx, o.Profile, state.Profile{File: file}, o.Reporter, log)
	if err != nil {
		return err
	}
	defer profile.stop()

	gpus, err := o.GPUs(profile.startup)
	if err != nil {
		return err
	}
	defer gpus.Close()
	node := nvml.NewNode(gpus.Library, nvml.Options{
		Logger:          log,
		Rescan:          o.Rescan,
		Probe:           o.Probe,
		Backoff:         o.DriverBackoff,
		FailOnInitError: profile.startup.FailOnInitError,
		Store:           state.Section[nvml.FatalHealth]{File: file, Name: state.HealthSection},
		Known:           state.Section[nvml.KnownGPU]{File: file, Name: state.GPUSection},
		Boot:            o.BootID,
		Kernel:          gpus.Kernel,
	})
	profile.rules.Store(&ruleLabels{
		node:      o.RuleFeatures,
		inventory: node.Inventory,
		complete:  node.Complete,
		versions:  node.Versions,
		boot:      o.BootID,
		store:     state.Section[gpuFacts]{File: file, Name: state.FactSection},
		log:       log,
	})
	if gpus.CDI == nil {
		gpus.CDI = cdi.Guarded{
			Source: cdi.NewDriver(driverOptions(profile.startup, o.HostRoot, log)),
			Open:   node.OpenAll,
		}
	}
	if gpus.Containers == nil && o.Pods != nil {
		gpus.Containers = o.Pods
	}
	cdiDir := cmp.Or(o.CDIDir, filepath.Join(o.PluginDir, "cdi"))
	claims := cdi.NewClaims(node.Inventory, cdiDir, filepath.Join(cmp.Or(o.HostRoot, "/"), "etc/cdi"))
	kubelet := podresources.New(podresources.Options{
		Socket:        o.PodResourcesSocket,
		CheckpointDir: o.PluginDir,
		Claimed:       claimedUnits(node.Inventory, claims),
		Logger:        log,
	})
	defer func() { _ = kubelet.Close() }()
	if o.DRA != nil {
		gpus.CDI = cdi.Aliased{Source: gpus.CDI, Alias: placeNames}
	}
	gpus.Library = node.Library()
	specs := cdi.NewWriter(cdi.Options{
		Dir:     cdiDir,
		Source:  gpus.CDI,
		Holders: kubelet,
		Retry:   o.CDIRetry,
		Logger:  log,
	})
	lock := &nodeLock{
		dir:  o.PluginDir,
		file: file,
		log:  log,
	}
	defer lock.release()
	partitioner := gpus.Partitioner(node.PauseEvents)
	var rights Privileged = ownRights{
		gpus:        gpus,
		node:        node,
		partitioner: partitioner,
	}
	releases := release.Driver{
		Releaser: node,
		Store:    state.Section[release.Release]{File: file, Name: state.ReleaseSection},
	}
	if o.AllowReset && gpus.Reset != nil {
		releases.Reset = rights.Reset
	}
	if gpus.SetPersistence != nil { // Needed also without AllowReset: an earlier run may have had it.
		releases.Persistence = &release.Persistence{
			On:    rights.Persistence,
			Set:   rights.SetPersistence,
			Store: state.Section[release.PersistenceOff]{File: file, Name: state.PersistenceSection},
			Boot:  o.BootID,
		}
	}
	settings := gpusettings.DriverSettings{
		Store:          state.Section[gpusettings.ChangedGPU]{File: file, Name: state.SettingSection},
		ComputeMode:    node.ComputeMode,
		SetComputeMode: rights.SetComputeMode,
	}
	if gpus.SetTimeSlice != nil {
		settings.SetTimeSlice = rights.SetTimeSlice
	}
	pluginOptions := plugin.Options{
		Dir:     o.PluginDir,
		Kubelet: kubelet,
		Store:   state.Lists{File: file},
		Timing:  o.Timing,
		Logger:  log.With("component", "plugin"),
	}
	if o.Reporter != nil && o.Reporter.Announces() {
		pluginOptions.Announcer = o.Reporter
	}
	hostOptions := host.Options{
		Root:         o.HostRoot,
		DevRoot:      profile.startup.DevRoot,
		Dev:          mountedDev(profile.startup),
		Capabilities: Capabilities(profile.startup, o.HostRoot),
		Specs:        specs,
		Interval:     o.HostInterval,
		Logger:       log,
	}
	if gpus.MakeNodes != nil {
		hostOptions.Maker = rights
	}
	options := agent.Options{
		Settings:       o.Settings,
		Node:           node,
		Health:         node,
		SetHealthRules: func(profile sharing.Profile) { node.SetHealthRules(o.HealthRules(profile.Health)) },
		RestoreHealth:  node.RestoreHealth,
		ConfigSource:   profile.source,
		LastKnownGood:  profile.lastKnownGood,

		AcquireLock:     lock.acquire,
		Plugin:          plugin.NewManager(pluginOptions),
		Kubelet:         kubelet,
		UnreadKubelet:   kubelet.Unread,
		StateWriteError: file.WriteError,
		Host:            host.New(hostOptions),

		Partitioner:    rights,
		LetGo:          node.PauseEvents,
		Releases:       releases,
		Processes:      partitioner.Processes,
		Programs:       partitioner.Clients,
		OpenedBy:       partitioner.OpenedBy,
		Resets:         node.Resets,
		DriverSettings: settings,
		Journal:        file,
		Refresh:        node.Refresh,

		Measure: usage.NewSampler(usage.Options{
			Meter:      nvml.NewMeter(gpus.Library),
			Proc:       gpus.Proc,
			Containers: gpus.Containers,
			Logger:     log,
		}).Measure,
		Background: []func(context.Context) error{profile.lastKnownGood.Run},
	}
	if gpus.DriverReplaced != nil {
		options.Background = append(options.Background, gpus.DriverReplaced)
	}
	if profile.startup.MPSRoot != "" {
		client := mps.NewClient(o.MPSSocket, log.With("component", "mps"))
		options.Background, options.MPS = append(options.Background, client.Run), client
	}
	if o.DRA != nil {
		options.ClaimCalls = nodemetrics.NewClaimCalls()
		entries := claimEntries{cdi.ClaimSpecs{Dir: cdiDir}, profile.startup.MPSRoot}
		options.DRA, err = newDRA(o, node, kubelet, file, entries, options.ClaimCalls)
		if err != nil {
			return err
		}
	}
	options.Pods = o.Guard
	if o.Pods != nil && o.Guard.UID == nil {
		options.Pods.UID = o.Pods.PodUID
	}
	if o.Reporter != nil {
		options.Reporter = o.Reporter
		if o.Reporter.Announces() {
			options.Announcements = o.Reporter.Announcements
		}
	}
	if o.Profile.Labels != nil && o.ClientLabels != nil {
		options.Clients, options.PauseClients = clientLabels{o.ClientLabels, o.Profile.Labels}, o.PauseClients
	}
	if o.Profile.Labels != nil {
		options.Paused = func() (release.Pause, bool) {
			pause, known := o.Profile.Labels.Paused()
			return release.Pause(pause), known
		}
	}
	if o.Features != nil {
		options.Features = func(gpus []sharing.GPU, profile sharing.Profile) map[string]string {
			n, versions := *o.Features, node.Versions()
			n.GPUs = gpus
			n.Profile = profile
			n.Driver = versions.Driver
			n.CUDA = versions.CUDA
			return features.Labels(n)
		}
	}
	if o.Pods != nil {
		options.Background = append(options.Background, func(ctx context.Context) error {
			return o.Pods.Watch(ctx, func() {}) // The sampler reads it at each sample.
		})
	}
	if o.ControlSocket != "" {
		serve := func(ctx context.Context, control net.Listener, releases http.Handler) error {
			return web.ServeControl(ctx, control, controlHandler(node, releases, gpus.Control))
		}
		if o.ListenWhenServing {
			options.Control = func(ctx context.Context, releases http.Handler) error {
				control, err := listenControl(o.ControlSocket)
				if err != nil {
					log.Error("no control socket", "error", err)
					return nil
				}
				return serve(ctx, control, releases)
			}
		} else if control, err := listenControl(o.ControlSocket); err == nil {
			options.Control = func(ctx context.Context, releases http.Handler) error {
				return serve(ctx, control, releases)
			}
		} else if o.ControlRequired {
			return err
		} else {
			log.Warn("no control socket", "error", err)
		}
	}
	log.Info("virgate starts", "version", o.Version, "node", gpus.Name, "config", profile.name)
	defer log.Info("virgate ends")
	err = agent.Run(ctx, options)
	if o.Reporter != nil {
		lock.leave(func() { o.Reporter.Leave(context.WithoutCancel(ctx)) })
	}
	return err
}

// clientLabels implements migchange.ClientLabels.
type clientLabels struct {
	*nodestatus.ClientLabels
	node *configsource.NodeLabels
}

func (c clientLabels) Running() []string { return c.node.RunningClients() }

// MIGOptions are the inputs of ApplyMIG.
type MIGOptions struct {
	GPUs GPUs
	// Simulated is true if no kubelet serves these GPUs and they end with the program: then there
	// is no journal.
	Simulated bool
	// PluginDir and PodResourcesSocket are as in Options; the journal is in PluginDir.
	PluginDir, PodResourcesSocket string
	// WithoutKubelet assumes that no pod holds a GPU.
	WithoutKubelet bool
	// Capabilities reads the driver's files that describe the device nodes of partitions; the zero
	// value reads this machine's.
	Capabilities migcaps.Reader
	Logger       *slog.Logger
}

// ApplyMIG brings the GPUs once to the wanted MIG layout, as far as possible now, on a node that no
// Virgate serves. It also makes the device nodes of the partitions, and returns the state of the
// GPUs. It fails if a Virgate serves the node or the GPUs cannot be read.
func ApplyMIG(ctx context.Context, o MIGOptions, wanted sharing.MIGConfig) ([]nodereport.GPULayout, error) {
	options := migchange.Options{Partitioner: o.GPUs.Partitioner(nil), Logger: o.Logger}
	var known []nvml.KnownGPU
	var gpus []sharing.GPU
	if !o.Simulated {
		lock, err := lockOnce(ctx, o.PluginDir)
		if err != nil {
			return nil, err
		}
		defer func() { _ = lock.Release() }()
		file := state.NewFile(o.PluginDir, o.Logger)
		file.Load()
		options.Store = file
		known, err = (state.Section[nvml.KnownGPU]{File: file, Name: state.GPUSection}).Load()
		if err != nil {
			return nil, err
		}
		if !o.WithoutKubelet {
			claims := cdi.NewClaims(func() ([]sharing.GPU, error) { return gpus, nil })
			kubelet := podresources.New(podresources.Options{
				Socket:        o.PodResourcesSocket,
				CheckpointDir: o.PluginDir,
				Claimed:       claimedUnits(func() ([]sharing.GPU, error) { return gpus, nil }, claims),
				Logger:        o.Logger,
			})
			defer func() { _ = kubelet.Close() }()
			options.Holders = kubelet.Held
		}
	}
	options.Inputs = func() (_ []sharing.GPU, _ sharing.MIGConfig, err error) {
		gpus, err = nvml.Scan(o.GPUs.Library, known...)
		return gpus, wanted, err
	}
	layouts, err := migchange.Once(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("read GPUs: %w", err)
	}
	if err := o.makeNodes(ctx); err != nil {
		o.Logger.Warn("device nodes of partitions not made: pods may be refused them", "error", err)
	}
	return layouts, nil
}

// makeNodes lets the driver's program make the device nodes of all partitions, because the kernel
// module makes none. Existing nodes are left alone.
func (o MIGOptions) makeNodes(ctx context.Context) error {
	if o.GPUs.MakeNodes == nil {
		return nil
	}
	gpus, err := nvml.Scan(o.GPUs.Library)
	if err != nil {
		return err
	}
	var files []string
	var unread error // The first one is enough.
	for _, gpu := range gpus {
		for _, partition := range gpu.Partitions {
			nodes, err := o.Capabilities.Partition(gpu.Minor, partition.GI, partition.CI)
			unread = cmp.Or(unread, err)
			for _, node := range nodes {
				files = append(files, node.Access)
			}
		}
	}
	slices.Sort(files)
	files = slices.Compact(files)
	if len(files) > 0 {
		err = o.GPUs.MakeNodes(ctx, files)
	}
	return errors.Join(unread, err)
}

// lockOnce takes the lock of an existing device-plugins directory that no Virgate serves.
func lockOnce(ctx context.Context, dir string) (*state.Lock, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("find --device-plugin-dir: %w", err)
	}
	waiting, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	lock, err := state.Acquire(waiting, dir, func(err error) { giveUp(err) })
	if err != nil {
		return nil, errors.Join(context.Cause(waiting), err)
	}
	return lock, nil
}
