package plugin

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// reconciler is the state of Run's own goroutine.
type reconciler struct {
	*Manager
	// lists are the newest lists, made for the plan in served and the host in servedOn.
	lists    Lists
	served   *sharing.Plan
	servedOn *grant.Host
	kubelet  KubeletSnapshot
	servers  map[string]*running
	start    func(*server) *running
	// saved are the lists in the store. saveFailed is true if the store could not save the current ones.
	saved      Lists
	saveFailed bool
	schedule   schedule
	// planned is when the current plan was adopted. No unit starts to change its mode before the
	// holders were read after that.
	planned time.Time
	// pendingGrants is true if devices were granted whose holders have not been seen yet.
	pendingGrants bool
	// unconfirmed is when the newest list was sent that the kubelet was not yet seen to have
	// applied; zero if it has applied all lists.
	unconfirmed time.Time
	// toAnnounce are the counts to announce, by resource.
	toAnnounce map[string]notice
}

type running struct {
	*server
	stop context.CancelFunc
	done chan struct{}
	// resentAt is when the list was last sent again unchanged, because of the devices in resentFor.
	// resendPause is how long it is not sent again for the same devices.
	resentAt    time.Time
	resentFor   map[string]bool
	resendPause time.Duration
	// stream is the stream that was open at the last call of streamState.
	stream grpc.ServerStream
	// given is the version of the list that this stream is known to have been sent, 0 for none.
	// givenAt is since when that is known.
	given   int64
	givenAt time.Time
	// told is the count last announced for a list that the kubelet has. lowered is true if the list
	// has lost devices since. toldOf is the version of the list announced in this way, and outcome
	// is the result.
	told    count
	lowered bool
	toldOf  int64
	outcome AnnounceState
}

// step computes the next lists, saves them, and gives them to the servers.
func (r *reconciler) step(plan *sharing.Plan) {
	calls := RPCState{
		Granted:   DeviceTimes{},
		Preferred: DeviceTimes{},
		Refused:   DeviceTimes{},
		Shared:    DeviceTimes{},
		Busy:      map[string]bool{},
		Sent:      map[string]bool{},
		Lost:      map[string]bool{},
	}
	for name, s := range r.servers {
		calls.Busy[name] = s.inFlight.Load() > 0
		s.streamState(calls)
		s.current.Load().rpcState(calls)
	}
	before, now := r.lists, r.options.Now()
	r.unconfirmed = time.Time{}
	for name, s := range r.servers {
		if !r.isApplied(s, calls.Sent[name], calls.Lost[name], now) && s.givenAt.After(r.unconfirmed) {
			r.unconfirmed = s.givenAt
		}
	}
	if plan != r.served {
		r.planned = now
	}
	kubelet := r.kubelet
	kubelet.HeldKnown = kubelet.HeldKnown && !kubelet.HeldAt.Before(r.planned)
	r.lists = Next(before, *plan, kubelet, calls, now, r.options.Timing)
	if !maps.EqualFunc(before, r.lists, List.equal) {
		r.schedule.change()
	}
	r.pendingGrants = kubelet.pendingGrants(calls.Granted, r.options.Timing.RemovalDelay)
	host := r.host.Load()
	samePlan := plan == r.served && host == r.servedOn
	r.served, r.servedOn = plan, host
	current := grantTerms{plan.Grants, host}

	resources := map[string]sharing.Resource{}
	units := map[string]sharing.Unit{}
	for name, s := range r.servers {
		resources[name] = s.current.Load().resource // A dropped resource stays as it was.
	}
	for _, resource := range plan.Resources {
		resources[resource.Name] = resource
		for _, unit := range resource.Units {
			units[unit.ID] = unit
		}
	}
	// The generations are built while the lists are saved, and published after that.
	saved := make(chan struct{})
	go func() { defer close(saved); r.save() }()
	next := map[string]*generation{}
	for name, list := range r.lists {
		var previous *generation
		if s := r.servers[name]; s != nil {
			if samePlan && list.equal(before[name]) {
				continue
			}
			previous = s.current.Load()
		}
		resource := resources[name]
		resource.Name = name
		next[name] = newGeneration(resource, list, current, plan.Health, units, previous)
	}
	<-saved
	for name, list := range r.lists {
		s, generation := r.servers[name], next[name]
		switch {
		case s == nil:
			created := r.newServer(name)
			created.publish(generation)
			r.servers[name] = r.start(created)
		case generation == nil:
			if !r.publishDue(s, now) {
				r.resendIfUncertain(s, list)
			}
		default:
			r.publishOrWait(s, generation, now)
		}
	}
	for name, s := range r.servers {
		if _, ok := r.lists[name]; !ok {
			s.stop()
			<-s.done
			delete(r.servers, name)
			if r.callMetrics != nil {
				r.callMetrics.Stop(name)
			}
			r.options.Logger.Info("resource stopped", "resource", name)
		}
	}
	r.publishStatus()
	r.schedule.stepped = time.Now()
}

