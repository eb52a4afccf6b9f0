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
	writer writer
	timing timing
	log    *slog.Logger
	// woken says that there is something new, among that many nodes have the same.
	woken, among chan struct{}
	replaced     chan struct{}
	// failures counts those in a row; complaint is the last one that was logged.
	failures  int
	complaint string
}

func newTask(writer writer, timing timing, log *slog.Logger) *task {
	return &task{
		writer: writer, timing: timing, log: log,
		woken: make(chan struct{}, 1), among: make(chan struct{}, 1), replaced: make(chan struct{}, 1),
	}
}

// wake says that there is something new. A task that backs off goes on doing so.
func (t *task) wake() { give(t.woken) }

// wakeAmongMany is wake for what many nodes write at once, which is written
// a while later by chance.
func (t *task) wakeAmongMany() { give(t.among) }

// restart ends backing off, and forgets what was written.
func (t *task) restart() { give(t.replaced) }

func give(signal chan<- struct{}) {
	select {
	case signal <- struct{}{}:
	default:
	}
}

func take(signal <-chan struct{}) {
	select {
	case <-signal:
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
		case <-t.among:
			t.standBack(ctx)
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
		take(t.woken)
		take(t.among)
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

// standBack lets some of the other nodes write first, unless something comes that
// is this node's alone, or the Node is another one.
func (t *task) standBack(ctx context.Context) {
	timer := time.NewTimer(part(t.timing.spread))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-t.woken:
	case <-t.replaced:
		t.writer.forget()
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
// half shorter by chance, so that nodes do not come back together, and comes on
// top of once to twice what the API asked for, which is the same for all of them.
func backoff(err error, failures int, timing timing) time.Duration {
	wait, longest := timing.firstRetry, timing.lastRetry
	if apierrors.IsNotFound(err) {
		longest = timing.lastLook
	}
	for i := 1; i < failures && wait < longest; i++ {
		wait *= 2
	}
	wait = min(wait, longest)
	asked := retryAfter(err)
	return asked + part(asked) + wait - part(wait/2)
}

// part is a part of the time by chance, up to all of it.
func part(of time.Duration) time.Duration {
	return time.Duration(rand.Int64N(int64(of) + 1)) //nolint:gosec // chance, not a secret
}
