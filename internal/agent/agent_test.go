package agent

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestFollowsBothInputs(t *testing.T) {
	r := newRig(t, nil)
	r.shows(8)
	r.policy.set(profile(10), nil)
	r.shows(20)
	r.node.set(gpus("", "XID 79"), nil)
	r.shows(10)
	r.node.set(gpus("", "", ""), nil)
	r.shows(30)
}

func TestRejectedProfileLeavesTheLastGoodOne(t *testing.T) {
	r := newRig(t, nil)
	r.shows(8)
	r.policy.set(sharing.Profile{}, errors.New("p.yaml:3: replicas: must be at least 1"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	r.node.set(gpus("", "", ""), nil)
	r.shows(12) // The GPUs' changes are planned with the last good profile.
	r.policy.set(profile(5), nil)
	r.shows(15)
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 1")
}

func TestUnreadableGPUsLeaveThePlan(t *testing.T) {
	r := newRig(t, nil)
	r.shows(8)
	r.node.set(nil, errors.New("driver gone"))
	r.awaitBody("/metrics", 200, "virgate_inventory_last_read_successful 0")
	r.policy.set(profile(3), nil)
	r.shows(6)
}

func TestStandsByUntilClaimed(t *testing.T) {
	claimed := make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.Claim = func(ctx context.Context, standBy func()) error {
			standBy()
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	r.awaitBody("/plan", 200, `"devices": 8`)
	r.awaitBody("/readyz", 200, "ok")
	if n := r.kubelet.Snapshot().Resources[gpuResource].Registrations; n != 0 {
		t.Errorf("%d registrations while standing by", n)
	}
	close(claimed)
	r.shows(8)
}

// TestTakesOverBeforeItLists has the last program's fatal error come into the
// inventory when all else has been planned.
func TestTakesOverBeforeItLists(t *testing.T) {
	r := newRig(t, func(r *rig) {
		r.options.TakeOver = func(ctx context.Context) error {
			<-r.node.started
			<-r.policy.started
			for len(r.agent.changed) > 0 {
				r.agent.lookNow(ctx)
			}
			r.agent.lookNow(ctx)
			r.node.mu.Lock()
			defer r.node.mu.Unlock()
			r.node.value = gpus("", "fatal") // Without saying so.
			return nil
		}
	})
	r.shows(4)
	if lists := r.kubelet.Snapshot().Resources[gpuResource].Lists; lists != 1 {
		t.Errorf("the kubelet was sent %d lists", lists)
	}
}

func TestDrainsBeforeItEnds(t *testing.T) {
	var end func()
	r := newRig(t, func(r *rig) {
		r.options.DrainTimeout = 30 * time.Second
		end = r.endable()
	})
	r.shows(8)
	end()
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpuResource].Capacity == 0 && !k.Resources[gpuResource].Connected
	}); err != nil {
		t.Error(err)
	}
}

func TestLookAgain(t *testing.T) {
	look := make(chan struct{})
	r := newRig(t, func(r *rig) { r.options.Look = look })
	r.shows(8)
	r.policy.mu.Lock()
	r.policy.value = profile(2) // Without saying so.
	r.policy.mu.Unlock()
	look <- struct{}{}
	r.shows(4)
}

func TestBackgroundFailureEndsRun(t *testing.T) {
	failure := errors.New("socket gone")
	err := Run(t.Context(), Options{
		Node: fakeNode{newInput(gpus(""), nil)}, Policy: fakePolicy{newInput(profile(1), nil)},
		Plugin:     plugin.NewManager(plugin.Options{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)}),
		Logger:     slog.New(slog.DiscardHandler),
		Background: []func(context.Context) error{func(context.Context) error { return failure }},
	})
	if !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
}
