package simkubelet

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestAdmissionErrors(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", append(healthy("a", "b"), unhealthy("c")...)...)
	r.add(oneContainer("first", 1))
	for _, row := range []struct {
		name     string
		requests map[string]int
		allocate func(context.Context, []string) (*api.AllocateResponse, error)
		want     string
		code     codes.Code
	}{
		{name: "too many", requests: map[string]int{gpu: 2}, want: "requested number of devices unavailable for nvidia.com/gpu. Requested: 2, Available: 1"},
		{name: "unknown", requests: map[string]int{"x.com/y": 1}, want: "cannot allocate unregistered device x.com/y"},
		{
			name: "plugin refuses", requests: map[string]int{gpu: 1},
			allocate: func(context.Context, []string) (*api.AllocateResponse, error) {
				return nil, status.Error(codes.NotFound, "no such device")
			},
			want: "rpc error: code = NotFound desc = no such device", code: codes.NotFound,
		},
		{
			name: "no answer", requests: map[string]int{gpu: 1},
			allocate: func(context.Context, []string) (*api.AllocateResponse, error) { return &api.AllocateResponse{}, nil },
			want:     "no containers return in allocation response",
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			p.allocate = row.allocate
			got, err := r.AddPod(r.ctx, Pod{Name: row.name, Containers: []Container{{Name: "c", Requests: row.requests}}})
			var rejection *AdmissionError
			if !errors.As(err, &rejection) || !strings.HasPrefix(err.Error(), "UnexpectedAdmissionError: ") {
				t.Fatalf("got %v, want an admission error", err)
			}
			if want := "Pod was rejected: Allocate failed due to " + row.want; !strings.HasPrefix(rejection.Message, want) ||
				!strings.HasSuffix(rejection.Message, ", which is unexpected") {
				t.Errorf("got %q, want %q", rejection.Message, want)
			}
			if row.code != codes.OK && status.Code(err) != row.code {
				t.Errorf("code of %v is not %v", err, row.code)
			}
			if got.Phase != Failed || got.Message != rejection.Message || got.Containers[0].Grants != nil {
				t.Errorf("got %+v, want a failed pod", got)
			}
		})
	}
	// A failed pod holds nothing.
	p.allocate = nil
	if _, err := r.AddPod(r.ctx, Pod{Name: "half", Containers: []Container{
		{Name: "served", Requests: map[string]int{gpu: 1}},
		{Name: "refused", Requests: map[string]int{gpu: 1}},
	}}); err == nil {
		t.Error("a pod of two was admitted to one device")
	}
	if _, err := r.RestartContainer(r.ctx, "", "half", "served"); err == nil {
		t.Error("a container of a failed pod was started")
	}
	r.add(oneContainer("last", 1))
}

func TestZeroRequest(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	if got := r.add(oneContainer("fits", 0)); got.Containers[0].Grants != nil {
		t.Errorf("got %+v for nothing", got)
	}
	p.send(unhealthy("a")...)
	if _, err := r.AddPod(r.ctx, oneContainer("refused", 0)); err == nil || !strings.Contains(err.Error(), "no healthy devices present") {
		t.Errorf("got %v", err)
	}
}

func TestPodNames(t *testing.T) {
	r := startRig(t, Options{})
	r.add(Pod{Name: "taken"})
	if _, err := r.AddPod(r.ctx, Pod{Name: "taken"}); err == nil {
		t.Error("two pods of one name")
	}
	if err := r.DeletePod("", "none"); !errors.Is(err, ErrNoPod) {
		t.Errorf("got %v", err)
	}
	if got := len(r.Snapshot().Pods); got != 1 {
		t.Errorf("%d pods, want 1", got)
	}
}

// No call to a plugin has a deadline, and one that hangs delays every other pod.
func TestAllocateHasNoDeadlineAndBlocks(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	entered := make(chan context.Context, 1)
	p.allocate = func(ctx context.Context, _ []string) (*api.AllocateResponse, error) {
		entered <- ctx
		<-ctx.Done()
		return nil, ctx.Err()
	}
	ctx, cancel := context.WithTimeout(r.ctx, time.Minute)
	hung := make(chan error, 1)
	go func() { _, err := r.AddPod(ctx, oneContainer("hung", 1)); hung <- err }()
	if _, limited := (<-entered).Deadline(); limited {
		t.Error("Allocate has a deadline")
	}
	impatient, cancelImpatient := context.WithTimeout(r.ctx, 20*time.Millisecond)
	defer cancelImpatient()
	if _, err := r.AddPod(impatient, Pod{Name: "other"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a pod beside the hanging one: got %v", err)
	}
	cancel()
	if err := <-hung; status.Code(err) != codes.Canceled || r.ctx.Err() != nil {
		t.Errorf("got %v, want the call cancelled with its caller", err)
	}
}

// The real kubelet dereferences nil here (cm/devicemanager/manager.go).
func TestDeviceVanishesDuringAllocate(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	p.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) {
		p.send(unhealthy("a", "b")...)
		p.send(unhealthy("b")...)
		return answer(ids), nil
	}
	if _, err := r.AddPod(r.ctx, oneContainer("pod", 1)); err == nil {
		t.Error("pod was admitted")
	}
	r.expectViolation("kubelet would panic", gpu, ": a")
}

// A device that became Unhealthy is still in the list, so the admission completes.
func TestDeviceTurnsUnhealthyDuringAllocate(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	p.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) {
		p.send(unhealthy("a")...)
		return answer(ids), nil
	}
	r.add(oneContainer("pod", 1))
}

func TestTooManyContainerResponses(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	p.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) {
		twice := answer(ids)
		twice.ContainerResponses = append(twice.ContainerResponses, &api.ContainerAllocateResponse{})
		return twice, nil
	}
	r.add(oneContainer("pod", 1))
	r.expectViolation("Allocate for one container got 2 answers")
}

func TestEnvOfTwoResources(t *testing.T) {
	r := startRig(t, Options{})
	r.startPlugin(gpu, "1.sock", healthy("a")...)
	r.startPlugin("nvidia.com/mig", "2.sock", healthy("m")...)
	status := r.add(Pod{Name: "pod", Containers: []Container{{Name: "c", Requests: map[string]int{gpu: 1, "nvidia.com/mig": 1}}}})
	if len(status.Containers) != 1 {
		t.Fatalf("got %+v", status)
	}
	container := status.Containers[0]
	if container.Name != "c" || container.Env()["DEVICES"] != "a" || len(container.Grants) != 2 || container.Devices("x") != nil {
		t.Errorf("got %+v", container)
	}
}

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

func TestInitContainerDevicesAreReused(t *testing.T) {
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
		{Name: "init2", Requests: wants(2), Init: true},
	}})
	got := map[string][]string{}
	for _, container := range status.Containers {
		got[container.Name] = container.Devices(gpu)
	}
	want := map[string][]string{
		"init":   {"a"},
		"init2":  {"a", "b"}, // init's device and another
		"main":   {"a", "b"}, // all reused: the plugin is not asked
		"second": {"c"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([][]string{nil, {"a"}, nil}, musts); diff != "" {
		t.Errorf("must include: %s", diff)
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
