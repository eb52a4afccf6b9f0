package podresources

import (
	"context"
	"sync"
)

// shared makes one call at a time, and one for all who ask while it waits for its
// turn: many resources that register at once would else wait for one turn each.
// None of them gets an answer that is older than its question.
type shared[Answer any] struct {
	// turn has the call that is under way, or waits for the kubelet's limit.
	turn chan struct{}

	mu sync.Mutex
	// next is the call that has not begun; nil for none.
	next *round[Answer]
}

// round is one call for several. What it has is written before done is closed.
type round[Answer any] struct {
	done   chan struct{}
	answer Answer
	err    error
	// abandoned says that the context of who made the call ended before: the error
	// is nobody else's.
	abandoned bool
}

func newShared[Answer any]() *shared[Answer] {
	return &shared[Answer]{turn: make(chan struct{}, 1)}
}

// ask returns the answer of the next call to begin. Whoever is the first to ask
// makes it: call waits for its turn, calls begins, and asks. The answer is for
// several and must not be changed. The error is call's, or that of ctx.
func (s *shared[Answer]) ask(ctx context.Context, call func(ctx context.Context, begins func()) (Answer, error)) (Answer, error) {
	for {
		r, first := s.join()
		if first {
			s.lead(ctx, r, call)
			return r.answer, r.err
		}
		select {
		case <-r.done:
			if !r.abandoned {
				return r.answer, r.err
			}
		case <-ctx.Done():
			var none Answer
			return none, ctx.Err()
		}
	}
}

// lead makes the call of the round. The call ends with ctx but does not know when
// that will be: else it could fail before, as too late for this one, and the others
// would take the error for theirs.
func (s *shared[Answer]) lead(ctx context.Context, r *round[Answer], call func(ctx context.Context, begins func()) (Answer, error)) {
	defer close(r.done)
	defer s.begin(r) // It may have failed before it could.
	calling, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	select {
	case s.turn <- struct{}{}:
		r.answer, r.err = call(calling, func() { s.begin(r) })
		<-s.turn
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		r.err, r.abandoned = ctx.Err(), true
	}
}

func (s *shared[Answer]) join() (r *round[Answer], first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil {
		return s.next, false
	}
	s.next = &round[Answer]{done: make(chan struct{})}
	return s.next, true
}

// begin lets nobody else join.
func (s *shared[Answer]) begin(r *round[Answer]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == r {
		s.next = nil
	}
}
