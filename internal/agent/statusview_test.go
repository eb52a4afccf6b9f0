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

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestGPUStatus(t *testing.T) {
	t.Parallel()
	small, err := mig.ParseProfile("1g.5gb")
	if err != nil {
		t.Fatal(err)
	}
	cutUp := sharing.GPU{
		UUID: "GPU-b", Index: 1, Model: "M", Memory: 40, MIG: true,
		Partitions: []sharing.Partition{{UUID: "MIG-1", Index: 0, Profile: small, Memory: 5, Placement: mig.Placement{Start: 6, Size: 1}}, {UUID: "MIG-2", Index: 1, Profile: small, Health: sharing.Faulty("XID 31")}},
	}
	whole := sharing.GPU{UUID: "GPU-a", Index: 0, Model: "M", Memory: 40, Health: sharing.Faulty("lost")}
	plan := []sharing.Resource{{Name: "r", Units: []sharing.Unit{
		{ID: "GPU-a", GPU: "GPU-a", Index: "0", Replicas: 4}, {ID: "MIG-1", GPU: "GPU-b", Index: "1:0", Replicas: 1},
	}}}
	held := []sharing.Allocation{
		{Namespace: "n", Pod: "p", Container: "c", Resource: "r", Devices: []string{"GPU-a::0", "GPU-a::1"}},
		{Namespace: "n", Pod: "q", Container: "c", Resource: "old", Devices: []string{"MIG-gone"}},
		{Namespace: "n", Pod: "q", Container: "c", Resource: "gpu", Devices: []string{"GPU-b"}},
	}
	since := time.Unix(5, 0)
	health := sharing.HealthReport{Units: []sharing.UnitHealth{{Unit: "GPU-a", GPU: "GPU-a", State: sharing.Recovering, Reason: "lost", Since: since}}}
	gpus, elsewhere := gpusOf([]sharing.GPU{cutUp, whole}, sharing.Usage(plan, held), health)
	good := status.Health{State: sharing.Healthy}
	sick := status.Health{State: sharing.Recovering, Reason: "lost", Since: &since}
	wantGPUs := []status.GPU{
		{UUID: "GPU-a", Index: 0, Model: "M", Memory: 40, Health: sick, Units: []status.Unit{{
			ID: "GPU-a", Index: "0", Memory: 40, Resource: "r", Replicas: 4, Health: sick,
			Holders: []status.Holder{{Namespace: "n", Pod: "p", Container: "c", Resource: "r", Devices: []string{"GPU-a::0", "GPU-a::1"}}},
		}}},
		{UUID: "GPU-b", Index: 1, Model: "M", Memory: 40, MIG: true, Health: good, Units: []status.Unit{
			{ID: "MIG-1", Index: "1:0", Profile: "1g.5gb", Placement: &mig.Placement{Start: 6, Size: 1}, Memory: 5, Resource: "r", Replicas: 1, Health: good, Holders: []status.Holder{}},
			{ID: "MIG-2", Index: "1:1", Profile: "1g.5gb", Health: status.Health{State: sharing.Unhealthy, Reason: "XID 31"}, Holders: []status.Holder{}},
			// Held from before it was partitioned.
			{ID: "GPU-b", Index: "1", Memory: 40, Health: good, Holders: []status.Holder{{Namespace: "n", Pod: "q", Container: "c", Resource: "gpu", Devices: []string{"GPU-b"}}}},
		}},
	}
	if diff := cmp.Diff(wantGPUs, gpus); diff != "" {
		t.Error(diff)
	}
	wantElsewhere := []status.Unit{{ID: "MIG-gone", Health: good, Holders: []status.Holder{{Namespace: "n", Pod: "q", Container: "c", Resource: "old", Devices: []string{"MIG-gone"}}}}}
	if diff := cmp.Diff(wantElsewhere, elsewhere); diff != "" {
		t.Error(diff)
	}
	if got := gpus[0].Units[0].Held(); got != 2 {
		t.Errorf("%d devices are held", got)
	}
}

func entry(id string, healthy bool) plugin.Entry {
	unit, _, _ := sharing.ParseDeviceID(id)
	return plugin.Entry{Device: sharing.Device{ID: id, Unit: unit, Healthy: healthy}, Phase: plugin.Offered}
}

