package plugin

import (
	"context"
	"time"

	"github.com/virgate/virgate/internal/wake"
)

// The kubelet reports a list to the API server up to 10 s after it has applied it
// (nodeStatusUpdateFrequency). Until then the scheduler binds pods to devices that are gone, which
// the kubelet rejects for good, and leaves new ones idle. So a list with fewer Healthy devices is
// announced before it is sent, and a list with more once the kubelet has applied it.

// Announcer tells the API server how many devices the kubelet is about to report.
type Announcer interface {
	// Announce writes, by resource, the number of devices and the number of Healthy ones to the
	// Node's status.capacity and status.allocatable. It returns the resources for which the API
	// server now has these numbers. ctx has a deadline. Manager never makes two calls at once.
	Announce(ctx context.Context, capacity, allocatable map[string]int) (written map[string]bool)
}

const (
	// announceLimit is the longest time that a list waits for its announcement. An unreachable API
	// server delays a switch by no more than that.
	announceLimit = 300 * time.Millisecond
	// boundPause is how long pods that were bound just before the announcement may take to reach
	// the kubelet.
	boundPause = 150 * time.Millisecond
	// burstLimit is how much longer a list waits while such pods keep coming: the kubelet admits them
	// one by one, and each may take a tenth of a second.
	burstLimit = time.Second
)

// count is the number of devices in a list and the number of Healthy ones among them.
type count struct{ devices, healthy int }

func (l List) count() (c count) {
	c.devices = len(l.Entries)
	for _, e := range l.Entries {
		if e.Healthy {
			c.healthy++
		}
	}
	return c
}

// notice is a count to announce.
type notice struct {
	count
	// applied is the version of the list if the kubelet already has it, otherwise 0.
	applied int64
}

// announcement is the result of one call of Announce.
type announcement struct {
	notices map[string]notice
	written map[string]bool
}

// announceLoop makes announcements until ctx ends.
func (m *Manager) announceLoop(ctx context.Context, wanted <-chan map[string]notice, made chan<- announcement) {
	m.takingOver.Wait()
	for {
		var notices map[string]notice
		select {
		case notices = <-wanted:
		case <-ctx.Done():
			return
		}
		written := m.announceNow(ctx, notices)
		select {
		case made <- announcement{notices, written}:
		case <-ctx.Done():
			return
		}
	}
}

// announceNow makes one announcement and waits for the API server for at most announceLimit.
func (m *Manager) announceNow(ctx context.Context, notices map[string]notice) (written map[string]bool) {
	capacity, allocatable := map[string]int{}, map[string]int{}
	for name, n := range notices {
		capacity[name], allocatable[name] = n.devices, n.healthy
	}
	limited, cancel := context.WithTimeout(ctx, announceLimit)
	defer cancel()
	return m.options.Announcer.Announce(limited, capacity, allocatable)
}

// From the end of one plugin's stream to the first list of the next plugin, the kubelet considers
// all devices of a resource Unhealthy and refuses the pods that arrive. It tells the API server
// only later. So a plugin that ends announces this first. A plugin that starts announces it as soon
// as it may serve: its predecessor may have been killed, and opening the driver takes time.

// TakeOver announces that the resources of the last run have no Healthy devices. Call it before
// Run, as soon as this program may serve. It does not wait.
func (m *Manager) TakeOver(ctx context.Context) {
	if m.options.Announcer == nil || m.options.Store == nil {
		return
	}
	lists, err := m.options.Store.Load()
	if err != nil {
		return // Run logs the error.
	}
	notices := map[string]notice{}
	for name, list := range lists {
		if c := list.count(); c.healthy > 0 {
			notices[name] = notice{count: count{devices: c.devices}}
		}
	}
	if len(notices) > 0 {
		m.takingOver.Go(func() { m.announceNow(ctx, notices) })
	}
}