// The pause before the same list is sent again starts at firstResendPause and doubles. Its limit is
// Timing.RemovalDelay, or longestResendPause while a unit waits for its holders.
const (
	firstResendPause   = 500 * time.Millisecond
	longestResendPause = 2 * time.Second
)

// resendIfUncertain sends a list again when something waits for one of its devices, and that device
// seems to be held by a pod that the kubelet does not name. The kubelet's checkpoint may be older
// than the end of that pod, and every list makes the kubelet write a new one. If the kubelet names
// no pods at all, the list is sent less and less often.
func (r *reconciler) resendIfUncertain(s *running, list List) {
	uncertain, more := map[string]bool{}, false
	longest := r.options.Timing.RemovalDelay
	surplus := map[string]bool{} // Units in which any device that becomes free lets one leave.
	for _, e := range list.Entries {
		if e.Phase == HeldSurplus {
			surplus[e.Unit] = true
		}
	}
	for _, e := range list.Entries {
		awaited := e.Switching || e.Whole || r.awaitsHolders(e.Unit)
		if (surplus[e.Unit] || awaited) && r.kubelet.Uncertain.has(s.name, e.ID) {
			uncertain[e.ID] = true
			more = more || !s.resentFor[e.ID]
			if awaited {
				longest = min(longest, longestResendPause)
			}
		}
	}
	if more {
		s.resendPause = min(firstResendPause, longest)
	}
	maps.DeleteFunc(s.resentFor, func(id string, _ bool) bool { return !uncertain[id] })
	now := r.options.Now()
	if len(uncertain) == 0 || now.Sub(s.resentAt) < min(s.resendPause, longest) {
		return
	}
	s.resentAt, s.resentFor = now, uncertain
	s.resendPause = min(2*s.resendPause, longest)
	s.publish(s.current.Load().repeated())
	r.schedule.recheck = time.Now().Add(recheckPause)
}

// restore loads the lists of the last run. Next continues from them once there is a plan.
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

// saveInterval is how often saving is retried while nothing else happens.
const saveInterval = 10 * time.Second

