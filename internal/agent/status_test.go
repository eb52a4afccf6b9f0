package agent

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestGPUStatus(t *testing.T) {
	small, err := mig.ParseProfile("1g.5gb")
	if err != nil {
		t.Fatal(err)
	}
	cutUp := sharing.GPU{
		UUID: "GPU-b", Index: 1, Model: "M", Memory: 40, MIG: true,
		Partitions: []sharing.Partition{{UUID: "MIG-1", Index: 0, Profile: small, Memory: 5, Placement: mig.Placement{Start: 6, Size: 1}}, {UUID: "MIG-2", Index: 1, Profile: small, Fault: "XID 31"}},
	}
	whole := sharing.GPU{UUID: "GPU-a", Index: 0, Model: "M", Memory: 40, Fault: "lost"}
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
	boards, elsewhere := gpusOf([]sharing.GPU{cutUp, whole}, sharing.Usage(plan, held), health)
	good := HealthStatus{State: sharing.Healthy}
	sick := HealthStatus{State: sharing.Recovering, Reason: "lost", Since: &since}
	wantBoards := []GPUStatus{
		{UUID: "GPU-a", Index: 0, Model: "M", Memory: 40, Health: sick, Units: []UnitStatus{{
			ID: "GPU-a", Index: "0", Memory: 40, Resource: "r", Replicas: 4, Health: sick,
			Holders: []Holder{{Namespace: "n", Pod: "p", Container: "c", Resource: "r", Devices: []string{"GPU-a::0", "GPU-a::1"}}},
		}}},
		{UUID: "GPU-b", Index: 1, Model: "M", Memory: 40, MIG: true, Health: good, Units: []UnitStatus{
			{ID: "MIG-1", Index: "1:0", Profile: "1g.5gb", Placement: &mig.Placement{Start: 6, Size: 1}, Memory: 5, Resource: "r", Replicas: 1, Health: good, Holders: []Holder{}},
			{ID: "MIG-2", Index: "1:1", Profile: "1g.5gb", Placement: &mig.Placement{}, Health: HealthStatus{State: sharing.Unhealthy, Reason: "XID 31"}, Holders: []Holder{}},
			// Held from before it was cut.
			{ID: "GPU-b", Index: "1", Memory: 40, Health: good, Holders: []Holder{{Namespace: "n", Pod: "q", Container: "c", Resource: "gpu", Devices: []string{"GPU-b"}}}},
		}},
	}
	if diff := cmp.Diff(wantBoards, boards); diff != "" {
		t.Error(diff)
	}
	wantElsewhere := []UnitStatus{{ID: "MIG-gone", Health: good, Holders: []Holder{{Namespace: "n", Pod: "q", Container: "c", Resource: "old", Devices: []string{"MIG-gone"}}}}}
	if diff := cmp.Diff(wantElsewhere, elsewhere); diff != "" {
		t.Error(diff)
	}
	if got := boards[0].Units[0].Held(); got != 2 {
		t.Errorf("%d devices are held", got)
	}
}

