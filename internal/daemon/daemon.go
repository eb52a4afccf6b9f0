package daemon

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/mpsshare"
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

// Run runs the program until ctx ends. An error means that it could not start or continue. It opens
// what the program needs, in order, and closes it in reverse order after the agent has ended. A part
// that the options disable is nil.
func Run(ctx context.Context, o Options) error {
	log := o.Logger
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
	gpus.Library = node.Library() // For everything else, so that the node can close the GPUs.
	profile.rules.Store(&ruleLabels{
		node:      o.RuleFeatures,
		inventory: node.Inventory,
		complete:  node.Complete,
		versions:  node.Versions,
		boot:      o.BootID,
		store:     state.Section[gpuFacts]{File: file, Name: state.FactSection},
		log:       log,
	})

	cdiDir := cmp.Or(o.CDIDir, filepath.Join(o.PluginDir, "cdi"))
	others := cdi.NewClaims(node.Inventory, cdiDir, filepath.Join(cmp.Or(o.HostRoot, "/"), "etc/cdi"))
	kubelet := podresources.New(podresources.Options{
		Socket:        o.PodResourcesSocket,
		CheckpointDir: o.PluginDir,
		Claimed:       claimedUnits(node.Inventory, others),
		Logger:        log,
	})
	defer func() { _ = kubelet.Close() }()

	lock := &nodeLock{
		dir:  o.PluginDir,
		file: file,
		log:  log,
	}
	defer lock.release()

	entries := claimEntries{cdi.ClaimSpecs{Dir: cdiDir}, profile.startup.MPSRoot}
	dra, claimCalls, err := newDRA(o, node, kubelet, file, entries)
	if err != nil {
		return err
	}
	control, err := newControl(o, node, gpus)
	if err != nil {
		return err
	}
	partitioner := gpus.Partitioner(node.PauseEvents)
	rights := Privileged{
		gpus:        gpus,
		node:        node,
		partitioner: partitioner,
	}
	specs := cdi.NewWriter(cdi.Options{
		Dir:     cdiDir,
		Source:  cdiSource(o, node, gpus, profile.startup),
		Holders: kubelet,
		Retry:   o.CDIRetry,
		Logger:  log,
	})
	sampler := usage.NewSampler(usage.Options{
		Meter:      nvml.NewMeter(gpus.Library),
		Proc:       gpus.Proc,
		Containers: gpus.containers(o.Pods),
		Logger:     log,
	})
	reporter, announcer, announcements := o.reporter()

	log.Info("virgate starts", "version", o.Version, "node", gpus.Name, "config", profile.name)
	defer log.Info("virgate ends")
	err = agent.Run(ctx, agent.Options{
		Settings:        o.Settings,
		ConfigSource:    profile.source,
		LastKnownGood:   profile.lastKnownGood,
		AcquireLock:     lock.acquire,
		Journal:         file,
		StateWriteError: file.WriteError,

		Node:           node,
		Health:         node,
		SetHealthRules: func(profile sharing.Profile) { node.SetHealthRules(o.healthRules(profile)) },
		RestoreHealth:  node.RestoreHealth,
		Refresh:        node.Refresh,
		Resets:         node.Resets,
		Measure:        sampler.Measure,

		Kubelet:       kubelet,
		UnreadKubelet: kubelet.Unread,
		Plugin: plugin.NewManager(plugin.Options{
			Dir:       o.PluginDir,
			Kubelet:   kubelet,
			Store:     state.Lists{File: file},
			Announcer: announcer,
			Timing:    o.Timing,
			Logger:    log.With("component", "plugin"),
		}),
		Host: host.New(host.Options{
			Root:         o.HostRoot,
			DevRoot:      profile.startup.DevRoot,
			Dev:          mountedDev(profile.startup),
			Capabilities: Capabilities(profile.startup, o.HostRoot),
			Specs:        specs,
			Maker:        rights.maker(),
			Interval:     o.HostInterval,
			Logger:       log,
		}),
		DRA:        dra,
		ClaimCalls: claimCalls,

		Partitioner:    rights,
		CloseHandles:   node.PauseEvents,
		Processes:      partitioner.Processes,
		Programs:       partitioner.Clients,
		OpenedBy:       partitioner.OpenedBy,
		Clients:        o.clients(),
		PauseClients:   o.PauseClients,
		Releases:       rights.releases(o, file),
		Paused:         o.paused(),
		DriverSettings: rights.driverSettings(file),
		MPS:            newMPS(o, profile.startup),
		Pods:           o.guardedPods(),

		Reporter:      reporter,
		Announcements: announcements,
		Features:      o.features(node),
		Control:       control,
		Background:    []func(context.Context) error{profile.lastKnownGood.Run, gpus.DriverReplaced, o.watchPods()},
	})
	if o.Reporter != nil {
		lock.leave(func() { o.Reporter.Leave(context.WithoutCancel(ctx), err) })
	}
	return err
}

