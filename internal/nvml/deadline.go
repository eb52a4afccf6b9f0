package nvml

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Limits are how long calls may take. The zero value means the defaults.
type Limits struct {
	// Call applies to every call except those below; 30 s when zero.
	Call time.Duration
	// Lookup applies to DeviceGetHandleByIndex, which may take ten seconds on a busy node, and to
	// Init, which does as much for all GPUs; 60 s when zero.
	Lookup time.Duration
	// Change applies to the calls that change the MIG mode or MIG instances. A change of the mode
	// resets the GPU. 60 s when zero.
	Change time.Duration
}

// endGrace is how long a call may still take after its caller's context has ended.
const endGrace = 500 * time.Millisecond

// AbandonedError is the error of a call that took too long. Until that call returns, it is also the
// error of every other call for the same GPU. errors.As and errors.Is also find an *Error with the
// code Timeout in it.
type AbandonedError struct {
	Call  string        // the call that the driver has not answered
	After time.Duration // how long the caller waited for it
}

func (e *AbandonedError) Error() string {
	return fmt.Sprintf("%v: abandoned after %s, the driver does not answer", e.Unwrap(), e.After)
}

// Unwrap returns the error of the call.
func (e *AbandonedError) Unwrap() error { return &Error{Call: e.Call, Return: Timeout} }

// WithDeadlines returns a library whose calls return in time whatever the driver does. NVML calls
// cannot be cancelled, so a call that is not answered within its limit is abandoned, and a late
// answer is dropped. Until the call returns, all calls for its GPU and the GPU's partitions fail at
// once with the same *AbandonedError, whichever code makes them; other GPUs are not affected. Calls
// that concern no GPU form one group of their own. Each event set is a group by itself, and
// EventSetWait has only its own timeout.
//
// Nothing else handles a hung call: code that runs on such a library can wait for its own calls.
// Node and Meter add deadlines to a library without them. A Meter's calls are groups of their own,
// and a Node with the same library names those that hang.
//
// Each call runs in its own goroutine, which costs some microseconds (BenchmarkDeadline). At most
// one call per handle of a GPU and one per index can hang.
func WithDeadlines(lib Library, limits Limits) Library {
	limits.Call = cmp.Or(limits.Call, 30*time.Second)
	limits.Lookup = cmp.Or(limits.Lookup, 60*time.Second)
	limits.Change = cmp.Or(limits.Change, 60*time.Second)
	d := &deadlines{
		lib:     lib,
		limits:  limits,
		library: newQueue(""),
		queues:  map[any]*queue{},
	}
	return &intercepted{
		lib:         lib,
		interceptor: d.interceptor(newEnding(nil)),
		deadlines:   d,
	}
}

// withDeadlines returns the library with deadlines: its own, if it has them.
func withDeadlines(lib Library) Library {
	if deadlinesOf(lib) != nil {
		return lib
	}
	return WithDeadlines(lib, Limits{})
}

// deadlinesOf returns the deadlines of a library, below any other interceptors; nil if it has none.
func deadlinesOf(lib Library) *deadlines {
	l, ok := lib.(*intercepted)
	switch {
	case !ok:
		return nil
	case l.deadlines != nil:
		return l.deadlines
	}
	return deadlinesOf(l.lib)
}

// Until returns the library with calls that end soon after ctx does. A call that the driver has not
// answered endGrace after that is abandoned, and later calls are not made. Only a library with
// deadlines supports this.
func Until(ctx context.Context, lib Library) Library {
	l, ok := lib.(*intercepted)
	if !ok {
		return lib
	}
	if l.deadlines == nil {
		return &intercepted{
			lib:         Until(ctx, l.lib),
			interceptor: l.interceptor,
			methods:     l.methods,
		}
	}
	return &intercepted{
		lib:         l.lib,
		interceptor: l.deadlines.interceptor(newEnding(ctx.Done())),
		deadlines:   l.deadlines,
	}
}

