package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

func newDRAMPSRig(t *testing.T, f *fakeDRA, m *fakeMPS, p sharing.Profile) *rig {
	return newMPSRig(t, m, p, func(r *rig) { r.options.DRA = draOptions(r, f, &memory{}) })
}

func draMPSProfile(shares int) sharing.Profile {
	p := mpsProfile(shares)
	p.DRA.All = true
	return p
}

// refuses wants that the claim is refused, with a reason that contains the text.
func (r *rig) refuses(c dra.Claim, reason string) {
	r.t.Helper()
	if err := r.options.DRA.Claims.Prepare(r.ctx, c); err == nil || !strings.Contains(err.Error(), reason) {
		r.t.Errorf("prepare %s: %v, want %q", c, err, reason)
	}
}

// awaitRefused is refuses for a reason that applies only a moment after a start. Before, the claim is refused for
// another reason.
func (r *rig) awaitRefused(c dra.Claim, reason string) {
	r.t.Helper()
	r.await("refused: "+reason, func() bool {
		err := r.options.DRA.Claims.Prepare(r.ctx, c)
		if err == nil {
			r.t.Fatalf("%s got its devices", c)
		}
		return strings.Contains(err.Error(), reason)
	})
}

// prepares waits until the claim gets its devices, as the kubelet tries again.
func (r *rig) prepares(c dra.Claim) {
	r.t.Helper()
	err := errors.New("not asked")
	r.await("prepared: "+c.String(), func() bool {
		err = r.options.DRA.Claims.Prepare(r.ctx, c)
		return err == nil
	})
}

// TestDRAMPS offers MPS shares to claims: no daemon starts while a claim has the GPU in another mode, no share is
// given before the daemon is ready, and the daemon stays until the last share is back.
func TestDRAMPS(t *testing.T) {
	t.Parallel()
	f, m := &fakeDRA{}, newFakeMPS(false)
	r := newDRAMPSRig(t, f, m, draProfile(4))
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	slice, share := shareClaim("slice", "gpu-a-ts"), shareClaim("share", "gpu-b-mps4")
	r.must(r.options.DRA.Claims.Prepare(r.ctx, slice))
	r.policy.set(draMPSProfile(4), nil)
	r.await("wanted for the free GPU", func() bool { return m.wants() == "GPU-b" })
	r.awaitOffer(f, "gpu-a-mps4(fault) gpu-a-ts(leaving) gpu-b-mps4(fault)")
	r.refuses(share, "gpu-b-mps4 is faulty: MPS daemon: it is not started yet")
	// The scheduler allocated this before it saw the new offer; the daemon is already wanted.
	late := shareClaim("late", "gpu-b-ts")
	r.refuses(late, "its MPS daemon is still running")
	r.must(r.options.DRA.Claims.Unprepare(late))
	m.tell("GPU-b", nodereport.MPSReady, "")
	r.awaitOffer(f, "gpu-a-mps4(fault) gpu-a-ts(leaving) gpu-b-mps4")
	r.prepares(share)
	if m.wants() != "GPU-b" {
		t.Errorf("while a claim has a time slice, daemons are wanted for %s", m.wants())
	}
	r.must(r.options.DRA.Claims.Unprepare(slice))
	r.await("wanted for both", func() bool { return m.wants() == "GPU-a GPU-b" })
	m.tell("GPU-a", nodereport.MPSReady, "")
	r.awaitOffer(f, "gpu-a-mps4 gpu-b-mps4")

	r.policy.set(draProfile(4), nil)
	r.await("no longer wanted where nobody has a share", func() bool { return m.wants() == "GPU-b" })
	r.refuses(shareClaim("1", "gpu-a-ts"), "its MPS daemon is still running")
	m.tell("GPU-a", "", "")
	r.prepares(shareClaim("1", "gpu-a-ts"))
	r.awaitOffer(f, "gpu-a-ts gpu-b-mps4(leaving) gpu-b-ts(fault)")
	r.must(r.options.DRA.Claims.Prepare(r.ctx, share)) // It has it already.
	r.must(r.options.DRA.Claims.Unprepare(share))
	r.await("no longer wanted", func() bool { return m.wants() == "" })
	m.tell("GPU-b", "", "")
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
}

// TestDRAMPSLate checks that a claim for shares that are no longer offered is still prepared. Otherwise it would
// wait forever, as no other claim gets its unit.
func TestDRAMPSLate(t *testing.T) {
	t.Parallel()
	f, m := &fakeDRA{}, newFakeMPS(true)
	r := newDRAMPSRig(t, f, m, draProfile(4))
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	late := shareClaim("late", "gpu-a-mps4")
	r.prepares(late)
	r.await("wanted for it alone", func() bool { return m.wants() == "GPU-a" })
	r.must(r.options.DRA.Claims.Unprepare(late))
	r.prepares(shareClaim("next", "gpu-a-ts"))
}

