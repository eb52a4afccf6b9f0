package agent

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// startsPaused starts the program in a pause, on a node whose driver is not open.
func startsPaused(t *testing.T, f *fakeReleaser, kubelet func(r *rig) plugin.Kubelet) *pausable {
	t.Helper()
	p := &pausable{}
	p.now.Store(&forUpgrade)
	p.rig = newRig(t, func(r *rig) {
		r.node.value, r.node.err = nil, sharing.ErrNotRead
		r.options.Kubelet = kubelet(r)
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Paused = func() (release.Pause, bool) { now := p.now.Load(); return now.by, now.known }
	})
	return p
}

// resettable is a node whose GPUs can be reset.
func resettable(t *testing.T, f *fakeReleaser) *pausable {
	t.Helper()
	p := &pausable{}
	p.now.Store(&pause{known: true})
	p.rig = newRig(t, func(r *rig) {
		r.node.value[0].PCIBusID = "00000000:07:00.0"
		r.options.Kubelet = r.sight
		r.options.Releases = release.Driver{Releaser: f, Store: f, Reset: f.reset}
		r.options.Paused = func() (release.Pause, bool) { now := p.now.Load(); return now.by, now.known }
	})
	p.shows(8)
	return p
}

// TestPauseOnAFullDisk checks that a pause releases all GPUs even if the state file cannot be written, and that
// the releases are kept once it can.
func TestPauseOnAFullDisk(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	p := newPausable(t, f, pause{known: true})
	p.shows(8)
	f.setSaving(errors.New("no space left on device"))
	p.set(forUpgrade)
	p.awaitReleases(release.Released, release.Released)
	p.shows(0)
	f.setSaving(nil)
	p.await("kept", func() bool { kept, _ := f.Load(); return len(kept) == 2 })
}

// TestPauseWithoutAProfile checks that a node whose profile is rejected, and so has no plan, still closes the
// driver.
func TestPauseWithoutAProfile(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	p := &pausable{}
	p.now.Store(&pause{known: true})
	p.rig = newRig(t, func(r *rig) {
		r.policy.err = errors.New("profiles: there is no lunch")
		r.options.Kubelet = r.sight
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Paused = func() (release.Pause, bool) { now := p.now.Load(); return now.by, now.known }
	})
	p.await("GPUs read", func() bool { return len(p.agent.state.Load().gpus) == 2 && p.agent.serving.Load() })
	p.set(forUpgrade)
	p.awaitReleases(release.Released, release.Released)
}

// TestNoResetInAPause checks that no GPU is reset in a pause, as nvidia-smi would load the driver's module again.
func TestNoResetInAPause(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	p := resettable(t, f)
	p.set(forUpgrade)
	p.awaitReleases(release.Released, release.Released)
	if code, body := p.tell(http.MethodPost, "/gpu/reset?gpu=0&for=10m"); code != http.StatusBadRequest || !strings.Contains(body, "paused-for-driver-upgrade") {
		t.Errorf("answered %d %q", code, body)
	}
}

// TestResetWaitsForTheEndOfAPause checks that a reset requested before a pause is done after it.
func TestResetWaitsForTheEndOfAPause(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	p := resettable(t, f)
	p.addPod("all", 8)
	p.tell(http.MethodPost, "/gpu/reset?gpu=0&for=10m")
	p.awaitReleases(release.Waiting)
	p.set(forUpgrade)
	p.awaitReleases(release.Waiting, release.Waiting)
	p.deletePod("all")
	p.awaitReleases(release.Released, release.Released)
	p.set(pause{known: true})
	p.awaitReleases(release.Restored, release.Restored)
	if made := f.made(); strings.Count(made, "reset 0000") != 1 || strings.Index(made, "reset 0000") < strings.Index(made, "release GPU-b") {
		t.Errorf("calls %s", made)
	}
}

