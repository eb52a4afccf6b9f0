package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// fakeReleaser releases and resets GPUs, and keeps releases for a restart.
type fakeReleaser struct {
	mu sync.Mutex
	// kept is the list last saved; saving is the error of Save.
	kept   []release.Release
	saving error
	// calls lists calls to Release, Reset and Restore; fail has an error for each, used once.
	calls []string
	fail  map[string]error
	// withdrawn reports whether the GPU is withdrawn; nil skips the check.
	withdrawn func(gpu string) bool
	// meanwhile runs before a call returns; may be nil.
	meanwhile func(ctx context.Context, call string)
	// early are the GPUs of KeepReleased.
	early map[string]int
	// paused are the GPUs of Pause, until Resume.
	paused []string
	// opensAll plays a driver that opens all GPUs at once; closed are the released ones.
	opensAll bool
	closed   []string
}

func (f *fakeReleaser) Load() ([]release.Release, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.kept), nil
}

func (f *fakeReleaser) setSaving(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.saving = err
}

func (f *fakeReleaser) Save(list []release.Release) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.saving == nil {
		f.kept = slices.Clone(list)
	}
	return f.saving
}

func (f *fakeReleaser) KeepReleased(gpus map[string]int) { f.early = gpus }

func (f *fakeReleaser) OpensAll() bool { return f.opensAll }

func (f *fakeReleaser) ClosedFor() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.opensAll {
		return nil
	}
	return slices.Clone(f.closed)
}

func (f *fakeReleaser) Pause(gpus []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.paused = append([]string{}, slices.Sorted(slices.Values(gpus))...)
}

func (f *fakeReleaser) Resume() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.paused = nil
}

// pausedFor are the GPUs of the current Pause; nil without one.
func (f *fakeReleaser) pausedFor() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.paused
}

func (f *fakeReleaser) call(ctx context.Context, name string) error {
	if f.meanwhile != nil {
		f.meanwhile(ctx, name)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, name)
	err := f.fail[name]
	delete(f.fail, name)
	return err
}

func (f *fakeReleaser) made() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.calls, ", ")
}

func (f *fakeReleaser) Release(ctx context.Context, gpu string) (int, error) {
	if f.withdrawn != nil && !f.withdrawn(gpu) {
		gpu += " too early"
	}
	err := f.call(ctx, "release "+gpu)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		f.closed = append(f.closed, gpu)
	}
	return 7, err
}

func (f *fakeReleaser) Restore(ctx context.Context, gpu string, wasReset bool) error {
	f.mu.Lock()
	f.closed = slices.DeleteFunc(f.closed, func(closed string) bool { return closed == gpu })
	f.mu.Unlock()
	if wasReset {
		gpu += " reset"
	}
	return f.call(ctx, "restore "+gpu)
}

func (f *fakeReleaser) reset(ctx context.Context, busID string) error {
	return cmp.Or(f.call(ctx, "reset "+busID), ctx.Err())
}

// releasing is a rig with two GPUs of four devices each.
func releasing(t *testing.T, f *fakeReleaser, mayReset bool) *rig {
	t.Helper()
	r := newRig(t, func(r *rig) {
		r.node.value[0].PCIBusID = "00000000:07:00.0"
		r.options.Kubelet = r.sight
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		if mayReset {
			r.options.Releases.Reset = f.reset
		}
	})
	return r
}

// tell sends a request to the control socket's handler.
func (r *rig) tell(method, path string) (code int, body string) {
	recorder := httptest.NewRecorder()
	r.agent.releases.Handler().ServeHTTP(recorder, httptest.NewRequest(method, path, nil))
	return recorder.Code, recorder.Body.String()
}

// awaitRelease waits until the only release is as wanted.
func (r *rig) awaitRelease(what string, wanted func(release.Release) bool) {
	r.t.Helper()
	r.until("a release "+what, func() error {
		var list []release.Release
		_, body := r.tell(http.MethodGet, "/gpu")
		if err := json.Unmarshal([]byte(body), &list); err != nil || len(list) != 1 || !wanted(list[0]) {
			return fmt.Errorf("releases are %s", body)
		}
		return nil
	})
}

