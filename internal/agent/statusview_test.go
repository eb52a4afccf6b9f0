package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// TestStatusOverHTTP checks a whole status, and that no list is null.
func TestStatusOverHTTP(t *testing.T) {
	t.Parallel()
	// An hour, so that only answers make the agent read the holders.
	r := newRig(t, func(r *rig) {
		r.options.NodeName, r.options.Kubelet, r.options.SampleInterval = "n1", r.sight, time.Hour
	})
	r.awaitBody("/api/v1/status", 200, `"state": "applied"`)
	began := time.Now()
	var body string
	var got status.Status
	r.until("the holders are read anew", func() error {
		_, body = r.get("/api/v1/status")
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			return err
		}
		if got.HoldersAt == nil || got.HoldersAt.Before(began) {
			return errors.New(body)
		}
		return nil
	})
	if got.Node != "n1" || got.Version != "test" || got.Role != status.RoleServing || !got.Ready || !got.HoldersKnown || got.HoldersAt.After(got.At) {
		t.Errorf("status %s", body)
	}
	if p := got.Profile; p.Applied == nil || *p.Applied != p.Wanted || p.Wanted.Source != "fake" || len(p.Wanted.Generation) != 12 || p.Since.IsZero() {
		t.Errorf("profile %+v", p)
	}
	if len(got.GPUs) != 2 || len(got.Resources) != 1 || got.Resources[0].Devices != 8 || got.Resources[0].Streams != 1 {
		t.Errorf("status %s", body)
	}
	for _, list := range []string{"unready", "resources", "gpus", "elsewhere", "warnings", "waits", "units", "holders"} {
		if strings.Contains(body, `"`+list+`": null`) {
			t.Errorf("%s is null", list)
		}
	}

	if _, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "c", Requests: map[string]int{gpuResource: 1}},
	}}); err != nil {
		t.Fatal(err)
	}
	r.awaitBody("/api/v1/status", 200, `"held": 1`)
	r.policy.set(sharing.Profile{}, errors.New("p.yaml:3: replicas: must be at least 1\np.yaml:4: x: unknown key"))
	r.awaitBody("/api/v1/status", 200, `"state": "rejected"`)
	_, body = r.get("/api/v1/status")
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if p := got.Profile; p.Problem != "p.yaml:3: replicas: must be at least 1" || !strings.HasSuffix(p.Error, "x: unknown key") || p.Applied == nil || !got.Ready {
		t.Errorf("profile %+v", p)
	}
}

func TestStatusBeforeAnything(t *testing.T) {
	t.Parallel()
	a := newAgent(withIdle(Options{Plugin: plugin.NewManager(plugin.Options{})}))
	node := a.view.status(t.Context())
	if node.Role != status.RoleStarting || node.Ready || len(node.Unready) == 0 || node.Profile.State != nodereport.ProfilePending || node.Profile.Applied != nil {
		t.Errorf("status %+v", node)
	}
}

func TestProfileMetrics(t *testing.T) {
	t.Parallel()
	began := time.Now().Truncate(time.Millisecond)
	r := newRig(t, nil)
	r.awaitBody("/metrics", 200, `virgate_config_state{state="applied"} 1`)
	_, body := r.get("/metrics")
	value := func(name string) string {
		for line := range strings.SplitSeq(body, "\n") {
			if text, ok := strings.CutPrefix(line, name+" "); ok {
				return text
			}
		}
		return ""
	}
	if at, err := strconv.ParseFloat(value("virgate_config_last_apply_timestamp_seconds"), 64); err != nil || time.UnixMilli(int64(math.Round(at*1000))).Before(began) || time.UnixMilli(int64(at*1000)).After(time.Now()) {
		t.Errorf("applied at %v, %v", at, err)
	}
	if !strings.Contains(body, `virgate_config_info{generation="`) || value(`virgate_config_state{state="rejected"}`) != "0" {
		t.Error(body)
	}
	r.policy.set(sharing.Profile{}, errors.New("bad"))
	r.awaitBody("/metrics", 200, `virgate_config_state{state="rejected"} 1`)
	if _, body = r.get("/metrics"); !strings.Contains(body, `virgate_config_info{generation="`) {
		t.Errorf("nothing of the profile in force:\n%s", body)
	}
}

// BenchmarkView renders a node whose devices are all held, by one pod each, or all free. It reports the bytes,
// and for metrics the series. docs/internals/scale.md has its table.
func BenchmarkView(b *testing.B) {
	for _, node := range []struct {
		replicas int
		held     bool
	}{{1, true}, {10, true}, {48, true}, {100, true}, {10, false}, {1000, false}} {
		w, pods := newWatch(b, "l40sx8", node.replicas), 0
		if node.held {
			w, pods = crowded(b, node.replicas), 8*node.replicas
		}
		handler := w.web.Handler()
		for _, path := range []string{"/metrics", "/status", "/api/v1/status"} {
			b.Run(fmt.Sprintf("gpus=8/devices=%d/pods=%d%s", 8*node.replicas, pods, path), func(b *testing.B) {
				b.ReportAllocs()
				var seen []byte
				for b.Loop() {
					recorder := httptest.NewRecorder()
					handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
					if recorder.Code != http.StatusOK {
						b.Fatal(recorder.Code)
					}
					seen = recorder.Body.Bytes()
				}
				b.ReportMetric(float64(len(seen)), "shown-B")
				if path == "/metrics" {
					b.ReportMetric(float64(bytes.Count(seen, []byte("\n"))-bytes.Count(seen, []byte("\n#"))), "series")
				}
			})
		}
	}
}