func TestResourceStatus(t *testing.T) {
	plan := sharing.Plan{Resources: []sharing.Resource{
		{Name: "a", Units: []sharing.Unit{{ID: "GPU-a", GPU: "GPU-a", Replicas: 4}, {ID: "GPU-b", GPU: "GPU-b", Replicas: 4, Fault: "lost"}}},
		{Name: "waits", Units: []sharing.Unit{{ID: "GPU-c", GPU: "GPU-c", Replicas: 1}}},
	}}
	served := []plugin.ResourceStatus{
		{Name: "old", Streams: 1, Devices: 1, Leaving: 1, Dropped: true},
		{Name: "a", Streams: 1, Devices: 8, Healthy: 4, Sent: true},
	}
	held := []sharing.Allocation{
		{Resource: "a", Devices: []string{"GPU-a::7", "GPU-b::1"}}, {Resource: "old", Devices: []string{"GPU-c"}},
	}
	n := func(n int) *int { return &n }
	for _, test := range []struct {
		name  string
		known bool
		want  []ResourceStatus
	}{
		{"holders known", true, []ResourceStatus{
			{Name: "a", Strategy: "time-slicing", Streams: 1, Devices: 8, Healthy: 4, Held: n(2), Free: n(3)},
			{Name: "old", Dropped: true, Streams: 1, Devices: 1, Leaving: 1, Held: n(1), Free: n(0)},
			{Name: "waits", Strategy: "exclusive", Held: n(0), Free: n(0)},
		}},
		{"holders not known", false, []ResourceStatus{
			{Name: "a", Strategy: "time-slicing", Streams: 1, Devices: 8, Healthy: 4},
			{Name: "old", Dropped: true, Streams: 1, Devices: 1, Leaving: 1},
			{Name: "waits", Strategy: "exclusive"},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := resourcesOf(served, plan, held, sharing.Usage(plan.Resources, held), test.known)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestStatusOverHTTP looks at a whole status, and that it never says null where
// there is a list.
func TestStatusOverHTTP(t *testing.T) {
	r := newRig(t, func(r *rig) { r.options.NodeName = "n1" })
	r.awaitBody("/api/v1/status", 200, `"state": "applied"`)
	_, body := r.get("/api/v1/status")
	var got Status
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if got.Node != "n1" || got.Version != "test" || got.Role != RoleServing || !got.Ready || got.HoldersKnown {
		t.Errorf("status %s", body)
	}
	if p := got.Profile; p.Applied == nil || *p.Applied != p.Wanted || p.Wanted.Source != "fake" || len(p.Wanted.Generation) != 12 || p.Since.IsZero() {
		t.Errorf("profile %+v", p)
	}
	if len(got.GPUs) != 2 || len(got.Resources) != 1 || got.Resources[0].Devices != 8 || got.Resources[0].Streams != 1 {
		t.Errorf("status %s", body)
	}
	for _, list := range []string{"unready", "resources", "gpus", "elsewhere", "warnings", "units", "holders"} {
		if strings.Contains(body, `"`+list+`": null`) {
			t.Errorf("%s is null", list)
		}
	}

	if _, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "c", Requests: map[string]int{gpuResource: 1}},
	}}); err != nil {
		t.Fatal(err)
	}
	held, err := r.sight.Held(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	r.agent.allocations.Store(&held)
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
	a := newAgent(Options{Plugin: plugin.NewManager(plugin.Options{})})
	status := a.status()
	if status.Role != RoleStarting || status.Ready || len(status.Unready) == 0 || status.Profile.State != sharing.ProfilePending || status.Profile.Applied != nil {
		t.Errorf("status %+v", status)
	}
}

func TestProfileMetrics(t *testing.T) {
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
	if wanted := value("virgate_config_generation"); wanted == "" || wanted != value("virgate_config_applied_generation") {
		t.Errorf("generation wanted %q, applied %q", wanted, value("virgate_config_applied_generation"))
	}
	if at, err := strconv.ParseFloat(value("virgate_config_last_apply_timestamp_seconds"), 64); err != nil || time.Since(time.UnixMilli(int64(at*1000))).Abs() > time.Hour {
		t.Errorf("applied at %v, %v", at, err)
	}
	if !strings.Contains(body, `virgate_config_info{generation="`) || value(`virgate_config_state{state="rejected"}`) != "0" {
		t.Error(body)
	}
	r.policy.set(sharing.Profile{}, errors.New("bad"))
	r.awaitBody("/metrics", 200, `virgate_config_state{state="rejected"} 1`)
	if _, body = r.get("/metrics"); value("virgate_config_generation") != "" || value("virgate_config_applied_generation") == "" {
		t.Errorf("generation wanted %q, applied %q", value("virgate_config_generation"), value("virgate_config_applied_generation"))
	}
}