func in(state release.State) func(release.Release) bool {
	return func(r release.Release) bool { return r.State == state }
}

// TestReleaseRefused checks which requests are refused, with the reason, and that they have no effect.
func TestReleaseRefused(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	r := releasing(t, f, false)
	r.shows(8)
	for _, test := range []struct{ path, says string }{
		{"/gpu/release?gpu=5&for=1m", "no such GPU: 5"},
		{"/gpu/release?gpu=all&for=1m", `gpu: "all" names no GPU or partition`},
		{"/gpu/release?for=1m", `gpu: "" names no GPU or partition`},
		{"/gpu/release?gpu=0", `for: expected a time such as 10m (got "")`},
		{"/gpu/release?gpu=0&for=10", `for: expected a time such as 10m (got "10")`},
		{"/gpu/release?gpu=0&for=-1s", "for: -1s is not more than 0 and at most 24h0m0s"},
		{"/gpu/release?gpu=0&for=24h1s", "for: 24h0m1s is not more than 0 and at most 24h0m0s"},
		{"/gpu/restore?gpu=0", "GPU 0 is not released"},
		{"/gpu/reset?gpu=0&for=1m", "this Virgate may not reset GPUs: it requires virgate run --allow-gpu-reset"},
	} {
		if code, body := r.tell(http.MethodPost, test.path); code != http.StatusBadRequest || !strings.HasPrefix(body, test.says) {
			t.Errorf("%s: %d %q, want %q", test.path, code, body, test.says)
		}
	}
	if code, _ := r.tell(http.MethodPost, "/gpu/lend?gpu=0"); code != http.StatusNotFound {
		t.Errorf("an unknown verb: %d", code)
	}
	if code, _ := r.tell(http.MethodGet, "/gpu/release?gpu=0&for=1m"); code != http.StatusMethodNotAllowed {
		t.Errorf("by reading: %d", code)
	}
	f.saving = errors.New("the disk is full")
	if code, body := r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1m"); code != http.StatusBadRequest || !strings.Contains(body, "keep the release for a restart: the disk is full") {
		t.Errorf("not kept: %d %q", code, body)
	}
	if _, body := r.tell(http.MethodGet, "/gpu"); body != "[]\n" {
		t.Errorf("there are releases: %s", body)
	}
	r.agent.planNow(r.ctx)
	if plan := r.agent.state.Load().plan; len(plan.Resources[0].Units) != 2 || f.made() != "" {
		t.Errorf("units %v, calls %s", plan.Resources[0].Units, f.made())
	}
}

// TestReleaseStandby checks that a standby releases nothing.
func TestReleaseStandby(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	r := newRig(t, func(r *rig) {
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
			standBy()
			<-ctx.Done()
			return ctx.Err()
		}
	})
	r.awaitBody("/readyz", http.StatusOK, "ok")
	if code, body := r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1m"); code != http.StatusBadRequest || !strings.Contains(body, "does not serve the node") {
		t.Errorf("%d %q", code, body)
	}
}

// TestReleaseIsTriedAgain checks that a GPU that cannot be released is withdrawn and tried again, that a newer
// request's time counts, and that the GPU comes back when it is over.
func TestReleaseIsTriedAgain(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{fail: map[string]error{"release GPU-a": errors.New("a call hangs")}}
	r := releasing(t, f, false)
	f.withdrawn = func(gpu string) bool { return r.agent.Plugin.Withdrawn(gpu) }
	r.shows(8)
	r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	r.awaitRelease("that waits for the driver", func(r release.Release) bool { return slices.Equal(r.Waits, []string{"a call hangs"}) })
	r.shows(4)
	r.awaitRelease("at the next try", in(release.Released))
	if list := r.agent.releases.Reservations(); len(list) != 1 || !strings.HasPrefix(list[0].Text, "GPU 0 (GPU-a) is not offered: it is released until ") {
		t.Errorf("reservations %+v", list)
	}
	if gpus, _, _ := r.agent.migInputs(); len(gpus) != 1 || gpus[0].UUID != "GPU-b" {
		t.Errorf("MIG layouts are changed of %v", gpus)
	}
	r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1ms")
	r.awaitRelease("that is over", in(release.Restored))
	r.shows(8)
	if f.made() != "release GPU-a, release GPU-a, restore GPU-a" || len(f.kept) != 0 {
		t.Errorf("calls %s, kept %v", f.made(), f.kept)
	}
}