// deadlines makes the calls of a library one at a time for each GPU, and abandons calls that take
// too long.
type deadlines struct {
	lib    Library
	limits Limits
	// library is the queue of calls that concern no GPU.
	library *queue

	mu sync.Mutex
	// queues are by handle and, for look-ups, by index. The GPU at an index may change. So a hung
	// look-up must not block the GPU's handle, and a hung call by an old handle must not block the
	// GPU that is now at the index.
	queues map[any]*queue
	// lanes have separate queues for the same library.
	lanes []*deadlines
}

// apart returns the library, which must have deadlines, with separate queues. A slow or hung call
// in them makes no other call wait, unless the driver itself does.
func apart(lib Library) Library {
	l := lib.(*intercepted)
	if l.deadlines == nil {
		return &intercepted{
			lib:         apart(l.lib),
			interceptor: l.interceptor,
			methods:     l.methods,
		}
	}
	lane := &deadlines{
		lib:     l.deadlines.lib,
		limits:  l.deadlines.limits,
		library: newQueue(""),
		queues:  map[any]*queue{},
	}
	l.deadlines.mu.Lock()
	defer l.deadlines.mu.Unlock()
	l.deadlines.lanes = append(l.deadlines.lanes, lane)
	return &intercepted{
		lib:         l.lib,
		interceptor: lane.interceptor(newEnding(nil)),
		deadlines:   lane,
	}
}

// queueLimit is the maximum number of queues. When it is reached, all handles are forgotten, and
// calls for them go to the library's queue until they are looked up again.
const queueLimit = 1 << 16

func (d *deadlines) interceptor(caller *ending) Interceptor {
	return func(call Call, do func() (any, error)) (any, error) {
		q := d.library
		if len(call.Arguments) > 0 {
			q = d.queue(call.Arguments[0])
		}
		for _, argument := range call.Arguments {
			// A call for two GPUs waits in the first one's queue. It must not make the first GPU
			// hang because the second one does.
			if second, ok := argument.(Device); ok {
				if err := d.queue(second).blocked(); err != nil {
					return nil, err
				}
			}
		}
		answer, err := q.run(call, d.limit(call), caller, do, d)
		if err != nil {
			return answer, err
		}
		return answer, d.assign(call, answer, q)
	}
}

func (d *deadlines) limit(call Call) time.Duration {
	switch call.Method {
	case "EventSetWait":
		return 0
	case "Init", "DeviceGetHandleByIndex":
		return d.limits.Lookup
	case "DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceDestroy",
		"GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy":
		return d.limits.Change
	}
	return d.limits.Call
}

// undo closes what an abandoned call has opened after all, because no caller knows of it. It does
// not undo changes of a GPU: a caller that made a change lists the GPU's state before the next one.
func (d *deadlines) undo(call Call, answer any) {
	switch call.Method {
	case "Init":
		_ = d.lib.Shutdown()
	case "EventSetCreate":
		_ = d.lib.EventSetFree(answer.(EventSet))
	}
}

// queue returns the queue of a handle or index.
func (d *deadlines) queue(key any) *queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	if q := d.queues[key]; q != nil {
		return q
	}
	switch key := key.(type) {
	case int:
		return d.add(key, newQueue(fmt.Sprintf("GPU %d", key)))
	case EventSet:
		return d.add(key, newQueue(""))
	}
	return d.library
}

// add makes q the queue of the key's calls. d.mu must be held.
func (d *deadlines) add(key any, q *queue) *queue {
	if len(d.queues) >= queueLimit {
		clear(d.queues)
	}
	d.queues[key] = q
	return q
}

// assign puts the handles in a call's answer into the queue of their GPU. It returns an error if
// the GPU that was looked up hangs.
func (d *deadlines) assign(call Call, answer any, q *queue) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch answer := answer.(type) {
	case Device:
		if call.Method != "DeviceGetHandleByIndex" {
			d.add(answer, q)
			break
		}
		known := d.queues[answer]
		if known == nil {
			known = d.add(answer, newQueue(q.name))
		}
		return known.blocked()
	case GPUInstance, ComputeInstance:
		d.add(answer, q)
	case []GPUInstance:
		for _, handle := range answer {
			d.add(handle, q)
		}
	case []ComputeInstance:
		for _, handle := range answer {
			d.add(handle, q)
		}
	}
	if call.Method == "EventSetFree" {
		delete(d.queues, call.Arguments[0])
	}
	return nil
}

