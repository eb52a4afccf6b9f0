package release_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// changingGPU is the GPU whose MIG layout is being changed.
type changingGPU struct{ atomic.Value }

func (*changingGPU) Status() []nodereport.GPULayout { return nil }
func (c *changingGPU) Changing(gpu string) bool     { return c.Load() == gpu }

// rig is a Manager with four GPUs of a simulated driver. A reset takes a minute.
type rig struct {
	*release.Manager
	t        *testing.T
	sim      *simnode.Node
	changing changingGPU
	paused   atomic.Bool
	resets   atomic.Int64
}

func start(t *testing.T, world string) *rig {
	t.Helper()
	sim, err := simnode.New("a30x4")
	if err == nil {
		err = sim.SetWorld(world)
	}
	if err != nil {
		t.Fatal(err)
	}
	node := nvml.NewNode(sim, nvml.Options{Kernel: sim})
	r := &rig{t: t, sim: sim}
	reset := func(_ context.Context, busID string) error {
		r.resets.Add(1)
		<-time.After(time.Minute) //nolint:forbidigo // In a bubble.
		return sim.ResetGPU(busID)
	}
	r.Manager = release.New(release.Options{
		Driver: release.Driver{Releaser: node, Store: &kept{}, Reset: reset}, Devices: free{}, Layouts: &r.changing,
		GPUs: func() []sharing.GPU { gpus, _ := node.Inventory(); return gpus }, Serving: func() bool { return true },
		Users: func(context.Context, string) []string { return nil }, Used: func(context.Context) bool { return false },
		MPS: func(string) bool { return false }, MIGReset: func() bool { return false },
		Paused: func() (release.Pause, bool) {
			if r.paused.Load() {
				return release.Pause{Label: "deploy.device-plugin", Value: "paused-for-driver-upgrade"}, true
			}
			return release.Pause{}, true
		},
		Changed: func() {}, Plan: func(context.Context) {}, Logger: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { _ = node.Watch(ctx, func() {}) })
	r.pass(time.Second)
	running.Go(func() { _ = r.Run(ctx) })
	return r
}

func (r *rig) pass(passed time.Duration) {
	<-time.After(passed) //nolint:forbidigo // In a bubble.
	synctest.Wait()
}

func (r *rig) ask(path string) {
	r.t.Helper()
	answer := httptest.NewRecorder()
	r.Handler().ServeHTTP(answer, httptest.NewRequest(http.MethodPost, path, nil))
	if answer.Code != http.StatusOK {
		r.t.Fatal(answer.Body)
	}
}

// of is the release of the GPU with this index.
func (r *rig) of(gpu int) release.Release {
	for _, of := range r.List() {
		if of.Index == gpu {
			return of
		}
	}
	return release.Release{}
}

// TestReleaseAndChangesElsewhere checks that a release and a change of another GPU's MIG layout wait for each
// other only if the driver opens all GPUs at once.
func TestReleaseAndChangesElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, "")
		gpus := r.GPUs()
		r.changing.Store(gpus[1].UUID)
		if why := r.Blocked(gpus[2].UUID); why != "" {
			t.Errorf("blocked before the release: %s", why)
		}
		r.ask("/gpu/release?gpu=0&for=1h")
		r.pass(time.Minute)
		if now := r.of(0); now.State != release.Waiting || !strings.Contains(strings.Join(now.Waits, ""), "MIG layout of GPU 1") {
			t.Errorf("during a change: %+v", now)
		}
		if why := r.Blocked(gpus[2].UUID); !strings.Contains(why, "GPU 0 is released, or about to be, until") {
			t.Errorf("another change may begin: %q", why)
		}
		r.changing.Store("")
		r.pass(2 * time.Second)
		if now := r.of(0); now.State != release.Released || r.Blocked(gpus[1].UUID) == "" || r.Blocked(gpus[0].UUID) != "" {
			t.Errorf("after it: %+v, blocked %q and %q", now, r.Blocked(gpus[1].UUID), r.Blocked(gpus[0].UUID))
		}
		r.ask("/gpu/restore?gpu=0")
		r.pass(2 * time.Second)
		if why := r.Blocked(gpus[1].UUID); why != "" {
			t.Errorf("blocked after the release: %s", why)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		r := start(t, "lazy")
		r.changing.Store(r.GPUs()[1].UUID)
		r.ask("/gpu/release?gpu=0&for=1h")
		r.pass(2 * time.Second)
		if now := r.of(0); now.State != release.Released || r.Blocked(r.GPUs()[1].UUID) != "" {
			t.Errorf("in world lazy: %+v, blocked %q", now, r.Blocked(r.GPUs()[1].UUID))
		}
	})
}

