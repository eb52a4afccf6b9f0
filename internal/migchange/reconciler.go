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
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Partitioner lists and changes the partitioning of GPUs. The Reconciler calls it from several
// goroutines, but Apply for one GPU from one goroutine at a time.
type Partitioner interface {
	// State returns exactly how the GPU with that UUID is partitioned; if that cannot be listed
	// exactly, it fails.
	State(ctx context.Context, gpu string) (sharing.MIGState, error)
	// Apply makes one step. After an error, its result is unknown.
	Apply(ctx context.Context, gpu string, step mig.Step) error
}

// Devices prevents units from being granted; see plugin.Manager.
type Devices interface {
	Withdrawn(units ...string) bool
	// SetRefusals refuses exactly these units for a MIG change.
	SetRefusals(units map[string]string)
	RefreshHolders(units ...string)
}

// Options are a Reconciler's inputs and callbacks.
type Options struct {
	Partitioner Partitioner
	// CloseHandles makes the other parts of this program close a GPU, for a change of its MIG mode, until
	// resume is called; nil if none use the GPUs. It is called before the GPU's turn, so that what
	// it waits for can be over by then.
	CloseHandles func(ctx context.Context, gpu string) (resume func(), err error)
	// Store keeps the journal; nil if the GPUs do not outlive the program.
	Store Store
	// Devices is nil if no kubelet is served.
	Devices Devices
	// Holders returns the holders of devices; nil if unknown.
	Holders func(ctx context.Context) ([]sharing.Allocation, error)
	// ByDRA returns the units that may be given to a claim at any moment; nil for none. They stay
	// as they are.
	ByDRA func() []string
	// Clients are labels by which other programs that have GPUs open can be paused; nil for none.
	// With PauseClients, they are paused if a change fails because of them. Without it, only what
	// an earlier run has paused is resumed.
	Clients      ClientLabels
	PauseClients bool
	// Inputs returns the node's GPUs and the configuration wanted for them; it fails if they are
	// unknown.
	Inputs func() (gpus []sharing.GPU, wanted sharing.MIGConfig, err error)
	// Resources returns the resources that these GPUs would be offered as; nil if no kubelet is
	// served.
	Resources func(gpus []sharing.GPU) []sharing.Resource
	// Blocked returns why no change of the GPU can be made now, because of another GPU; empty if it
	// can. It is nil if it always can.
	Blocked func(gpu string) string
	// Plan makes a plan with the current Reservations, and returns when it is published; nil
	// disables it.
	Plan func(ctx context.Context)
	// Changed is called when Status has changed; nil disables it.
	Changed func()
	// Refresh reads the GPUs again for Inputs; nil if that is not needed.
	Refresh func(ctx context.Context) error
	Logger  *slog.Logger

	now func() time.Time
}

