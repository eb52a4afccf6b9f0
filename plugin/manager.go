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

	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// Options are what a Manager needs.
type Options struct {
	// Dir is the kubelet's device-plugins directory. It need not exist yet.
	Dir string
	// Kubelet reads which devices are held and applied; nil if that cannot be read.
	Kubelet Kubelet
	// Store keeps the lists across restarts; nil disables it.
	Store Store
	// Announcer makes lists known to the scheduler before the kubelet does; nil disables it.
	Announcer Announcer
	Timing    Timing
	Logger    *slog.Logger
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Store keeps the lists, so that a restarted Virgate first offers every device that a pod may hold.
// Manager never makes two calls at once, and no allocation waits for a call.
type Store interface {
	// Load returns the lists saved last, each Entry with its Mode; none if none were saved.
	Load() (Lists, error)
	// Save returns once the lists are stored durably. After an error it is called again within 10 s.
	Save(lists Lists) error
}

// Manager serves the latest plan to the kubelet, and brings the lists to what the plan wants.
type Manager struct {
	options Options
	// planned wakes Run after Apply, SetHost and RefreshHolders.
	planned wake.Signal
	plan    atomic.Pointer[sharing.Plan]
	host    atomic.Pointer[grant.Host]
	status  atomic.Pointer[managerStatus]
	readers subscribers
	// listed and grants wake Run after a list was sent on a stream, and after Allocate granted devices.
	listed, grants wake.Signal
	callMetrics    CallMetrics
	refusedUnits   *refusedUnits
	// takingOver waits for the announcement of TakeOver.
	takingOver sync.WaitGroup
	// refreshing has the units of the last call of RefreshHolders.
	refreshing atomic.Pointer[[]string]
}

// managerStatus is what Run serves now. It is immutable except for superseded, which is closed when
// another one replaces it.
type managerStatus struct {
	servers []*server // by name
	plan    *sharing.Plan
	// kubeletSeen is true if the latest reading of the kubelet succeeded.
	kubeletSeen bool
	holders     []sharing.Allocation
	// switched is true if the holders were read for this plan and Lists.switched is true.
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
		planned:      wake.NewSignal(),
		listed:       wake.NewSignal(),
		grants:       wake.NewSignal(),
		refusedUnits: newRefusedUnits(),
	}
	m.status.Store(&managerStatus{superseded: make(chan struct{})})
	m.host.Store(&grant.Host{})
	return m
}

// SetHost sets what the node provides for containers; without it, grants can only name devices.
// Call it before applying a plan that needs it, because each list is served with the latest host.
// It does not wait.
func (m *Manager) SetHost(host grant.Host) {
	m.host.Store(&host)
	m.planned.Notify()
}

// Apply makes plan the wanted one. It does not wait; if it is called several times, the last plan
// wins. The plan must not be changed afterwards.
func (m *Manager) Apply(plan sharing.Plan) {
	if last := m.plan.Load(); last != nil && reflect.DeepEqual(*last, plan) {
		return // An equal plan would only make units wait for another reading of the holders.
	}
	m.plan.Store(&plan)
	m.planned.Notify()
}

// AwaitStopped returns nil once no resource is served any more, which happens after an empty plan
// was applied. It returns an error if ctx ends first.
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

// Run serves until ctx ends, and returns after every server has stopped. It does not withdraw the
// lists that the kubelet has, so that a successor can go on from there. Just before its servers
// stop, it announces that; see leave.
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
	defer children.Wait() // All other announcements end before the one of leave.
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
	// The first lists wait until it is known what pods already hold.
	looked := m.options.Kubelet == nil
	var due, asked reading // The next reading and the one in progress; zero for none.
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
			if r.pendingGrants {
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
			r.pendingGrants = true // A grant changes no list; its holder is read later.
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
	// RemovalDelay is how long a surplus device stays in the list after the kubelet has applied that
	// it is Unhealthy; default 30 s. Any admission that chose the device earlier takes less time.
	RemovalDelay time.Duration
	// RetireAfter is how long a surplus device that a pod holds stays Healthy, unless the plan says
	// otherwise; default 10 min.
	RetireAfter time.Duration
	// Settle is for a unit that changes its sharing mode: the time from when the kubelet has
	// applied that a device is Unhealthy until Allocate refuses the device; default 50 ms. An
	// admission that chose the device earlier can finish in that time.
	Settle time.Duration
	// StopAfter is how long a dropped resource is served with an empty list before its
	// server stops; default 30 s, so that the kubelet reports the 0 at least twice.
	StopAfter time.Duration
	// RegisterTimeout is how long the kubelet may take to answer a registration; default 15 s,
	// which is more than the 10 s within which it dials back.
	RegisterTimeout time.Duration
	// StreamTimeout is how long the kubelet may take after a registration to open its stream;
	// default 5 s.
	StreamTimeout time.Duration
	// VerifyAfter is how long the kubelet may take after a stream has opened to show the resource;
	// default 5 s.
	VerifyAfter time.Duration
	// ListInterval is the shortest time between two lists of a resource; default 100 ms, because
	// each list costs the kubelet an fsync.
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

// pollInterval is how often the kubelet is read while something waits for it.
func (t Timing) pollInterval() time.Duration {
	return min(max(t.RemovalDelay/4, 20*time.Millisecond), 500*time.Millisecond)
}

// RefreshHolders tells the Manager that the caller waits until no pod holds the units. Until the
// kubelet gets a list, it may report allocations of pods that are gone. So while one of the units
// has an allocation without a named pod, its list is sent again, with pauses of at most
// longestResendPause. The next call replaces the units.
func (m *Manager) RefreshHolders(units ...string) {
	m.refreshing.Store(&units)
	m.planned.Notify()
}

func (m *Manager) awaitsHolders(unit string) bool {
	awaited := m.refreshing.Load()
	return awaited != nil && slices.Contains(*awaited, unit)
}

// Withdrawn reports whether the units are out of use: the latest plan is served, and for each of
// their devices still listed, Allocate refused it first and no pod was found to hold it afterwards.
// Use Subscribe to learn when the answer may have changed.
func (m *Manager) Withdrawn(units ...string) bool {
	serving := m.status.Load()
	if m.plan.Load() != serving.plan {
		return false
	}
	lists := func(g *generation) bool {
		return slices.ContainsFunc(g.list.Entries, func(e Entry) bool {
			return !e.Unused && slices.Contains(units, e.Unit)
		})
	}
	for _, s := range serving.servers {
		// Check waiting first: a list that stops waiting has become the current one.
		if waiting := s.waiting.Load(); waiting != nil && lists(waiting.generation) || lists(s.current.Load()) {
			return false
		}
	}
	return true
}

// subscribers are the channels that Subscribe has returned. A nil *subscribers is ignored.
type subscribers struct{ signals atomic.Pointer[[]wake.Signal] }

func (s *subscribers) add() wake.Signal {
	added := wake.NewSignal()
	for {
		before := s.signals.Load()
		after := []wake.Signal{added}
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
			each.Notify()
		}
	}
}

