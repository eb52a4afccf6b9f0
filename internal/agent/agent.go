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
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Node is where the GPUs are known.
type Node interface {
	// Inventory returns the GPUs as last seen. The error says why none can be read.
	Inventory() ([]sharing.GPU, error)
	// Watch calls changed whenever Inventory or Unlisted would return something else, at
	// least once, from any goroutine, and returns when ctx ends. It is not called before
	// AcquireLock has returned, and nor is anything else that opens the driver.
	Watch(ctx context.Context, changed func()) error
	// Unlisted says which GPUs the node has and the driver does not list, for people; empty for none.
	Unlisted() string
}

// ConfigSource is where the profile comes from.
type ConfigSource interface {
	// Profile returns the profile that should be in force. With an error, the last
	// good one stays in force, and only what Refused leaves of what is returned counts:
	// it is of the profile that was wanted, as far as that is known. The
	// error is configs.ErrPending while it is not known which one is wanted.
	Profile() (configs.SelectedProfile, error)
	// WithLabel returns what Profile would if the Node's label of that name had that value. The
	// error can also be that no such label is looked at.
	WithLabel(label, value string) (configs.SelectedProfile, error)
	// Watch is as in Node.
	Watch(ctx context.Context, changed func()) error
}

// Health is where the units' health is known.
type Health interface {
	// Health returns the health of all units as last seen, from any goroutine.
	Health() sharing.HealthReport
}

// Settings say how Run does its work.
type Settings struct {
	// SampleInterval is the time between two samples of the GPUs' utilization and of
	// who holds what, for the metrics; 5 s when 0.
	SampleInterval time.Duration
	// DrainTimeout is how long, when ctx ends, devices are withdrawn before Run
	// returns; 0 leaves them as they are, for a successor.
	DrainTimeout time.Duration
	// Listen is the HTTP address, empty for none; HTTP is how it is served.
	Listen string
	HTTP   web.HTTP
	// ListenWhenServing leaves Listen and the control socket to the program that serves
	// the node, for two that share them in one pod. Probes then need HTTP.HealthListen.
	ListenWhenServing bool
	// Reload has the loop read its inputs again, as SIGHUP does; nil for never.
	Reload <-chan os.Signal
	Logger *slog.Logger
	// Version is shown in virgate_build_info and in the status.
	Version string
	// NodeName is the Node object's name, for the status; empty when unknown.
	NodeName string
}

// Options are what Run needs.
type Options struct {
	Settings
	Node         Node
	ConfigSource ConfigSource
	Plugin       *plugin.Manager
	// Host prepares what allocate responses refer to, such as CDI specs.
	Host    Host
	Kubelet plugin.Kubelet
	// UnreadKubelet says why a source of who holds what could not be read when last tried; nil for
	// one that could. It must not wait.
	UnreadKubelet func() (podResources, checkpoint error)
	// Measure measures who uses the GPUs and how much, which may take seconds, and
	// returns soon after ctx ends. One goroutine calls it, and what it returns is not
	// changed afterwards.
	Measure func(ctx context.Context) sharing.Measurement
	Health  Health
	// SetHealthRules is called from the loop with each profile that comes into force,
	// before it is planned with.
	SetHealthRules func(sharing.Profile)
	LastKnownGood  LastKnownGood
	// AcquireLock returns when this program may serve the node. While another program
	// serves it, standBy is called: this one is ready then, and not registered.
	AcquireLock func(ctx context.Context, standBy func()) error
	// RestoreHealth is called after that; when it has returned, the inventory has the
	// fatal errors that the last program on this node saved.
	RestoreHealth func(ctx context.Context) error
	// Background are more things to run beside the loop, such as the control
	// socket of a simulated node. When one fails, Run ends.
	Background []func(ctx context.Context) error
	// StateWriteError says why the state file could not be written the last time, for
	// the metrics and the status; nil when it could. It must not wait.
	StateWriteError func() error
	// Reporter tells Kubernetes what happens on this node; nil where nothing does.
	Reporter Reporter
	// Announcements counts numbers of devices that were written to the Node ahead of the kubelet, by
	// result; nil where nothing is.
	Announcements func() map[string]uint64
	// Features are the labels of the node with these GPUs and this profile; nil for none. It
	// must not wait.
	Features func([]sharing.GPU, sharing.Profile) map[string]string
	// Partitioner makes and destroys partitions, as far as the profile allows. Journal
	// keeps the changes begun; Refresh returns when the inventory shows what was made.
	// LetGo is as in migchange.Options.
	Partitioner migchange.Partitioner
	LetGo       func(ctx context.Context, gpu string) (resume func(), err error)
	// Clients and PauseClients are as in migchange.Options, too.
	Clients      migchange.ClientLabels
	PauseClients bool
	Journal      migchange.Store
	Refresh      func(ctx context.Context) error
	Releases     release.Driver
	// Processes are the IDs of the processes that the driver lists on the GPU; none where it
	// cannot tell.
	Processes func(ctx context.Context, gpu string) []int
	// OpenedBy says which programs have the device node of the GPU with that minor number open, as the end of a
	// sentence; nil where nobody can tell.
	OpenedBy func(minor int) string
	// Resets is how often the GPU of that UUID was seen to be reset.
	Resets func(gpu string) int
	// Paused is the pause by which another program has all GPUs let go of just now, and whether that is
	// known; nil for never. ConfigSource.Watch tells of changes.
	Paused func() (pause release.Pause, known bool)
	// DriverSettings sets time slices and compute modes.
	DriverSettings gpusettings.DriverSettings
	// MPS runs the daemons of MPS; nil where nothing does.
	MPS mpsshare.Daemons
	// DRA serves what the profile offers by Dynamic Resource Allocation.
	DRA drapath.Options
	// ClaimCalls measures the kubelet's calls for claims; nil where nobody does.
	ClaimCalls *nodemetrics.ClaimCalls
	// Pods are for the guard of memory.
	Pods memoryguard.Pods
	// Control serves the control socket, with gpu for what is below /gpu; nil for none.
	Control func(ctx context.Context, gpu http.Handler) error
}