// TestReleaseWaitsForMPS checks that a GPU is closed only after virgate mps keeps it closed, by the driver's
// index.
func TestReleaseWaitsForMPS(t *testing.T) {
	t.Parallel()
	f, daemons := &fakeReleaser{}, newFakeMPS(true)
	daemons.slow = true
	r := newRig(t, func(r *rig) {
		r.node.value[0].DriverIndex = "5"
		r.options.Kubelet = r.sight
		r.options.Releases, r.options.MPS = release.Driver{Releaser: f, Store: f}, daemons
	})
	r.shows(8)
	r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	r.awaitRelease("that waits", func(r release.Release) bool {
		return slices.Equal(r.Waits, []string{"virgate mps, which has its daemon or may open it"})
	})
	if told := daemons.keptClosed(); told["GPU-a"] != 5 || len(told) != 1 || f.made() != "" {
		t.Errorf("told to keep %v closed, calls %s", told, f.made())
	}
	daemons.change(func() { daemons.slow = false })
	r.awaitRelease("when it is closed", in(release.Released))
	r.tell(http.MethodPost, "/gpu/restore?gpu=0")
	r.awaitRelease("that is over", in(release.Restored))
	r.until("nothing to be kept closed", func() error {
		if told := daemons.keptClosed(); len(told) > 0 {
			return fmt.Errorf("told to keep %v closed", told)
		}
		return nil
	})
}

// TestReleaseAgainAtItsEnd checks that a GPU being reopened does not count as released, and is released again if
// that is requested meanwhile.
func TestReleaseAgainAtItsEnd(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	r := releasing(t, f, false)
	asked := false
	f.meanwhile = func(_ context.Context, call string) {
		if call == "restore GPU-a" && !asked {
			asked = true
			if code, body := r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h"); code != http.StatusOK || !strings.Contains(body, `"waiting"`) {
				t.Errorf("asked for while it ends: %d %s", code, body)
			}
		}
	}
	r.shows(8)
	r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	r.awaitRelease("at first", in(release.Released))
	r.tell(http.MethodPost, "/gpu/restore?gpu=0")
	r.awaitRelease("anew", func(now release.Release) bool {
		return now.State == release.Released && f.made() == "release GPU-a, restore GPU-a, release GPU-a"
	})
	r.shows(4)
}

// TestResetCutShort checks that a reset interrupted by the program's end is kept for the next run, and not
// reported as failed.
func TestResetCutShort(t *testing.T) {
	t.Parallel()
	under := make(chan struct{})
	f := &fakeReleaser{meanwhile: func(ctx context.Context, call string) {
		if strings.HasPrefix(call, "reset") {
			close(under)
			<-ctx.Done()
		}
	}}
	t.Cleanup(func() { // When the program has ended.
		if len(f.kept) != 1 || !f.kept[0].Reset || f.kept[0].Problem != "" || !f.kept[0].Until.After(time.Now()) {
			t.Errorf("kept are %+v", f.kept)
		}
	})
	r := releasing(t, f, true)
	r.shows(8)
	r.tell(http.MethodPost, "/gpu/reset?gpu=0&for=1h")
	select {
	case <-under:
	case <-r.ctx.Done():
		t.Error("it is not reset")
	}
}

