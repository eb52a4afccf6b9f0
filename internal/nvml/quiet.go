package nvml

import (
	"context"
	"fmt"
	"sync"
)

// errand is something for the watcher's loop, between two looks.
type errand struct {
	// do may be nil: then only the next look is waited for.
	do func(listening *listener)
	// done is closed when do has been done, looked when the boards have been read
	// after that and the owner has what was seen.
	done, looked chan struct{}
}

// LookAgain returns when Inventory shows what the driver says now, in a reading
// that began after the call; a board that answers late may still be missing from
// it. The error says that ctx ended first: while the driver cannot be opened,
// that is what happens.
func (n *Node) LookAgain(ctx context.Context) error {
	e, err := n.send(ctx, nil)
	if err != nil {
		return fmt.Errorf("look at the GPUs again: %w", err)
	}
	select {
	case <-e.looked:
	case <-ctx.Done():
		return fmt.Errorf("look at the GPUs again: %w", ctx.Err())
	}
	// The owner takes in what it was handed before it takes an order.
	return n.order(ctx, func(*owner) {})
}

// Quiet lets go of the board of that UUID: no event set has it until resume is
// called, which must be. A driver changes a board's MIG mode only when nobody
// uses it. Other boards' events are missed for a moment. The error says that
// ctx ended first.
func (n *Node) Quiet(ctx context.Context, gpu string) (resume func(), err error) {
	n.mutes.set(gpu, true)
	e, err := n.send(ctx, func(l *listener) { l.end() })
	if err == nil {
		select {
		case <-e.done:
			return func() { n.mutes.set(gpu, false) }, nil
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	n.mutes.set(gpu, false)
	return nil, fmt.Errorf("let go of %s: %w", gpu, err)
}

func (n *Node) send(ctx context.Context, do func(*listener)) (errand, error) {
	e := errand{do: do, done: make(chan struct{}), looked: make(chan struct{})}
	select {
	case n.errands <- e:
		return e, nil
	case <-ctx.Done():
		return e, ctx.Err()
	}
}

// mutes are the boards that must not be registered for events.
type mutes struct {
	mu     sync.Mutex
	boards map[string]bool
}

func (m *mutes) set(gpu string, muted bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boards == nil {
		m.boards = map[string]bool{}
	}
	if muted {
		m.boards[gpu] = true
		return
	}
	delete(m.boards, gpu)
}

func (m *mutes) has(gpu string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.boards[gpu]
}