// newControl returns the function that serves the control socket.
func newControl(o Options, node *nvml.Node, gpus GPUs) (func(context.Context, http.Handler) error, error) {
	if o.ControlSocket == "" {
		return nil, nil
	}
	listen := sync.OnceValues(func() (net.Listener, error) { return listenControl(o.ControlSocket) })
	if !o.ListenWhenServing {
		if _, err := listen(); err != nil && o.ControlRequired {
			return nil, err
		}
	}
	return func(ctx context.Context, releases http.Handler) error {
		control, err := listen()
		if err != nil {
			o.Logger.Warn("no control socket", "error", err)
			return nil
		}
		return web.ServeControl(ctx, control, controlHandler(node, releases, gpus.Control))
	}, nil
}

func cdiSource(o Options, node *nvml.Node, gpus GPUs, startup configs.StartupSettings) cdi.Source {
	source := gpus.CDI
	if source == nil {
		source = cdi.Guarded{Source: cdi.NewDriver(driverOptions(startup, o.HostRoot, o.Logger)), Open: node.OpenAll}
	}
	if o.DRA != nil {
		source = cdi.Aliased{Source: source, Alias: unitNames}
	}
	return source
}

func newMPS(o Options, startup configs.StartupSettings) mpsshare.Daemons {
	if startup.MPSRoot == "" {
		return nil
	}
	return mps.NewClient(o.MPSSocket, o.Logger.With("component", "mps"))
}

func (o Options) healthRules(profile sharing.Profile) sharing.HealthRules {
	if o.HealthRules == nil {
		return profile.Health
	}
	return o.HealthRules(profile.Health)
}

// reporter returns the Reporter in its roles.
func (o Options) reporter() (agent.Reporter, plugin.Announcer, func() map[string]uint64) {
	switch {
	case o.Reporter == nil:
		return nil, nil, nil
	case o.Reporter.Announces():
		return o.Reporter, o.Reporter, o.Reporter.Announcements
	}
	return o.Reporter, nil, nil
}

// clientLabels implements migchange.ClientLabels.
type clientLabels struct {
	*nodestatus.ClientLabels
	node *configsource.NodeLabels
}

func (c clientLabels) Running() []string { return c.node.RunningClients() }

func (o Options) clients() migchange.ClientLabels {
	if o.Profile.Labels == nil || o.ClientLabels == nil {
		return nil
	}
	return clientLabels{o.ClientLabels, o.Profile.Labels}
}

func (o Options) paused() func() (release.Pause, bool) {
	if o.Profile.Labels == nil {
		return nil
	}
	return func() (release.Pause, bool) {
		pause, known := o.Profile.Labels.Paused()
		return release.Pause(pause), known
	}
}

func (o Options) guardedPods() memoryguard.Pods {
	if o.Pods != nil && o.Guard.UID == nil {
		o.Guard.UID = o.Pods.PodUID
	}
	return o.Guard
}

func (o Options) watchPods() func(context.Context) error {
	if o.Pods == nil {
		return nil
	}
	return func(ctx context.Context) error {
		return o.Pods.Watch(ctx, func() {}) // The sampler reads it at each sample.
	}
}

func (o Options) features(node *nvml.Node) func([]sharing.GPU, sharing.Profile) map[string]string {
	if o.Features == nil {
		return nil
	}
	return func(gpus []sharing.GPU, profile sharing.Profile) map[string]string {
		n, versions := *o.Features, node.Versions()
		n.GPUs = gpus
		n.Profile = profile
		n.Driver = versions.Driver
		n.CUDA = versions.CUDA
		return features.Labels(n)
	}
}