// save stores the lists before the kubelet gets them, so that after a crash every device that was
// ever listed is listed again. If saving fails, serving goes on.
func (r *reconciler) save() {
	if r.options.Store == nil || r.lists.savedAs(r.saved) {
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

func (r *reconciler) newServer(name string) *server {
	var observers CallObservers
	if r.callMetrics != nil {
		observers = r.callMetrics.Start(name)
	}
	options := r.options
	options.Logger = options.Logger.With("resource", name)
	return &server{
		Options:       options,
		name:          name,
		kubeletSocket: filepath.Join(options.Dir, "kubelet.sock"),
		observers:     observers,
		refusals:      make(chan refusal, 16),
		readers:       &r.readers,
		listed:        r.listed,
		grants:        r.grants,
		refusedUnits:  r.refusedUnits,
	}
}

func (r *reconciler) publishStatus() {
	servers := make([]*server, 0, len(r.servers))
	for _, name := range slices.Sorted(maps.Keys(r.servers)) {
		servers = append(servers, r.servers[name].server)
	}
	previous := r.status.Swap(&managerStatus{
		servers:     servers,
		plan:        r.served,
		kubeletSeen: r.kubelet.HeldKnown && r.kubelet.AppliedKnown,
		holders:     r.kubelet.Holders,
		switched:    r.kubelet.HeldKnown && !r.kubelet.HeldAt.Before(r.planned) && r.lists.switched(r.kubelet.Held),
		superseded:  make(chan struct{}),
	})
	close(previous.superseded)
	r.readers.notify()
}

// isApplied records and reports whether the kubelet has the newest list of s. It also returns true
// while the list has not been sent, because no reading could tell yet.
func (r *reconciler) isApplied(s *running, sent, lost bool, now time.Time) bool {
	current := s.current.Load()
	if lost {
		s.given = 0
		s.told = count{}
		s.toldOf = 0
		s.outcome = Announcing
		s.applied.Store(0)
	}
	if !sent || s.applied.Load() == current.version {
		return true
	}
	if s.given != current.version {
		s.given, s.givenAt = current.version, now
	}
	applied := r.options.Kubelet == nil || r.kubelet.AppliedKnown && r.kubelet.AppliedAt.After(s.givenAt) &&
		!slices.ContainsFunc(current.list.Entries,
			func(e Entry) bool { return e.Healthy != r.kubelet.Applied.has(s.name, e.ID) })
	if applied {
		s.applied.Store(current.version)
		r.announceApplied(s)
	}
	return applied
}

// sentList is what a stream was last sent: an empty generation before the first list.
type sentList struct {
	*generation
	stream grpc.ServerStream
}

// streamState tells Next whether the open stream was sent the newest list, and whether it is a
// different stream than at the last call.
func (r *running) streamState(into RPCState) {
	current, last := r.current.Load(), r.sent.Load()
	if last == nil {
		into.Lost[r.name], r.stream = true, nil
		return
	}
	into.Lost[r.name], r.stream = last.stream != r.stream, last.stream
	into.Sent[r.name] = last.version == current.version && r.waiting.Load() == nil
}

type reading struct{ applied, held bool }

func (r reading) or(other reading) reading {
	return reading{r.applied || other.applied, r.held || other.held}
}

// schedule decides when to make the next step, and what to read before it. What a switch waits for
// is read at once and then less and less often, the rest at longer intervals, some of which grow.
type schedule struct {
	// due is what to read when the time has come.
	due reading
	// last is when the kubelet was last read, or a reading requested, or when a list last changed.
	// lastApplied is the same for readings of what the kubelet has applied. lastHeld is when the
	// holders were last read, or their reading requested.
	last, lastApplied, lastHeld time.Time
	// pause is the time between readings that a switch waits for; zero after a change.
	pause time.Duration
	// grant is when to read the holders of granted devices, after grantPause; zero if all of them
	// were seen.
	grant      time.Time
	grantPause time.Duration
	// recheck is when to read the holders after a list was sent again; zero if none was.
	recheck time.Time
	// stepped is when the last step was made. stepBy is when to make the next one even if the
	// requested reading has not arrived.
	stepped, stepBy time.Time
}

// A list is applied within some milliseconds, and a pod holds what it was granted once its other
// devices were granted, too. If no unit waits for a list to be applied, only the status does, and a
// reading of thousands of devices is expensive. So the readings for a list become rarer while it
// stays unconfirmed, for example because the kubelet cannot be read: each comes after a quarter of
// the time that has already passed, but after longestPause at the latest.
const (
	firstPause      = 5 * time.Millisecond
	confirmPause    = 100 * time.Millisecond
	firstGrantPause = 250 * time.Millisecond
	recheckPause    = 50 * time.Millisecond
	longestPause    = 10 * time.Second
)

// read records that the kubelet was read, or that a reading was requested.
func (s *schedule) read(what reading, most time.Duration) {
	s.last, s.pause = time.Now(), min(max(2*s.pause, firstPause), most)
	if what.applied {
		s.lastApplied = s.last
	}
	if what.held {
		s.lastHeld = s.last
	}
	if s.recheck.Before(s.lastHeld) {
		s.recheck = time.Time{}
	}
}

func (s *schedule) change() {
	now := time.Now()
	s.last = now
	s.lastApplied = now
	s.pause = 0
}

// awaitReading is called when the wait that next returned is over. If a reading was requested, it
// returns how much longer to wait for that reading, whose end triggers the step. waits is false if
// the step is due at once.
func (s *schedule) awaitReading() (wait time.Duration, waits bool) {
	wait = time.Until(s.stepBy)
	if s.due == (reading{}) || wait <= 0 {
		return 0, false
	}
	s.due = reading{} // Do not request it twice.
	return wait, true
}

// next returns how long to wait before the next step; any is false if there is nothing to wait for.
func (s *schedule) next(r *reconciler) (wait time.Duration, any bool) {
	now := time.Now()
	s.due, s.stepBy = reading{}, s.stepped.Add(2*r.options.Timing.pollInterval())
	for _, reason := range s.reasons(r, now) {
		if reason.due == (reading{}) && reason.at.Before(s.stepBy) {
			s.stepBy = reason.at
		}
		if until := max(0, reason.at.Sub(now)); !any || until < wait {
			any = true
			wait = until
			s.due = reason.due
		}
	}
	return wait, any
}

// reason is one of the reasons to look again at a certain time, with what to read then.
type reason struct {
	at  time.Time
	due reading
}

// reasons returns all current reasons to look again.
func (s *schedule) reasons(r *reconciler, now time.Time) (all []reason) {
	look := func(at time.Time, due reading) { all = append(all, reason{at, due}) }
	switch {
	case !r.lists.settled():
		look(s.last.Add(r.options.Timing.pollInterval()), reading{applied: true, held: true})
	case r.lists.grows():
		look(s.last.Add(r.options.Timing.pollInterval()), reading{held: true})
	case r.saveFailed:
		look(now.Add(saveInterval), reading{})
	}

	urgent, closes := r.lists.awaited(r.kubelet)
	switch {
	case urgent.held:
		look(s.last.Add(s.pause), reading{applied: urgent.applied || !r.unconfirmed.IsZero(), held: true})
	case urgent.applied:
		look(s.last.Add(max(s.pause, firstPause)), urgent)
	case !r.unconfirmed.IsZero():
		pause := max(r.options.Now().Sub(r.unconfirmed)/4, confirmPause)
		look(s.lastApplied.Add(min(pause, longestPause)), reading{applied: true, held: !r.kubelet.HeldKnown})
	}
	if until := closes.Add(r.options.Timing.Settle).Sub(r.options.Now()); !closes.IsZero() && until > 0 {
		look(now.Add(until), reading{})
	}

	if due := r.firstDue(); !due.IsZero() {
		look(now.Add(due.Sub(r.options.Now())), reading{})
	}

	most := time.Second
	if !r.kubelet.HeldKnown {
		most = longestPause
	}
	switch {
	case !r.pendingGrants:
		s.grant, s.grantPause = time.Time{}, 0
	case s.grant.IsZero(), !s.grant.After(s.lastHeld):
		s.grantPause = min(max(2*s.grantPause, firstGrantPause), most)
		s.grant = now.Add(s.grantPause)
	}
	if !s.grant.IsZero() {
		look(s.grant, reading{held: true})
	}
	if !s.recheck.IsZero() {
		look(s.recheck, reading{held: true})
	}
	return all
}

// awaited returns what must be read so that a unit can change its mode, and when the kubelet last
// applied that a device that Allocate is going to refuse is Unhealthy; zero for nothing.
func (l Lists) awaited(last KubeletSnapshot) (urgent reading, closes time.Time) {
	for resource, list := range l {
		for _, e := range list.Entries {
			switch {
			case e.Whole && !last.Held.has(resource, e.ID):
				urgent.held = true // The unit's other shares wait only for that.
			case e.Phase != Removing || e.Since.IsZero() || e.Unused:
			case e.Applied.IsZero():
				urgent.applied = true
			case e.RefusesAllocate:
				urgent.held = true
			case e.Switching && (closes.IsZero() || e.Applied.After(closes)):
				closes = e.Applied
			}
		}
	}
	return urgent, closes
}
