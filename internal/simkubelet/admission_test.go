package simkubelet

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

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
			if !errors.As(err, &rejection) || rejection.Reason != "UnexpectedAdmissionError" {
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
	// What failed holds nothing.
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

func TestBadPods(t *testing.T) {
	r := startRig(t, Options{})
	r.add(Pod{Name: "taken"})
	for name, pod := range map[string]Pod{
		"no name":        {},
		"same name":      {Name: "taken"},
		"container":      {Name: "p", Containers: []Container{{}}},
		"two containers": {Name: "p", Containers: []Container{{Name: "c"}, {Name: "c"}}},
		"negative":       {Name: "p", Containers: []Container{{Name: "c", Requests: map[string]int{gpu: -1}}}},
	} {
		if _, err := r.AddPod(r.ctx, pod); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := r.DeletePod("", "none"); !errors.Is(err, ErrNoPod) {
		t.Errorf("got %v", err)
	}
	if got := len(r.Snapshot().Pods); got != 1 {
		t.Errorf("%d pods, want 1", got)
	}
}

// F10: no call carries a deadline, and one that hangs holds up every pod.
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

// F2: the real kubelet dereferences nil here.
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

// Unhealthy is not gone: the admission completes.
func TestDeviceTurnsUnhealthyDuringAllocate(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	p.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) {
		p.send(unhealthy("a")...)
		return answer(ids), nil
	}
	r.add(oneContainer("pod", 1))
}

func TestTooManyAnswers(t *testing.T) {
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
	container, ok := status.Container("c")
	if !ok || container.Env()["DEVICES"] != "a" || len(container.Grants) != 2 || container.Devices("x") != nil {
		t.Errorf("got %+v", container)
	}
	if _, ok := status.Container("d"); ok {
		t.Error("there is no container d")
	}
}
