package agent

import (
	"context"
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// awaitReset is for a board that should have the mode that is to come: its
// devices are withdrawn so that somebody can reset it.
func (r *repartitioner) awaitReset(ctx context.Context, b *boardWork) time.Duration {
	r.say(b, sharing.LayoutResetRequired, awaitsReset)
	r.reopen(b)
	r.offer(ctx, b, map[string]bool{})
	return r.recheck
}

const awaitsReset = "another MIG mode waits for a reset of the GPU, which Virgate does not do"

// takeBack is for a board with another mode to come that it should not have: the
// next reboot would bring it. While somebody uses the board nothing is asked of
// the driver.
func (r *repartitioner) takeBack(ctx context.Context, b *boardWork, cut sharing.Cut) time.Duration {
	users := r.inUse(ctx, b.layout.GPU)
	if users.whole(b.layout.GPU, cut) != "" || anyBusy(users.mark(cut)) {
		r.say(b, sharing.LayoutResetRequired, awaitsReset)
		r.release(ctx, b)
		return r.recheck
	}
	step := mig.Step{Action: mig.DisableMIG, GI: -1, CI: -1}
	if cut.MIG {
		step.Action = mig.EnableMIG
	}
	if err := r.partitioner.Make(ctx, b.layout.GPU, step); err != nil {
		return r.fail(ctx, b, err)
	}
	return soon
}
