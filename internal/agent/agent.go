package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/mpsshare"
	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Node provides the node's GPUs.
type Node interface {
	// Inventory returns the GPUs as last seen. The error is why none can be read.
	Inventory() ([]sharing.GPU, error)
	// Watch calls changed whenever Inventory or Unlisted would return something else, at least
	// once, from any goroutine, and returns when ctx ends. It is called only after AcquireLock has
	// returned, like everything else that opens the driver.
	Watch(ctx context.Context, changed func()) error
	// Unlisted describes the GPUs that the node has and the driver does not list; empty for none.
	Unlisted() string
}

// ConfigSource provides the profile.
type ConfigSource interface {
	// Profile returns the profile that should be in force. On an error, the last good one stays in
	// force, and only what Refused keeps of the returned profile is valid: it describes the wanted
	// profile, as far as that is known. The error is configs.ErrPending while the wanted profile is
	// unknown.
	Profile() (configs.SelectedProfile, error)
	// WithLabel returns what Profile would return if the Node's label had that value. It also fails
	// if the source does not use that label.
	WithLabel(label, value string) (configs.SelectedProfile, error)
	// Watch is as in Node.
	Watch(ctx context.Context, changed func()) error
}

// Health provides the health of units.
type Health interface {
	// Health returns the health of all units as last seen, from any goroutine.
	Health() sharing.HealthReport
}

// Settings control how Run works.
type Settings struct {
	// SampleInterval is the time between two samples of the GPUs' utilization and of the holders,
	// for the metrics; 5 s if 0.
	SampleInterval time.Duration
	// DrainTimeout limits the withdrawal of devices after ctx has ended, before Run returns. With 0
	// the devices stay as they are, for a successor.
	DrainTimeout time.Duration
	// Listen is the HTTP address, empty for none. HTTP configures the server.
	Listen string
	HTTP   web.HTTP
	// ListenWhenServing leaves Listen and the control socket to the program that serves the node,
	// for two programs that share them in one pod. Probes then need HTTP.HealthListen.
	ListenWhenServing bool
	// Reload makes the loop read its inputs again, as SIGHUP does; nil disables it.
	Reload <-chan os.Signal
	Logger *slog.Logger
	// Version is shown in virgate_build_info and in the status.
	Version string
	// NodeName is the Node object's name, for the status; empty if unknown.
	NodeName string
}

// Options are Run's inputs.
type Options struct {
	Settings
	Node         Node
	ConfigSource ConfigSource
	Plugin       *plugin.Manager
	// Host prepares what allocate responses refer to, such as CDI specs.
	Host    Host
	Kubelet plugin.Kubelet
	// UnreadKubelet returns why a source of the holders could not be read at the last try; nil if
	// it could be read. It must not wait.
	UnreadKubelet func() (podResources, checkpoint error)
	// Measure measures the processes' use of the GPUs. It may take seconds, and returns soon after
	// ctx ends. One goroutine calls it, and its result is not changed afterwards.
	Measure func(ctx context.Context) sharing.Measurement
	Health  Health
	// SetHealthRules is called from the loop with each profile that comes into force, before
	// planning with it.
	SetHealthRules func(sharing.Profile)
	LastKnownGood  LastKnownGood
	// AcquireLock returns when this program may serve the node. While another program serves it,
	// AcquireLock calls standBy: this program is ready then, but not registered.
	AcquireLock func(ctx context.Context, standBy func()) error
	// RestoreHealth is called after AcquireLock. When it returns, the inventory includes the fatal
	// errors that the last program on this node saved.
	RestoreHealth func(ctx context.Context) error
	// Background are further functions to run beside the loop, such as the control socket of a
	// simulated node. Nil ones are skipped. If one fails, Run ends.
	Background []func(ctx context.Context) error
	// StateWriteError returns why the last write of the state file failed, for the metrics and the
	// status; nil if it succeeded. It must not wait.
	StateWriteError func() error
	// Reporter reports to Kubernetes what happens on this node; nil disables it.
	Reporter Reporter
	// Announcements counts, by result, the device numbers written to the Node ahead of the kubelet;
	// nil if there are none.
	Announcements func() map[string]uint64
	// Features returns the labels of the node with these GPUs and this profile; nil disables it. It
	// must not wait.
	Features func([]sharing.GPU, sharing.Profile) map[string]string
	// Partitioner makes and destroys partitions, as far as the profile allows. Journal stores the
	// changes that have begun. Refresh returns when the inventory shows the new partitions. CloseHandles
	// is as in migchange.Options.
	Partitioner  migchange.Partitioner
	CloseHandles func(ctx context.Context, gpu string) (resume func(), err error)
	// Clients and PauseClients are as in migchange.Options, too.
	Clients      migchange.ClientLabels
	PauseClients bool
	Journal      migchange.Store
	Refresh      func(ctx context.Context) error
	Releases     release.Driver
	// Processes returns the IDs of the processes that the driver lists on the GPU. The error is why
	// they are unknown.
	Processes func(ctx context.Context, gpu string) ([]int, error)
	// Programs returns the programs that have the device node of the GPU with that minor number open.
	// The error is why some may be missing. It is nil if that cannot be found out.
	Programs func(minor int) ([]string, error)
	// OpenedBy names the programs that have the device node of the GPU with that minor number open,
	// as the end of a sentence; nil if that cannot be found out.
	OpenedBy func(minor int) string
	// Resets returns how often the GPU with that UUID was seen to be reset.
	Resets func(gpu string) int
	// Paused returns the pause with which another program requires all GPUs to be closed now, and
	// whether it is known; nil if there are no pauses. ConfigSource.Watch signals its changes.
	Paused func() (pause release.Pause, known bool)
	// DriverSettings sets time slices and compute modes.
	DriverSettings gpusettings.DriverSettings
	// MPS runs the MPS daemons; nil disables MPS.
	MPS mpsshare.Daemons
	// DRA serves what the profile offers by Dynamic Resource Allocation.
	DRA drapath.Options
	// ClaimCalls measures the kubelet's calls for claims; nil disables it.
	ClaimCalls *nodemetrics.ClaimCalls
	// Pods are for the memory guard.
	Pods memoryguard.Pods
	// Control serves the control socket, with gpu as the handler for paths below /gpu; nil disables
	// it.
	Control func(ctx context.Context, gpu http.Handler) error
}

