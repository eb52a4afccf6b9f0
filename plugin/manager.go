package plugin

import (
	"cmp"
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Options are what a Manager needs.
type Options struct {
	// Dir is the kubelet's device-plugins directory. It need not exist yet.
	Dir string
	// Kubelet tells what is held and applied; nil when nothing can.
	Kubelet Kubelet
	// Store keeps the lists over restarts; nil for none.
	Store  Store
	Timing Timing
	Logger *slog.Logger
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Store keeps the lists, so that a restarted Virgate offers every device that
// a pod may hold before it changes anything. Manager calls it from one
// goroutine; no allocation waits for it.
type Store interface {
	// Load returns the lists that were saved last; none when there are none.
	Load() (Lists, error)
	// Save returns when the lists are kept for good.
	Save(lists Lists) error
}

// Manager brings what the kubelet lists to what the last plan wants, and keeps
// it there.
type Manager struct {
	options Options
	planned chan struct{}
	plan    atomic.Pointer[sharing.Plan]
	status  atomic.Pointer[serving]
}

// serving is what Run serves now. It is immutable but for superseded, which is
// closed when another takes its place.
type serving struct {
	servers    []*server // by name
	plan       *sharing.Plan
	superseded chan struct{}
}

// NewManager returns a manager without a plan.
func NewManager(options Options) *Manager {
	options.Timing = options.Timing.withDefaults()
	if options.Now == nil {
		options.Now = time.Now
	}
	m := &Manager{options: options, planned: make(chan struct{}, 1)}
	m.status.Store(&serving{superseded: make(chan struct{})})
	return m
}

// Apply makes plan the wanted one. It does not wait; of several plans the last
// wins. The plan must not be changed afterwards.
func (m *Manager) Apply(plan sharing.Plan) {
	m.plan.Store(&plan)
	select {
	case m.planned <- struct{}{}:
	default:
	}
}

// AwaitStopped returns nil when no resource is served any more, as after an
// empty plan, and an error when ctx ends first.
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

// Run serves until ctx ends and returns when every server has stopped. What
// the kubelet was told stays as it is, for a successor.
func (m *Manager) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var children sync.WaitGroup
	defer children.Wait()
	defer cancel()

	looks := make(chan struct{}, 1)
	sights := make(chan Sight)
	if m.options.Kubelet != nil {
		children.Go(func() { m.watchKubelet(ctx, looks, sights) })
	}
	askToLook := func() {
		select {
		case looks <- struct{}{}:
		default:
		}
	}

	r := reconciler{Manager: m, lists: Lists{}, servers: map[string]*running{}, start: func(s *server) *running {
		ctx, stop := context.WithCancel(ctx)
		run := &running{server: s, stop: stop, done: make(chan struct{})}
		children.Go(func() {
			defer close(run.done)
			s.run(ctx)
		})
		return run
	}}
	r.restore()
	again := time.NewTimer(0)
	again.Stop()
	// The first lists wait for a look at what pods hold already.
	looked := m.options.Kubelet == nil
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.planned:
			askToLook()
		case r.seen = <-sights:
			looked = true
		case <-again.C:
			askToLook()
		}
		plan := m.plan.Load()
		if plan == nil || !looked {
			continue
		}
		if r.step(plan); !r.lists.settled() {
			again.Reset(m.options.Timing.pollInterval())
		}
	}
}

// pollInterval is how often the kubelet is asked while something waits for it.
func (t Timing) pollInterval() time.Duration {
	return min(max(t.Quiet/4, 20*time.Millisecond), time.Second)
}

// watchKubelet looks at the kubelet when asked and hands on what it saw.
func (m *Manager) watchKubelet(ctx context.Context, looks <-chan struct{}, sights chan<- Sight) {
	var last Sight
	complained := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-looks:
		}
		var appliedErr, heldErr error
		last, appliedErr, heldErr = look(ctx, m.options.Kubelet, last, m.options.Now)
		complaint := ""
		if err := cmp.Or(heldErr, appliedErr); err != nil && ctx.Err() == nil {
			complaint = err.Error()
		}
		if complaint != complained && complaint != "" {
			m.options.Logger.Warn("kubelet not seen, no list loses a device", "error", complaint)
		}
		complained = complaint
		select {
		case sights <- last:
		case <-ctx.Done():
			return
		}
	}
}

// reconciler is the state of Run's own goroutine.
type reconciler struct {
	*Manager
	// lists are the last ones, made for the plan that served points to.
	lists   Lists
	served  *sharing.Plan
	seen    Sight
	servers map[string]*running
	start   func(*server) *running
	// saved are the lists that the store has; saveFailed says why it has not
	// the current ones.
	saved      Lists
	saveFailed string
}

