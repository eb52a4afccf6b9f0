package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Node is where the GPUs are known.
type Node interface {
	// Inventory returns the GPUs as last seen. It fails while they cannot be
	// read at all, and says why.
	Inventory() ([]sharing.GPU, error)
	// Watch calls changed whenever Inventory would return something else, at
	// least once, from any goroutine, and returns when ctx ends.
	Watch(ctx context.Context, changed func()) error
}

// Policy is where the profile comes from.
type Policy interface {
	// Profile returns the profile that should be in force. It fails when there
	// is none that can be used; the last good one then stays in force, and Name
	// and Source are those of what was wanted, as far as that is known. The error
	// is configs.ErrPending while the choice itself is not known.
	Profile() (configs.Selected, error)
	// Watch is as in Node.
	Watch(ctx context.Context, changed func()) error
}

// Health is where the units' health is known and can be changed.
type Health interface {
	// Health returns the health of all units as last seen, from any goroutine.
	Health() sharing.HealthReport
	// ClearHealth takes an operator's word that the units which the selector names
	// may be used, and returns their health after that. The error says that there
	// are none, or that ctx ended.
	ClearHealth(ctx context.Context, selector sharing.Selector) ([]sharing.UnitHealth, error)
}

// Options are what Run needs.
type Options struct {
	Node   Node
	Policy Policy
	Plugin *plugin.Manager
	// Host has ready what grants name; nil where names are all that is granted.
	Host Host
	// Holders says who holds what; nil when nothing can.
	Holders plugin.Kubelet
	// Meter measures the use of the boards; nil for nobody.
	Meter Meter
	// SampleInterval is the time between two samples of use and of who holds what,
	// for the metrics; 5 s when 0.
	SampleInterval time.Duration
	// Health is shown in metrics; nil for none.
	Health Health
	// OnProfile is called from the loop with each profile that comes into force,
	// before it is planned with; nil for nobody.
	OnProfile func(sharing.Profile)
	// Keeper has the profile of the last run, and keeps this one's; nil for none.
	Keeper Keeper
	// Claim returns when this program may serve the node. While another program
	// does it calls standBy: this one is then ready, and not registered. Nil means
	// at once.
	Claim func(ctx context.Context, standBy func()) error
	// TakeOver is called after that; when it has returned, the inventory has what
	// the last program on this node left. Nil when that is nothing.
	TakeOver func(ctx context.Context) error
	// DrainTimeout is how long, when ctx ends, devices are withdrawn before Run
	// returns; 0 leaves them as they are, for a successor.
	DrainTimeout time.Duration
	// Listen is the HTTP address; empty for none.
	Listen string
	// HTTP is how it is served.
	HTTP HTTP
	// Background are more things to run beside the loop, such as the control
	// socket of a simulated node. When one fails, Run ends.
	Background []func(ctx context.Context) error
	// Kept says why what has to outlive the program could not be written the last
	// time, for the metrics and the status; nil where it could. It must not wait.
	// A nil Kept is that of a program that keeps nothing.
	Kept func() error
	// Look makes the loop look again when it receives, as SIGHUP does; nil for
	// never.
	Look   <-chan struct{}
	Logger *slog.Logger
	// Version is shown in virgate_build_info and in the status.
	Version string
	// NodeName is the Node object's name, for the status; empty when unknown.
	NodeName string
	// Reporter tells Kubernetes; nil for nobody.
	Reporter Reporter
	// Partitioner makes and destroys partitions, as far as the profile allows that;
	// nil where nothing can. Journal then keeps what has begun, and Refresh returns
	// when the inventory shows what has been made.
	Partitioner Partitioner
	Journal     Journal
	Refresh     func(ctx context.Context) error
}

// Run plans and serves until ctx ends, and returns when everything it started
// has. An error means that it could not go on, not that ctx ended.
func Run(ctx context.Context, options Options) error {
	return newAgent(options).run(ctx)
}

func newAgent(options Options) *agent {
	a := &agent{
		Options: options, changed: make(chan struct{}, 1), asked: make(chan chan struct{}), decided: make(chan struct{}, 1), decidedLast: make(chan struct{}),
		repartitionWake: make(chan struct{}, 1), registering: make(chan struct{}),
	}
	a.boards = a.newRepartition()
	a.state.Store(&state{})
	a.observed.Store(newObservation())
	a.progress.Store(&progress{state: sharing.ProfilePending, since: time.Now()})
	return a
}

