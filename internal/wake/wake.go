// Package wake has what goroutines wait with: a signal that wakes one of them, and a sleep that ends
// with its context. Backoffs are wait.Backoff of k8s.io/apimachinery.
package wake

import (
	"context"
	"time"
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