// Reconciler brings the GPUs to their wanted layout. Prepare and Run must be called from one
// goroutine; the other methods may be called from any.
//
// That goroutine checks the GPUs and decides. Each change is made in its own goroutine, which has
// the GPU's managedGPU to itself until it ends.
type Reconciler struct {
	Options
	wake     wake.Signal
	requests chan waitingRequest
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

// managedGPU is the state of one GPU. It needs no lock: while a change is under way, only the
// change uses it, otherwise only the goroutine that checks the GPUs.
type managedGPU struct {
	status nodereport.GPULayout
	// stale is true if the GPU now has the partitions in left, and the inventory may not show them
	// yet.
	stale bool
	left  map[string]bool
	// inTheWay are the partitions in use that the layout has no place for.
	inTheWay []mig.Blocked
	// logged is the last state that was logged, except pending.
	logged stateReason
	// last is the last look, nil if it is no longer valid. While a GPU waits, it is valid until
	// inspectAt if the number of its withdrawn units stays the same.
	last      *inspection
	inspectAt time.Time
	withdrawn int
	// tried is the configuration that the failures below belong to.
	tried sharing.MIGConfig
	// notPermitted is true if the driver refused this process. Another try would only withdraw
	// devices again, so it waits for another profile or a restart.
	notPermitted bool
	// resetRequired is true if the last failure was that the GPU must be reset. The GPU is still
	// checked, because it may have been reset.
	resetRequired bool
	// inVain is the last pause of programs, if it did not help; nil if none was tried, or if the
	// wanted layout is another one or a change has succeeded since.
	inVain *vainPause
	// failures is the number of failures in a row, which postpone the next try until retryAt.
	failures int
	retryAt  time.Time
}

// isShownBy reports whether the inventory shows the GPU as it was left.
func (g *managedGPU) isShownBy(gpu sharing.GPU) bool {
	shown := map[string]bool{}
	for _, p := range gpu.Partitions {
		shown[p.UUID] = true
	}
	return gpu.MIG == g.status.MIG && maps.Equal(shown, g.left)
}

// New returns a Reconciler that has not started.
func New(o Options) *Reconciler {
	if o.Devices == nil {
		o.Devices = noKubelet{}
	}
	if o.Plan == nil {
		o.Plan = func(context.Context) {}
	}
	if o.Blocked == nil {
		o.Blocked = func(string) string { return "" }
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
		Options:  o,
		wake:     wake.NewSignal(),
		requests: make(chan waitingRequest),
		gpus:     map[string]*managedGPU{},
	}
	r.changes = &changes{
		Options:  &r.Options,
		wake:     r.Wake,
		underWay: map[string]bool{},
	}
	r.holders = &holderReader{Options: &r.Options}
	r.offers = newOffers(&r.Options)
	r.journal = &keeper{Options: &r.Options, offers: r.offers}
	r.progress = newProgress(&r.Options)
	r.clients = &clients{
		Options: &r.Options,
		journal: r.journal,
		wake:    wake.NewSignal(),
	}
	r.executor = &executor{
		Options:  &r.Options,
		wake:     r.Wake,
		holders:  r.holders,
		offers:   r.offers,
		journal:  r.journal,
		progress: r.progress,
		clients:  r.clients,
		driver:   wake.NewSignal(),
	}
	return r
}

// noKubelet replaces Devices if no kubelet is served.
type noKubelet struct{}

func (noKubelet) Withdrawn(...string) bool      { return true }
func (noKubelet) SetRefusals(map[string]string) {}
func (noKubelet) RefreshHolders(...string)      {}

// Once brings the GPUs to their layouts as far as possible now, without serving a kubelet. It
// withdraws nothing, and leaves alone what pods and processes use. Without Holders it assumes that
// no pod holds anything. It returns the state of the GPUs, by index, and the error of Inputs.
func Once(ctx context.Context, o Options) ([]nodereport.GPULayout, error) {
	if o.Holders == nil {
		o.Holders = func(context.Context) ([]sharing.Allocation, error) { return nil, nil }
	}
	r := New(o)
	err := r.reconcileAll(ctx, false)
	return r.Status(), err
}

// Wake makes Run check the GPUs again. It does not wait.
func (r *Reconciler) Wake() { r.wake.Notify() }

// WakeIfWaiting calls Wake if a GPU waits for its layout. It is for changes of lists and holders,
// which do not matter otherwise.
func (r *Reconciler) WakeIfWaiting() {
	if r.progress.waiting.Load() {
		r.Wake()
	}
}

// Prepare brings the GPUs as far as possible before anything is registered. It finishes or undoes
// what a crash left, and makes again what a reboot or a reset removed, so that the pods that had it
// are admitted again. It returns when that is done or has failed, or when ctx ends.
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
	_ = r.reconcileAll(ctx, true)
}

