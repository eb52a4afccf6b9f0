package nvml

import (
	"cmp"
	"fmt"
	"sync"
	"time"
)

// Limits are how long a call may take; the zero value stands for the defaults.
type Limits struct {
	// Call is for every call but those below; 30 s when zero.
	Call time.Duration
	// Lookup is for DeviceGetHandleByIndex, which on a busy node may honestly
	// take ten seconds, and Init, which does as much for all boards; 60 s when
	// zero.
	Lookup time.Duration
	// Change is for the calls that change how a board is cut, of which a change of
	// the MIG mode resets it; 60 s when zero.
	Change time.Duration
}

// AbandonedError is what a call answers that took too long, and then every call
// for the same board until that one has returned. It is an *Error with Timeout
// for errors.Is and errors.As.
type AbandonedError struct {
	// Call is the call that the driver does not answer.
	Call string
	// After is how long it was waited for.
	After time.Duration
}

func (e *AbandonedError) Error() string {
	return fmt.Sprintf("%v: abandoned after %s, the driver does not answer", e.Unwrap(), e.After)
}

// Unwrap is the error of the call.
func (e *AbandonedError) Unwrap() error { return &Error{Call: e.Call, Return: Timeout} }

// WithDeadlines makes a library whose calls return in time whatever the driver
// does. One that is not answered within its limit is abandoned; what it would
// have answered is dropped. Until the driver lets go of it all calls for its
// board, its partitions included, answer the same *AbandonedError at once,
// whoever makes them; other boards go on. Calls that concern no board stand
// together in the same way.
//
// EventSetWait is handed on as it is: it has a limit of its own.
//
// Each call has a goroutine. At most one is ever stuck for each handle of a board,
// and one for each index that is looked up. That costs 6 µs a call
// (BenchmarkDeadline), of which a look at eight boards makes some hundreds: worker
// goroutines would save little and need an end.
func WithDeadlines(lib Library, limits Limits) Library {
	limits.Call = cmp.Or(limits.Call, 30*time.Second)
	limits.Lookup = cmp.Or(limits.Lookup, 60*time.Second)
	limits.Change = cmp.Or(limits.Change, 60*time.Second)
	return &deadlined{lib: lib, limits: limits, lanes: newLanes()}
}

// deadlined is a library with deadlines. Which call belongs to which board is
// in lanes; the methods are in deadlinecalls.go, deadlinemetering.go, deadlinemig.go and
// deadlinecutting.go.
type deadlined struct {
	lib    Library
	limits Limits
	lanes  *lanes
}

// lane is a board's, or the library's, calls: one at a time.
type lane struct {
	// turn has room for whoever makes a call.
	turn chan struct{}
	mu   sync.Mutex
	// stuck is the abandoned call that still has the turn; nil for none.
	stuck *AbandonedError
}

func newLane() *lane { return &lane{turn: make(chan struct{}, 1)} }

func (l *lane) blocked() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stuck == nil {
		return nil
	}
	return l.stuck
}

// release gives the turn to the next call.
func (l *lane) release() {
	l.mu.Lock()
	l.stuck = nil
	l.mu.Unlock()
	<-l.turn
}

// answer is what a call returned.
type answer[T any] struct {
	value T
	err   error
}

// limited makes the call when it is its turn, and waits for the limit at most.
func limited[T any](l *lane, call string, limit time.Duration, do func() (T, error)) (T, error) {
	return undoable(l, call, limit, do, func(T) {})
}

// undoable is limited for a call that opens something. When it succeeds after
// it was abandoned, nobody will close that but undo.
func undoable[T any](l *lane, call string, limit time.Duration, do func() (T, error), undo func(T)) (T, error) {
	var nothing T
	if err := l.blocked(); err != nil {
		return nothing, err
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case l.turn <- struct{}{}:
	case <-timer.C:
		return nothing, cmp.Or(l.blocked(), error(&AbandonedError{Call: call, After: limit}))
	}
	answers := make(chan answer[T], 1)
	go func() {
		value, err := do()
		l.mu.Lock()
		late := l.stuck != nil
		answers <- answer[T]{value, err}
		l.mu.Unlock()
		if late && err == nil {
			undo(value)
		}
		l.release()
	}()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-timer.C:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case a := <-answers: // At the last moment.
		return a.value, a.err
	default:
		l.stuck = &AbandonedError{Call: call, After: limit}
		return nothing, l.stuck
	}
}

// limitedDo is limited for a call without an answer.
func limitedDo(l *lane, call string, limit time.Duration, do func() error) error {
	_, err := limited(l, call, limit, func() (struct{}, error) { return struct{}{}, do() })
	return err
}