// TestMPSAfterARestartInAPause checks that the last run's daemons are ended while the driver stays closed.
func TestMPSAfterARestartInAPause(t *testing.T) {
	t.Parallel()
	daemons, f := newFakeMPS(false), &fakeReleaser{}
	gpu := gpus("")[0].UUID
	daemons.states[gpu] = nodereport.MPSState{ID: gpu, Phase: nodereport.MPSReady}
	p := &pausable{}
	p.now.Store(&forUpgrade)
	p.rig = newMPSRig(t, daemons, mpsProfile(4), func(r *rig) {
		r.node.value, r.node.err = nil, sharing.ErrNotRead
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Kubelet = heldBy{}
		r.options.Paused = func() (release.Pause, bool) { now := p.now.Load(); return now.by, now.known }
	})
	p.await("told to end", func() bool {
		told := daemons.told()
		return len(told) > 0 && len(told[len(told)-1]) == 0
	})
	if f.pausedFor() == nil {
		t.Error("the driver is not closed")
	}
}

// TestReleasedAndUsed checks that the driver is not closed while a pod has a GPU, even if an operator has
// released another one, and is closed once no pod has one.
func TestReleasedAndUsed(t *testing.T) {
	t.Parallel()
	for _, kept := range [][]release.Release{nil, {{GPU: "GPU-a", DriverIndex: 0, Until: time.Now().Add(time.Hour), State: release.Released}}} {
		f, held := &fakeReleaser{kept: kept}, &atomic.Bool{}
		held.Store(true)
		p := startsPaused(t, f, func(r *rig) plugin.Kubelet { return holdingFor{r.sight, held} })
		p.await("serving", p.agent.serving.Load)
		p.agent.planNow(p.ctx)
		if got := f.pausedFor(); got != nil {
			t.Errorf("with %d kept: the driver is closed while a pod has a GPU", len(kept))
		}
		held.Store(false)
		p.await("closed", func() bool { return f.pausedFor() != nil })
	}
}

// TestPauseOverIsForgotten checks that a pause that is over at the start is dropped from the state file, so that
// a later start without an API server does not find it.
func TestPauseOverIsForgotten(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{kept: []release.Release{{GPU: "GPU-a", Until: time.Now().Add(time.Hour), State: release.Released, Pause: true}}}
	p := newPausable(t, f, pause{known: true})
	p.shows(8)
	if kept, _ := f.Load(); len(kept) > 0 {
		t.Errorf("still kept: %+v", kept)
	}
}

// TestReleaseInAPause checks that the end of a pause does not end a release that an operator requested during it.
func TestReleaseInAPause(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	p := newPausable(t, f, pause{known: true})
	p.shows(8)
	p.set(forMIG)
	p.awaitReleases(release.Released, release.Released)
	p.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	p.set(pause{known: true})
	p.awaitReleases(release.Released, release.Restored)
	p.shows(4)
}

// holdingFor is a kubelet on which a pod has the second GPU, for a time.
type holdingFor struct {
	plugin.Kubelet
	held *atomic.Bool
}

func (h holdingFor) Held(ctx context.Context) ([]sharing.Allocation, error) {
	held, err := h.Kubelet.Held(ctx)
	if h.held.Load() {
		held = append(held, sharing.Allocation{Namespace: "ns", Pod: "pod", Container: "c", Resource: gpuResource, Devices: []string{"GPU-b::0"}})
	}
	return held, err
}

// TestMPSPauseWithoutAProfile checks the same with MPS enabled: virgate mps gets no request before there is a
// plan.
func TestMPSPauseWithoutAProfile(t *testing.T) {
	t.Parallel()
	daemons, f := newFakeMPS(false), &fakeReleaser{}
	p := &pausable{}
	p.now.Store(&pause{known: true})
	p.rig = newMPSRig(t, daemons, mpsProfile(4), func(r *rig) {
		r.policy.err = errors.New("profiles: there is no lunch")
		r.options.Kubelet = r.sight
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Paused = func() (release.Pause, bool) { now := p.now.Load(); return now.by, now.known }
	})
	p.await("GPUs read", func() bool { return len(p.agent.state.Load().gpus) == 2 && p.agent.serving.Load() })
	p.set(forUpgrade)
	p.awaitReleases(release.Released, release.Released)
}