// TestDRAMPSOtherShares checks that all shares of a unit have the same size.
func TestDRAMPSOtherShares(t *testing.T) {
	t.Parallel()
	f, m := &fakeDRA{}, newFakeMPS(true)
	r := newDRAMPSRig(t, f, m, draMPSProfile(4))
	r.awaitOffer(f, "gpu-a-mps4 gpu-b-mps4")
	old := shareClaim("old", "gpu-a-mps4")
	r.prepares(old)
	r.policy.set(draMPSProfile(10), nil)
	r.awaitOffer(f, "gpu-a-mps10(fault) gpu-a-mps4(leaving) gpu-b-mps10")
	r.refuses(shareClaim("new", "gpu-a-mps10"), "it has the limits of other shares yet")
	r.must(r.options.DRA.Claims.Unprepare(shareClaim("new", "gpu-a-mps10")))
	r.must(r.options.DRA.Claims.Unprepare(old))
	r.awaitOffer(f, "gpu-a-mps10 gpu-b-mps10")
	r.prepares(shareClaim("new", "gpu-a-mps10"))
}

// TestDRAMPSDaemonFails checks that while a daemon does not answer, its shares are tainted, their claims are
// reported as unhealthy, and no other claim gets one.
func TestDRAMPSDaemonFails(t *testing.T) {
	t.Parallel()
	f, m := &fakeDRA{}, newFakeMPS(true)
	r := newDRAMPSRig(t, f, m, draMPSProfile(4))
	r.awaitOffer(f, "gpu-a-mps4 gpu-b-mps4")
	c := shareClaim("1", "gpu-a-mps4")
	r.prepares(c)
	m.tell("GPU-a", nodereport.MPSFailed, "it does not answer")
	r.awaitOffer(f, "gpu-a-mps4(fault) gpu-b-mps4")
	r.await("told", func() bool {
		got, _ := r.options.DRA.Claims.Devices()
		return len(got) == 1 && got[0].Reason == "MPS daemon: it does not answer"
	})
	r.must(r.options.DRA.Claims.Prepare(r.ctx, c)) // It has it already.
	r.refuses(shareClaim("2", "gpu-a-mps4"), "MPS daemon: it does not answer")
	m.tell("GPU-a", nodereport.MPSReady, "")
	r.awaitOffer(f, "gpu-a-mps4 gpu-b-mps4")
	r.prepares(shareClaim("2", "gpu-a-mps4"))
}

// TestDRAMPSFromPlugin moves MPS shares from the device plugin to DRA and back. While a pod has a share of a GPU
// whose sharing mode stays, its daemon keeps running.
func TestDRAMPSFromPlugin(t *testing.T) {
	t.Parallel()
	f, m := &fakeDRA{}, newFakeMPS(true)
	r := newDRAMPSRig(t, f, m, mpsProfile(4))
	r.shows(8)
	r.addPod("share", 1) // Of a.
	r.policy.set(draMPSProfile(4), nil)
	r.awaitOffer(f, "gpu-b-mps4")
	r.refuses(shareClaim("early", "gpu-a-mps4"), "offered by the device plugin")
	r.must(r.options.DRA.Claims.Unprepare(shareClaim("early", "gpu-a-mps4")))
	for _, wish := range m.told()[1:] {
		if len(wish) == 0 || wish[0] != "GPU-a" {
			t.Errorf("the daemon of a pod's share was to end: %v", m.told())
		}
	}
	r.deletePod("share")
	r.awaitOffer(f, "gpu-a-mps4 gpu-b-mps4")
	c := shareClaim("1", "gpu-b-mps4")
	r.prepares(c)
	r.policy.set(mpsProfile(4), nil)
	r.shows(4)
	r.must(r.options.DRA.Claims.Unprepare(c))
	r.shows(8)
}

// TestDRAMPSWithout checks that without virgate mps, a refused claim names it as the reason.
func TestDRAMPSWithout(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{}
	r := newDRAMPSRig(t, f, nil, draMPSProfile(4))
	r.awaitOffer(f, "gpu-a-mps4(fault) gpu-b-mps4(fault)")
	r.refuses(shareClaim("1", "gpu-a-mps4"), decide.MPSUnanswered)
	r.policy.set(draProfile(4), nil)
	r.must(r.options.DRA.Claims.Unprepare(shareClaim("1", "gpu-a-mps4")))
	r.prepares(shareClaim("1", "gpu-a-ts"))
}