// leave announces that there will be no Healthy devices in a moment. It returns after pods that
// were bound just before have had time to reach the kubelet. The servers keep running meanwhile.
func (r *reconciler) leave() {
	notices := map[string]notice{}
	for name, s := range r.servers {
		if c := s.current.Load().list.count(); c.healthy > 0 && s.streams.Load() > 0 {
			notices[name] = notice{count: count{devices: c.devices}}
		}
	}
	if r.options.Announcer == nil || len(notices) == 0 {
		return
	}
	for _, written := range r.announceNow(context.Background(), notices) {
		if written {
			end := r.options.Now().Add(boundPause) // By Now, so that a test can make it longer.
			for left := boundPause; left > 0; left = end.Sub(r.options.Now()) {
				wake.Sleep(context.Background(), left)
			}
			return
		}
	}
}

// waitingList is a list that waits for its announcement. The kubelet still has the previous list.
type waitingList struct {
	*generation
	// due is when it is sent, and limit the latest time for that while no pods come.
	due, limit time.Time
	// announced is true when the API server has its number of Healthy devices or a lower one, so that the scheduler
	// binds no more pods by the old one.
	announced bool
}

// dueAt returns when to send the list: when it is due and, if it is announced, the kubelet has asked for no device
// for boundPause.
func (s *server) dueAt(w *waitingList) time.Time {
	if !w.announced {
		return w.due
	}
	due, latest := w.due, w.limit.Add(burstLimit)
	for _, use := range s.current.Load().uses {
		if quiet := time.Unix(0, use.granted.Load()).Add(boundPause); quiet.After(due) {
			due = quiet
		}
	}
	if due.After(latest) {
		return latest
	}
	return due
}

// announce queues the count; queued counts are announced together soon.
func (r *reconciler) announce(name string, n notice) {
	if r.options.Announcer == nil {
		return
	}
	if r.toAnnounce == nil {
		r.toAnnounce = map[string]notice{}
	}
	r.toAnnounce[name] = n
}

// announced records which lists the API server knows about. It also releases the lists that waited
// for this announcement: at once if it failed, otherwise after a pause.
func (r *reconciler) announced(made announcement) {
	now := r.options.Now()
	for name, s := range r.servers {
		n, waiting := made.notices[name], s.waiting.Load()
		if n.applied != 0 && n.applied == s.toldOf {
			s.outcome = Unannounced
			if made.written[name] {
				s.outcome = Announced
			}
			s.noteOutcome()
		}
		if waiting == nil || waiting.list.count() != n.count {
			continue
		}
		due := now
		if made.written[name] {
			due = now.Add(boundPause)
		}
		if waiting.due.Before(due) {
			due = waiting.due
		}
		s.waiting.Store(&waitingList{waiting.generation, due, waiting.limit, waiting.announced || made.written[name]})
	}
}

// follow returns next as the list that waits in place of w, which is nil if none waits. A list with more Healthy
// devices than w does not end the wait for pods: the scheduler knows of fewer. A list with fewer takes an announcement
// of its own.
func (w *waitingList) follow(next *generation, now time.Time) *waitingList {
	limit := now.Add(announceLimit)
	switch {
	case w == nil:
		return &waitingList{next, limit, limit, false}
	case w.announced && next.list.count().healthy < w.list.count().healthy:
		due := limit
		if latest := w.limit.Add(burstLimit); due.After(latest) {
			due = latest
		}
		return &waitingList{next, due, w.limit, false}
	default:
		return &waitingList{next, w.due, w.limit, w.announced}
	}
}

