package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"reflect"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

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
	// is none that can be used; the last good one then stays in force.
	Profile() (sharing.Profile, error)
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
	// Health is shown in metrics; nil for none.
	Health Health
	// OnProfile is called from the loop with each profile that comes into force,
	// before it is planned with; nil for nobody.
	OnProfile func(sharing.Profile)
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
	// Background are more things to run beside the loop, such as the control
	// socket of a simulated node. When one fails, Run ends.
	Background []func(ctx context.Context) error
	// Look makes the loop look again when it receives, as SIGHUP does; nil for
	// never.
	Look   <-chan struct{}
	Logger *slog.Logger
	// Version is shown in virgate_build_info.
	Version string
}

// Run plans and serves until ctx ends, and returns when everything it started
// has. An error means that it could not go on, not that ctx ended.
func Run(ctx context.Context, options Options) error {
	return newAgent(options).run(ctx)
}

func newAgent(options Options) *agent {
	a := &agent{Options: options, changed: make(chan struct{}, 1), asked: make(chan chan struct{})}
	a.state.Store(&state{})
	return a
}

func (a *agent) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	// HTTP answers until the kubelet is not served any more: a probe must not end
	// a program that drains.
	answering, stopAnswering := context.WithCancel(context.WithoutCancel(ctx))
	defer stopAnswering()
	start := func(part func(context.Context) error) { group.Go(func() error { return part(ctx) }) }
	if a.Listen != "" {
		listener, err := a.listen(ctx)
		if err != nil {
			return err
		}
		start(func(context.Context) error { return a.serve(answering, listener) })
	}
	start(func(ctx context.Context) error {
		defer stopAnswering()
		return a.serveKubelet(ctx)
	})
	start(a.watchNode)
	if a.Host != nil {
		start(a.watchHost)
	}
	start(func(ctx context.Context) error { return a.Policy.Watch(ctx, a.look) })
	start(a.plan)
	if a.Holders != nil {
		start(a.sample)
	}
	for _, background := range a.Background {
		start(background)
	}
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// watchNode follows the GPUs. A driver call that hangs at the end is left
// behind: it cannot be cancelled, and the program ends all the same.
func (a *agent) watchNode(ctx context.Context) error {
	err := a.Node.Watch(ctx, a.look)
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
	// standby says that another program serves the node, serving that it is
	// claimed.
	standby, serving atomic.Bool
	state            atomic.Pointer[state]
	allocations      atomic.Pointer[[]sharing.Allocation]
}

// state is what the loop last decided. It is immutable.
type state struct {
	// profile is the last good one; planned says that there is one and that the
	// GPUs have been read.
	profile *sharing.Profile
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
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.Look:
		case <-a.changed:
		case looked := <-a.asked:
			a.decide()
			close(looked)
			continue
		}
		a.decide()
	}
}

// decide reads both inputs, plans, and hands the plan on. A profile that cannot
// be used leaves the last good one in force, planned anew for the GPUs as they
// are; GPUs that cannot be read leave the plan as it is.
func (a *agent) decide() {
	last := a.state.Load()
	next := *last

	var profile sharing.Profile
	if profile, next.rejected = a.Policy.Profile(); next.rejected == nil {
		next.profile = &profile
		if a.OnProfile != nil && (last.profile == nil || !reflect.DeepEqual(*last.profile, profile)) {
			a.OnProfile(profile)
		}
	} else if !sameError(last.rejected, next.rejected) {
		a.Logger.Error("profile rejected, the last good one stays in force", "error", next.rejected)
	}
	var gpus []sharing.GPU
	if gpus, next.unread = a.Node.Inventory(); next.unread == nil {
		next.gpus = gpus
	} else if last.planned && !sameError(last.unread, next.unread) {
		a.Logger.Warn("GPUs not read", "error", next.unread)
	}
	defer a.state.Store(&next)
	if next.profile == nil || (next.unread != nil && !last.planned) {
		return
	}

	next.plan = sharing.NewPlan(next.gpus, *next.profile)
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

// sampleInterval is how often the loop reads who holds what, for the metrics.
const sampleInterval = 5 * time.Second

// sample keeps allocations current. What cannot be read is absent, not old.
func (a *agent) sample(ctx context.Context) error {
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	for {
		held, err := a.Holders.Held(ctx)
		if err != nil {
			a.allocations.Store(nil)
		} else {
			a.allocations.Store(&held)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