type running struct {
	*server
	stop context.CancelFunc
	done chan struct{}
	// reminded is when a list was last repeated.
	reminded time.Time
}

// step brings the servers to the next lists.
func (r *reconciler) step(plan *sharing.Plan) {
	calls := Calls{Granted: map[string]map[string]time.Time{}, Named: map[string]map[string]time.Time{}, Busy: map[string]bool{}}
	for name, s := range r.servers {
		calls.Busy[name] = s.inFlight.Load() > 0
		s.current.Load().calls(calls)
	}
	before := r.lists
	r.lists = Next(before, *plan, r.seen, calls, r.options.Now(), r.options.Timing)
	samePlan := plan == r.served
	r.served = plan

	resources := map[string]sharing.Resource{}
	units := map[string]sharing.Unit{}
	for _, resource := range plan.Resources {
		resources[resource.Name] = resource
		for _, unit := range resource.Units {
			units[unit.ID] = unit
		}
	}
	for _, list := range r.lists {
		for i, e := range list.Entries {
			if unit, ok := units[e.Unit]; ok {
				list.Entries[i].Index = unit.Index
			}
		}
	}
	r.save()
	for name, list := range r.lists {
		s := r.servers[name]
		if s == nil {
			created := r.newServer(name)
			created.publish(newGeneration(resourceOr(resources, name, nil), list, plan.Faults, units, nil))
			r.servers[name] = r.start(created)
			continue
		}
		if samePlan && list.equal(before[name]) {
			r.remind(s, list)
			continue
		}
		previous := s.current.Load()
		s.publish(newGeneration(resourceOr(resources, name, previous), list, plan.Faults, units, previous))
	}
	for name, s := range r.servers {
		if _, ok := r.lists[name]; !ok {
			s.stop()
			<-s.done
			delete(r.servers, name)
			r.options.Logger.Info("resource stopped", "resource", name)
		}
	}
	r.publishStatus()
}

// remind repeats a list when a surplus device in it seems to be held by a pod
// that the kubelet does not name. Its checkpoint may be older than the end of
// that pod, and it writes a new one with every list.
func (r *reconciler) remind(s *running, list List) {
	doubt := slices.ContainsFunc(list.Entries, func(e Entry) bool {
		return e.Phase == Closing && r.seen.doubtful.has(s.name, e.ID)
	})
	if now := r.options.Now(); doubt && now.Sub(s.reminded) >= r.options.Timing.Quiet {
		s.reminded = now
		s.publish(s.current.Load().repeated())
	}
}

// restore takes over the lists of the last run. They are published only when
// there is a plan, in the form that follows from both.
func (r *reconciler) restore() {
	if r.options.Store == nil {
		return
	}
	lists, err := r.options.Store.Load()
	if err != nil {
		r.options.Logger.Warn("lists of the last run unknown", "error", err)
		return
	}
	for name, list := range lists {
		r.lists[name] = list
	}
	r.saved = r.lists
}

// save keeps the lists before anyone sees them: a device that was ever listed
// is then listed after a crash too. When that fails serving goes on.
func (r *reconciler) save() {
	if r.options.Store == nil || r.lists.keptAs(r.saved) {
		return
	}
	if err := r.options.Store.Save(r.lists); err != nil {
		if r.saveFailed == "" {
			r.options.Logger.Error("lists not kept for a restart, serving goes on", "error", err)
		}
		r.saveFailed = err.Error()
		return
	}
	r.saved, r.saveFailed = r.lists, ""
}

// resourceOr is the planned resource, or what a dropped one was.
func resourceOr(resources map[string]sharing.Resource, name string, previous *generation) sharing.Resource {
	if resource, ok := resources[name]; ok {
		return resource
	}
	if previous != nil {
		return previous.resource
	}
	return sharing.Resource{Name: name}
}

func (r *reconciler) newServer(name string) *server {
	return &server{
		name: name, dir: r.options.Dir,
		kubeletSocket: filepath.Join(r.options.Dir, "kubelet.sock"),
		kubelet:       r.options.Kubelet,
		timing:        r.options.Timing,
		log:           r.options.Logger.With("resource", name),
		now:           r.options.Now,
		refusals:      make(chan refusal, 16),
	}
}

func (r *reconciler) publishStatus() {
	servers := make([]*server, 0, len(r.servers))
	for _, s := range r.servers {
		servers = append(servers, s.server)
	}
	slices.SortFunc(servers, func(a, b *server) int { return strings.Compare(a.name, b.name) })
	previous := r.status.Swap(&serving{servers: servers, plan: r.served, superseded: make(chan struct{})})
	close(previous.superseded)
}