// TestReleaseReset checks the order of a reset, and that the GPU comes back in any case.
func TestReleaseReset(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{fail: map[string]error{"reset 00000000:07:00.0": fmt.Errorf("%w by another client", mig.ErrInUse)}}
	r := releasing(t, f, true)
	r.agent.OpenedBy = func(minor int) string { return fmt.Sprintf(": dcgm (PID 812) has %d", minor) }
	r.shows(8)
	r.tell(http.MethodPost, "/gpu/reset?gpu=0&for=1h")
	r.awaitRelease("with a problem", func(r release.Release) bool {
		return r.State == release.Restored && !r.WasReset && r.Problem == "in use by another client, by a program that is in no list of the driver: dcgm (PID 812) has 0"
	})
	r.shows(8)
	r.tell(http.MethodPost, "/gpu/reset?gpu=0&for=1h")
	r.awaitRelease("with a reset", func(r release.Release) bool { return r.State == release.Restored && r.WasReset && r.Problem == "" })
	r.shows(8)
	const one = "release GPU-a, reset 00000000:07:00.0, restore GPU-a"
	if f.made() != one+", "+one+" reset" {
		t.Errorf("calls %s", f.made())
	}
}

// TestReleaseOverARestart checks that a kept release is known before the driver is opened, and that a kept reset
// is done only if resets are still allowed.
func TestReleaseOverARestart(t *testing.T) {
	t.Parallel()
	waiting := &fakeReleaser{kept: []release.Release{{GPU: "GPU-a", DriverIndex: -1, Until: time.Now().Add(time.Hour), State: release.Waiting}}}
	releasing(t, waiting, false).awaitRelease("after it had waited", in(release.Released))
	if len(waiting.early) > 0 {
		t.Errorf("before it was withdrawn, %v is not looked up", waiting.early)
	}
	for _, mayReset := range []bool{false, true} {
		f := &fakeReleaser{kept: []release.Release{{
			GPU: "GPU-a", Index: 0, PCIBusID: "00000000:07:00.0", DriverIndex: 3, Until: time.Now().Add(time.Hour), State: release.Released, Reset: true,
		}}}
		var opened atomic.Bool
		r := newRig(t, func(r *rig) {
			r.options.Kubelet = r.sight
			r.options.Releases = release.Driver{Releaser: f, Store: f}
			if mayReset {
				r.options.Releases.Reset = f.reset
			}
			r.options.Node = watchedNode{r.node, func() { opened.Store(f.early["GPU-a"] == 3) }}
		})
		if mayReset {
			r.awaitRelease("with a reset", func(r release.Release) bool { return r.State == release.Restored && r.WasReset })
			r.shows(8)
		} else {
			r.awaitRelease("kept", in(release.Released))
			r.shows(4)
		}
		if !opened.Load() {
			t.Error("the driver was opened before the release was known")
		}
	}
}

// watchedNode calls watched when it is watched.
type watchedNode struct {
	fakeNode
	watched func()
}

func (n watchedNode) Watch(ctx context.Context, changed func()) error {
	n.watched()
	return n.fakeNode.Watch(ctx, changed)
}

// TestSecondRelease checks that a release waits for programs that have its GPU open, even if the driver cannot
// list processes because of another release.
func TestSecondRelease(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{opensAll: true}
	var mu sync.Mutex
	programs := []string{"nvidia-persiste (PID 7)", "python (PID 812)"}
	r := newRig(t, func(r *rig) {
		r.options.Kubelet = r.sight
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Processes = func(_ context.Context, gpu string) ([]int, error) {
			if len(f.ClosedFor()) > 0 {
				return nil, sharing.ErrReleased
			}
			return nil, nil
		}
		r.options.Programs = func(int) ([]string, error) {
			mu.Lock()
			defer mu.Unlock()
			return programs, nil
		}
	})
	r.shows(8)
	second := func(what string, wanted func(release.Release) bool) {
		r.until("the second release "+what, func() error {
			list := r.agent.releases.List()
			if len(list) != 2 || !wanted(list[1]) {
				return fmt.Errorf("releases are %+v", list)
			}
			return nil
		})
	}
	r.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	r.awaitRelease("of the first", in(release.Released))
	r.tell(http.MethodPost, "/gpu/release?gpu=1&for=1h")
	second("that waits", func(r release.Release) bool {
		return slices.Equal(r.Waits, []string{"the program python (PID 812)"})
	})
	mu.Lock()
	programs = programs[:1]
	mu.Unlock()
	second("when it has ended, though a daemon watches the GPU", in(release.Released))
}