// Run plans and serves until ctx ends, and returns when everything it started has ended. An error
// means that it could not continue, not that ctx ended.
func Run(ctx context.Context, options Options) error {
	return newAgent(options).run(ctx)
}

type agent struct {
	Options
	current
	// replan wakes the loop; so does replanNow, with a channel to close after planning.
	replan    wake.Signal
	replanNow chan chan struct{}
	// reportWake wakes the reports; planEnded is closed when the loop has ended.
	reportWake wake.Signal
	planEnded  chan struct{}
	// locked is closed when the driver may be opened, registering when the parts may act.
	locked, registering chan struct{}
	// begun is this run's start, in milliseconds since 1970.
	begun int

	mig         *migchange.Reconciler
	dra         *drapath.Paths
	releases    *release.Manager
	gpuSettings *gpusettings.Settings
	mps         *mpsshare.Manager
	guard       *memoryguard.Guard

	samples *sampler
	view    *view
	web     *web.Server
	reports *reports
}

// current is the program's present state, for all goroutines that report it.
type current struct {
	// state is the loop's last decision, progress the last result of reports.
	state    atomic.Pointer[state]
	progress atomic.Pointer[profileProgress]
	// standby is true if another program serves the node, serving if this one has its lock, and
	// draining while it withdraws its devices before it ends.
	standby, serving, draining atomic.Bool
}