// publishOrWait publishes the next generation of a server. If a plan, and not a fault, makes the
// kubelet lose Healthy devices, the generation first waits for its announcement.
func (r *reconciler) publishOrWait(s *running, next *generation, now time.Time) {
	waiting, before := s.waiting.Load(), s.current.Load()
	count := next.list.count()
	lowers := count.healthy < before.list.count().healthy
	told := waiting != nil && waiting.list.count() == count
	overdue := waiting != nil && !now.Before(s.dueAt(waiting))
	if r.options.Announcer != nil && lowers && !overdue && !before.losesFaulty(next) {
		if !told {
			r.announce(s.name, notice{count: count})
		}
		s.waiting.Store(waiting.follow(next, now))
		return
	}
	if lowers && !told || waiting != nil && next.version == before.version {
		r.announce(s.name, notice{count: count}) // Together with the list, or to correct a number announced before.
	}
	s.lowered = s.lowered || lowers || waiting != nil
	s.stopWaiting(next)
}

// stopWaiting publishes the generation. A reader that loads waiting first and then current finds it
// in one of them.
func (r *running) stopWaiting(next *generation) {
	r.publish(next)
	r.waiting.Store(nil)
}

// publishDue publishes a list that has waited long enough. It reports whether a list still waits.
func (r *reconciler) publishDue(s *running, now time.Time) (waits bool) {
	waiting := s.waiting.Load()
	if waiting == nil || now.Before(s.dueAt(waiting)) {
		return waiting != nil
	}
	s.lowered = true
	s.stopWaiting(waiting.generation)
	return false
}

// losesFaulty reports whether next loses a Healthy device of g because something is wrong with the
// device's unit.
func (g *generation) losesFaulty(next *generation) bool {
	for _, e := range g.list.Entries {
		if !e.Healthy {
			continue
		}
		at, listed := next.choices.Index(e.ID)
		if listed && next.list.Entries[at].Healthy {
			continue
		}
		unit, known := next.units[e.Unit]
		_, withheld := next.withheld[e.Unit]
		// If a unit changes its mode, withheld refers to the new mode: MPS, for example, before its
		// daemon is ready.
		switches := listed && next.list.Entries[at].Switching
		if withheld && !switches || known && !unit.Health.Healthy() {
			return true
		}
	}
	return false
}

// announceApplied announces the list that the kubelet was just seen to have, unless the API server
// already has its numbers. A list that has lost devices is announced again, because the kubelet may
// have reported the old number in between.
func (r *reconciler) announceApplied(s *running) {
	current := s.current.Load()
	c := current.list.count()
	if s.told != c || s.lowered {
		s.toldOf, s.outcome = current.version, Announcing
		r.announce(s.name, notice{c, current.version})
	}
	s.told, s.lowered = c, false
	s.noteOutcome()
}

// AnnounceState is how far the announcement of a list has come.
type AnnounceState int

const (
	// Announcing means that the list is not announced yet, or the kubelet has not applied it, or
	// there is no Announcer.
	Announcing AnnounceState = iota
	// Announced means that the Node's status has had the numbers of the list since the kubelet
	// applied it.
	Announced
	// Unannounced means that the numbers could not be written. The kubelet writes them with its
	// next report.
	Unannounced
)

// listOutcome is the announcement state of the list with that version.
type listOutcome struct {
	version int64
	AnnounceState
}

// noteOutcome makes the announcement state of the list that the kubelet has visible in the status.
// A list with the same numbers as the previous one needs no announcement of its own.
func (r *running) noteOutcome() { r.known.Store(&listOutcome{r.applied.Load(), r.outcome}) }

// announceState returns Announcing also while a newer list is on its way.
func (s *server) announceState() AnnounceState {
	known := s.known.Load()
	if known == nil || known.version != s.current.Load().version || s.waiting.Load() != nil {
		return Announcing
	}
	return known.AnnounceState
}

// firstDue returns when the first of the waiting lists is to be sent; zero if none waits.
func (r *reconciler) firstDue() (first time.Time) {
	for _, s := range r.servers {
		w := s.waiting.Load()
		if w == nil {
			continue
		}
		if due := s.dueAt(w); first.IsZero() || due.Before(first) {
			first = due
		}
	}
	return first
}
