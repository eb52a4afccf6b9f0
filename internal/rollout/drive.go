package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/wake"
)

const (
	// leaseTime is how long a driver that does not renew its lease counts as alive. The waiting
	// program measures it with its own clock, so clocks need not agree. The driver renews after
	// each third of it, and writes nothing if the last renewal is older than two thirds.
	leaseTime = 30 * time.Second
	// tick is how often the driver checks for what only time changes.
	tick = time.Second
)

// Resume sets how a rollout continues.
type Resume struct {
	// SkipFailed leaves out nodes that failed; otherwise the rollout waits for them again.
	SkipFailed bool
	// PauseAfter is the number of further waves after which it pauses; 0 for never.
	PauseAfter int
	// AllowUnhealthy ignores devices that are not allocatable from now on.
	AllowUnhealthy bool
}

// errHeld: another program drives the rollout.
var errHeld = errors.New("another program drives it")

func (s *State) renew(holder string) error {
	if s.Holder != holder {
		return fmt.Errorf("%w: %s", errHeld, cmp.Or(s.Holder, "no program now: it was taken from this one"))
	}
	s.Renewed = time.Now().UTC()
	return nil
}

// writeState changes the plan's State with set, and calls set again if the plan has changed
// meanwhile.
func (c *Client) writeState(ctx context.Context, p plan, set func(*State) error) (plan, error) {
	for {
		next := p.State
		if err := set(&next); err != nil {
			return p, err
		}
		now, err := c.patchPlan(ctx, p, map[string]string{headKey: encode(next)})
		if err == nil || !gone(err) {
			return now, err
		}
		p, err = c.plan(ctx, p.ID)
		if err != nil {
			return p, err
		}
	}
}

// driver drives one rollout.
type driver struct {
	*Client
	store *store
	id    string
	// renewed is when the lease was last renewed.
	renewed time.Time
	// seen is the state of the last call of Progress.
	seen string
}

// Drive continues a rollout until it ends, pauses or stops, and returns its last state. The error
// is ErrStopped if a node is in the way, and ErrInterrupted if ctx ended.
func (c *Client) Drive(ctx context.Context, id string, how Resume) (*Rollout, error) {
	return c.run(ctx, id, func(ctx context.Context, d *driver, r *Rollout) error {
		switch r.Phase {
		case Claiming:
			return fmt.Errorf("rollout %s was never begun: its start was cut off; undo gives its nodes back", id)
		case TakingBack, TakenBack, Finished:
			return fmt.Errorf("rollout %s cannot go on: it is %s", id, r.Phase)
		}
		if err := d.waitAgain(ctx, how.SkipFailed); err != nil {
			return err
		}
		r, err := d.find()
		if err != nil {
			return err
		}
		// Keep a pause that is still ahead.
		at := r.PauseAt
		ahead := false
		first := -1
		for _, n := range r.Nodes {
			ahead = ahead || n.Record.Wave < at && (n.Record.State == Waiting || n.Record.State == Pending)
			if n.Record.State == Waiting && (first < 0 || n.Record.Wave < first) {
				first = n.Record.Wave
			}
		}
		if !ahead {
			at = 0
		}
		if how.PauseAfter > 0 && first >= 0 {
			at = first + how.PauseAfter
		}
		return d.setPhase(ctx, r.Phase, func(s *State) {
			s.Phase = Running
			s.Reason = ""
			s.PauseAt = at
			s.IgnoreUnhealthy = s.IgnoreUnhealthy || how.AllowUnhealthy
		})
	}, false)
}

// Undo puts every node back to what it had, at most Max at a time; with atOnce, all together and
// without waiting for any. It leaves nodes alone whose label someone else has changed.
func (c *Client) Undo(ctx context.Context, id string, atOnce bool) (*Rollout, error) {
	r, err := c.run(ctx, id, func(ctx context.Context, d *driver, r *Rollout) error {
		switch r.Phase {
		case Claiming:
			return errRelease
		case TakenBack:
			return nil
		}
		return d.setPhase(ctx, r.Phase, func(s *State) { s.Phase, s.Reason = TakingBack, "" })
	}, atOnce)
	if errors.Is(err, errRelease) { // No node has its label.
		err = c.release(ctx, id)
	}
	return r, err
}

// errRelease: the rollout only needs to be forgotten.
var errRelease = errors.New("to be forgotten")

