package simkubelet

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestPreferredAllocation(t *testing.T) {
	for _, row := range []struct {
		name   string
		count  int
		answer []string
		want   []string
	}{
		{"followed", 2, []string{"d", "b"}, []string{"b", "d"}},
		{"short answer is filled", 2, []string{"c"}, []string{"a", "c"}},
		{"empty answer is filled", 2, nil, []string{"a", "b"}},
		{"what is not available is ignored", 2, []string{"sick", "none", "d"}, []string{"a", "d"}},
		{"asked although there is no choice", 4, nil, []string{"a", "b", "c", "d"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := startRig(t, Options{})
			p := r.servePlugin(gpu, "a.sock")
			p.options = &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}
			var asked []*api.ContainerPreferredAllocationRequest
			p.prefer = func(_ context.Context, request *api.ContainerPreferredAllocationRequest) ([]string, error) {
				asked = append(asked, request)
				return row.answer, nil
			}
			if err := p.register(r.ctx); err != nil {
				t.Fatal(err)
			}
			p.send(append(healthy("a", "b", "c", "d"), unhealthy("sick")...)...)
			got := r.add(oneContainer("pod", row.count)).Containers[0].Devices(gpu)
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Error(diff)
			}
			if len(asked) != 1 || int(asked[0].AllocationSize) != row.count || len(asked[0].MustIncludeDeviceIDs) != 0 ||
				!slices.Equal(asked[0].AvailableDeviceIDs, []string{"a", "b", "c", "d"}) {
				t.Errorf("asked %v", asked)
			}
		})
	}
}

func TestPreferredAllocationFails(t *testing.T) {
	r := startRig(t, Options{})
	p := r.servePlugin(gpu, "a.sock")
	p.options = &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}
	p.prefer = func(context.Context, *api.ContainerPreferredAllocationRequest) ([]string, error) {
		return nil, status.Error(codes.Internal, "no idea")
	}
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a")...)
	_, err := r.AddPod(r.ctx, oneContainer("pod", 1))
	if err == nil || !strings.Contains(err.Error(), "device plugin GetPreferredAllocation rpc failed with err: rpc error: code = Internal desc = no idea") {
		t.Errorf("got %v", err)
	}
}

func TestInitContainersLendDevices(t *testing.T) {
	r := startRig(t, Options{})
	p := r.servePlugin(gpu, "a.sock")
	p.options = &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}
	var musts [][]string
	var last *api.ContainerPreferredAllocationRequest
	p.prefer = func(_ context.Context, request *api.ContainerPreferredAllocationRequest) ([]string, error) {
		musts, last = append(musts, request.MustIncludeDeviceIDs), request
		return nil, nil
	}
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a", "b", "c", "d", "e")...)
	wants := func(n int) map[string]int { return map[string]int{gpu: n} }
	status := r.add(Pod{Name: "pod", Containers: []Container{
		{Name: "main", Requests: wants(2)},
		{Name: "second", Requests: wants(1)},
		{Name: "init", Requests: wants(1), Init: true},
		{Name: "sidecar", Requests: wants(1), Sidecar: true},
		{Name: "init2", Requests: wants(2), Init: true},
	}})
	got := map[string][]string{}
	for _, container := range status.Containers {
		got[container.Name] = container.Devices(gpu)
	}
	want := map[string][]string{
		"init":    {"a"},
		"sidecar": {"a"}, // takes over what init had, and keeps it
		"init2":   {"b", "c"},
		"main":    {"b", "c"}, // all reused: the plugin is not asked
		"second":  {"d"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if len(musts) != 3 || slices.ContainsFunc(musts, func(must []string) bool { return len(must) > 0 }) {
		t.Errorf("asked %q, want 3 times without reused devices", musts)
	}

	r.remove("", "pod")
	musts = nil
	r.add(Pod{Name: "grows", Containers: []Container{
		{Name: "init", Requests: wants(1), Init: true},
		{Name: "main", Requests: wants(3)},
	}})
	if diff := cmp.Diff([][]string{nil, {"a"}}, musts); diff != "" {
		t.Errorf("must include: %s", diff)
	}
	if last.AllocationSize != 3 || !slices.Contains(last.AvailableDeviceIDs, "a") {
		t.Errorf("asked %v, want the whole request and the reused device among the available", last)
	}
}

func (r *rig) remove(namespace, name string) {
	r.t.Helper()
	if err := r.DeletePod(namespace, name); err != nil {
		r.t.Fatal(err)
	}
}

func TestRandomOrder(t *testing.T) {
	r := startRig(t, Options{Random: rand.New(rand.NewPCG(1, 2))})
	r.startPlugin(gpu, "a.sock", healthy("a", "b", "c", "d", "e", "f", "g", "h")...)
	seen := set{}
	for range 20 {
		seen.add(setOf(r.add(oneContainer("pod", 1)).Containers[0].Devices(gpu)...))
		r.remove("default", "pod")
	}
	if len(seen) < 3 {
		t.Errorf("20 pods got %v", seen.sorted())
	}
}