// TestReleaseHolders checks that a release names what it waits for: processes that the driver lists, and claims.
func TestReleaseHolders(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	pids := []int{4242}
	var mu sync.Mutex
	r := newRig(t, func(r *rig) {
		r.options.Kubelet = r.sight
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Processes = func(_ context.Context, gpu string) ([]int, error) {
			mu.Lock()
			defer mu.Unlock()
			return pids, nil
		}
	})
	r.shows(8)
	r.tell(http.MethodPost, "/gpu/release?gpu=1&for=1h")
	r.awaitRelease("that waits for a process", func(r release.Release) bool { return slices.Equal(r.Waits, []string{"process 4242"}) })
	if f.made() != "" {
		t.Errorf("calls %s", f.made())
	}
	mu.Lock()
	pids = nil
	mu.Unlock()
	r.awaitRelease("when it has ended", in(release.Released))

	claims := newRig(t, func(r *rig) {
		r.options.Kubelet = claiming{r.sight}
		r.options.Releases = release.Driver{Releaser: &fakeReleaser{}, Store: &fakeReleaser{}}
	})
	claims.shows(8)
	claims.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	claims.awaitRelease("that waits for claims", func(r release.Release) bool {
		return slices.Equal(r.Waits, []string{"ns/odd (claim c, of unknown GPUs)", "ns/pod (claim c)"})
	})

	blind := newRig(t, func(r *rig) {
		r.options.Releases = release.Driver{Releaser: &fakeReleaser{}, Store: &fakeReleaser{}}
	})
	blind.shows(8)
	blind.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	blind.awaitRelease("that cannot be judged", func(r release.Release) bool {
		return slices.Equal(r.Waits, []string{"what pods hold cannot be read: no kubelet"})
	})
}

// claiming is a kubelet on which pods have the first GPU by claims.
type claiming struct{ plugin.Kubelet }

func (c claiming) Held(ctx context.Context) ([]sharing.Allocation, error) {
	held, err := c.Kubelet.Held(ctx)
	return append(held,
		sharing.Allocation{Namespace: "ns", Pod: "pod", Container: "c", Resource: "gpu.nvidia.com", Devices: []string{"GPU-a"}, Claim: "c"},
		sharing.Allocation{Namespace: "ns", Pod: "odd", Container: "c", Resource: "gpu.example.com", Devices: []string{"GPU-a"}, Claim: "c", AnyGPU: true}), err
}

// The pauses of mig-manager and of a driver upgrade.
var (
	forMIG     = pause{release.Pause{Label: "nvidia.com/gpu.deploy.device-plugin", Value: "paused-for-mig-change"}, true}
	forUpgrade = pause{release.Pause{Label: "nvidia.com/gpu.deploy.client", Value: "mine_paused-for-driver-upgrade"}, true}
)

// forMIGText is the text of the pause forMIG.
const forMIGText = "no GPU is offered while mig-manager changes MIG layouts: the Node's label nvidia.com/gpu.deploy.device-plugin is paused-for-mig-change"

// pausable is a rig on which another program may need the GPUs.
type pausable struct {
	*rig
	now atomic.Pointer[pause]
}

func newPausable(t *testing.T, f *fakeReleaser, at pause) *pausable {
	t.Helper()
	p := &pausable{}
	p.now.Store(&at)
	p.rig = newRig(t, func(r *rig) {
		r.options.Kubelet = r.sight
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Paused = func() (release.Pause, bool) { now := p.now.Load(); return now.by, now.known }
	})
	return p
}

func (p *pausable) set(now pause) {
	p.now.Store(&now)
	p.agent.requestPlan()
}

// awaitReleases waits until the releases are in these states, by index.
func (p *pausable) awaitReleases(states ...release.State) {
	p.t.Helper()
	p.until("releases", func() error {
		var now []release.State
		for _, r := range p.agent.releases.List() {
			now = append(now, r.State)
		}
		if !slices.Equal(now, states) {
			return fmt.Errorf("they are %v, want %v", now, states)
		}
		return nil
	})
}

