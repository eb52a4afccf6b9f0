package plugin

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/virgate/virgate/sharing"
)

// reconciler is the state of Run's own goroutine.
type reconciler struct {
	*Manager
	// lists are the newest ones, made for the plan served and the host servedOn.
	lists    Lists
	served   *sharing.Plan
	servedOn *Host
	kubelet  KubeletSnapshot
	servers  map[string]*running
	start    func(*server) *running
	// saved are the lists that the store has; saveFailed says that it could not
	// keep the current ones.
	saved      Lists
	saveFailed bool
	schedule   schedule
	// planned is when the plan was taken up. No unit begins to change its mode before
	// the holders were read after that.
	planned time.Time
	// unseenGrants says that devices were granted whose holders have not been seen yet.
	unseenGrants bool
	// unconfirmed is when the newest of the lists was sent that the kubelet was not seen to have
	// applied; zero when it has all.
	unconfirmed time.Time
	// toAnnounce are the counts that are to be announced, by resource.
	toAnnounce map[string]notice
}

type running struct {
	*server
	stop context.CancelFunc
	done chan struct{}
	// resentAt is when the list was last sent again without a change, for the devices in
	// resentFor, and resendPause how long not to do so again for them.
	resentAt    time.Time
	resentFor   map[string]bool
	resendPause time.Duration
	// stream is the one that was open when deliveries was last asked.
	stream grpc.ServerStream
	// given is the version of the list that this stream is known to have been sent, givenAt
	// since when; 0 for none.
	given   int64
	givenAt time.Time
	// told is the count that was last announced of a list that the kubelet has, lowered says that
	// the list has lost devices since. toldOf is the version of the list that was announced so, and
	// outcome what became of it.
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
		Closed:    DeviceTimes{},
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
	r.unseenGrants = kubelet.unseenAny(calls.Granted, r.options.Timing.RemovalDelay)
	host := r.host.Load()
	samePlan := plan == r.served && host == r.servedOn
	r.served, r.servedOn = plan, host
	current := grantTerms{plan.Grants, host}

	resources := map[string]sharing.Resource{}
	units := map[string]sharing.Unit{}
	for name, s := range r.servers {
		resources[name] = s.current.Load().resource // A dropped one stays as it was.
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

// The pause between two lists that are the same is firstResendPause, and then longer and
// longer; but no longer than longestResendPause while a unit waits for its holders.
const (
	firstResendPause   = 500 * time.Millisecond
	longestResendPause = 2 * time.Second
)

// resendIfUncertain sends a list again when a device in it that somebody waits for
// seems to be held by a pod that the kubelet does not name. The kubelet's checkpoint
// may be older than the end of that pod, and every list makes it write a new one.
// Where it names no pods at all, that is done more and more rarely.
func (r *reconciler) resendIfUncertain(s *running, list List) {
	uncertain, more := map[string]bool{}, false
	longest := r.options.Timing.RemovalDelay
	surplus := map[string]bool{} // Of such a unit any device that comes free makes one leave.
	for _, e := range list.Entries {
		if e.Phase == Closing {
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

// restore loads the lists of the last run, which Next goes on from when there is a plan.
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

// saveInterval is how often saving is tried again while nothing else happens.
const saveInterval = 10 * time.Second

// save keeps the lists before the kubelet gets them, so that after a crash every device
// that was ever listed is listed again. When it fails, serving goes on.
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

// isApplied notes whether the kubelet has the newest list of s. It is true too where
// no reading of the kubelet could say so yet, because the list has not been sent.
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

// streamState tells Next whether the open stream was sent the newest list, and whether
// the stream is another one than when this was last asked.
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

// schedule says when to make the next step, and what to read before it. What a switch
// waits for is read at once and then less and less often, the rest at fixed intervals.
type schedule struct {
	// due is what is to be read when the time has come.
	due reading
	// last is when the kubelet was last read, or was to be, or when a list last changed.
	// lastApplied is that of readings of what it has applied, lastHeld when holders were last
	// read, or were to be.
	last, lastApplied, lastHeld time.Time
	// pause is the time between readings for which a switch waits; zero after a change.
	pause time.Duration
	// grant is when to look for the holders of what was granted, after grantPause;
	// zero when all of them were seen.
	grant      time.Time
	grantPause time.Duration
	// recheck is when to read the holders after a list was sent again; zero when none was.
	recheck time.Time
	// stepped is when the last step was made, and stepBy when to make the next although what is
	// to be read before it has not come.
	stepped, stepBy time.Time
}

// A list is applied within some milliseconds, and a pod holds what it was granted
// when its other devices were granted too. Where no unit waits for a list to be applied,
// only the status does, and a reading is not cheap with thousands of devices. So the longer it
// does without, as with a kubelet that cannot be read, the rarer are the readings for it: each
// comes when a quarter more of that time has passed, or longestPause.
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

// awaitReading is asked when the time has come for which next waited. It returns how long to wait
// once more, for the reading that was requested, because its end makes the step; false when the
// step is due at once.
func (s *schedule) awaitReading() (wait time.Duration, waits bool) {
	wait = time.Until(s.stepBy)
	if s.due == (reading{}) || wait <= 0 {
		return 0, false
	}
	s.due = reading{} // It is not requested twice.
	return wait, true
}

// next returns how long to wait before the next step; false when nothing is waited for.
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

// reason is one of those to look again at a time, with what is to be read then.
type reason struct {
	at  time.Time
	due reading
}

// reasons are all there are now to look again.
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
	case !r.unseenGrants:
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

// awaited returns what has to be read for a unit to change its mode, and when the
// kubelet applied what is to be closed next; zero for nothing.
func (l Lists) awaited(last KubeletSnapshot) (urgent reading, closes time.Time) {
	for resource, list := range l {
		for _, e := range list.Entries {
			switch {
			case e.Whole && !last.Held.has(resource, e.ID):
				urgent.held = true // The unit's other shares wait for that alone.
			case e.Phase != Retiring || e.Since.IsZero() || e.Vacated:
			case e.Applied.IsZero():
				urgent.applied = true
			case e.Closed:
				urgent.held = true
			case e.Switching && (closes.IsZero() || e.Applied.After(closes)):
				closes = e.Applied
			}
		}
	}
	return urgent, closes
}
