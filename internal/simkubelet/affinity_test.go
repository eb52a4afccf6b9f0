package simkubelet

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestBestEffortAffinity(t *testing.T) {
	list := healthy("a@0", "b@0", "c@1", "d@1", "e@1", "x")
	for _, row := range []struct {
		name  string
		count int
		// asked are the available and must-include IDs of the plugin's calls.
		asked [][2][]string
		want  []string
	}{
		{
			"one node, with a choice", 1,
			[][2][]string{{{"a", "b"}, nil}},
			[]string{"b"},
		},
		{"one node, all of it", 2, nil, []string{"a", "b"}},
		{"the other node has room", 3, nil, []string{"c", "d", "e"}},
		{
			"both nodes, with a choice", 4,
			[][2][]string{{{"a", "b", "c", "d", "e"}, nil}},
			[]string{"b", "c", "d", "e"},
		},
		{
			"no nodes suffice, so there is no wish", 6,
			[][2][]string{{{"a", "b", "c", "d", "e", "x"}, nil}},
			[]string{"a", "b", "c", "d", "e", "x"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := startRig(t, Options{NUMAAligned: true})
			p := r.servePlugin(gpu, "a.sock")
			p.options = &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}
			var asked [][2][]string
			p.prefer = func(_ context.Context, request *api.ContainerPreferredAllocationRequest) ([]string, error) {
				asked = append(asked, [2][]string{request.AvailableDeviceIDs, request.MustIncludeDeviceIDs})
				available := request.AvailableDeviceIDs
				return available[len(available)-int(request.AllocationSize)+len(request.MustIncludeDeviceIDs):], nil
			}
			if err := p.register(r.ctx); err != nil {
				t.Fatal(err)
			}
			p.send(list...)
			got := r.add(oneContainer("pod", row.count)).Containers[0].Devices(gpu)
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(row.asked, asked); diff != "" {
				t.Errorf("asked: %s", diff)
			}
		})
	}
}

// An init container's device binds the next container to its node, although
// another one has room by then.
func TestAffinityKeepsReusableDevices(t *testing.T) {
	r := startRig(t, Options{NUMAAligned: true})
	p := r.startPlugin(gpu, "a.sock", healthy("b@1", "c@1")...)
	p.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) {
		p.send(healthy("b@1", "c@1", "y@0", "z@0")...)
		return answer(ids), nil
	}
	status := r.add(Pod{Name: "pod", Containers: []Container{
		{Name: "init", Init: true, Requests: map[string]int{gpu: 1}},
		{Name: "main", Requests: map[string]int{gpu: 2}},
	}})
	if diff := cmp.Diff([]string{"b", "c"}, status.Containers[1].Devices(gpu)); diff != "" {
		t.Error(diff)
	}
}

// Held devices do not count for a node.
func TestAffinityCountsFreeDevices(t *testing.T) {
	r := startRig(t, Options{NUMAAligned: true})
	r.startPlugin(gpu, "a.sock", healthy("a@0", "b@0", "c@1", "d@1")...)
	r.add(oneContainer("first", 1))
	got := r.add(oneContainer("second", 2)).Containers[0].Devices(gpu)
	if diff := cmp.Diff([]string{"c", "d"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestPolicyNoneIgnoresNodes(t *testing.T) {
	r := startRig(t, Options{})
	r.startPlugin(gpu, "a.sock", healthy("a@0", "b@1", "c@1")...)
	got := r.add(oneContainer("pod", 2)).Containers[0].Devices(gpu)
	if diff := cmp.Diff([]string{"a", "b"}, got); diff != "" {
		t.Error(diff)
	}
}