// reconcileAll repeats reconcile while something can be done at once: a pass may finish one change of a GPU,
// and the next one begin another.
func (r *Reconciler) reconcileAll(ctx context.Context, starting bool) error {
	for n := 0; ; n++ {
		gpus, wanted, err := r.Inputs()
		if err != nil {
			return err
		}
		again := r.reconcileAndWait(ctx, gpus, wanted, starting)
		if again == 0 || again > soon || n >= maxPasses*len(gpus) {
			return nil
		}
	}
}

// maxPasses limits the passes per GPU, in case they never settle.
const maxPasses = 8

// reconcileAndWait calls reconcile, and waits for the changes that it begins.
func (r *Reconciler) reconcileAndWait(
	ctx context.Context,
	gpus []sharing.GPU,
	wanted sharing.MIGConfig,
	starting bool,
) time.Duration {
	before := r.changes.begun
	again := r.reconcile(ctx, gpus, wanted, starting)
	r.changes.running.Wait()
	if r.changes.begun > before {
		return soon
	}
	return again
}

// Run goes over the GPUs until ctx ends, whenever it is woken or a wait is over.
func (r *Reconciler) Run(ctx context.Context) {
	var resuming sync.WaitGroup
	resuming.Go(func() { r.clients.run(ctx) })
	defer func() {
		r.changes.running.Wait()
		resuming.Wait()
		r.clients.leave(ctx)
	}()
	var waiting []waitingRequest
	defer func() { endRequests(waiting, ctx.Err()) }()
	for ctx.Err() == nil {
		var later <-chan time.Time
		if gpus, wanted, err := r.Inputs(); err == nil {
			waiting = r.beginRequests(ctx, gpus, waiting)
			if again := r.reconcile(ctx, gpus, wanted, false); again > 0 {
				later = time.After(again)
			}
		}
		select {
		case <-r.wake:
		case c := <-r.requests:
			waiting = append(waiting, c)
		case <-later:
		case <-ctx.Done():
		}
	}
}

// inspection is the result of checking a GPU. It is not modified.
type inspection struct {
	gpu sharing.GPU
	*managedGPU
	Decision
	starting bool
	// withheld are the units that must not be offered any more.
	withheld []string
}

// reconcile checks all GPUs, withdraws everything that has to go in one plan, and begins the changes
// that nothing prevents any more. It returns when to do so again; 0 means when something changes.
// If starting is true, the node is not registered yet, and units that the kubelet may know are
// kept.
func (r *Reconciler) reconcile(
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
	var inspections []*inspection
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
		l, wait := r.inspect(ctx, gpu, g, holders, starting)
		if l != nil {
			inspections = append(inspections, l)
			fresh = fresh || l != before
		}
		again = sooner(again, wait)
	}
	r.oneFirst(inspections)
	r.keepCapacity(gpus, inspections)
	var doubtful []string
	limited := false
	for _, l := range inspections {
		r.progress.report(l.managedGPU, l.State, l.Reason)
		doubtful = append(doubtful, l.Doubtful...)
		limited = r.offers.limit(l.managedGPU, l.Offer) || limited
	}
	if limited {
		r.Plan(ctx)
	}
	again = sooner(again, r.begin(ctx, inspections, starting))
	r.progress.publish()
	if fresh && len(doubtful) > 0 { // The request makes the kubelet be read, which wakes the next pass.
		r.Devices.RefreshHolders(slices.Compact(slices.Sorted(slices.Values(doubtful)))...)
	}
	return again
}