// hung names the abandoned calls that have not returned yet; empty if there are none.
func (d *deadlines) hung() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	calls := []string{d.library.hung()}
	for _, q := range d.queues {
		calls = append(calls, q.hung())
	}
	for _, lane := range d.lanes {
		if hung := lane.hung(); hung != "" {
			calls = append(calls, hung)
		}
	}
	slices.Sort(calls)
	calls = slices.DeleteFunc(slices.Compact(calls), func(call string) bool { return call == "" })
	return strings.Join(calls, ", ")
}

// queue makes calls one at a time.
type queue struct {
	// name is the GPU or other subject of the calls; empty for the library.
	name string
	// turn has room for the one call in progress.
	turn chan struct{}
	mu   sync.Mutex
	// abandoned is the call that still has the turn although its caller has given up; nil if there
	// is none.
	abandoned *AbandonedError
}

func newQueue(name string) *queue { return &queue{name: name, turn: make(chan struct{}, 1)} }

func (q *queue) blocked() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.abandoned == nil {
		return nil
	}
	return q.abandoned
}

func (q *queue) hung() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.abandoned == nil:
		return ""
	case q.name == "":
		return q.abandoned.Call
	}
	return q.abandoned.Call + " for " + q.name
}

type answer[T any] struct {
	value T
	err   error
}

// run makes the call when it is its turn. It returns when the call is answered, when the limit (0
// for none) has passed, or when the caller must end.
func (q *queue) run(
	call Call,
	limit time.Duration,
	caller *ending,
	do func() (any, error),
	of *deadlines,
) (any, error) {
	if err := q.blocked(); err != nil {
		return nil, err
	}
	select {
	case <-caller.over:
		return nil, fmt.Errorf("nvml: %s: %w", call, context.Canceled)
	default:
	}
	began := time.Now()
	var timeout <-chan time.Time
	var over <-chan struct{}
	if limit > 0 {
		timeout = time.After(limit)
	}
	turn, done := q.turn, caller.done
	var answers chan answer[any]
	for {
		select {
		case turn <- struct{}{}:
			turn, answers = nil, make(chan answer[any], 1)
			go q.make(call, do, answers, of)
		case a := <-answers:
			return a.value, a.err
		case <-done:
			done, over = nil, caller.end()
		case <-timeout:
			return q.abandon(call, time.Since(began), answers)
		case <-over:
			return q.abandon(call, time.Since(began), answers)
		}
	}
}

// make makes the call and gives the turn to the next one.
func (q *queue) make(call Call, do func() (any, error), answers chan<- answer[any], of *deadlines) {
	value, err := do()
	q.mu.Lock()
	late := q.abandoned != nil
	answers <- answer[any]{value, err}
	q.mu.Unlock()
	if late && err == nil {
		of.undo(call, value)
	}
	q.mu.Lock()
	q.abandoned = nil
	q.mu.Unlock()
	<-q.turn
}

// abandon gives up a call that took too long. If answers is nil, the call was still waiting for its
// turn.
func (q *queue) abandon(call Call, after time.Duration, answers <-chan answer[any]) (any, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case a := <-answers: // The answer came at the last moment.
		return a.value, a.err
	default:
	}
	if q.abandoned != nil {
		return nil, q.abandoned
	}
	abandoned := &AbandonedError{Call: call.String(), After: after.Round(time.Millisecond)}
	if answers != nil {
		q.abandoned = abandoned
	}
	return nil, abandoned
}

// ending limits how long a caller waits for its calls: until endGrace after done is closed, or
// without limit if done is nil.
type ending struct {
	done  <-chan struct{}
	began sync.Once
	// over is closed endGrace after a call has noticed that done is closed.
	over chan struct{}
}

func newEnding(done <-chan struct{}) *ending { return &ending{done: done, over: make(chan struct{})} }

func (e *ending) end() <-chan struct{} {
	e.began.Do(func() { time.AfterFunc(endGrace, func() { close(e.over) }) })
	return e.over
}
