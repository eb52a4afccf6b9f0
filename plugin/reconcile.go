package plugin

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/virgate/virgate/sharing"
)

// reconciler is the state of Run's own goroutine.
type reconciler struct {
	*Manager
	// lists are the last ones, made for the plan that served points to; servedOn
	// is what the host had then.
	lists    Lists
	served   *sharing.Plan
	servedOn *Host
	seen     Sight
	servers  map[string]*running
	start    func(*server) *running
	// saved are the lists that the store has; saveFailed says that it could not
	// keep the current ones.
	saved      Lists
	saveFailed bool
}

type running struct {
	*server
	stop context.CancelFunc
	done chan struct{}
	// reminded is when a list was last repeated.
	reminded time.Time
	// stream is the one that was open when deliveries was last asked.
	stream grpc.ServerStream
}

// step brings the servers to the next lists.
func (r *reconciler) step(plan *sharing.Plan) {
	calls := Calls{
		Granted: map[string]map[string]time.Time{}, Named: map[string]map[string]time.Time{},
		Busy: map[string]bool{}, Sent: map[string]bool{}, Lost: map[string]bool{},
	}
	for name, s := range r.servers {
		calls.Busy[name] = s.inFlight.Load() > 0
		s.deliveries(calls)
		s.current.Load().calls(calls)
	}
	before := r.lists
	r.lists = Next(before, *plan, r.seen, calls, r.options.Now(), r.options.Timing)
	host := r.host.Load()
	samePlan := plan == r.served && host == r.servedOn
	r.served, r.servedOn = plan, host
	current := terms{plan.Grants, host}

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
	// What serves the lists is made while they are kept, and published after that.
	kept := make(chan struct{})
	go func() { defer close(kept); r.save() }()
	next := map[string]*generation{}
	for name, list := range r.lists {
		var previous *generation
		if s := r.servers[name]; s != nil {
			if samePlan && list.equal(before[name]) {
				continue
			}
			previous = s.current.Load()
		}
		next[name] = newGeneration(resourceOr(resources, name, previous), list, current, plan.Faults, units, previous)
	}
	<-kept
	for name, list := range r.lists {
		s, generation := r.servers[name], next[name]
		switch {
		case s == nil:
			created := r.newServer(name)
			created.publish(generation)
			r.servers[name] = r.start(created)
		case generation == nil:
			r.remind(s, list)
		default:
			s.publish(generation)
		}
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

// remind repeats a list when a device in it, surplus or awaited, seems to be
// held by a pod that the kubelet does not name. Its checkpoint may be older than
// the end of that pod, and it writes a new one with every list.
func (r *reconciler) remind(s *running, list List) {
	doubt := slices.ContainsFunc(list.Entries, func(e Entry) bool {
		return (e.Phase == Closing || r.isAwaited(e.Unit)) && r.seen.doubtful.has(s.name, e.ID)
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
	maps.Copy(r.lists, lists)
	r.saved = r.lists
}

// saveInterval is how often it is tried again to keep the lists, while nothing
// else happens.
const saveInterval = 10 * time.Second

// save keeps the lists before anyone sees them: a device that was ever listed
// is then listed after a crash too. When that fails serving goes on.
func (r *reconciler) save() {
	if r.options.Store == nil || r.lists.keptAs(r.saved) {
		return
	}
	if err := r.options.Store.Save(r.lists); err != nil {
		if !r.saveFailed {
			r.options.Logger.Error("lists not kept for a restart, serving goes on", "error", err)
		}
		r.saveFailed = true
		return
	}
	r.saved, r.saveFailed = r.lists, false
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
		changed:       r.changed,
		closing:       r.closing,
	}
}

func (r *reconciler) publishStatus() {
	servers := make([]*server, 0, len(r.servers))
	for _, s := range r.servers {
		servers = append(servers, s.server)
	}
	slices.SortFunc(servers, func(a, b *server) int { return strings.Compare(a.name, b.name) })
	previous := r.status.Swap(&serving{
		servers: servers, plan: r.served, seen: r.seen.heldKnown && r.seen.appliedKnown,
		superseded: make(chan struct{}),
	})
	close(previous.superseded)
	r.changed.give()
}