// sooner returns the shorter of two waits, of which 0 means none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// inspect finds out how far a GPU is and decides about it. It returns nil if there is nothing to
// decide, or if it was done, and always when to check again.
func (r *Reconciler) inspect(
	ctx context.Context,
	gpu sharing.GPU,
	g *managedGPU,
	holders func() Holders,
	starting bool,
) (*inspection, time.Duration) {
	if !reflect.DeepEqual(g.tried, r.wanted) {
		g.tried = r.wanted
		g.notPermitted = false
		g.resetRequired = false
		g.failures = 0
		g.retryAt = time.Time{}
		g.last = nil
		g.inVain = nil
	}
	g.stale = g.stale && !g.isShownBy(gpu)
	record, begun := r.journal.current().record(gpu.UUID)
	if begun && r.wanted.LeftTo != "" { // Another program makes the layouts now, and decides anew.
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
	if why := r.Blocked(gpu.UUID); why != "" && (begun || r.wanted.Manage && r.wanted.Name != "") {
		g.last = nil
		if begun || g.status.State == "" || g.status.State == nodereport.LayoutPending {
			r.progress.report(g, nodereport.LayoutPending, "waits: "+why)
		}
		return nil, recheckInterval
	}
	if begun {
		if r.changes.room() > 0 && !r.changes.start(g, func() { r.executor.resume(ctx, g, record) }) {
			return nil, recheckInterval
		}
		return nil, 0 // The end of another change wakes Run.
	}
	if l := g.last; l != nil && !r.executor.refused.Load() && r.progress.waiting.Load() &&
		l.State != nodereport.LayoutFailed && l.starting == starting && now.Before(g.inspectAt) &&
		l.countWithdrawn(r.Devices) == g.withdrawn && reflect.DeepEqual(l.gpu, gpu) {
		if l.Again == 0 {
			return l, 0
		}
		return l, g.inspectAt.Sub(now)
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
	l := &inspection{
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
	g.inspectAt = now.Add(cmp.Or(d.Again, recheckInterval))
	g.withdrawn = l.countWithdrawn(r.Devices)
	return l, d.Again
}

// countWithdrawn returns how many of the units that must not be offered are withdrawn. A held unit
// becomes withdrawn when its pod has ended, and then there is something new to decide.
func (l *inspection) countWithdrawn(devices Devices) (count int) {
	for _, unit := range l.withheld {
		if devices.Withdrawn(unit) {
			count++
		}
	}
	return count
}

// begin begins the changes whose units are all withdrawn, as many as may be made at a time. It
// first makes Allocate refuse these units, and then decides again: what it now finds free can no
// longer be granted to a pod.
func (r *Reconciler) begin(ctx context.Context, inspections []*inspection, starting bool) (again time.Duration) {
	withdrawn := func(l *inspection) bool { return starting || r.Devices.Withdrawn(l.Withdraw...) }
	request := r.changes.room()
	inspections = slices.DeleteFunc(slices.Clone(inspections), func(l *inspection) bool {
		if len(l.Steps) == 0 || request == 0 || !withdrawn(l) {
			return true
		}
		request--
		return false
	})
	r.offers.refuse(inspections)
	holders := sync.OnceValue(func() Holders { return r.holders.read(ctx) })
	for _, l := range inspections {
		l.last = nil
		d, err := r.decide(ctx, l.managedGPU, holders, starting)
		switch {
		case err != nil:
			again = sooner(again, r.executor.fail(ctx, l.managedGPU, err, longestRetry))
		case !reflect.DeepEqual(l.Decision, d) || !withdrawn(l):
			r.offers.allow(l.status.GPU)
			again = sooner(again, retryInterval)
		case !r.changes.start(l.managedGPU, func() { r.executor.change(ctx, l.managedGPU, d, holders()) }):
			r.offers.allow(l.status.GPU)
			again = sooner(again, recheckInterval)
		}
	}
	return again
}

// forgetMissing drops the state of GPUs that have left the node. Their entries in the journal stay.
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

// managed returns the state of that GPU; nil while it is being changed.
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

// decide reads the GPU's state and decides about it. It does not read a GPU without a wanted
// layout.
func (r *Reconciler) decide(
	ctx context.Context,
	g *managedGPU,
	holders func() Holders,
	starting bool,
) (Decision, error) {
	if !r.wanted.Manage || r.wanted.Name == "" {
		return Decision{}, nil
	}
	// Read holders first: if a pod ended in between, its processes would seem to belong to no pod.
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