// TestPause checks that every GPU, also a new one, is withdrawn and closed while mig-manager needs them, that no
// MIG layout changes meanwhile, and that the GPUs come back afterwards.
func TestPause(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	p := newPausable(t, f, pause{known: true})
	f.withdrawn = func(gpu string) bool { return p.agent.Plugin.Withdrawn(gpu) }
	p.shows(8)
	p.set(forMIG)
	p.awaitReleases(release.Released, release.Released)
	p.shows(0)
	if gpus, _, err := p.agent.migInputs(); len(gpus) != 0 || err != nil {
		t.Errorf("MIG layouts are changed of %v, %v", gpus, err)
	}
	if got := f.pausedFor(); !slices.Equal(got, []string{"GPU-a", "GPU-b"}) {
		t.Errorf("the driver is closed with %q", got)
	}
	s := p.agent.state.Load()
	if !slices.Equal(s.plan.Warnings, []string{forMIGText}) {
		t.Errorf("warnings %q", s.plan.Warnings)
	}
	if ready, reason, message := readiness(s, *p.agent.progress.Load(), p.agent.Plugin.Status(), false); ready != nodereport.ConditionFalse || reason != "PausedForMIGChange" || message != forMIGText {
		t.Errorf("%s %s: %s", ready, reason, message)
	}
	if code, body := p.tell(http.MethodPost, "/gpu/restore?gpu=0"); code != http.StatusBadRequest || body != forMIGText+"\n" {
		t.Errorf("restored meanwhile: %d %q", code, body)
	}
	p.node.set(gpus("", "", ""), nil)
	p.awaitReleases(release.Released, release.Released, release.Released)
	if got := f.pausedFor(); !slices.Equal(got, []string{"GPU-a", "GPU-b", "GPU-c"}) {
		t.Errorf("the driver is closed with %q", got)
	}
	p.set(forUpgrade)
	p.until("another reason", func() error {
		s := p.agent.state.Load()
		_, reason, message := readiness(s, *p.agent.progress.Load(), p.agent.Plugin.Status(), false)
		want := "no GPU is offered while the GPU Operator replaces the driver: the Node's label nvidia.com/gpu.deploy.client is mine_paused-for-driver-upgrade"
		if reason != "PausedForDriverUpgrade" || message != want || !slices.Equal(s.plan.Warnings, []string{want}) {
			return fmt.Errorf("%s: %s, warnings %q", reason, message, s.plan.Warnings)
		}
		return nil
	})

	p.set(pause{}) // The API server is away.
	p.set(pause{known: true})
	p.awaitReleases(release.Restored, release.Restored, release.Restored)
	p.shows(12)
	for _, gpu := range []string{"GPU-a", "GPU-b", "GPU-c"} {
		if made := f.made(); strings.Count(made, "release "+gpu) != 1 || strings.Count(made, "restore "+gpu) != 1 {
			t.Errorf("%s: calls %s", gpu, made)
		}
	}
	if len(f.kept) != 0 {
		t.Errorf("kept %v", f.kept)
	}
}

// TestPauseIsLogged checks that the log shows when a pause begins and when it is known to be over.
func TestPauseIsLogged(t *testing.T) {
	t.Parallel()
	over := pause{known: true}
	for _, test := range []struct {
		last, next pause
		want       string
	}{
		{pause{}, over, ""},
		{over, over, ""},
		{over, forMIG, "level=WARN msg=\"a label of the Node pauses this program\" label=nvidia.com/gpu.deploy.device-plugin value=paused-for-mig-change\n"},
		{forMIG, forMIG, ""},
		{forMIG, forUpgrade, "level=WARN msg=\"a label of the Node pauses this program\" label=nvidia.com/gpu.deploy.client value=mine_paused-for-driver-upgrade\n"},
		{forMIG, pause{}, ""},
		{forMIG, over, "level=INFO msg=\"no label of the Node pauses this program any more\"\n"},
	} {
		var log strings.Builder
		logPause(slog.New(slog.NewTextHandler(&log, nil)), test.last, test.next)
		if _, got, _ := strings.Cut(log.String(), " "); got != test.want {
			t.Errorf("%+v after %+v: logged %q, want %q", test.next, test.last, got, test.want)
		}
	}
}

