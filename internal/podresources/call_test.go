package podresources

import (
	"cmp"
	"context"
	"errors"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// patient is a timeout for a busy machine.
const patient = 20 * time.Second

// scripted answers List with a script that is told the number of the call,
// from 1.
type scripted struct {
	api.UnimplementedPodResourcesListerServer
	calls  atomic.Int64
	script func(ctx context.Context, call int64) (*api.ListPodResourcesResponse, error)
	// called and answer are GetAllocatableResources'; nil for none.
	called, answer chan struct{}
}

func (s *scripted) List(ctx context.Context, _ *api.ListPodResourcesRequest) (*api.ListPodResourcesResponse, error) {
	return s.script(ctx, s.calls.Add(1))
}

func serve(t *testing.T, timeout time.Duration, script func(ctx context.Context, call int64) (*api.ListPodResourcesResponse, error)) (*scripted, *Source) {
	t.Helper()
	socket := filepath.Join(shortDir(t), "p.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	service := &scripted{script: script}
	server := grpc.NewServer()
	api.RegisterPodResourcesListerServer(server, service)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	source := New(Options{Socket: socket, Timeout: timeout})
	t.Cleanup(func() { _ = source.Close() })
	return service, source
}

func list(ctx context.Context, source *Source) (*api.ListPodResourcesResponse, error) {
	return call(ctx, source, func(ctx context.Context, client api.PodResourcesListerClient) (*api.ListPodResourcesResponse, error) {
		return client.List(ctx, &api.ListPodResourcesRequest{})
	})
}

var (
	limited  = status.Error(codes.ResourceExhausted, rateLimited)
	tooLarge = status.Error(codes.ResourceExhausted, "message is too large")
)

func TestCall(t *testing.T) {
	empty := &api.ListPodResourcesResponse{}
	for _, row := range []struct {
		name   string
		script func(ctx context.Context, call int64) (*api.ListPodResourcesResponse, error)
		// timeout is patient when zero.
		timeout time.Duration
		code    codes.Code
		// calls are the fewest and the most.
		fewest, most int64
	}{
		{
			name:   "answers",
			script: func(context.Context, int64) (*api.ListPodResourcesResponse, error) { return empty, nil },
			code:   codes.OK, fewest: 1, most: 1,
		},
		{
			name: "limited twice",
			script: func(_ context.Context, call int64) (*api.ListPodResourcesResponse, error) {
				if call <= 2 {
					return nil, limited
				}
				return empty, nil
			},
			code: codes.OK, fewest: 3, most: 3,
		},
		{
			name:    "limited for ever",
			script:  func(context.Context, int64) (*api.ListPodResourcesResponse, error) { return nil, limited },
			timeout: time.Second, code: codes.ResourceExhausted, fewest: 2, most: 6, // at 0, 50, 150, 350, 750 ms
		},
		{
			name:   "too large is not limited",
			script: func(context.Context, int64) (*api.ListPodResourcesResponse, error) { return nil, tooLarge },
			code:   codes.ResourceExhausted, fewest: 1, most: 1,
		},
		{
			name: "hangs",
			script: func(ctx context.Context, _ int64) (*api.ListPodResourcesResponse, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			},
			timeout: 200 * time.Millisecond, code: codes.DeadlineExceeded, fewest: 1, most: 1,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			service, source := serve(t, cmp.Or(row.timeout, patient), row.script)
			_, err := list(t.Context(), source)
			if status.Code(err) != row.code {
				t.Errorf("got %v, want %v", err, row.code)
			}
			if calls := service.calls.Load(); calls < row.fewest || calls > row.most {
				t.Errorf("%d calls, want %d to %d", calls, row.fewest, row.most)
			}
		})
	}
}

func TestAnswerOverFourMiB(t *testing.T) {
	_, source := serve(t, patient, func(context.Context, int64) (*api.ListPodResourcesResponse, error) {
		return &api.ListPodResourcesResponse{PodResources: []*api.PodResources{{Name: strings.Repeat("x", 5<<20)}}}, nil
	})
	if _, err := list(t.Context(), source); err != nil {
		t.Error(err)
	}
}

func TestOwnRateLimit(t *testing.T) {
	_, source := serve(t, patient, func(context.Context, int64) (*api.ListPodResourcesResponse, error) {
		return &api.ListPodResourcesResponse{}, nil
	})
	begin := time.Now()
	for range 15 { // a burst of 5, then one each 50 ms
		if _, err := list(t.Context(), source); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(begin); took < 400*time.Millisecond {
		t.Errorf("15 calls took %v", took)
	}
}

func TestClose(t *testing.T) {
	_, source := serve(t, patient, func(context.Context, int64) (*api.ListPodResourcesResponse, error) {
		return &api.ListPodResourcesResponse{}, nil
	})
	if _, err := list(t.Context(), source); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := source.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := source.Held(t.Context()); !errors.Is(err, ErrUnknown) || !errors.Is(err, errClosed) {
		t.Errorf("got %v", err)
	}
	if err := New(Options{}).Close(); err != nil {
		t.Errorf("closing what was never opened: %v", err)
	}

	// The client's reader ends with its connection.
	deadline := time.Now().Add(10 * time.Second)
	for {
		stacks := make([]byte, 1<<20)
		if !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "http2Client") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("gRPC's client goroutines live on")
		}
		runtime.Gosched()
	}
}
