package agent

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

// fakeHealth is one board with a fatal error until it is cleared.
type fakeHealth struct{ cleared []string }

func (f *fakeHealth) unit() sharing.UnitHealth {
	u := sharing.UnitHealth{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: sharing.Unhealthy, Reason: "XID 79"}
	if len(f.cleared) > 0 {
		u.State = sharing.Recovering
	}
	return u
}

func (f *fakeHealth) Health() sharing.HealthReport {
	return sharing.HealthReport{Units: []sharing.UnitHealth{f.unit()}, Monitors: []sharing.HealthMonitor{{GPU: "GPU-a", Degraded: "deaf"}}}
}

func (f *fakeHealth) ClearHealth(_ context.Context, selector sharing.Selector) ([]sharing.UnitHealth, error) {
	if !selector.MatchGPU(sharing.GPU{UUID: "GPU-a", Index: 0}) {
		return nil, errors.New("no such GPU or partition: " + selector.String())
	}
	f.cleared = append(f.cleared, selector.String())
	return []sharing.UnitHealth{f.unit()}, nil
}

func TestHealthHandler(t *testing.T) {
	for _, test := range []struct {
		name, method, path string
		code               int
		state              sharing.HealthState
		says               string
	}{
		{"shown", http.MethodGet, "/health", 200, sharing.Unhealthy, ""},
		{"cleared", http.MethodPost, "/health/clear?gpu=0", 200, sharing.Recovering, ""},
		{"cleared by reading", http.MethodGet, "/health/clear?gpu=0", 405, "", "Method Not Allowed\n"},
		{"of no GPU", http.MethodPost, "/health/clear?gpu=1", 400, "", "no such GPU or partition: 1\n"},
		{"of nothing", http.MethodPost, "/health/clear", 400, "", "gpu: \"\" names no GPU or partition: want a GPU index (0), a MIG index (0:1), a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			health := &fakeHealth{}
			recorder := httptest.NewRecorder()
			HealthHandler(health).ServeHTTP(recorder, httptest.NewRequest(test.method, test.path, nil))
			if recorder.Code != test.code {
				t.Errorf("code %d, want %d", recorder.Code, test.code)
			}
			if test.code != 200 {
				if diff := cmp.Diff(test.says, recorder.Body.String()); diff != "" || len(health.cleared) > 0 {
					t.Errorf("cleared %v, answer (-want +got):\n%s", health.cleared, diff)
				}
				return
			}
			var report sharing.HealthReport
			if err := json.Unmarshal(recorder.Body.Bytes(), &report); err != nil {
				t.Fatal(err)
			}
			if len(report.Units) != 1 || report.Units[0].State != test.state {
				t.Errorf("answer %+v", report)
			}
		})
	}
}

func TestHealthMetrics(t *testing.T) {
	r := newRig(t, func(r *rig) { r.options.Health = &fakeHealth{} })
	r.awaitBody("/metrics", 200, `virgate_unit_health_state{gpu_uuid="GPU-a",state="unhealthy",unit_uuid="GPU-a"} 1`)
	r.awaitBody("/metrics", 200, `virgate_health_monitor_up{gpu_uuid="GPU-a"} 0`)
	r.awaitBody("/readyz", 200, "ok") // Degraded is not unready.
}

// TestOnProfile holds that it is called with each profile that comes into force,
// once, and with no other.
func TestOnProfile(t *testing.T) {
	var mu sync.Mutex
	var seen []int
	r := newRig(t, func(r *rig) {
		r.options.OnProfile = func(p sharing.Profile) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, p.Shares[0].Replicas)
		}
	})
	r.shows(8)
	r.node.set(gpus("", "", ""), nil)
	r.shows(12)
	r.policy.set(sharing.Profile{}, errors.New("line 3"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	r.policy.set(profile(5), nil)
	r.shows(15)
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(seen, []int{4, 5}) {
		t.Errorf("called with %v, want 4 and 5", seen)
	}
}

// TestTakesOverBeforeServing holds that what the last program left is in the
// first list already.
func TestTakesOverBeforeServing(t *testing.T) {
	r := newRig(t, func(r *rig) {
		r.options.TakeOver = func(context.Context) error {
			r.node.set(gpus("", "XID 79"), nil)
			return nil
		}
	})
	r.shows(4)
	if lists := r.agent.Plugin.Status().Resources[0].Lists; lists != 1 {
		t.Errorf("%d lists, want one", lists)
	}
}

func TestTakeOverFailureEndsRun(t *testing.T) {
	failure := errors.New("no health")
	options := newRig(t, nil).options
	options.TakeOver = func(context.Context) error { return failure }
	options.Node, options.Policy = fakeNode{newInput(gpus(""), nil)}, fakePolicy{newInput(profile(1), nil)}
	if err := Run(t.Context(), options); !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
}