// Status is how the latest plan is served now.
type Status struct {
	// Served is true if the lists are made for the latest plan that was applied. One of them may
	// still wait for its announcement; then its Applied is false, and its Listed has the previous
	// list. If Served is true, a resource of the plan that is not in Resources has only units that
	// are still held in another sharing mode.
	Served bool
	// Switched is true if the lists are as the latest plan wants them, except for what pods hold.
	// They may still be on their way to the kubelet.
	Switched bool
	// KubeletSeen is true if what the kubelet holds and has applied could be read when it was last
	// needed. While it is false, no device is removed from a list.
	KubeletSeen bool
	// Holders are the allocations at the latest successful reading. While a unit waits for its
	// holders, they are at most half a second old.
	Holders []sharing.Allocation
	// Resources are sorted by name.
	Resources []ResourceStatus
}

// ResourceStatus is how one resource is served now.
type ResourceStatus struct {
	Name string
	// Streams is how many ListAndWatch streams the kubelet has open; 1 is right.
	Streams int
	// Devices is the number of devices in the list, Healthy the number that the kubelet may hand
	// out, and Leaving the number on their way out.
	Devices, Healthy, Leaving int
	// Dropped is true if the plan no longer has the resource.
	Dropped bool
	// Applied is true if the kubelet has the list as it is now: the list was sent, and a later
	// reading showed all of its Healthy devices and none of its Unhealthy ones.
	Applied bool
	// AnnounceState is whether the API server has the numbers of the list, once it is Applied.
	AnnounceState AnnounceState
	// Listed are the devices in the list, including the ones on their way out.
	Listed []Entry
	// Units are the units that are offered under this name, or held in a mode that they are to
	// leave. Replicas counts such devices; it is 1 while a pod may hold the whole unit.
	Units []sharing.Unit
	// Registrations, Lists and Granted count since the server started. So does SameUnit, which
	// counts the grants of two devices of one unit to one container.
	Registrations, Lists, Granted, SameUnit uint64
	// Refused counts refused calls by reason; every reason is present.
	Refused map[RefusalReason]uint64
}

// Status returns how the latest plan is served now.
func (m *Manager) Status() Status {
	plan, serving := m.plan.Load(), m.status.Load()
	status := make([]ResourceStatus, len(serving.servers))
	for i, s := range serving.servers {
		waits := s.waiting.Load() != nil // Read before current, which it becomes.
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
			if e.Phase != Offered && (e.Phase != HeldSurplus || !e.Switching) {
				continue
			}
			last := len(status[i].Units) - 1 // The devices of a unit are adjacent.
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

// Subscribe returns a channel that receives when Status may have changed, once for any number of
// changes since the last receipt. Each reader needs a channel of its own, and must read Status only
// after it has subscribed. The channel lasts as long as the Manager.
func (m *Manager) Subscribe() <-chan struct{} { return m.readers.add() }

// CallMetrics measures how long the kubelet's calls take. Run's goroutine calls its methods.
type CallMetrics interface {
	// Start is called before a resource's server starts, Stop after it has stopped.
	Start(resource string) CallObservers
	Stop(resource string)
}

// CallObservers measure the calls of one resource: Granted and Refused the calls of Allocate, and
// Preferred those of GetPreferredAllocation. They must not block.
type CallObservers struct{ Granted, Refused, Preferred Observer }

// Observer records a duration in seconds; a prometheus.Histogram is one.
type Observer interface{ Observe(seconds float64) }

// SetCallMetrics turns on the measurement of calls. Call it before Run.
func (m *Manager) SetCallMetrics(metrics CallMetrics) { m.callMetrics = metrics }

func observe(observer Observer, took time.Duration) {
	if observer != nil {
		observer.Observe(took.Seconds())
	}
}
