// Package wake has what goroutines wait with: a signal that wakes one of them, a sleep that ends with
// its context, and backoffs.
package wake

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Signal tells the goroutine that receives from it to look again. Signals that it has not received
// yet are one. A nil Signal is ignored.
type Signal chan struct{}

// NewSignal returns a Signal that nothing was sent to.
func NewSignal() Signal { return make(Signal, 1) }

// Notify sends the signal. It does not wait.
func (s Signal) Notify() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Sleep returns after d, or when ctx ends, and reports whether ctx goes on.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// Backoff returns the pauses between tries that fail: they double from first to longest.
func Backoff(first, longest time.Duration) wait.Backoff {
	return wait.Backoff{
		Duration: first,
		Factor:   2,
		Steps:    32,
		Cap:      longest,
	}
}
