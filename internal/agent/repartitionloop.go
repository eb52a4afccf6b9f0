package agent

import (
	"context"
	"time"

	"github.com/virgate/virgate/sharing"
)

// newRepartition makes the agent's repartitioner; nil where nothing can cut.
func (a *agent) newRepartition() *repartitioner {
	if a.Partitioner == nil {
		return nil
	}
	r := newRepartitioner(a.Partitioner, a.Journal, a.Plugin, a.Logger)
	r.show, r.told = a.lookNow, a.tellAgain
	if a.Holders != nil {
		r.holders = a.Holders.Held
	}
	if a.Refresh != nil {
		r.refresh = a.Refresh
	}
	return r
}

// repartitionAgain wakes the repartitioner after the loop has decided. It does
// not wait.
func (a *agent) repartitionAgain() {
	select {
	case a.repartitionWake <- struct{}{}:
	default:
	}
}

// repartitionFirst brings the boards as far as it can before anything is
// registered: what a crash left is finished or undone, and what a reboot or a
// reset took away is made again, so that the pods which had it are admitted
// again. It returns when that is done, or could not be, or ctx ends.
func (a *agent) repartitionFirst(ctx context.Context) {
	for !a.state.Load().planned {
		select {
		case <-a.repartitionWake:
		case <-ctx.Done():
			return
		}
	}
	a.leaveBehind(ctx, func(ctx context.Context) {
		// Each pass may finish one change of a board and begin another.
		for range startPasses {
			if again := a.repartitionRound(ctx, true); again == 0 || again > soon {
				return
			}
		}
	})
}

// startPasses bounds the work on boards before the node is registered.
const startPasses = 8

// repartition brings the boards to their layouts from then on, until ctx ends.
func (a *agent) repartition(ctx context.Context) error {
	select {
	case <-a.registering:
	case <-ctx.Done():
		return nil
	}
	a.leaveBehind(ctx, func(ctx context.Context) {
		for ctx.Err() == nil {
			again := a.repartitionRound(ctx, false)
			var later <-chan time.Time
			if again > 0 {
				later = time.After(again)
			}
			select {
			case <-a.repartitionWake:
			case <-later:
			case <-ctx.Done():
			}
		}
	})
	return nil
}

func (a *agent) repartitionRound(ctx context.Context, starting bool) time.Duration {
	s := a.state.Load()
	var wish sharing.Repartition
	if s.profile != nil {
		wish = s.profile.Profile.MIG
	}
	return a.boards.round(ctx, s.gpus, wish, starting)
}

// leaveBehind does something that may be stuck in a driver call when ctx ends,
// and then waits for it no longer than it may take. What had begun is in the
// journal.
func (a *agent) leaveBehind(ctx context.Context, do func(context.Context)) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		do(ctx)
	}()
	select {
	case <-ended:
		return
	case <-ctx.Done():
	}
	select {
	case <-ended:
	case <-time.After(leaveAfter):
		a.Logger.Warn("driver left behind", "error", "a call that changes MIG partitions is not answered")
	}
}

// leaveAfter is how long a stuck driver call is waited for at the end.
const leaveAfter = 500 * time.Millisecond

// holdBack takes out of the plan what must not be offered while boards are being
// changed. The units stay known, so that their devices are withdrawn in the usual
// way.
func (a *agent) holdBack(plan sharing.Plan) sharing.Plan {
	if a.boards == nil {
		return plan
	}
	now := a.boards.offered.Load()
	if len(now.only) == 0 && len(now.parts) == 0 {
		return plan
	}
	held := func(unit sharing.Unit) bool {
		only, limited := now.only[unit.GPU]
		return limited && !only[unit.ID] || !unit.Partition() && now.parts[unit.GPU]
	}
	var resources []sharing.Resource
	for _, r := range plan.Resources {
		gone := map[string]bool{}
		var units []sharing.Unit
		for _, unit := range r.Units {
			if held(unit) {
				gone[unit.ID] = true
				continue
			}
			units = append(units, unit)
		}
		var devices []sharing.Device
		for _, device := range r.Devices {
			if !gone[device.Unit] {
				devices = append(devices, device)
			}
		}
		r.Units, r.Devices = units, devices
		if len(devices) > 0 {
			resources = append(resources, r)
		}
	}
	plan.Resources = resources
	return plan
}

// layouts are the boards that Virgate cuts, by index; none where it cuts none.
func (a *agent) layouts() []sharing.BoardLayout {
	if a.boards == nil {
		return nil
	}
	return *a.boards.status.Load()
}