// run starts everything, and returns when all of it has ended. startServing closes the two channels:
//
//  1. At once: HTTP, the inputs that need no driver, the loop and the reports. So a program that
//     stands by has a plan already.
//  2. After locked, when this program serves the node: everything that opens the driver, and the
//     samples.
//  3. After registering, when it has taken over what the last program left: the parts that act. The
//     device plugin registers with the kubelet then.
//
// When ctx ends, HTTP and the reports continue while the devices are withdrawn, and the kubelet is
// served to the last (serveKubelet).
func (a *agent) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	// HTTP answers until the end: a probe must not end a program that drains.
	answering, stopAnswering := context.WithCancel(context.WithoutCancel(ctx))
	defer stopAnswering()
	var others sync.WaitGroup
	start := func(part func(context.Context) error) {
		others.Add(1)
		group.Go(func() error {
			defer others.Done()
			return part(ctx)
		})
	}
	if err := a.web.CheckAddresses(); err != nil {
		return err
	}
	start(func(context.Context) error { return a.web.Run(answering) })
	start(after(a.locked, func(ctx context.Context) error { return a.watchDriver(ctx, a.Node.Watch) }))
	start(func(ctx context.Context) error { return a.watchDriver(ctx, a.Host.Watch) })
	start(func(ctx context.Context) error { return a.ConfigSource.Watch(ctx, a.requestPlan) })
	start(a.planLoop)
	start(func(context.Context) error { return a.reports.run(answering) })
	if a.Reporter != nil {
		start(func(context.Context) error { return a.Reporter.Run(answering) })
	}
	start(after(a.locked, a.samples.run))
	start(after(a.registering, func(ctx context.Context) error {
		a.mig.Run(ctx)
		return nil
	}))
	start(after(a.locked, a.releases.Run)) // A pause does not wait for a profile.
	start(after(a.registering, a.guard.Run))
	if a.DriverSettings.Store != nil {
		start(after(a.registering, a.gpuSettings.Run))
	}
	if a.MPS != nil {
		start(a.MPS.Run)
		start(func(ctx context.Context) error {
			_ = a.MPS.Watch(ctx, a.mps.Wake) // It ends with ctx.
			return nil
		})
		start(after(a.locked, a.mps.Run)) // In a pause, virgate mps opens no GPU, even without a profile.
	}
	if a.DRA.Driver != nil {
		start(after(a.registering, a.dra.Run))
		start(after(a.registering, a.DRA.Driver.Run))
	}
	if a.Control != nil {
		control := func(ctx context.Context) error { return a.Control(ctx, a.releases.Handler()) }
		if a.ListenWhenServing {
			control = after(a.locked, control)
		}
		start(control)
	}
	for _, background := range a.Background {
		if background != nil {
			start(background)
		}
	}
	group.Go(func() error {
		defer stopAnswering()
		return a.serveKubelet(ctx, func() { stopAnswering(); others.Wait() })
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// after returns a part that runs once ready is closed; if ctx ends first, it never runs.
func after(ready <-chan struct{}, part func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-ready:
			return part(ctx)
		case <-ctx.Done():
			return nil
		}
	}
}

// watchDriver follows the driver or the host. If a driver call hangs at the end, it is abandoned:
// it cannot be cancelled, and the program must end nevertheless.
func (a *agent) watchDriver(ctx context.Context, watch func(ctx context.Context, changed func()) error) error {
	err := watch(ctx, a.requestPlan)
	if err != nil && ctx.Err() != nil {
		a.Logger.Warn("driver call abandoned", "error", err)
		return nil
	}
	return err
}

// serveKubelet waits for the lock and serves the kubelet until ctx has ended and endOthers has
// returned, which ends everything else. The kubelet comes last: a successor cannot serve it before
// everything here has ended, and pods should not be without devices for so long. With a
// DrainTimeout, the devices are withdrawn first.
func (a *agent) serveKubelet(ctx context.Context, endOthers func()) error {
	err := a.startServing(ctx)
	if ctx.Err() != nil {
		return nil // A registration now would be lost in a moment.
	}
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- a.Plugin.Run(running) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	if a.DrainTimeout > 0 {
		a.drain(running)
	}
	endOthers()
	stop()
	return <-ended
}

// startServing returns when this program has the lock and has taken over what the last program left
// on the node, or when ctx ends.
func (a *agent) startServing(ctx context.Context) error {
	if err := a.AcquireLock(ctx, func() { a.standby.Store(true) }); err != nil {
		return err
	}
	a.Plugin.TakeOver(ctx)
	a.dra.Load()
	if a.Releases.Releaser != nil {
		a.awaitPause(ctx)
		if a.releases.Load(ctx) && a.MPS != nil {
			a.MPS.Want(nil) // The daemons of the last run have the driver open.
		}
	}
	a.serving.Store(true)
	// Only the serving program may use the last run's profile, so the loop must decide again even
	// if it has seen the same error before. It does so before the driver is opened, because the
	// profile's health rules judge the first scan.
	a.planNow(ctx)
	close(a.locked)
	if err := a.RestoreHealth(ctx); err != nil {
		return err
	}
	a.mig.Prepare(ctx)
	a.mps.Await(ctx)
	close(a.registering)
	a.planNow(ctx) // So that the first lists have what was found since, but not what the host lacks.
	return nil
}

// drain withdraws all devices and waits until the kubelet has had time to apply that. Devices that
// pods hold stay listed to the end.
func (a *agent) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, a.DrainTimeout)
	defer cancel()
	a.Logger.Info("draining", "timeout", a.DrainTimeout)
	a.draining.Store(true)
	a.wakeReport()
	select {
	case <-a.planEnded: // Another plan would bring the devices back.
	case <-ctx.Done():
	}
	last := a.state.Load().plan
	a.Plugin.Apply(sharing.Plan{Health: last.Health, Grants: last.Grants})
	if a.Plugin.AwaitStopped(ctx) != nil {
		for _, r := range a.Plugin.Status().Resources {
			a.Logger.Warn("not drained", "resource", r.Name, "devices", r.Devices)
		}
	}
}