// Run plans and serves until ctx ends, and returns when everything it started
// has. An error means that it could not go on, not that ctx ended.
func Run(ctx context.Context, options Options) error {
	return newAgent(options).run(ctx)
}

type agent struct {
	Options
	current
	// replan wakes the loop; so does replanNow, with a channel to close after planning.
	replan    chan struct{}
	replanNow chan chan struct{}
	// reportWake wakes the reports; planEnded is closed when the loop has ended.
	reportWake, planEnded chan struct{}
	// locked is closed when the driver may be opened, registering when the parts may act.
	locked, registering chan struct{}
	// begun is when this run began, in milliseconds.
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

// current is what the program is at now, for all goroutines that tell of it.
type current struct {
	// state is what the loop decided last, progress what reports found last.
	state    atomic.Pointer[state]
	progress atomic.Pointer[profileProgress]
	// standby says that another program serves the node, serving that this one has
	// its lock, draining that it is withdrawing its devices before it ends.
	standby, serving, draining atomic.Bool
}

// run starts everything, and returns when all of it has ended. startServing closes the two channels:
//
//  1. At once: HTTP, the inputs that need no driver, the loop and the reports. So a program that stands by
//     has a plan already.
//  2. After locked, when this program serves the node: what opens the driver, and the samples.
//  3. After registering, when it has taken over what the last program left: the parts that act. The device
//     plugin registers with the kubelet then.
//
// When ctx ends, HTTP and the reports go on while the devices are withdrawn, and the kubelet is served to the
// last (serveKubelet).
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
		start(func(ctx context.Context) error {
			_ = a.MPS.Watch(ctx, a.mps.Wake) // It ends with ctx.
			return nil
		})
		start(after(a.locked, a.mps.Run)) // Nor does virgate mps, which then opens no GPU any more.
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
		start(background)
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

// after returns a part that waits for ready to be closed before it runs; when ctx ends
// first, it never does.
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

// watchDriver follows the driver or the host. A driver call that hangs at the end
// is abandoned: it cannot be cancelled, and the program must end all the same.
func (a *agent) watchDriver(ctx context.Context, watch func(ctx context.Context, changed func()) error) error {
	err := watch(ctx, a.requestPlan)
	if err != nil && ctx.Err() != nil {
		a.Logger.Warn("driver call abandoned", "error", err)
		return nil
	}
	return err
}

// serveKubelet waits for the lock and serves the kubelet until ctx has ended and
// endOthers, which ends what else runs, has returned. The kubelet comes last because
// a successor cannot serve it before everything here has ended, and nobody should be
// without devices for so long. With a DrainTimeout the devices are withdrawn first.
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

// startServing returns when this program has the lock and has taken over what the
// last program left on the node, or when ctx ends.
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
	close(a.locked)
	// Only the program that serves may use the profile of the last run, so the loop
	// has to look again even if it has seen the same error before.
	a.requestPlan()
	if err := a.RestoreHealth(ctx); err != nil {
		return err
	}
	a.mig.Prepare(ctx)
	a.mps.Await(ctx)
	close(a.registering)
	a.planNow(ctx) // So that the first lists have what was found since, and not what the host lacks.
	return nil
}

// drain withdraws all devices and waits until the kubelet has had time to apply
// that. Devices that pods hold stay listed to the end.
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
