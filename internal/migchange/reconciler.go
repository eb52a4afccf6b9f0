package migchange

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Partitioner lists and changes how GPUs are partitioned. The Reconciler calls it from
// several goroutines, Apply for one GPU from one at a time.
type Partitioner interface {
	// State lists how the GPU of that UUID is partitioned, exactly; what cannot be
	// listed exactly is an error.
	State(ctx context.Context, gpu string) (sharing.MIGState, error)
	// Apply makes one step. What became of it when it fails is not known.
	Apply(ctx context.Context, gpu string, step mig.Step) error
}

// Devices keeps units from being granted; see plugin.Manager.
type Devices interface {
	Withdrawn(units ...string) bool
	// SetRefusals refuses these units, and no others, for a MIG change.
	SetRefusals(units map[string]string)
	RefreshHolders(units ...string)
}

// Options are what a Reconciler works with.
type Options struct {
	Partitioner Partitioner
	// LetGo has this program let go of a GPU, for a change of its MIG mode, until resume
	// is called; nil where nothing else in it uses the GPUs. What it waits for can then be
	// over when it is the GPU's turn.
	LetGo func(ctx context.Context, gpu string) (resume func(), err error)
	// Store keeps the journal; nil for GPUs that do not outlive the program.
	Store Store
	// Devices is nil where no kubelet is served.
	Devices Devices
	// Holders says who holds which devices; nil where that cannot be known.
	Holders func(ctx context.Context) ([]sharing.Allocation, error)
	// ByDRA are the units that may be given to a claim at any moment; nil for none. They stay as
	// they are.
	ByDRA func() []string
	// Clients are labels by which other programs that have GPUs open can be paused; nil for none. With
	// PauseClients that is done for a change that fails because of one. Without, only what an earlier run
	// has paused is taken back.
	Clients      ClientLabels
	PauseClients bool
	// Inputs are the node's GPUs and what is wanted of them; an error says that they
	// are not known.
	Inputs func() (gpus []sharing.GPU, wanted sharing.MIGConfig, err error)
	// Resources are those that these GPUs would be offered as; nil where no kubelet is
	// served.
	Resources func(gpus []sharing.GPU) []sharing.Resource
	// Plan plans with what Reservations says now, and returns when the new plan is out;
	// nil for none.
	Plan func(ctx context.Context)
	// Changed is called when Status returns something else; nil for none.
	Changed func()
	// Refresh has the GPUs read again for Inputs; nil where that is not needed.
	Refresh func(ctx context.Context) error
	Logger  *slog.Logger

	now func() time.Time
}

// Reconciler brings the GPUs to their wanted layout. Reservations, Status, Results, Wake
// and WakeIfWaiting may be called from any goroutine, the rest from one.
//
// That goroutine looks at the GPUs and decides; each change that has begun is made in
// a goroutine of its own, which has the GPU's managedGPU to itself until it ends.
type Reconciler struct {
	Options
	wake     chan struct{}
	cuts     chan cut
	gpus     map[string]*managedGPU
	changes  *changes
	holders  *holderReader
	offers   *offers
	journal  *keeper
	progress *progress
	clients  *clients
	executor *executor

	wanted sharing.MIGConfig
}

// managedGPU is what is known of one GPU, and done about it. It needs no lock: while a change is
// under way, that has it, and else the goroutine that looks at the GPUs.
type managedGPU struct {
	status nodereport.GPULayout
	// stale says that the GPU has other partitions than before, those in left, and
	// that the inventory may not show them yet.
	stale bool
	left  map[string]bool
	// inTheWay are the partitions in use that the layout has no place for.
	inTheWay []mig.Blocked
	// logged is the last state that was logged, other than pending.
	logged stateReason
	// last is the last look, nil when nothing of it counts any more. While a GPU waits, it
	// stands until lookAt as long as so many of its units are withdrawn.
	last      *look
	lookAt    time.Time
	withdrawn int
	// tried is what the failures below are about.
	tried sharing.MIGConfig
	// notPermitted says that the driver refused this process. To try again would only
	// withdraw devices again: another profile or start has to come.
	notPermitted bool
	// resetRequired says that the last failure was that the GPU has to be reset. It is
	// looked at all the same: somebody may have done that.
	resetRequired bool
	// pausedInVain says which other programs it did not help to pause, and for how long they were. That is
	// not done again for the same layout. It is empty when it was not tried, or helped.
	pausedInVain string
	// failures in a row put off the next try until retryAt.
	failures int
	retryAt  time.Time
}

// isShownBy says that the inventory has the GPU as it was left.
func (g *managedGPU) isShownBy(gpu sharing.GPU) bool {
	shown := map[string]bool{}
	for _, p := range gpu.Partitions {
		shown[p.UUID] = true
	}
	return gpu.MIG == g.status.MIG && maps.Equal(shown, g.left)
}

