package agent

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// attend brings one board nearer to its layout, and says when to look again; 0
// for when something changes. It does one of these, in this order:
//
//  1. finish or undo a change that had begun
//  2. say that there is nothing to do, or what is in the way
//  3. withdraw the devices that have to go, and wait for the kubelet
//  4. when they are withdrawn: close them, look again who uses what, and recut
func (r *repartitioner) attend(ctx context.Context, gpu sharing.GPU, starting bool) time.Duration {
	b := r.board(gpu)
	b.settling = b.settling && !shows(gpu, b)
	if wait := b.notBefore.Sub(r.now()); b.refused || wait > 0 {
		if _, begun := r.begun(gpu.UUID); !begun {
			r.release(ctx, b)
		}
		return max(wait, 0)
	}
	if change, begun := r.begun(gpu.UUID); begun {
		return r.resume(ctx, b, change)
	}
	if !r.wish.Manage || r.wish.Name == "" {
		return r.forget(ctx, b)
	}
	cut, err := r.partitioner.Cut(ctx, gpu.UUID)
	if err != nil {
		return r.fail(ctx, b, err)
	}
	b.see(cut)
	layout, wanted, err := r.wish.Layout(cut.Board, cut.Geometry)
	switch {
	case err != nil:
		r.say(b, sharing.LayoutFailed, err.Error())
		r.release(ctx, b)
		return 0
	case !wanted:
		return r.forget(ctx, b)
	case cut.MIG != cut.Pending && layout.MIG == cut.MIG:
		return r.takeBack(ctx, b, cut)
	case cut.MIG != cut.Pending:
		return r.awaitReset(ctx, b)
	}
	return r.converge(ctx, b, cut, layout, starting)
}

// converge is attend for a board that may be changed.
func (r *repartitioner) converge(ctx context.Context, b *boardWork, cut sharing.Cut, layout mig.Layout, starting bool) time.Duration {
	gpu := b.layout.GPU
	users := r.inUse(ctx, gpu)
	b.see(users.hold(cut))
	next, err := prepareRecut(gpu, cut, layout, users)
	if err != nil {
		r.say(b, sharing.LayoutFailed, err.Error())
		r.release(ctx, b)
		return 0
	}
	switch {
	case next.change.Empty() && next.blocked == "":
		r.say(b, sharing.LayoutApplied, "")
		r.keepEnabled(gpu, cut.MIG)
		b.failures = 0
		r.release(ctx, b)
		return 0
	case next.whole && !users.known && !r.seen && r.now().Before(r.blindUntil):
		// A pod that got the board now would keep the layout waiting for as long as it
		// runs. A kubelet that cannot be read is most often one that has just begun.
		r.say(b, sharing.LayoutPending, next.blocked)
		r.offer(ctx, b, next.kept)
		return drainInterval
	case next.blocked != "" && (r.wish.WhenBusy == sharing.Refuse || !users.known && (next.whole || next.change.Empty())):
		r.say(b, sharing.LayoutBlocked, next.blocked)
		r.release(ctx, b)
		maps.Copy(r.doubtful, users.doubtful)
		return r.recheck
	case next.change.Empty(), next.whole:
		r.say(b, sharing.LayoutBlocked, next.blocked)
		if !b.settling {
			// What is in the way is not given to another pod when it is free.
			r.offer(ctx, b, next.kept)
		}
		return r.recheck
	case starting && len(next.change.Doomed) > 0:
		r.say(b, sharing.LayoutPending, "waits until devices can be withdrawn")
		// What nobody has been told of yet need not be withdrawn later.
		r.offer(ctx, b, next.kept)
		return r.recheck
	}

	r.say(b, sharing.LayoutPending, "devices are being withdrawn")
	b.blocked = next.change.Blocked
	r.offer(ctx, b, next.kept)
	if !starting && !r.withdrawal.Withdrawn(next.doomed...) {
		return drainInterval
	}
	r.close(b, next.doomed)
	again, err := r.lookTwice(ctx, b, layout)
	if err != nil {
		return r.fail(ctx, b, err)
	}
	if !reflect.DeepEqual(next, again) || !starting && !r.withdrawal.Withdrawn(next.doomed...) {
		r.reopen(b)
		return drainInterval
	}
	return r.recut(ctx, b, next.recut)
}

// lookTwice is the in-use check that counts: no unit that it finds free can be
// granted any more.
func (r *repartitioner) lookTwice(ctx context.Context, b *boardWork, layout mig.Layout) (prepared, error) {
	cut, err := r.partitioner.Cut(ctx, b.layout.GPU)
	if err != nil {
		return prepared{}, err
	}
	users := r.inUse(ctx, b.layout.GPU)
	return prepareRecut(b.layout.GPU, cut, layout, users)
}