// TestPauseBeforeRelease checks that no MIG layout changes in a pause, even before the GPUs are released.
func TestPauseBeforeRelease(t *testing.T) {
	t.Parallel()
	a := &agent{}
	a.state.Store(&state{planned: true, gpus: gpus("", ""), pause: forMIG})
	if gpus, _, err := a.migInputs(); len(gpus) != 0 || err != nil {
		t.Errorf("MIG layouts are changed of %v, %v", gpus, err)
	}
}

// TestPauseAndRelease checks that a pause does not end an operator's release, and that the end of the release
// does not end the pause.
func TestPauseAndRelease(t *testing.T) {
	t.Parallel()
	f := &fakeReleaser{}
	p := newPausable(t, f, pause{known: true})
	p.shows(8)
	p.tell(http.MethodPost, "/gpu/release?gpu=0&for=1h")
	p.awaitReleases(release.Released)
	p.set(forMIG)
	p.awaitReleases(release.Released, release.Released)
	p.set(pause{known: true})
	p.awaitReleases(release.Released, release.Restored)
	p.shows(4)

	p.set(forMIG)
	p.awaitReleases(release.Released, release.Released)
	p.tell(http.MethodPost, "/gpu/release?gpu=0&for=1ms")
	p.node.set(gpus("", "", ""), nil)
	p.awaitReleases(release.Released, release.Released, release.Released)
	if made := f.made(); strings.Contains(made, "restore GPU-a") {
		t.Errorf("the end of the release ended the pause: %s", made)
	}
	p.set(pause{known: true})
	p.awaitReleases(release.Restored, release.Restored, release.Restored)
	p.shows(12)
}

// TestPauseAgain checks that GPUs that are just being restored are released again for the next pause.
func TestPauseAgain(t *testing.T) {
	t.Parallel()
	var p *pausable
	var once sync.Once
	f := &fakeReleaser{meanwhile: func(_ context.Context, call string) {
		if strings.HasPrefix(call, "restore") {
			once.Do(func() { p.set(forMIG); p.agent.planNow(p.ctx) })
		}
	}}
	p = newPausable(t, f, forMIG)
	p.awaitReleases(release.Released, release.Released)
	p.set(pause{known: true})
	p.await("taken back", func() bool { return strings.Contains(f.made(), "restore") })
	p.awaitReleases(release.Released, release.Released)
	p.shows(0)
}

// TestPauseOverARestart checks that a restart in a pause leaves the GPUs closed while it is unknown whether the
// pause is over, and does not withdraw them if it is.
func TestPauseOverARestart(t *testing.T) {
	t.Parallel()
	kept := func() *fakeReleaser {
		return &fakeReleaser{kept: []release.Release{
			{GPU: "GPU-a", DriverIndex: 3, Until: time.Now().Add(time.Hour), State: release.Released, Pause: true},
			{GPU: "GPU-b", Index: 1, DriverIndex: 4, Until: time.Now().Add(time.Hour), State: release.Released, Pause: true},
		}}
	}
	over := kept()
	newPausable(t, over, pause{known: true}).shows(8)
	if len(over.early) != 0 || over.made() != "" {
		t.Errorf("it was over: %v, calls %s", over.early, over.made())
	}
	f := kept()
	p := newPausable(t, f, pause{})
	p.awaitReleases(release.Released, release.Released)
	if f.early["GPU-a"] != 3 || f.early["GPU-b"] != 4 {
		t.Errorf("before the driver was opened: %v", f.early)
	}
	if got := f.pausedFor(); !slices.Equal(got, []string{"GPU-a", "GPU-b"}) {
		t.Errorf("the driver is closed with %q", got)
	}
	p.set(pause{known: true})
	p.awaitReleases(release.Restored, release.Restored)
	p.shows(8)
}

