package agent

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// fakeHost answers what the test sets, and counts the questions.
type fakeHost struct {
	*input[plugin.Host]
	prepared *atomic.Int64
}

func newFakeHost(host plugin.Host) fakeHost { return fakeHost{newInput(host, nil), &atomic.Int64{}} }

func (h fakeHost) Prepare(sharing.Grants, []sharing.GPU) plugin.Host {
	h.prepared.Add(1)
	host, _ := h.get()
	return host
}

func withheld(units ...string) plugin.Host {
	host := plugin.Host{Obstacles: map[string]string{}}
	for _, unit := range units {
		host.Obstacles[unit] = "the driver is not installed yet"
	}
	return host
}

// TestObstaclesWithhold holds that nothing is advertised ready until the host
// has what a grant names, and that it is taken back when the host loses it.
func TestObstaclesWithhold(t *testing.T) {
	host := newFakeHost(withheld("GPU-a", "GPU-b"))
	r := newRig(t, func(r *rig) { r.options.Host = host })
	listed := func(k simkubelet.Snapshot) bool { return len(k.Resources[gpuResource].Devices) == 8 }
	if err := r.kubelet.Await(r.ctx, listed); err != nil {
		t.Fatal(err)
	}
	r.shows(0)
	host.set(withheld("GPU-b"), nil)
	r.shows(4)
	host.set(withheld(), nil)
	r.shows(8)
	host.set(withheld("GPU-a"), nil)
	r.shows(4)
}

// TestHostReachesGrants holds that a grant has what the host got ready for it,
// also when only that has changed.
func TestHostReachesGrants(t *testing.T) {
	nodes := map[string][]string{"GPU-a": {"/dev/nvidia0"}, "GPU-b": {"/dev/nvidia1"}}
	host := newFakeHost(plugin.Host{Nodes: nodes})
	r := newRig(t, func(r *rig) {
		r.options.Host = host
		want, _ := r.policy.get()
		want.Grants = sharing.Grants{DeviceNodes: true}
		r.policy.value = want
	})
	r.shows(8)
	granted := func(name string) []string {
		t.Helper()
		pod, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "test", Name: name, Containers: []simkubelet.Container{
			{Name: "main", Requests: map[string]int{gpuResource: 1}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		var paths []string
		for _, device := range pod.Containers[0].Grants[0].Response.Devices {
			paths = append(paths, device.ContainerPath)
		}
		return paths
	}
	if got := granted("first"); len(got) != 1 || !strings.HasPrefix(got[0], "/dev/nvidia") {
		t.Errorf("granted %v", got)
	}
	host.set(plugin.Host{Nodes: nodes, ControlNodes: []string{"/dev/nvidiactl"}}, nil)
	r.agent.lookNow(r.ctx)
	// The manager takes the new view up by itself; nothing shows that it has.
	for name := "p"; ; name += "p" {
		if got := granted(name); len(got) == 2 && got[0] == "/dev/nvidiactl" {
			return
		}
		if err := r.kubelet.DeletePod("test", name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStandbyLeavesTheHostAlone(t *testing.T) {
	host := newFakeHost(withheld())
	claimed := make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.Host = host
		r.options.Claim = func(ctx context.Context, _ func()) error {
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	r.agent.lookNow(r.ctx)
	if got := host.prepared.Load(); got != 0 {
		t.Errorf("prepared %d times while standing by", got)
	}
	close(claimed)
	r.shows(8)
	if host.prepared.Load() == 0 {
		t.Error("serves without having prepared the host")
	}
}

// TestFirstListIsPrepared holds that the kubelet never sees a unit Healthy that
// could not be granted from the start.
func TestFirstListIsPrepared(t *testing.T) {
	host := newFakeHost(withheld("GPU-a"))
	r := newRig(t, func(r *rig) { r.options.Host = host })
	healthy := map[string]bool{}
	err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool {
		for _, device := range k.Resources[gpuResource].Devices {
			healthy[device.ID] = healthy[device.ID] || device.Healthy
		}
		return k.Resources[gpuResource].Allocatable == 4
	})
	if err != nil {
		t.Fatal(err)
	}
	for id, was := range healthy {
		if was && strings.HasPrefix(id, "GPU-a") {
			t.Errorf("%s was Healthy", id)
		}
	}
}

func TestCountObstacles(t *testing.T) {
	got := count(map[string]string{"GPU-a": "x", "GPU-b": "x", "GPU-c": "y"})
	if diff := cmp.Diff(map[string]int{"x": 2, "y": 1}, got); diff != "" {
		t.Error(diff)
	}
}

// stuckHost ends like a Host whose driver does not answer.
type stuckHost struct{ fakeHost }

func (h stuckHost) Watch(ctx context.Context, changed func()) error {
	if err := h.fakeHost.Watch(ctx, changed); err != nil {
		return err
	}
	return errors.New("abandoned the CDI specs")
}

func TestStuckHostIsLeftBehind(t *testing.T) {
	r := newRig(t, func(r *rig) { r.options.Host = stuckHost{newFakeHost(withheld())} })
	r.shows(8)
}