// TestDRAMPSAfterRestart starts where a claim has a share but no daemon runs, as after a reboot. The daemon is
// wanted at once, even if a process uses the GPU, and no other claim gets a share before it is ready.
func TestDRAMPSAfterRestart(t *testing.T) {
	t.Parallel()
	f, m := &fakeDRA{}, newFakeMPS(false)
	store := &memory{data: []byte(`{"paths": {"gpu-a": "dra", "gpu-b": "dra"},
		"claims": [{"uid": "1", "namespace": "ns", "name": "1", "results": [{"request": "r", "device": "gpu-a-mps4", "shareID": "1", "shares": 1}]}]}`)}
	r := newMPSRig(t, m, draProfile(4), func(r *rig) {
		r.options.DRA = draOptions(r, f, store)
		r.options.Processes = func(context.Context, string) ([]int, error) { return []int{4711}, nil }
	})
	r.await("wanted for the claim", func() bool { return m.wants() == "GPU-a" })
	r.must(r.options.DRA.Claims.Prepare(r.ctx, shareClaim("1", "gpu-a-mps4")))
	r.awaitRefused(shareClaim("2", "gpu-a-mps4"), "MPS daemon: it does not answer")
	r.awaitRefused(shareClaim("3", "gpu-a-ts"), "MPS daemon: it does not answer")
	m.tell("GPU-a", nodereport.MPSReady, "")
	r.prepares(shareClaim("2", "gpu-a-mps4"))
}

// TestUsersByClaims checks that a claim counts as a user of its GPU once it is prepared, before the kubelet shows
// its pod.
func TestUsersByClaims(t *testing.T) {
	t.Parallel()
	f, m := &fakeDRA{}, newFakeMPS(true)
	r := newDRAMPSRig(t, f, m, draProfile(4))
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	r.prepares(shareClaim("1", "gpu-a-ts"))
	if got := r.agent.usersOf(r.ctx, "GPU-a"); !slices.Equal(got, []string{"claim ns/1"}) {
		t.Errorf("who uses the GPU: %q", got)
	}
	if got := r.agent.usersOf(r.ctx, "GPU-b"); len(got) > 0 {
		t.Errorf("who uses the other GPU: %q", got)
	}
}

// TestDRAMPSStorm changes sharing modes while claims come and go. No daemon is wanted for a GPU that a claim has
// in another mode, and none is ended while a claim has a share.
func TestDRAMPSStorm(t *testing.T) {
	t.Parallel()
	steps := repeat.Times(375, 1500)
	f, m, random := &fakeDRA{}, newFakeMPS(true), rand.New(rand.NewPCG(3, 4))
	r := newDRAMPSRig(t, f, m, draMPSProfile(4))
	r.awaitOffer(f, "gpu-a-mps4 gpu-b-mps4")
	given, has := map[string]dra.Claim{}, map[string]bool{}
	for step := range steps {
		switch random.IntN(6) {
		case 0:
			r.policy.set([]sharing.Profile{draProfile(4), draMPSProfile(4), draMPSProfile(10), draProfile(1)}[random.IntN(4)], nil)
		case 1, 2:
			uid := fmt.Sprint("c", random.IntN(5))
			if c, is := given[uid]; is {
				r.must(r.options.DRA.Claims.Unprepare(c))
				delete(given, uid)
				delete(has, uid)
			} else {
				given[uid] = shareClaim(uid, []string{"gpu-a", "gpu-b"}[random.IntN(2)]+[]string{"", "-ts", "-mps4", "-mps10"}[random.IntN(4)])
			}
		case 3:
			r.agent.planNow(r.ctx)
		default:
			for uid, c := range given { // The kubelet does so again and again.
				err := r.options.DRA.Claims.Prepare(r.ctx, c)
				if has[uid] && err != nil {
					t.Fatalf("step %d: claim %s has lost its device: %v", step, uid, err)
				}
				has[uid] = err == nil
			}
		}
		wanted := m.wants()
		for uid := range has {
			device := given[uid].Results[0].Device
			gpu := "GPU-" + strings.TrimPrefix(dra.UnitNameOf(device), "gpu-")
			if byMPS := dra.ModeOf(device).Shares > 0; has[uid] && byMPS != strings.Contains(wanted, gpu) {
				t.Fatalf("step %d: claim %s has %s, and daemons are wanted for %q", step, uid, device, wanted)
			}
		}
	}
	for _, c := range given {
		r.must(r.options.DRA.Claims.Unprepare(c))
	}
	r.policy.set(draMPSProfile(4), nil)
	r.awaitOffer(f, "gpu-a-mps4 gpu-b-mps4")
}