// TestUsedInAPause checks that GPUs count as used while the kubelet does not answer: a pause must not close the
// driver then.
func TestUsedInAPause(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		kubelet heldBy
		want    bool
	}{
		{heldBy{}, false},
		{heldBy{held: []sharing.Allocation{{Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::1"}}}}, true},
		{heldBy{held: []sharing.Allocation{{Resource: "gpu.nvidia.com", Claim: "c"}}}, true},
		{heldBy{held: []sharing.Allocation{{Resource: "rdma/hca", Devices: []string{"mlx5_0"}}}}, false},
		{heldBy{err: errors.New("no kubelet")}, true},
	} {
		if got := newReleases(&agent{Options: Options{Kubelet: test.kubelet}}).Used(t.Context()); got != test.want {
			t.Errorf("%+v: %t, want %t", test.kubelet, got, test.want)
		}
	}
}

// TestStillUsed checks how the condition names the pods that block a pause.
func TestStillUsed(t *testing.T) {
	t.Parallel()
	waits := func(state release.State, users ...string) release.Release {
		return release.Release{State: state, Waits: users}
	}
	var many []string
	for i := range 12 {
		many = append(many, fmt.Sprintf("ns/p%d", i))
	}
	holders := []sharing.Allocation{
		{Resource: "nvidia.com/gpu.shared", Devices: []string{"GPU-a"}},
		{Resource: "nvidia.com/mig-1g.5gb", Devices: []string{"MIG-a"}},
		{Resource: "gpu.nvidia.com", Claim: "c"},
		{Resource: "gpu.virgate.github.io", Claim: "c"},
		{Resource: "example.com/gpu", Devices: []string{"GPU-a"}},
		{Resource: "example.com/gpu", Devices: []string{"MIG-b"}},
		{Resource: "rdma/hca", Devices: []string{"mlx5_0"}},
	}
	for _, test := range []struct {
		name     string
		by       release.Pause
		releases []release.Release
		holders  []sharing.Allocation
		want     string
	}{
		{"nobody", forUpgrade.by, []release.Release{waits(release.Waiting, release.Withdrawing), waits(release.Released, "ns/gone")}, holders, ""},
		{"pods", forUpgrade.by, []release.Release{waits(release.Waiting, "ns/a", "process 4"), waits(release.Waiting, "ns/a", "ns/b")}, holders[:3], "; still used by ns/a, process 4, ns/b"},
		{"many", forMIG.by, []release.Release{waits(release.Waiting, many...)}, nil, "; still used by ns/p0, ns/p1, ns/p2, ns/p3, ns/p4, ns/p5, ns/p6, ns/p7, ns/p8, ns/p9, 2 more"},
		{
			"that are not evicted", forUpgrade.by, []release.Release{waits(release.Waiting, "ns/a")}, holders,
			"; still used by ns/a; the GPU Operator does not evict the pods with example.com/gpu, gpu.virgate.github.io: delete them",
		},
		{"that mig-manager does not evict, as all", forMIG.by, []release.Release{waits(release.Waiting, "ns/a")}, holders, "; still used by ns/a"},
	} {
		if got := stillUsed(test.by, test.releases, test.holders); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}

// TestPauseWithMPS checks that a GPU shared by MPS is released once its daemon has ended.
func TestPauseWithMPS(t *testing.T) {
	t.Parallel()
	daemons, f := newFakeMPS(false), &fakeReleaser{}
	p := &pausable{}
	p.now.Store(&pause{known: true})
	p.rig = newMPSRig(t, daemons, mpsProfile(4), func(r *rig) {
		r.options.Releases = release.Driver{Releaser: f, Store: f}
		r.options.Paused = func() (release.Pause, bool) { now := p.now.Load(); return now.by, now.known }
	})
	a, b := gpus("", "")[0].UUID, gpus("", "")[1].UUID
	p.await("wanted for both", func() bool { return daemons.wants() == a+" "+b })
	daemons.tell(a, nodereport.MPSReady, "")
	daemons.tell(b, nodereport.MPSReady, "")
	p.shows(8)
	p.set(forUpgrade)
	p.await("not wanted", func() bool { return daemons.wants() == "" })
	daemons.tell(a, "", "")
	p.awaitReleases(release.Released, release.Waiting)
	p.until("the daemon to be named", func() error {
		if waits := p.agent.releases.List()[1].Waits; !slices.Equal(waits, []string{"virgate mps, which has its daemon or may open it"}) {
			return fmt.Errorf("it waits for %q", waits)
		}
		return nil
	})
	daemons.tell(b, "", "")
	p.awaitReleases(release.Released, release.Released)
}
