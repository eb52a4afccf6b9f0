package migchange

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// executor makes the changes that were decided. It works on a GPU in the goroutine that has its
// managedGPU.
type executor struct {
	*Options
	wake     func()
	holders  *holderReader
	offers   *offers
	journal  *keeper
	progress *progress
	clients  *clients
	// driver has room for the one change whose turn it is.
	driver chan struct{}
	// modeChanges is true if the last change of a GPU's MIG mode succeeded.
	modeChanges atomic.Bool
	// refused is true if the driver refused this process a step towards the wanted layout, as it
	// would for every GPU.
	refused atomic.Bool

	applied, undone, failed atomic.Uint64
}

// Results counts the changes that were applied, undone or failed.
func (r *Reconciler) Results() (applied, undone, failed uint64) {
	return r.executor.applied.Load(), r.executor.undone.Load(), r.executor.failed.Load()
}

// change makes a change that nothing prevents any more. From the first write of the journal to the
// last, the GPU is between two layouts, and only units that belong to both are offered.
func (e *executor) change(ctx context.Context, g *managedGPU, d Decision, holders Holders) {
	if err := e.journal.save(func(j Journal) Journal { return j.begin(*d.Record) }); err != nil {
		e.fail(ctx, g, err, longestRetry)
		return
	}
	g.inTheWay = d.Change.Blocked
	e.progress.report(g, nodereport.LayoutPending, "partitions are being made")
	_ = e.finish(ctx, g, *d.Record, holders) // The status has the error.
}

// resume continues a change that an earlier run, or an earlier try, has begun.
func (e *executor) resume(ctx context.Context, g *managedGPU, record Record) {
	e.progress.report(g, nodereport.LayoutPending, "an interrupted change is being finished")
	state, err := e.Partitioner.State(ctx, record.GPU)
	if err != nil {
		e.offers.limitAndPlan(ctx, g, map[string]bool{})
		e.fail(ctx, g, err, longestRetry)
		return
	}
	e.offers.limitAndPlan(ctx, g, lasting(state, record))
	_ = e.finish(ctx, g, record, e.holders.read(ctx))
}

// finish makes the GPU as the change wants it or, if that fails, as it was before. If both fail,
// the journal keeps the change for the next try. A change that ctx interrupts is left to the next
// run. The error is why the GPU is not as the change wants it.
func (e *executor) finish(ctx context.Context, g *managedGPU, record Record, holders Holders) error {
	e.clients.begin()
	defer e.clients.end()
	turn := e.takeTurn(ctx, record)
	if turn == nil {
		return ctx.Err()
	}
	defer turn.end()
	err := e.apply(ctx, g, record.After, holders)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil {
		if ended := e.end(ctx, g, record, turn); ended != nil {
			e.fail(ctx, g, ended, longestRetry)
			return ended
		}
		e.applied.Add(1)
		g.failures = 0
		g.inVain = nil
		return nil
	}
	undoing := e.apply(ctx, g, record.Before, holders)
	switch {
	case ctx.Err() != nil:
	case undoing == nil:
		e.undone.Add(1)
		err = errors.Join(err, e.end(ctx, g, record, turn))
		e.fail(ctx, g, fmt.Errorf("undone after %w", err), longestUndone)
	case errors.Is(err, mig.ErrInUse) && errors.Is(undoing, mig.ErrInUse):
		// Something that neither layout has is in use, so the journal cannot help any more. The
		// next decision starts from what exists.
		e.failed.Add(1)
		e.fail(ctx, g, errors.Join(err, e.end(ctx, g, record, turn)), longestRetry)
	default:
		e.failed.Add(1)
		e.fail(ctx, g, fmt.Errorf("%w; and not undone: %w", err, undoing), longestRetry)
	}
	return err
}

// turn is a GPU's turn at the driver, from its first step until its new state is read. resume
// undoes Options.CloseHandles before that reading. Both functions may be called repeatedly.
type turn struct{ resume, end func() }

// takeTurn waits for the GPU's turn; it returns nil if ctx ends first.
func (e *executor) takeTurn(ctx context.Context, record Record) *turn {
	resume := func() {}
	if e.CloseHandles != nil && record.Before.MIG != record.After.MIG {
		// If it fails, the step fails, too, and reports why.
		if undo, err := e.CloseHandles(ctx, record.GPU); err == nil {
			resume = sync.OnceFunc(undo)
		}
	}
	select {
	case e.driver <- struct{}{}:
		return &turn{resume, sync.OnceFunc(func() { resume(); <-e.driver })}
	case <-ctx.Done():
		resume()
		return nil
	}
}

// errNoProgress: the driver does not list what it reported as done.
var errNoProgress = errors.New("the driver said that it was done, and lists something else")