func TestResourceStatus(t *testing.T) {
	t.Parallel()
	plan := sharing.Plan{Resources: []sharing.Resource{
		{Name: "a", Units: []sharing.Unit{{ID: "GPU-a", GPU: "GPU-a", Replicas: 9}, {ID: "GPU-b", GPU: "GPU-b", Replicas: 9}}},
		{Name: "waits", Units: []sharing.Unit{{ID: "GPU-c", GPU: "GPU-c", Replicas: 1}}},
	}}
	units := []sharing.Unit{{ID: "GPU-a", GPU: "GPU-a", Replicas: 1}, {ID: "GPU-b", Replicas: 4}}
	served := []plugin.ResourceStatus{
		{Name: "old", Streams: 1, Devices: 1, Leaving: 1, Dropped: true, Listed: []plugin.Entry{entry("GPU-c", false)}},
		{Name: "a", Streams: 1, Devices: 4, Healthy: 3, Applied: true, Units: units, Listed: []plugin.Entry{
			entry("GPU-a", true), entry("GPU-b::0", true), entry("GPU-b::1", true), entry("GPU-b::2", false),
		}},
	}
	held := []sharing.Allocation{
		{Resource: "a", Devices: []string{"GPU-a", "GPU-b::2"}}, {Resource: "old", Devices: []string{"GPU-c"}},
	}
	n := func(n int) *int { return &n }
	for _, test := range []struct {
		name  string
		known bool
		want  []status.Resource
	}{
		{"holders known", true, []status.Resource{
			{Name: "a", Strategy: "exclusive,time-slicing", Streams: 1, Devices: 4, Healthy: 3, Held: n(2), Free: n(2)},
			{Name: "old", Dropped: true, Streams: 1, Devices: 1, Leaving: 1, Held: n(1), Free: n(0)},
			{Name: "waits", Strategy: "exclusive", Held: n(0), Free: n(0)},
		}},
		{"holders not known", false, []status.Resource{
			{Name: "a", Strategy: "exclusive,time-slicing", Streams: 1, Devices: 4, Healthy: 3},
			{Name: "old", Dropped: true, Streams: 1, Devices: 1, Leaving: 1},
			{Name: "waits", Strategy: "exclusive"},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := resourcesOf(served, listed(served, []sharing.GPU{{UUID: "GPU-b"}}), plan, held, test.known)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestStatusOverHTTP looks at a whole status, and that it never says null where
// there is a list.
func TestStatusOverHTTP(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.options.NodeName, r.options.Kubelet = "n1", r.sight })
	r.awaitBody("/api/v1/status", 200, `"state": "applied"`)
	_, body := r.get("/api/v1/status")
	var got status.Status
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if got.Node != "n1" || got.Version != "test" || got.Role != status.RoleServing || !got.Ready || !got.HoldersKnown || got.HoldersAt == nil || got.At.Sub(*got.HoldersAt) > lookTimeout {
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
	node := a.status(t.Context())
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

func TestStatusSaysWhoUsesWhat(t *testing.T) {
	t.Parallel()
	one := sharing.Container{Namespace: "n", Pod: "one", Name: "main"}
	node := status.Status{GPUs: []status.GPU{
		{UUID: "GPU-a", Units: []status.Unit{{ID: "GPU-a", Holders: []status.Holder{{Namespace: "n", Pod: "one", Container: "main"}, {Namespace: "n", Pod: "two", Container: "main"}}}}},
		{UUID: "GPU-b", Units: []status.Unit{{ID: "GPU-b", Holders: []status.Holder{{Namespace: "n", Pod: "one", Container: "main"}}}}},
		{UUID: "GPU-c"},
	}}
	known := func(v float64) *float64 { return &v }
	addUtilization(&node, sharing.UtilizationReport{
		Attributed: true,
		GPUs:       []sharing.GPUUtilization{{GPU: "GPU-a", Memory: known(9), SM: known(1)}, {GPU: "GPU-b", Celsius: known(40)}},
		Containers: []sharing.ContainerUtilization{{Container: one, GPU: "GPU-a", Unit: "GPU-a", Processes: 2, Memory: known(5), SM: known(0.75), OverShare: known(1)}},
		Unattributed: []sharing.UnattributedUtilization{
			{GPU: "GPU-a", Cause: sharing.CauseNoContainer, Processes: 1, Memory: known(3)}, {GPU: "GPU-a", Cause: sharing.CauseUnreadable},
			{GPU: "GPU-gone", Cause: sharing.CauseUnreadable, Processes: 1},
		},
		Contention: []sharing.Contention{{GPU: "GPU-a", MaxShare: 0.75, Contended: true}, {GPU: "GPU-b", MaxShare: 1}, {GPU: "GPU-gone", Contended: true}},
	})
	if !node.Attributed {
		t.Error("not attributed")
	}
	want := []*status.Use{
		{
			Memory: known(9), SM: known(1), Contended: true, MaxShare: known(0.75),
			Unattributed: []sharing.UnattributedUtilization{{GPU: "GPU-a", Cause: sharing.CauseNoContainer, Processes: 1, Memory: known(3)}},
		},
		{Celsius: known(40)},
		nil,
	}
	for i, gpu := range node.GPUs {
		if diff := cmp.Diff(want[i], gpu.Use); diff != "" {
			t.Errorf("%s (-want +got):\n%s", gpu.UUID, diff)
		}
	}
	holders := node.GPUs[0].Units[0].Holders
	if diff := cmp.Diff(&status.Use{Memory: known(5), SM: known(0.75), Processes: 2, OverShare: known(1)}, holders[0].Use); diff != "" {
		t.Error(diff)
	}
	if holders[1].Use != nil || node.GPUs[1].Units[0].Holders[0].Use != nil {
		t.Error("use of a unit that was not measured")
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	some := plugin.ResourceStatus{Name: "r", Refused: map[plugin.RefusalReason]uint64{plugin.TooMany: 0, plugin.MIGChange: 2}}
	got := resourcesOf([]plugin.ResourceStatus{some}, make([]sharing.Resource, 1), sharing.Plan{}, nil, false)[0].Refused
	if diff := cmp.Diff(map[plugin.RefusalReason]uint64{plugin.MIGChange: 2}, got); diff != "" {
		t.Error(diff)
	}
}

// BenchmarkView is what is shown of a node whose devices are all held, by one
// pod each, or all free: it reports the bytes, and for metrics the series.
// docs/scale.md has its table.
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
