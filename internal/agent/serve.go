package agent

import (
	"context"

	"github.com/virgate/virgate/sharing"
)

// serveKubelet waits for the node and serves it until ctx has ended and endOthers,
// which ends what else runs, has returned. A successor has to wait for all of that,
// and the kubelet should not have to. With a DrainTimeout it withdraws the devices
// before.
func (a *agent) serveKubelet(ctx context.Context, endOthers func()) error {
	err := a.takeNode(ctx)
	if ctx.Err() != nil {
		return nil // Who registers now is gone in a moment.
	}
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- a.Plugin.Run(running) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	if a.DrainTimeout > 0 {
		a.drain(running)
	}
	endOthers()
	stop()
	return <-ended
}

// takeNode returns when this program may serve the node, and has taken over what
// the last one left there, or when ctx ends.
func (a *agent) takeNode(ctx context.Context) error {
	if a.Claim != nil {
		if err := a.Claim(ctx, func() { a.standby.Store(true) }); err != nil {
			return err
		}
	}
	a.serving.Store(true)
	// Only who serves may use the profile of the last run, and what is wrong with
	// the wanted one may have been seen before.
	a.look()
	if a.TakeOver != nil {
		if err := a.TakeOver(ctx); err != nil {
			return err
		}
	}
	if a.boards != nil {
		a.repartitionFirst(ctx)
		close(a.registering)
	}
	a.lookNow(ctx) // What has been found since, and what the host lacks, is in the first lists.
	return nil
}

// drain offers nothing any more and waits until the kubelet has been told so
// for long enough. What pods hold stays listed to the end.
func (a *agent) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, a.DrainTimeout)
	defer cancel()
	a.Logger.Info("draining", "timeout", a.DrainTimeout)
	a.draining.Store(true)
	a.tellAgain()
	select {
	case <-a.decidedLast: // What it decides now would bring the devices back.
	case <-ctx.Done():
	}
	last := a.state.Load().plan
	a.Plugin.Apply(sharing.Plan{Faults: last.Faults, Grants: last.Grants})
	if a.Plugin.AwaitStopped(ctx) != nil {
		for _, r := range a.Plugin.Status().Resources {
			a.Logger.Warn("not drained", "resource", r.Name, "devices", r.Devices)
		}
	}
}
