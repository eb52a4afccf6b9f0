package report

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	// longestQueue bounds how many different events are remembered.
	longestQueue = 64
	// countsFor is how long an event is counted up. The API forgets one that has
	// not changed for an hour (kube-apiserver, --event-ttl).
	countsFor = 50 * time.Minute
)

// series is an event that is or will be in the API.
type series struct {
	notice
	// name is that of the Event; created says that the API has it.
	name    string
	created bool
	// count is how often it happened, written how many of those the API knows.
	count, written int32
	first, last    time.Time
	// next is the earliest time at which it may be written.
	next time.Time
}

func (s *series) waits() bool { return s.count > s.written }

// queue is the events that happened, equal ones as one. It never grows beyond
// longestQueue, however long the API is away and whatever flaps.
type queue struct {
	timing  timing
	mutex   sync.Mutex
	series  []*series // in the order in which they last happened
	dropped int
	limit   *rate.Limiter
}

func newQueue(timing timing) *queue {
	return &queue{timing: timing, limit: rate.NewLimiter(rate.Every(timing.between), timing.burst)}
}

// add says that it happened.
func (q *queue) add(n notice, at time.Time) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	if i := slices.IndexFunc(q.series, func(s *series) bool { return s.notice == n && at.Sub(s.last) < countsFor }); i >= 0 {
		s := q.series[i]
		s.count++
		s.last = at
		q.series = append(slices.Delete(q.series, i, i+1), s)
		return
	}
	if len(q.series) >= longestQueue {
		q.drop()
	}
	q.series = append(q.series, &series{notice: n, count: 1, first: at, last: at})
}

// drop makes room: the oldest that is written goes, else the oldest.
func (q *queue) drop() {
	i := max(0, slices.IndexFunc(q.series, func(s *series) bool { return !s.waits() }))
	if q.series[i].waits() {
		q.dropped++
	}
	q.series = slices.Delete(q.series, i, i+1)
}

// take returns a copy of the event to write now; else ok is false, and after is
// how long until there may be one, 0 for never.
func (q *queue) take(now time.Time) (s series, after time.Duration, ok bool) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	var first *series
	for _, s := range q.series {
		if s.waits() && (first == nil || s.next.Before(first.next)) {
			first = s
		}
	}
	if first == nil {
		return series{}, 0, false
	}
	if wait := first.next.Sub(now); wait > 0 {
		return series{}, wait, false
	}
	if tokens := q.limit.TokensAt(now); tokens < 1 {
		return series{}, time.Duration((1 - tokens) * float64(q.timing.between)), false
	}
	if first.name == "" {
		first.name = eventName(now)
	}
	return *first, 0, true
}

// written says that the API has s as take returned it, or, when it is lost,
// that the API has forgotten it.
func (q *queue) written(s series, now time.Time, lost bool) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	q.limit.AllowN(now, 1)
	i := slices.IndexFunc(q.series, func(other *series) bool { return other.notice == s.notice && other.name == s.name })
	if i < 0 {
		return
	}
	known := q.series[i]
	if lost {
		known.name, known.created = "", false
		known.count -= known.written
		known.written, known.first = 0, known.last
		return
	}
	known.created, known.written, known.next = true, s.count, now.Add(q.timing.repeat)
}

// takeDropped returns how many events were never written, since the last call.
func (q *queue) takeDropped() int {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	dropped := q.dropped
	q.dropped = 0
	return dropped
}