// New makes a reconciler that has done nothing yet.
func New(o Options) *Reconciler {
	if o.Devices == nil {
		o.Devices = noKubelet{}
	}
	if o.Plan == nil {
		o.Plan = func(context.Context) {}
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	if o.Refresh == nil {
		o.Refresh = func(context.Context) error { return nil }
	}
	o.Logger = o.Logger.With("component", "mig")
	o.now = time.Now
	r := &Reconciler{
		Options: o,
		wake:    make(chan struct{}, 1),
		cuts:    make(chan cut),
		gpus:    map[string]*managedGPU{},
	}
	r.changes = &changes{wake: r.Wake, underWay: map[string]bool{}}
	r.holders = &holderReader{Options: &r.Options}
	r.offers = newOffers(&r.Options)
	r.journal = &keeper{Options: &r.Options, offers: r.offers}
	r.progress = newProgress(&r.Options)
	r.clients = &clients{
		Options: &r.Options,
		journal: r.journal,
		wake:    make(chan struct{}, 1),
	}
	r.executor = &executor{
		Options:  &r.Options,
		wake:     r.Wake,
		holders:  r.holders,
		offers:   r.offers,
		journal:  r.journal,
		progress: r.progress,
		clients:  r.clients,
		driver:   make(chan struct{}, 1),
	}
	return r
}

// noKubelet stands in for Devices where no kubelet is served.
type noKubelet struct{}

func (noKubelet) Withdrawn(...string) bool      { return true }
func (noKubelet) SetRefusals(map[string]string) {}
func (noKubelet) RefreshHolders(...string)      {}

// Once brings the GPUs to their layouts as far as that goes now, where no program
// serves the kubelet: nothing is withdrawn, and what pods and processes use is left
// alone. Without Holders no pod holds anything. It returns what became of the GPUs,
// by index. The error is that of Inputs.
func Once(ctx context.Context, o Options) ([]nodereport.GPULayout, error) {
	if o.Holders == nil {
		o.Holders = func(context.Context) ([]sharing.Allocation, error) { return nil, nil }
	}
	r := New(o)
	err := r.passes(ctx, false)
	return r.Status(), err
}

// Wake has Run look at the GPUs again. It does not wait.
func (r *Reconciler) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// WakeIfWaiting is Wake for when a list or a holder has changed, which is nothing to a
// GPU that has its layout.
func (r *Reconciler) WakeIfWaiting() {
	if r.progress.waiting.Load() {
		r.Wake()
	}
}

// Prepare brings the GPUs as far as it can before anything is registered: what a
// crash left is finished or undone, and what a reboot or a reset took away is made
// again, so that the pods which had it are admitted again. It returns when that is
// done, or could not be, or ctx ends.
func (r *Reconciler) Prepare(ctx context.Context) {
	for {
		if _, _, err := r.Inputs(); err == nil {
			break
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
			return
		}
	}
	_ = r.passes(ctx, true)
}

// passes goes over the GPUs until nothing can be done at once any more: a pass may
// finish one change of a GPU, and the next one begin another.
func (r *Reconciler) passes(ctx context.Context, starting bool) error {
	for n := 0; ; n++ {
		gpus, wanted, err := r.Inputs()
		if err != nil {
			return err
		}
		again := r.passAndWait(ctx, gpus, wanted, starting)
		if again == 0 || again > soon || n >= maxPasses*len(gpus) {
			return nil
		}
	}
}

// maxPasses bounds the passes for a GPU where they do not go on for ever.
const maxPasses = 8

// passAndWait is a pass with the end of the changes that it begins.
func (r *Reconciler) passAndWait(
	ctx context.Context,
	gpus []sharing.GPU,
	wanted sharing.MIGConfig,
	starting bool,
) time.Duration {
	before := r.changes.begun
	again := r.pass(ctx, gpus, wanted, starting)
	r.changes.running.Wait()
	if r.changes.begun > before {
		return soon
	}
	return again
}

// Run goes over the GPUs until ctx ends, whenever it is woken or has something to
// wait for.
func (r *Reconciler) Run(ctx context.Context) {
	var resuming sync.WaitGroup
	resuming.Go(func() { r.clients.run(ctx) })
	defer func() {
		r.changes.running.Wait()
		resuming.Wait()
		r.clients.leave(ctx)
	}()
	var waiting []cut
	defer func() { endCuts(waiting, ctx.Err()) }()
	for ctx.Err() == nil {
		var later <-chan time.Time
		if gpus, wanted, err := r.Inputs(); err == nil {
			waiting = r.beginCuts(ctx, gpus, waiting)
			if again := r.pass(ctx, gpus, wanted, false); again > 0 {
				later = time.After(again)
			}
		}
		select {
		case <-r.wake:
		case c := <-r.cuts:
			waiting = append(waiting, c)
		case <-later:
		case <-ctx.Done():
		}
	}
}

// look is what was found out about a GPU. It is not modified.
type look struct {
	gpu sharing.GPU
	*managedGPU
	Decision
	starting bool
	// withheld are the units that are not to be offered any more.
	withheld []string
}

// pass looks at all GPUs, has everything withdrawn at once that has to go, and begins
// the changes that nothing speaks against any more. It says when to do so again; 0 for
// when something changes. Before the node is registered, starting, nothing goes that
// somebody may have been told of.
func (r *Reconciler) pass(
	ctx context.Context,
	gpus []sharing.GPU,
	wanted sharing.MIGConfig,
	starting bool,
) (again time.Duration) {
	r.journal.load()
	if !reflect.DeepEqual(r.wanted, wanted) {
		r.wanted = wanted
		r.executor.refused.Store(false)
	}
	r.holders.begin()
	r.forgetMissing(gpus)
	holders := sync.OnceValue(func() Holders { return r.holders.read(ctx) })
	var looks []*look
	fresh := false
	for _, gpu := range gpus {
		g := r.managed(gpu)
		if g == nil {
			continue // It is being changed.
		}
		if ctx.Err() != nil {
			break
		}
		before := g.last
		l, wait := r.look(ctx, gpu, g, holders, starting)
		if l != nil {
			looks = append(looks, l)
			fresh = fresh || l != before
		}
		again = sooner(again, wait)
	}
	r.oneFirst(looks)
	r.keepCapacity(gpus, looks)
	var doubtful []string
	limited := false
	for _, l := range looks {
		r.progress.report(l.managedGPU, l.State, l.Reason)
		doubtful = append(doubtful, l.Doubtful...)
		limited = r.offers.limit(l.managedGPU, l.Offer) || limited
	}
	if limited {
		r.Plan(ctx)
	}
	again = sooner(again, r.begin(ctx, looks, starting))
	r.progress.publish()
	if fresh && len(doubtful) > 0 { // To be asked has the kubelet read, which wakes the next pass.
		r.Devices.RefreshHolders(slices.Compact(slices.Sorted(slices.Values(doubtful)))...)
	}
	return again
}

// sooner is the shorter of two waits, of which 0 is none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// look finds out how far a GPU is and decides about it. It returns nil where there is
// nothing to decide, or that was done, and in any case when to look again.
func (r *Reconciler) look(
	ctx context.Context,
	gpu sharing.GPU,
	g *managedGPU,
	holders func() Holders,
	starting bool,
) (*look, time.Duration) {
	if !reflect.DeepEqual(g.tried, r.wanted) {
		g.tried = r.wanted
		g.notPermitted = false
		g.resetRequired = false
		g.failures = 0
		g.retryAt = time.Time{}
		g.last = nil
		g.pausedInVain = ""
	}
	g.stale = g.stale && !g.isShownBy(gpu)
	record, begun := r.journal.current().record(gpu.UUID)
	if begun && r.wanted.LeftTo != "" { // Whoever makes the layouts now has decided otherwise, or will.
		if err := r.journal.save(func(j Journal) Journal { return j.end(gpu.UUID) }); err != nil {
			return nil, r.executor.fail(ctx, g, err, longestRetry)
		}
		begun = false
	}
	now := r.now()
	if wait := g.retryAt.Sub(now); g.notPermitted || wait > 0 && !g.resetRequired {
		if !begun {
			r.offers.limitAndPlan(ctx, g, nil)
		}
		return nil, max(wait, 0)
	}
	if begun {
		if r.changes.room() > 0 {
			r.changes.start(g, func() { r.executor.resume(ctx, g, record) })
		}
		return nil, 0 // The end of another one wakes.
	}
	if l := g.last; l != nil && !r.executor.refused.Load() && r.progress.waiting.Load() &&
		l.State != nodereport.LayoutFailed && l.starting == starting && now.Before(g.lookAt) &&
		l.countWithdrawn(r.Devices) == g.withdrawn && reflect.DeepEqual(l.gpu, gpu) {
		if l.Again == 0 {
			return l, 0
		}
		return l, g.lookAt.Sub(now)
	}
	g.last = nil
	d, err := r.decide(ctx, g, holders, starting)
	if err != nil {
		return nil, r.executor.fail(ctx, g, err, longestRetry)
	}
	switch d.State {
	case "":
		r.journal.saveEnabled(gpu.UUID, false)
	case nodereport.LayoutApplied:
		r.journal.saveEnabled(gpu.UUID, g.status.MIG)
		g.failures = 0
	}
	if len(d.Steps) > 0 && d.Record == nil {
		r.progress.report(g, d.State, d.Reason)
		for _, step := range d.Steps {
			if err := r.executor.makeStep(ctx, gpu.UUID, step); err != nil {
				return nil, r.executor.fail(ctx, g, err, longestRetry)
			}
		}
		return nil, d.Again
	}
	l := &look{
		gpu:        gpu,
		managedGPU: g,
		Decision:   d,
		starting:   starting,
	}
	if d.Offer != nil {
		units := partitionsOf(g.status.Instances)
		units[gpu.UUID] = true
		for unit := range units {
			if !d.Offer[unit] {
				l.withheld = append(l.withheld, unit)
			}
		}
	}
	g.last = l
	g.lookAt = now.Add(cmp.Or(d.Again, recheckInterval))
	g.withdrawn = l.countWithdrawn(r.Devices)
	return l, d.Again
}

// countWithdrawn is how many of the units are withdrawn that are not to be offered any
// more. A unit that a pod held becomes so by itself when the pod has ended, and then
// there is something new to decide.
func (l *look) countWithdrawn(devices Devices) (count int) {
	for _, unit := range l.withheld {
		if devices.Withdrawn(unit) {
			count++
		}
	}
	return count
}

// begin begins the changes for which everything is withdrawn, as many as may be made
// at a time. It has Allocate refuse what they take away, and then decides once more:
// what that finds to be free can be granted to nobody any more.
func (r *Reconciler) begin(ctx context.Context, looks []*look, starting bool) (again time.Duration) {
	withdrawn := func(l *look) bool { return starting || r.Devices.Withdrawn(l.Withdraw...) }
	room := r.changes.room()
	looks = slices.DeleteFunc(slices.Clone(looks), func(l *look) bool {
		if len(l.Steps) == 0 || room == 0 || !withdrawn(l) {
			return true
		}
		room--
		return false
	})
	r.offers.refuse(looks)
	holders := sync.OnceValue(func() Holders { return r.holders.read(ctx) })
	for _, l := range looks {
		l.last = nil
		d, err := r.decide(ctx, l.managedGPU, holders, starting)
		switch {
		case err != nil:
			again = sooner(again, r.executor.fail(ctx, l.managedGPU, err, longestRetry))
		case !reflect.DeepEqual(l.Decision, d) || !withdrawn(l):
			r.offers.allow(l.status.GPU)
			again = sooner(again, retryInterval)
		default:
			r.changes.start(l.managedGPU, func() { r.executor.change(ctx, l.managedGPU, d, holders()) })
		}
	}
	return again
}

// forgetMissing drops what is known of GPUs that are not on the node any more. What
// the journal has of them stays there.
func (r *Reconciler) forgetMissing(gpus []sharing.GPU) {
	for uuid := range r.gpus {
		there := slices.ContainsFunc(gpus, func(gpu sharing.GPU) bool { return gpu.UUID == uuid })
		if !there && !r.changes.has(uuid) {
			delete(r.gpus, uuid)
			r.offers.forget(uuid)
			r.progress.forget(uuid)
		}
	}
}

// managed is what is known of that GPU; nil while it is being changed.
func (r *Reconciler) managed(gpu sharing.GPU) *managedGPU {
	if r.changes.has(gpu.UUID) {
		return nil
	}
	g := r.gpus[gpu.UUID]
	if g == nil {
		g = &managedGPU{}
		r.gpus[gpu.UUID] = g
	}
	g.status.GPU = gpu.UUID
	g.status.Index = gpu.Index
	g.status.Wanted = r.wanted.Name
	r.progress.set(g.status)
	return g
}

// decide looks at the GPU and decides about it. A GPU of which nothing can be wanted
// is not looked at.
func (r *Reconciler) decide(
	ctx context.Context,
	g *managedGPU,
	holders func() Holders,
	starting bool,
) (Decision, error) {
	if !r.wanted.Manage || r.wanted.Name == "" {
		return Decision{}, nil
	}
	// Holders come first: otherwise the processes of a pod that ends in between would seem to
	// be nobody's.
	h := holders()
	state, err := r.Partitioner.State(ctx, g.status.GPU)
	if err != nil {
		return Decision{}, err
	}
	state.GPU.Index, state.NotPermitted = g.status.Index, state.NotPermitted || r.executor.refused.Load()
	r.progress.see(g, h.markHeld(g.status.GPU, state))
	return Decide(Situation{
		GPU:           g.status.GPU,
		State:         state,
		Wanted:        r.wanted,
		Holders:       h,
		KeptInMIG:     slices.Contains(r.journal.current().Enabled, g.status.GPU),
		Starting:      starting,
		ResetRequired: g.resetRequired && (state.Pending != state.Enabled || r.now().Before(g.retryAt)),
		AwaitKubelet:  r.holders.awaitsKubelet(),
	}), nil
}