// waitAgain restarts the wait for nodes that failed or are under way. With skip, it leaves out the
// nodes that failed, and waiting ones that are not ready.
func (d *driver) waitAgain(ctx context.Context, skip bool) error {
	for now := time.Now().UTC(); ; {
		r, err := d.find()
		if err != nil {
			return err
		}
		var writes []Write
		for _, n := range r.Nodes {
			record := *n.Record
			switch {
			case record.State == Failed && skip:
				record.State = Skipped
			case record.State == Waiting && skip && n.NotReady != "":
				record.State, record.Reason = Skipped, n.NotReady
			case record.State == Failed && !record.Set:
				record.State, record.Reason = Waiting, ""
			case record.State == Failed, record.State == Pending && record.Since.Before(now):
				record.State = Pending
				record.Reason = ""
				record.Since = now
				record.Applied = time.Time{}
			default:
				continue
			}
			writes = append(writes, Write{Node: n, Record: record})
		}
		if len(writes) == 0 {
			return nil
		}
		if err := d.write(ctx, writes); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

func (c *Client) run(
	ctx context.Context,
	id string,
	begin func(context.Context, *driver, *Rollout) error,
	unmake bool,
) (*Rollout, error) {
	p, err := c.plan(ctx, id)
	switch {
	case ctx.Err() != nil:
		return nil, ErrInterrupted
	case err != nil:
		return nil, err
	}
	following, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	d := &driver{
		Client: c,
		store:  newStore(p.Domain),
		id:     id,
	}
	failures := make(chan error, 1)
	d.store.failed = func(err error) {
		select {
		case failures <- err:
		default: // One is enough.
		}
		select {
		case <-d.store.filled:
			c.notice("%v", err)
		default:
		}
	}
	running.Go(func() { c.followNodes(following, d.store) })
	running.Go(func() { c.followPlan(following, d.store, id) })
	select {
	case <-d.store.filled:
	case err := <-failures:
		return nil, err
	case <-ctx.Done():
		return nil, ErrInterrupted
	}
	r, err := d.take(ctx)
	if err == nil {
		err = begin(ctx, d, r)
	}
	if err == nil {
		err = d.loop(ctx, unmake)
	}
	interrupted := ctx.Err() != nil && err != nil
	// Give the lease back, so that the next driver need not wait for its end.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUp)
	defer cancel()
	if !d.renewed.IsZero() {
		if leaveErr := d.leave(ending, interrupted); err == nil {
			err = leaveErr
		} else if interrupted && leaveErr != nil {
			return nil, leaveErr
		}
	}
	last, findErr := d.find()
	switch {
	case interrupted:
		return last, ErrInterrupted
	case err != nil:
		return last, err
	case findErr == nil && last.Phase == Stopped:
		return last, fmt.Errorf("%w: %s", ErrStopped, last.Reason)
	}
	return last, findErr
}

func (d *driver) find() (*Rollout, error) { return d.store.rollout(d.id) }

// take gets the lease. If another holder has it, take waits until that lease has not changed for
// outwait.
func (d *driver) take(ctx context.Context) (*Rollout, error) {
	var last State
	var since time.Time
	for {
		p, err := d.store.current(d.id)
		if err != nil {
			return nil, err
		}
		free := p.Holder == "" || p.Holder == d.Holder
		switch {
		case since.IsZero() && !free:
			last, since = p.State, time.Now()
			d.notice("%s drives rollout %s: waiting %s for a sign of life", p.Holder, d.id, d.outwait)
		case !free && p.State != last:
			return nil, fmt.Errorf("rollout %s: %w: %s", d.id, errHeld, p.Holder)
		}
		if free || time.Since(since) >= d.outwait {
			err := d.writeLease(ctx, p, func(s *State) error {
				if s.Holder != p.Holder || !s.Renewed.Equal(p.Renewed) {
					return fmt.Errorf("rollout %s: %w: %s", d.id, errHeld, s.Holder)
				}
				s.Holder = d.Holder
				return s.renew(d.Holder)
			})
			if err != nil {
				return nil, err
			}
			return d.find()
		}
		if err := d.wait(ctx); err != nil {
			return nil, err
		}
	}
}

// gather is how long to wait for further changes after a node has changed.
const gather = 50 * time.Millisecond

// wait returns when a node has changed, or after a tick.
func (d *driver) wait(ctx context.Context) error {
	select {
	case <-d.store.changed:
		wake.Sleep(ctx, gather)
	case <-time.After(min(tick, d.outwait)):
	case <-ctx.Done():
	}
	return ctx.Err()
}

// loop executes Next until nothing is left to do.
func (d *driver) loop(ctx context.Context, unmake bool) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		r, err := d.find()
		if err != nil {
			return err
		}
		d.tell(r)
		if r.Holder != d.Holder {
			return fmt.Errorf("rollout %s: %w: %s", d.id, errHeld, r.Holder)
		}
		if r.Phase != Running && r.Phase != TakingBack {
			return nil
		}
		if time.Since(d.renewed) > d.lease/3 {
			err = d.changeState(ctx, func(*State) error { return nil })
		}
		again := false
		if err == nil {
			writes, phase, reason := Next(r, time.Now().UTC(), unmake)
			before := d.Writes.Load()
			err = d.write(ctx, writes)
			again = d.Writes.Load() > before // These writes may allow the next step.
			if err == nil && len(writes) == 0 && phase != r.Phase {
				again, err = true, d.setPhase(ctx, r.Phase, func(s *State) { s.Phase, s.Reason = phase, reason })
			}
		}
		switch {
		case refused(err) || errors.Is(err, errHeld):
			return err
		case err != nil && ctx.Err() == nil:
			d.notice("%v", err)
			wake.Sleep(ctx, tick)
			continue
		case !again:
			err = d.wait(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// leased reports whether no other program can have taken the lease yet.
func (d *driver) leased() bool { return time.Since(d.renewed) < d.lease*2/3 }

// changeState changes the State if this driver still has the lease, and renews the lease.
func (d *driver) changeState(ctx context.Context, set func(*State) error) error {
	p, err := d.store.current(d.id)
	if err != nil {
		return err
	}
	return d.writeLease(ctx, p, func(s *State) error {
		return errors.Join(s.renew(d.Holder), set(s))
	})
}

// writeLease changes the State with set, which renews the lease too.
func (d *driver) writeLease(ctx context.Context, p plan, set func(*State) error) error {
	began := time.Now().UTC()
	now, err := d.writeState(ctx, p, set)
	if err != nil {
		return err
	}
	d.renewed = began
	d.store.putPlan(now)
	return nil
}

// setPhase changes the State if its phase is still from. Otherwise it only renews the lease, and the
// caller decides again.
func (d *driver) setPhase(ctx context.Context, from Phase, set func(*State)) error {
	return d.changeState(ctx, func(s *State) error {
		if s.Phase == from {
			set(s)
		}
		return nil
	})
}

// leave gives the lease back, and pauses an interrupted rollout.
func (d *driver) leave(ctx context.Context, interrupted bool) error {
	err := d.changeState(ctx, func(s *State) error {
		s.Holder = ""
		if interrupted && s.Phase == Running {
			s.Phase, s.Reason = Paused, "interrupted by "+d.Holder
		}
		return nil
	})
	if errors.Is(err, errHeld) {
		return nil // Another program has it.
	}
	return err
}

// write executes the writes, several at once, while the lease lasts.
func (d *driver) write(ctx context.Context, writes []Write) error {
	var mutex sync.Mutex
	var problem error
	nodes := make([]Node, len(writes))
	for i, w := range writes {
		nodes[i] = w.Node
	}
	each(nodes, func(i int, _ Node) {
		w := writes[i]
		if ctx.Err() != nil || !d.leased() {
			return
		}
		progress := encode(w.Record.Progress)
		p := change{annotations: map[string]*string{RecordAnnotation: &progress}}
		if w.SetLabel {
			p.labels = map[string]*string{w.Record.Label: w.Label}
		}
		n, err := d.patch(ctx, w.Node, p)
		if err == nil {
			d.store.put(n)
		}
		if gone(err) { // Store the current Node, for the next decision.
			var found bool
			n, found, err = d.get(ctx, w.Node.Name, w.Record.Domain)
			if err == nil && found {
				d.store.put(n)
			} else if err == nil {
				d.store.remove(w.Node.Name, w.Node.Version)
			}
		}
		if err != nil {
			mutex.Lock()
			defer mutex.Unlock()
			if problem == nil || refused(err) {
				problem = err
			}
		}
	})
	return problem
}

// tell calls Progress if anything that it shows has changed.
func (d *driver) tell(r *Rollout) {
	if d.Progress == nil {
		return
	}
	seen := fmt.Sprint(r.Phase, r.Reason)
	for _, state := range NodeStates() {
		seen += fmt.Sprint(" ", r.Count(state))
	}
	if seen != d.seen {
		d.seen = seen
		d.Progress(r)
	}
}