// apply makes steps until the GPU matches target. It reads the GPU after each step: so the result
// of a step that failed or was not answered is seen rather than guessed, and the end result is
// verified. It continues while each step leaves fewer to make. holders may be from before the
// change, because no pod can get what it destroys.
func (e *executor) apply(ctx context.Context, g *managedGPU, target mig.PlacedLayout, holders Holders) error {
	gpu, failure := g.status.GPU, errNoProgress
	target.Partitions = slices.Clone(target.Partitions)
	for left := -1; ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		state, err := e.Partitioner.State(ctx, gpu)
		if err != nil {
			if !errors.Is(failure, errNoProgress) {
				err = errors.Join(failure, err)
			}
			return err
		}
		// Some drivers list their profiles only with MIG mode on.
		for i, p := range target.Partitions {
			target.Partitions[i].Profile = state.Geometry.Name(p.Profile)
		}
		steps, err := mig.Steps(state.Enabled, holders.markHeld(gpu, state).Instances, target)
		switch {
		case err != nil:
			return err
		case len(steps) == 0:
			return nil
		case left >= 0 && len(steps) >= left:
			return failure
		}
		left, failure = len(steps), errNoProgress
		err = e.makeStep(ctx, gpu, steps[0])
		if errors.Is(err, mig.ErrUnlistedClient) {
			err = e.makeWithoutClients(ctx, g, state.Layout(), steps[0], err)
		}
		if err != nil {
			failure = err
		}
		if steps[0].Profile.IsZero() {
			e.modeChanges.Store(err == nil)
			e.wake()
		}
	}
}

// makeStep makes one step and logs it, so that the log can be compared with virgate mig plan.
func (e *executor) makeStep(ctx context.Context, gpu string, step mig.Step) error {
	return e.logStep(gpu, step, e.Partitioner.Apply(ctx, gpu, step))
}

// logStep logs the result of a step and returns it.
func (e *executor) logStep(gpu string, step mig.Step, err error) error {
	if errors.Is(err, mig.ErrNoPermission) {
		e.refused.Store(true)
	}
	if err != nil {
		e.Logger.Warn("MIG step not made", "gpu", gpu, "step", step, "error", err)
	} else {
		e.Logger.Info("MIG step made", "gpu", gpu, "step", step)
	}
	return err
}

// end offers what the GPU has now, and then removes the change from the journal. The inventory may
// still show the old partitions; until it is current, only units that the GPU has are offered. That
// ends its turn.
func (e *executor) end(ctx context.Context, g *managedGPU, record Record, turn *turn) error {
	state, err := e.Partitioner.State(ctx, record.GPU)
	if err != nil {
		return err
	}
	e.progress.see(g, state)
	g.stale = true
	turn.resume()
	limit, cancel := context.WithTimeout(ctx, refreshLimit)
	defer cancel()
	err = e.Refresh(limit)
	turn.end()
	if err != nil && record.Before.MIG != record.After.MIG {
		// Its device node may belong to another GPU now.
		return err
	}
	g.left = partitionsOf(state.Instances)
	only := maps.Clone(g.left)
	for _, blocked := range g.inTheWay {
		delete(only, blocked.UUID)
	}
	e.offers.limitAndPlan(ctx, g, only)
	e.offers.allow(record.GPU)
	return e.journal.save(func(j Journal) Journal {
		j = j.end(record.GPU)
		if state.Enabled && record.After.MIG {
			j = j.withEnabled(record.GPU, true)
		}
		return j
	})
}

// refreshLimit limits how long a change waits for the GPUs to be read again.
const refreshLimit = 30 * time.Second

// fail reports the error and delays the next try, by at most longest. Until then the GPU and its
// offer stay as they are.
func (e *executor) fail(ctx context.Context, g *managedGPU, err error, longest time.Duration) time.Duration {
	if errors.Is(err, sharing.ErrReleased) { // Nothing failed, and the state stays until it is known again.
		return firstRetry
	}
	state, reason := nodereport.LayoutFailed, err.Error()
	g.resetRequired = errors.Is(err, mig.ErrResetRequired)
	switch {
	case errors.Is(err, mig.ErrNoPermission):
		reason = NotPermitted + ": " + reason
	case errors.Is(err, mig.ErrInUse):
		state = nodereport.LayoutBlocked
	case g.resetRequired:
		state = nodereport.LayoutResetRequired
	}
	e.progress.report(g, state, reason)
	if _, begun := e.journal.current().record(g.status.GPU); !begun {
		e.offers.limitAndPlan(ctx, g, nil)
	}
	if errors.Is(err, mig.ErrNoPermission) {
		g.notPermitted = true
		return 0
	}
	g.failures++
	wait := retryAfter(g.failures, longest)
	g.retryAt = e.now().Add(wait)
	return wait
}

// The pause after a failure doubles from firstRetry to longestRetry. Each try that is undone takes
// free partitions out of service for a while, so its pauses grow up to longestUndone.
const (
	firstRetry    = 5 * time.Second
	longestRetry  = 5 * time.Minute
	longestUndone = time.Hour
)

// retryAfter returns the pause after so many failures in a row, with jitter.
func retryAfter(failures int, longest time.Duration) time.Duration {
	pause := min(firstRetry<<min(failures-1, 10), longest)
	return pause/2 + rand.N(pause/2)
}
