package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// recut makes a change that nothing speaks against any more. From its first
// write to the journal to its last the board is between two layouts, and only
// what belongs to both is offered.
func (r *repartitioner) recut(ctx context.Context, b *boardWork, change sharing.Recut) time.Duration {
	next := r.journalled
	next.Underway = append(slices.Clone(next.Underway), change)
	if !change.After.MIG {
		next.Enabled = without(next.Enabled, change.GPU)
	}
	if err := r.save(next); err != nil {
		return r.fail(ctx, b, err)
	}
	r.say(b, sharing.LayoutPending, "partitions are being made")
	return r.finish(ctx, b, change)
}

// resume is finish for a change that an earlier run, or an earlier try, left.
func (r *repartitioner) resume(ctx context.Context, b *boardWork, change sharing.Recut) time.Duration {
	r.say(b, sharing.LayoutPending, "an interrupted change is being finished")
	cut, err := r.partitioner.Cut(ctx, change.GPU)
	if err != nil {
		r.offer(ctx, b, map[string]bool{})
		return r.fail(ctx, b, err)
	}
	r.offer(ctx, b, lasting(cut, change))
	return r.finish(ctx, b, change)
}

// finish brings the board to how it should be, and where that cannot be back to
// how it was. When neither can, the journal keeps the change for the next try.
// A change that ctx interrupts is left to the successor.
func (r *repartitioner) finish(ctx context.Context, b *boardWork, change sharing.Recut) time.Duration {
	err := r.reach(ctx, change.GPU, change.After)
	if ctx.Err() != nil {
		return 0
	}
	if err == nil || errors.Is(err, errPending) {
		if ended := r.settle(ctx, b, change); ended != nil {
			return r.fail(ctx, b, ended)
		}
		if err == nil {
			r.results.applied.Add(1)
			b.failures = 0
		}
		return soon
	}
	undo := r.reach(ctx, change.GPU, change.Before)
	if ctx.Err() != nil {
		return 0
	}
	if errors.Is(err, sharing.ErrInUse) && errors.Is(undo, sharing.ErrInUse) {
		// Somebody uses what neither layout has: the journal cannot help any more. What
		// there is counts, and a new plan goes around it.
		r.results.failed.Add(1)
		return r.fail(ctx, b, errors.Join(err, r.settle(ctx, b, change)))
	}
	if undo != nil {
		r.results.failed.Add(1)
		return r.fail(ctx, b, fmt.Errorf("%w; and not undone: %w", err, undo))
	}
	r.results.undone.Add(1)
	b.undone = true
	if ended := r.settle(ctx, b, change); ended != nil {
		err = errors.Join(err, ended)
	}
	return r.fail(ctx, b, fmt.Errorf("undone after %w", err))
}

// soon is the wait before another look at a board that was changed, from which
// follows what there is to say of it.
const soon = time.Millisecond

// errNoProgress says that the driver does not list what it said it did.
var errNoProgress = errors.New("the driver said that it was done, and lists something else")

// errPending says that the MIG mode is asked for and waits for a reset: there is
// nothing to finish or to undo.
var errPending = errors.New("another MIG mode waits for a reset of the GPU")

// reach makes steps until the board is as the target says. After each it lists
// the board again: what became of one that failed, or was never answered, is
// seen and not guessed, and at the end the whole is verified.
func (r *repartitioner) reach(ctx context.Context, gpu string, target sharing.Arrangement) error {
	users := r.inUse(ctx, gpu)
	failure := errNoProgress
	for left := -1; ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		cut, err := r.partitioner.Cut(ctx, gpu)
		if err != nil {
			return errors.Join(unlessNoProgress(failure), err)
		}
		steps, err := towards(users.hold(cut), target)
		switch {
		case err != nil:
			return err
		case len(steps) == 0:
			return nil
		case cut.MIG != cut.Pending:
			return errPending
		case left >= 0 && len(steps) >= left:
			return failure
		}
		left, failure = len(steps), errNoProgress
		if err := r.partitioner.Make(ctx, gpu, steps[0]); err != nil {
			failure = err
		}
	}
}

func unlessNoProgress(err error) error {
	if errors.Is(err, errNoProgress) {
		return nil
	}
	return err
}

// settle offers what the board has now, and then ends the change. The inventory
// may still show what was there before, so until it does not, only what the
// board has is offered.
func (r *repartitioner) settle(ctx context.Context, b *boardWork, change sharing.Recut) error {
	cut, err := r.partitioner.Cut(ctx, change.GPU)
	if err != nil {
		return err
	}
	b.see(cut)
	b.settling = true
	limit, cancel := context.WithTimeout(ctx, refreshLimit)
	defer cancel()
	if err := r.refresh(limit); err != nil {
		r.log.Warn("GPUs not read again after a MIG change", "error", err)
	}
	b.left = uuids(cut)
	only := maps.Clone(b.left)
	for _, blocked := range b.blocked {
		delete(only, blocked.UUID)
	}
	r.offer(ctx, b, only)
	r.reopen(b)
	next := r.journalled
	next.Underway = slices.DeleteFunc(slices.Clone(next.Underway), func(c sharing.Recut) bool { return c.GPU == change.GPU })
	if cut.MIG && change.After.MIG && !slices.Contains(next.Enabled, change.GPU) {
		next.Enabled = append(slices.Clone(next.Enabled), change.GPU)
	}
	return r.save(next)
}

// refreshLimit bounds how long a change waits for the GPUs to be read again.
const refreshLimit = 30 * time.Second

// save keeps the journal.
func (r *repartitioner) save(next sharing.CutJournal) error {
	if err := r.journal.Save(next); err != nil {
		return fmt.Errorf("keep the journal: %w", err)
	}
	r.journalled = next
	r.limit()
	return nil
}

// begun is the board's change in the journal; false for none.
func (r *repartitioner) begun(gpu string) (sharing.Recut, bool) {
	i := slices.IndexFunc(r.journalled.Underway, func(c sharing.Recut) bool { return c.GPU == gpu })
	if i < 0 {
		return sharing.Recut{}, false
	}
	return r.journalled.Underway[i], true
}

// keepEnabled notes whether Virgate keeps the board in MIG mode.
func (r *repartitioner) keepEnabled(gpu string, enabled bool) {
	next := r.journalled
	switch {
	case slices.Contains(next.Enabled, gpu) == enabled:
		return
	case enabled:
		next.Enabled = append(slices.Clone(next.Enabled), gpu)
	default:
		next.Enabled = without(next.Enabled, gpu)
	}
	if err := r.save(next); err != nil {
		r.log.Error("MIG mode not kept for a restart", "gpu", gpu, "error", err)
	}
}

func without(list []string, one string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(other string) bool { return other == one })
}

// The pause after a failure doubles from the first to the longest. What was begun
// and undone took free partitions away from everybody for a while, and does so at
// each try: it is tried more rarely in the end.
const (
	firstRetry    = 5 * time.Second
	longestRetry  = 5 * time.Minute
	longestUndone = time.Hour
)

// retryAfter is the pause after so many failures in a row, with jitter.
func retryAfter(failures int, longest time.Duration) time.Duration {
	pause := min(firstRetry<<min(failures-1, 10), longest)
	return pause/2 + rand.N(pause/2)
}
