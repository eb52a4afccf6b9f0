package plugin

import (
	"cmp"
	"context"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Options are what a Manager needs.
type Options struct {
	// Dir is the kubelet's device-plugins directory. It need not exist yet.
	Dir string
	// Kubelet says what is held and applied; nil when nothing can.
	Kubelet Kubelet
	// Store keeps the lists over restarts; nil for none.
	Store Store
	// Announcer tells the scheduler of lists before the kubelet does; nil for nobody.
	Announcer Announcer
	Timing    Timing
	Logger    *slog.Logger
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Store keeps the lists, so that a restarted Virgate first offers every device that a
// pod may hold. Manager calls it from one goroutine; no allocation waits for it.
type Store interface {
	// Load returns the lists that were saved last, each Entry with its Mode; none when there are none.
	Load() (Lists, error)
	// Save returns when the lists are kept for good. After an error it is called
	// again, at the latest in 10 s.
	Save(lists Lists) error
}

// Manager serves the last plan to the kubelet, and brings the lists to what it wants.
type Manager struct {
	options Options
	// planned wakes Run when there is a new plan or host.
	planned signal
	plan    atomic.Pointer[sharing.Plan]
	host    atomic.Pointer[Host]
	status  atomic.Pointer[managerStatus]
	readers subscribers
	// listed and grants wake Run when a stream was sent a list, and Allocate has granted.
	listed, grants signal
	callMetrics    CallMetrics
	refusedUnits   *refusedUnits
	// takingOver is the announcement of TakeOver.
	takingOver sync.WaitGroup
	// refreshing are the units of RefreshHolders.
	refreshing atomic.Pointer[[]string]
}

// managerStatus is what Run serves now. It is immutable but for superseded, which is
// closed when another takes its place.
type managerStatus struct {
	servers []*server // by name
	plan    *sharing.Plan
	// kubeletSeen says that the last reading of the kubelet succeeded.
	kubeletSeen bool
	holders     []sharing.Allocation
	// switched says that what pods hold was read for the plan, and Lists.switched.
	switched   bool
	superseded chan struct{}
}

// NewManager returns a manager without a plan.
func NewManager(options Options) *Manager {
	options.Timing = options.Timing.withDefaults()
	if options.Now == nil {
		options.Now = time.Now
	}
	m := &Manager{
		options:      options,
		planned:      make(signal, 1),
		listed:       make(signal, 1),
		grants:       make(signal, 1),
		refusedUnits: newRefusedUnits(),
	}
	m.status.Store(&managerStatus{superseded: make(chan struct{})})
	m.host.Store(&Host{})
	return m
}

// SetHost says what the node has ready for containers; without it, only the names of
// devices can be granted. Call it before Apply of a plan that needs it, because each
// list is served with the last host. It does not wait.
func (m *Manager) SetHost(host Host) {
	m.host.Store(&host)
	m.planned.notify()
}

// Apply makes plan the wanted one. It does not wait; of several plans the last
// wins. The plan must not be changed afterwards.
func (m *Manager) Apply(plan sharing.Plan) {
	if last := m.plan.Load(); last != nil && reflect.DeepEqual(*last, plan) {
		return // Another one would have what pods hold read again before units change.
	}
	m.plan.Store(&plan)
	m.planned.notify()
}

// AwaitStopped returns nil when no resource is served any more, which happens after an
// empty plan was applied, and an error when ctx ends first.
func (m *Manager) AwaitStopped(ctx context.Context) error {
	for {
		stopped := m.status.Load()
		if len(stopped.servers) == 0 && m.plan.Load() == stopped.plan {
			return nil
		}
		select {
		case <-stopped.superseded:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Run serves until ctx ends, and returns when every server has stopped. It does not
// take back what the kubelet was told, so that a successor can go on from there. The last thing
// it does before its servers stop is to announce that; see leave.
func (m *Manager) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	var children, servers sync.WaitGroup
	r := reconciler{
		Manager: m,
		lists:   Lists{},
		servers: map[string]*running{},
		start: func(s *server) *running {
			ctx, stop := context.WithCancel(serving)
			run := &running{
				server: s,
				stop:   stop,
				done:   make(chan struct{}),
			}
			servers.Go(func() {
				defer close(run.done)
				s.run(ctx)
			})
			return run
		},
	}
	defer servers.Wait()
	defer stopServing()
	defer r.leave()
	defer children.Wait() // The announcements have ended before the last one.
	defer cancel()

	requests := make(chan reading)
	snapshots := make(chan KubeletSnapshot)
	announce, announced := make(chan map[string]notice), make(chan announcement)
	if m.options.Announcer != nil {
		children.Go(func() { m.announceLoop(ctx, announce, announced) })
	}
	if m.options.Kubelet != nil {
		children.Go(func() { m.watchKubelet(ctx, requests, snapshots) })
	}

	r.restore()
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	// The first lists wait until it is known what pods hold already.
	looked := m.options.Kubelet == nil
	var due, asked reading // What is to be read, and what is being read; zero for nothing.
	for {
		var ask chan<- reading
		if due != (reading{}) && m.options.Kubelet != nil {
			ask = requests
		}
		var tell chan<- map[string]notice
		if len(r.toAnnounce) > 0 {
			tell = announce
		}
		granted := false
		select {
		case <-ctx.Done():
			return nil
		case ask <- due:
			due, asked = reading{}, due
			continue
		case tell <- r.toAnnounce:
			r.toAnnounce = nil
			continue
		case made := <-announced:
			r.announced(made)
		case <-m.planned:
			due = reading{applied: true, held: true}
		case r.kubelet = <-snapshots:
			looked = true
			r.schedule.read(asked, m.options.Timing.pollInterval())
			asked = reading{}
		case <-m.listed:
		case <-m.grants:
			if r.unseenGrants {
				continue
			}
			granted = true
		case <-timer.C:
			due = due.or(r.schedule.due)
			if due != (reading{}) {
				r.schedule.read(due, m.options.Timing.pollInterval())
			}
			if m.options.Kubelet != nil && asked == (reading{}) {
				if wait, waits := r.schedule.awaitReading(); waits {
					timer.Reset(wait)
					continue
				}
			}
		}
		plan := m.plan.Load()
		if plan == nil || !looked {
			continue
		}
		if granted {
			r.unseenGrants = true // No list changes by it: its holder is looked for in a while.
		} else {
			r.step(plan)
		}
		timer.Stop()
		if wait, any := r.schedule.next(&r); any {
			timer.Reset(wait)
		}
	}
}

// Timing has the durations of the protocol. A zero field means its default.
type Timing struct {
	// RemovalDelay is how long a surplus device stays in the list after the kubelet has
	// applied that it is Unhealthy; default 30 s. It is longer than any admission that
	// chose the device before that.
	RemovalDelay time.Duration
	// RetireAfter is how long a surplus device that a pod holds stays Healthy, where
	// the plan does not say so; default 10 min.
	RetireAfter time.Duration
	// Settle is for a unit that changes its sharing mode: it is the time from when the
	// kubelet has applied that a device is Unhealthy until Allocate refuses the device;
	// default 50 ms. An admission that chose the device before that can still finish.
	Settle time.Duration
	// StopAfter is how long a dropped resource is served with an empty list before its
	// server stops; default 30 s, so that the kubelet reports the 0 at least twice.
	StopAfter time.Duration
	// RegisterTimeout is how long the kubelet may take to answer a registration; default
	// 15 s, above the 10 s in which it dials back.
	RegisterTimeout time.Duration
	// StreamTimeout is how long after a registration the kubelet may take to open
	// its stream; 5 s when zero.
	StreamTimeout time.Duration
	// VerifyAfter is how long after a stream has opened the kubelet must show
	// the resource; default 5 s.
	VerifyAfter time.Duration
	// ListInterval is the shortest time between two lists of a resource; default 100 ms,
	// because each list costs the kubelet an fsync.
	ListInterval time.Duration
}

func (t Timing) withDefaults() Timing {
	t.RemovalDelay = cmp.Or(t.RemovalDelay, 30*time.Second)
	t.RetireAfter = cmp.Or(t.RetireAfter, 10*time.Minute)
	t.Settle = cmp.Or(t.Settle, 50*time.Millisecond)
	t.StopAfter = cmp.Or(t.StopAfter, 30*time.Second)
	t.RegisterTimeout = cmp.Or(t.RegisterTimeout, 15*time.Second)
	t.StreamTimeout = cmp.Or(t.StreamTimeout, 5*time.Second)
	t.VerifyAfter = cmp.Or(t.VerifyAfter, 5*time.Second)
	t.ListInterval = cmp.Or(t.ListInterval, 100*time.Millisecond)
	return t
}

// pollInterval is how often the kubelet is asked while something waits for it.
func (t Timing) pollInterval() time.Duration {
	return min(max(t.RemovalDelay/4, 20*time.Millisecond), 500*time.Millisecond)
}

// RefreshHolders says that somebody waits for the units' holders to go. The kubelet may
// name holders that are gone until it gets a list. So while one of the units has such
// a holder, its list is sent again, once in each Timing.RemovalDelay. The next call
// replaces the units.
func (m *Manager) RefreshHolders(units ...string) {
	m.refreshing.Store(&units)
	m.planned.notify()
}

func (m *Manager) awaitsHolders(unit string) bool {
	awaited := m.refreshing.Load()
	return awaited != nil && slices.Contains(*awaited, unit)
}

// Withdrawn says that nobody can use the units any more: the last plan is served, and each
// of their devices that is still listed was first refused by Allocate and then found to be
// held by nobody. Changed receives when the answer may be another.
func (m *Manager) Withdrawn(units ...string) bool {
	serving := m.status.Load()
	if m.plan.Load() != serving.plan {
		return false
	}
	lists := func(g *generation) bool {
		return slices.ContainsFunc(g.list.Entries, func(e Entry) bool {
			return !e.Vacated && slices.Contains(units, e.Unit)
		})
	}
	for _, s := range serving.servers {
		// One that waits first: it is the current one when it does not wait any more.
		if waiting := s.waiting.Load(); waiting != nil && lists(waiting.generation) || lists(s.current.Load()) {
			return false
		}
	}
	return true
}

// signal says that there is something to look at. A nil one is ignored; notify never blocks.
type signal chan struct{}

func (s signal) notify() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// subscribers are the channels that Subscribe has returned. A nil one is ignored.
type subscribers struct{ signals atomic.Pointer[[]signal] }

func (s *subscribers) add() signal {
	added := make(signal, 1)
	for {
		before := s.signals.Load()
		after := []signal{added}
		if before != nil {
			after = append(after, *before...)
		}
		if s.signals.CompareAndSwap(before, &after) {
			return added
		}
	}
}

func (s *subscribers) notify() {
	if s == nil {
		return
	}
	if signals := s.signals.Load(); signals != nil {
		for _, each := range *signals {
			each.notify()
		}
	}
}

// Status is how the last plan is served now.
type Status struct {
	// Served says that the lists are made for the last plan that was applied, though one may wait
	// for its announcement: it is not Applied then, and Listed has the one before it. A
	// resource of the plan that is not in Resources then has only units that are still
	// held in another sharing mode.
	Served bool
	// Switched says that the lists are as the last plan wants them, but for what pods hold. They may
	// still be on their way to the kubelet.
	Switched bool
	// KubeletSeen says that what the kubelet holds and has applied could be read
	// when it was last needed. While it cannot, no device is removed from a list.
	KubeletSeen bool
	// Holders are who held which devices when that could last be read. While a unit
	// waits for its holders, they are half a second old at most.
	Holders []sharing.Allocation
	// Resources are by name.
	Resources []ResourceStatus
}

// ResourceStatus is how one resource is served now.
type ResourceStatus struct {
	Name string
	// Streams is how many ListAndWatch streams the kubelet has open; 1 is right.
	Streams int
	// Devices is how many devices the list has, Healthy how many of them the
	// kubelet may hand out, Leaving how many are on their way out.
	Devices, Healthy, Leaving int
	// Dropped says that the plan does not have the resource any more.
	Dropped bool
	// Applied says that the kubelet has the list as it is now: it was sent, and a
	// reading after that showed its Healthy devices, and none that are Unhealthy.
	Applied bool
	// AnnounceState is whether the API server was told of the list, once it is Applied.
	AnnounceState AnnounceState
	// Listed are the devices of the list, those on their way out included.
	Listed []Entry
	// Units are those that are offered under the name, or held in a mode that they
	// are to leave. Replicas counts such devices; it is 1 as long as a pod was promised the whole.
	Units []sharing.Unit
	// Registrations, Lists and Granted count since the server started; SameUnit are the
	// grants of two devices of one unit to a container.
	Registrations, Lists, Granted, SameUnit uint64
	// Refused counts refused calls by reason; it has every reason.
	Refused map[RefusalReason]uint64
}

// Status returns how the last plan is served now.
func (m *Manager) Status() Status {
	plan, serving := m.plan.Load(), m.status.Load()
	status := make([]ResourceStatus, len(serving.servers))
	for i, s := range serving.servers {
		waits := s.waiting.Load() != nil // Before current, which it becomes.
		current := s.current.Load()
		list := current.list
		status[i] = ResourceStatus{
			Name:          s.name,
			Streams:       int(s.streams.Load()),
			Devices:       len(list.Entries),
			Dropped:       !list.Dropped.IsZero(),
			Applied:       s.applied.Load() == current.version && !waits,
			AnnounceState: s.announceState(),
			Registrations: s.counters.registrations.Load(),
			Lists:         s.counters.lists.Load(),
			Granted:       s.counters.granted.Load(),
			SameUnit:      s.counters.sameUnit.Load(),
			Listed:        list.Entries,
			Refused:       s.counters.refusals(),
		}
		whole := map[string]bool{}
		for _, e := range list.Entries {
			if e.Whole {
				whole[e.Unit] = true
			}
			if e.Healthy {
				status[i].Healthy++
			}
			if e.Phase != Offered {
				status[i].Leaving++
			}
			if e.Phase != Offered && (e.Phase != Closing || !e.Switching) {
				continue
			}
			last := len(status[i].Units) - 1 // A unit's devices stand together.
			if last < 0 || status[i].Units[last].ID != e.Unit {
				unit := current.units[e.Unit]
				unit.Replicas = 0
				status[i].Units, last = append(status[i].Units, unit), last+1
			}
			if unit := &status[i].Units[last]; !whole[unit.ID] || unit.Replicas == 0 {
				unit.Replicas++
			}
		}
	}
	return Status{
		Served:      plan == serving.plan,
		Switched:    serving.switched,
		KubeletSeen: serving.kubeletSeen,
		Holders:     serving.holders,
		Resources:   status,
	}
}

// Subscribe returns a channel that receives when Status may answer otherwise, once for any
// number of changes since the last receipt. Each reader needs a channel of its own, and reads
// Status only after it has subscribed. The channel lasts as long as the Manager.
func (m *Manager) Subscribe() <-chan struct{} { return m.readers.add() }

// CallMetrics measures how long the kubelet's calls take. Run's goroutine calls it.
type CallMetrics interface {
	// Start is called before a resource's server starts, Stop after it has stopped.
	Start(resource string) CallObservers
	Stop(resource string)
}

// CallObservers measure the calls of one resource: Allocate, by whether it was
// granted, and GetPreferredAllocation. They must not block.
type CallObservers struct{ Granted, Refused, Preferred Observer }

// Observer takes a duration in seconds; a prometheus.Histogram is one.
type Observer interface{ Observe(seconds float64) }

// SetCallMetrics has calls measured; without it they are not. Call it before Run.
func (m *Manager) SetCallMetrics(metrics CallMetrics) { m.callMetrics = metrics }

func observe(observer Observer, took time.Duration) {
	if observer != nil {
		observer.Observe(took.Seconds())
	}
}
