package plugin

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// backoff grows from minBackoff to maxBackoff, with jitter.
type backoff struct{ current time.Duration }

func (b *backoff) reset() { b.current = 0 }

func (b *backoff) grow() { b.current = min(max(2*b.current, minBackoff), maxBackoff) }

// wait is the wait before the next try, without growing it.
func (b *backoff) wait() time.Duration { return jitter(b.current) }

func (b *backoff) next() time.Duration {
	b.grow()
	return b.wait()
}

// jitter is between half of d and d.
func jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return d/2 + rand.N(d/2+1)
}

// sleep waits; false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
