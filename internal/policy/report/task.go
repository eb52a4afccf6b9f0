package report

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// writer writes one thing.
type writer interface {
	// write brings the API to what is wanted now, from task's goroutine. again is
	// after how long it wants to be called without anything new; 0 for never.
	write(ctx context.Context) (again time.Duration, err error)
	// forget makes the next write take nothing for written, from the same
	// goroutine.
	forget()
}

// task calls one writer when there is something to write. Tasks are
// independent: where one may not write, another may.
type task struct {
	writer   writer
	timing   timing
	log      *slog.Logger
	woken    chan struct{}
	replaced chan struct{}
	// failures counts those in a row; complaint is the last one that was logged.
	failures  int
	complaint string
}

func newTask(writer writer, timing timing, log *slog.Logger) *task {
	return &task{
		writer: writer, timing: timing, log: log,
		woken: make(chan struct{}, 1), replaced: make(chan struct{}, 1),
	}
}

// wake says that there is something new. A task that backs off goes on doing so.
func (t *task) wake() { give(t.woken) }

// restart ends backing off, and forgets what was written.
func (t *task) restart() { give(t.replaced) }

func give(signal chan<- struct{}) {
	select {
	case signal <- struct{}{}:
	default:
	}
}

// run writes until ctx ends.
func (t *task) run(ctx context.Context) {
	again := time.NewTimer(0)
	again.Stop()
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.replaced:
			t.writer.forget()
		case <-t.woken:
			t.pause(ctx, t.timing.settle)
		case <-again.C:
		}
		if ctx.Err() != nil {
			return
		}
		if wait := t.try(ctx); wait > 0 {
			again.Reset(wait)
		} else {
			again.Stop()
		}
	}
}

// try writes until it works or ctx ends, and returns when to write again.
func (t *task) try(ctx context.Context) (again time.Duration) {
	for {
		// What came until here is written by this attempt.
		select {
		case <-t.woken:
		default:
		}
		again, err := t.writer.write(ctx)
		if ctx.Err() != nil {
			return 0
		}
		if err == nil {
			if t.complaint != "" {
				t.log.Info("written again")
			}
			t.failures, t.complaint = 0, ""
			t.pause(ctx, t.timing.pace)
			return again
		}
		if apierrors.IsNotFound(err) {
			// What was written is gone with the Node; the next one has none of it.
			t.writer.forget()
		}
		t.failures++
		if text := err.Error(); text != t.complaint {
			t.complaint = text
			t.log.Warn("not written, trying again", "error", err)
		}
		t.pause(ctx, backoff(err, t.failures, t.timing))
	}
}

// pause waits, but not for longer than it takes until ctx ends or the Node is
// another one.
func (t *task) pause(ctx context.Context, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-t.replaced:
		t.writer.forget()
		t.failures = 0
		t.wake()
	}
}

// backoff is the pause after so many failures in a row: it doubles, is up to
// half shorter by chance, so that nodes do not come back together, and is not
// shorter than the API asked for.
func backoff(err error, failures int, timing timing) time.Duration {
	wait, longest := timing.firstRetry, timing.lastRetry
	if apierrors.IsNotFound(err) {
		longest = timing.lastLook
	}
	for i := 1; i < failures && wait < longest; i++ {
		wait *= 2
	}
	wait = min(wait, longest)
	wait -= time.Duration(rand.Int64N(int64(wait)/2 + 1)) //nolint:gosec // chance, not a secret
	return max(wait, retryAfter(err))
}
