package agent

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

func TestNotReadyReasons(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*rig)
		want   string
	}{
		{"no profile", func(r *rig) {
			r.policy = fakePolicy{newInput(sharing.Profile{}, errors.New("line 3"))}
			r.options.Policy = r.policy
		}, "no profile: line 3"},
		{"no driver", func(r *rig) {
			r.node = fakeNode{newInput[[]sharing.GPU](nil, errors.New("no driver"))}
			r.options.Node = r.node
		}, "GPUs not read: no driver"},
		{"silent kubelet", func(r *rig) { r.kubelet.SetSilent(true) }, "nvidia.com/gpu: not registered"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, test.change)
			r.awaitBody("/readyz", 503, test.want)
		})
	}
}

func TestReadyWhenServed(t *testing.T) {
	r := newRig(t, nil)
	r.awaitBody("/readyz", 200, "ok")
	r.shows(8)
	if code, body := r.get("/healthz"); code != 200 {
		t.Errorf("healthz %d %s", code, body)
	}
	code, body := r.get("/plan")
	var got sharing.Summary
	if err := json.Unmarshal([]byte(body), &got); code != 200 || err != nil {
		t.Fatalf("plan %d %s", code, body)
	}
	if len(got.Resources) != 1 || got.Resources[0].Devices != 8 || got.Warnings == nil {
		t.Errorf("plan %+v", got)
	}
}

func TestReadyWithoutGPUs(t *testing.T) {
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput([]sharing.GPU{}, nil)}; r.options.Node = r.node })
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, `"resources": []`)
}

func TestNotReadyBeforeTheClaim(t *testing.T) {
	r := newRig(t, func(r *rig) {
		r.options.Claim = func(ctx context.Context, _ func()) error {
			<-ctx.Done()
			return ctx.Err()
		}
	})
	r.awaitBody("/readyz", 503, "not serving yet")
}

// TestReadyWhileANewNameWaits renames a resource whose only unit a pod holds:
// the new name has nothing to serve, and nothing is wrong.
func TestReadyWhileANewNameWaits(t *testing.T) {
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput(gpus(""), nil)}; r.options.Node = r.node })
	r.shows(4)
	_, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "c", Requests: map[string]int{gpuResource: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	renamed := profile(4)
	renamed.Shares[0].Rename = gpuResource + ".shared"
	r.policy.set(renamed, nil)
	r.shows(1)
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, "nvidia.com/gpu.shared")
	r.awaitBody("/metrics", 200, "virgate_kubelet_state_known 1")
}