func (a *agent) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	// HTTP answers until the kubelet is not served any more: a probe must not end
	// a program that drains.
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
	servers, err := a.listenAll(ctx)
	if err != nil {
		return err
	}
	for _, server := range servers {
		start(func(context.Context) error { return server(answering) })
	}
	start(func(ctx context.Context) error { return a.watchDriver(ctx, a.Node.Watch) })
	if a.Host != nil {
		start(func(ctx context.Context) error { return a.watchDriver(ctx, a.Host.Watch) })
	}
	start(func(ctx context.Context) error { return a.Policy.Watch(ctx, a.look) })
	start(a.plan)
	start(func(context.Context) error { return a.tell(answering) })
	if a.Reporter != nil {
		start(func(context.Context) error { return a.Reporter.Run(answering) })
	}
	if a.Holders != nil || a.Meter != nil {
		start(a.sample)
	}
	if a.boards != nil {
		start(a.repartition)
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

// watchDriver follows what the driver or the host has. A driver call that hangs
// at the end is left behind: it cannot be cancelled, and the program ends all the
// same.
func (a *agent) watchDriver(ctx context.Context, watch func(ctx context.Context, changed func()) error) error {
	err := watch(ctx, a.look)
	if err != nil && ctx.Err() != nil {
		a.Logger.Warn("driver left behind", "error", err)
		return nil
	}
	return err
}

type agent struct {
	Options
	changed chan struct{}
	// asked has wishes to be told when the loop has looked.
	asked chan chan struct{}
	// decided wakes tell; decidedLast is closed when the loop has ended.
	decided, decidedLast chan struct{}
	// boards cuts the boards; nil where nothing can. repartitionWake is for it,
	// and registering is closed when it may withdraw devices.
	boards          *repartitioner
	repartitionWake chan struct{}
	registering     chan struct{}
	// standby says that another program serves the node, serving that it is
	// claimed, draining that it is being given up.
	standby, serving, draining atomic.Bool
	state                      atomic.Pointer[state]
	progress                   atomic.Pointer[progress]
	allocations                atomic.Pointer[[]sharing.Allocation]
	observed                   atomic.Pointer[observation]
}

// state is what the loop last decided. It is immutable.
type state struct {
	// profile is the last good one; planned says that there is one and that the
	// GPUs have been read.
	profile *configs.Selected
	// restored says that profile is that of the last run.
	restored bool
	// wanted is what Policy last returned; with rejected it only has a name and a
	// source.
	wanted  configs.Selected
	plan    sharing.Plan
	planned bool
	gpus    []sharing.GPU
	// host is what was last found ready for grants.
	host plugin.Host
	// rejected says why the wanted profile is not in force, unread why the GPUs
	// cannot be read; nil when all is well.
	rejected, unread error
}

// look asks the loop to read its inputs again. Bursts become one look.
func (a *agent) look() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

// lookNow returns when the loop has read its inputs after the call, or ctx ends.
func (a *agent) lookNow(ctx context.Context) {
	looked := make(chan struct{})
	select {
	case a.asked <- looked:
		<-looked
	case <-ctx.Done():
	}
}

// plan is the loop.
func (a *agent) plan(ctx context.Context) error {
	defer close(a.decidedLast)
	for {
		var looked chan struct{}
		select {
		case <-ctx.Done():
			return nil
		case <-a.Look:
		case <-a.changed:
		case looked = <-a.asked:
		}
		a.decide()
		if looked != nil {
			close(looked)
		}
	}
}

// decide reads both inputs, plans, and hands the plan on. A profile that cannot
// be used leaves the last good one in force, planned anew for the GPUs as they
// are; GPUs that cannot be read leave the plan as it is.
func (a *agent) decide() {
	last := a.state.Load()
	next := *last

	a.choose(last, &next)
	var gpus []sharing.GPU
	if gpus, next.unread = a.Node.Inventory(); next.unread == nil {
		next.gpus = gpus
	} else if last.planned && !sameError(last.unread, next.unread) {
		a.Logger.Warn("GPUs not read", "error", next.unread)
	}
	defer a.tellAgain()
	defer a.repartitionAgain()
	defer a.state.Store(&next)
	if next.profile == nil || (next.unread != nil && !last.planned) {
		return
	}

	next.plan = a.holdBack(sharing.NewPlan(next.gpus, next.profile.Profile))
	a.prepare(last, &next)
	if last.planned && reflect.DeepEqual(last.plan, next.plan) {
		next.plan = last.plan
		return
	}
	next.planned = true
	a.report(last.plan, next.plan)
	a.Plugin.Apply(next.plan)
}

func sameError(a, b error) bool {
	return a != nil && b != nil && a.Error() == b.Error()
}

// report logs what a plan changes.
func (a *agent) report(last, next sharing.Plan) {
	for _, r := range next.Resources {
		a.Logger.Info("resource planned", "resource", r.Name, "strategy", r.Strategy(), "units", len(r.Units), "devices", len(r.Devices), "healthy", r.Healthy())
	}
	known := map[string]bool{}
	for _, warning := range last.Warnings {
		known[warning] = true
	}
	for _, warning := range next.Warnings {
		if !known[warning] {
			a.Logger.Warn("plan", "warning", warning)
		}
	}
}