// TestTakeBackAndResets checks that no GPU is restored while another is being reset, or the reverse: a driver
// that opens all GPUs at once refuses to reset an open one.
func TestTakeBackAndResets(t *testing.T) {
	for _, first := range []string{"the reset", "taking back"} {
		t.Run("first "+first, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, "")
				r.ask("/gpu/release?gpu=1&for=1h")
				r.pass(5 * time.Second)
				if first == "the reset" {
					r.ask("/gpu/reset?gpu=2&for=1h")
					r.pass(5 * time.Second)
					r.ask("/gpu/restore?gpu=1")
					r.pass(5 * time.Second)
					if now := r.of(1); now.State != release.Waiting || len(now.Waits) == 0 {
						t.Errorf("during the reset: %+v", now)
					}
				} else {
					r.ask("/gpu/release?gpu=2&for=1h")
					r.pass(5 * time.Second)
					r.sim.InjectFault("Init", simnode.Fault{Delay: 45 * time.Second, Times: 1})
					r.sim.InjectFault("DeviceGetName", simnode.Fault{Delay: 25 * time.Second, Times: 4})
					r.ask("/gpu/restore?gpu=1")
					r.pass(5 * time.Second)
					r.ask("/gpu/reset?gpu=2&for=1h")
				}
				r.pass(3 * time.Minute)
				if now := r.of(2); !now.WasReset || now.Problem != "" {
					t.Errorf("%+v", now)
				}
				for gpu := 1; gpu <= 2; gpu++ {
					if now := r.of(gpu); now.State != release.Restored || now.Waits != nil {
						t.Errorf("%+v", now)
					}
				}
			})
		})
	}
}

// TestTakenBackTogether checks that GPUs whose releases end together are read together, in at most two sessions.
func TestTakenBackTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, "")
		for _, path := range []string{"release?for=1h&", "restore?"} {
			before := r.sim.Calls("Init")
			// Without this, the first GPU may be back before the others are requested.
			r.sim.InjectFault("Init", simnode.Fault{Delay: time.Second})
			for gpu := range 3 {
				r.ask(fmt.Sprintf("/gpu/%sgpu=%d", path, gpu))
			}
			r.pass(time.Minute)
			if opened := r.sim.Calls("Init") - before; strings.HasPrefix(path, "restore") && opened > 2 {
				t.Errorf("the driver was opened %d times", opened)
			}
		}
		for gpu := range 3 {
			if now := r.of(gpu); now.State != release.Restored {
				t.Errorf("%+v", now)
			}
		}
	})
}

// TestNoResetAsAPauseBegins checks that a reset that waits for another GPU also waits for a pause that begins
// meanwhile.
func TestNoResetAsAPauseBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, "")
		r.ask("/gpu/release?gpu=1&for=1h")
		r.ask("/gpu/release?gpu=2&for=1h")
		r.pass(5 * time.Second)
		r.sim.InjectFault("Init", simnode.Fault{Delay: 45 * time.Second, Times: 1})
		r.ask("/gpu/restore?gpu=1")
		r.pass(5 * time.Second)
		r.ask("/gpu/reset?gpu=2&for=1h")
		r.pass(5 * time.Second)
		r.paused.Store(true)
		r.Wake()
		r.pass(2 * time.Minute)
		if r.resets.Load() != 0 {
			t.Error("a GPU was reset in the pause")
		}
		r.paused.Store(false)
		r.Wake()
		r.pass(3 * time.Minute)
		if now := r.of(2); r.resets.Load() != 1 || !now.WasReset || now.Problem != "" {
			t.Errorf("%d resets after the pause, %+v", r.resets.Load(), now)
		}
	})
}