// prepared is what is to be done to a board, and what speaks against it.
type prepared struct {
	change mig.Change
	recut  sharing.Recut
	// kept are the units that stay offered, those in the way not among them; doomed those that have to be withdrawn
	// first.
	kept   map[string]bool
	doomed []string
	// blocked says what is in the way; whole that it is somebody who uses the
	// board as a whole, so that nothing can be done now.
	blocked string
	whole   bool
}

// prepareRecut is pure.
func prepareRecut(gpu string, cut sharing.Cut, layout mig.Layout, users use) (prepared, error) {
	cut = users.mark(cut)
	var p prepared
	var err error
	if p.change, err = mig.Repartition(cut.Geometry, cut.MIG, cut.Instances, layout); err != nil {
		return prepared{}, err
	}
	if !p.change.Complete() {
		p.blocked = users.explain(p.change.Blocked)
	}
	mode := cut.MIG
	for _, step := range p.change.Steps {
		switch step.Action {
		case mig.EnableMIG:
			mode = true
		case mig.DisableMIG:
			mode = false
		}
	}
	p.doomed = slices.Clone(p.change.Doomed)
	if mode != cut.MIG {
		p.doomed = append(p.doomed, gpu)
		if why := users.whole(gpu, cut); why != "" {
			p.blocked, p.whole = why, true
		}
	}
	p.kept = map[string]bool{}
	for _, uuid := range p.change.Kept {
		p.kept[uuid] = true
	}
	for _, b := range p.change.Blocked {
		delete(p.kept, b.UUID)
	}
	p.recut = sharing.Recut{
		GPU: gpu, Before: cut.Arrangement(), After: sharing.Arrangement{MIG: mode, Partitions: p.change.Result},
	}
	return p, nil
}

// forget is for a board that nothing is wanted of.
func (r *repartitioner) forget(ctx context.Context, b *boardWork) time.Duration {
	b.layout.State, b.layout.Reason = "", ""
	r.keepEnabled(b.layout.GPU, false)
	r.release(ctx, b)
	return 0
}

// fail puts the board off: it stays, or goes on being offered, as it is.
func (r *repartitioner) fail(ctx context.Context, b *boardWork, err error) time.Duration {
	state, reason := sharing.LayoutFailed, err.Error()
	switch {
	case errors.Is(err, sharing.ErrNoPermission):
		reason = "Virgate may not change how GPUs are cut: its container must be privileged, or run as root with CAP_SYS_ADMIN and /dev/nvidia-caps: " + reason
	case errors.Is(err, sharing.ErrInUse):
		state = sharing.LayoutBlocked
	case errors.Is(err, sharing.ErrResetRequired):
		state = sharing.LayoutResetRequired
	}
	r.say(b, state, reason)
	if _, begun := r.begun(b.layout.GPU); !begun {
		r.release(ctx, b)
	}
	if errors.Is(err, sharing.ErrNoPermission) {
		b.refused = true
		return 0
	}
	b.failures++
	longest := longestRetry
	if b.undone {
		longest = longestUndone
	}
	b.undone = false
	wait := retryAfter(b.failures, longest)
	b.notBefore = r.now().Add(wait)
	return wait
}

// say notes the state, and logs it when it is news.
func (r *repartitioner) say(b *boardWork, state sharing.LayoutState, reason string) {
	if b.layout.State == state && b.layout.Reason == reason {
		return
	}
	b.layout.State, b.layout.Reason = state, reason
	r.publish()
	log := r.log.With("gpu", b.layout.GPU, "layout", b.layout.Wanted, "state", state)
	if state == sharing.LayoutPending {
		log.Info("MIG layout", "reason", reason)
		return
	}
	// Each try has its pending states; that it ended like the last is no news.
	if last := b.said; last == (saying{state, reason}) {
		return
	}
	b.said = saying{state, reason}
	switch state {
	case sharing.LayoutFailed, sharing.LayoutResetRequired:
		log.Error("MIG layout not reached", "reason", reason)
	case sharing.LayoutBlocked:
		log.Warn("MIG layout waits", "reason", reason)
	default:
		log.Info("MIG layout reached")
	}
}

// see notes how the board is cut.
func (b *boardWork) see(cut sharing.Cut) {
	b.layout.MIG, b.layout.Slots, b.layout.Instances = cut.MIG, cut.Geometry.Slots, cut.Instances
	b.layout.Unreachable = unreachable(cut)
}

// shows says that the inventory has the board as it was left.
func shows(gpu sharing.GPU, b *boardWork) bool {
	shown := map[string]bool{}
	for _, p := range gpu.Partitions {
		shown[p.UUID] = true
	}
	return gpu.MIG == b.layout.MIG && maps.Equal(shown, b.left)
}
