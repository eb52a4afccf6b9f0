package podresources

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/shortdir"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// patient is a timeout for a busy machine.
const patient = 2 * time.Minute

// scripted answers List with a script that gets the number of the call, from 1.
type scripted struct {
	api.UnimplementedPodResourcesListerServer
	calls  atomic.Int64
	script func(ctx context.Context, call int64) (*api.ListPodResourcesResponse, error)
	// called and answer are for GetAllocatableResources; may be nil.
	called, answer chan struct{}
}

func (s *scripted) List(ctx context.Context, _ *api.ListPodResourcesRequest) (*api.ListPodResourcesResponse, error) {
	return s.script(ctx, s.calls.Add(1))
}

func serve(t *testing.T, script func(ctx context.Context, call int64) (*api.ListPodResourcesResponse, error)) (*scripted, *Source) {
	t.Helper()
	socket := filepath.Join(shortdir.New(t), "p.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	service := &scripted{script: script}
	server := grpc.NewServer()
	api.RegisterPodResourcesListerServer(server, service)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	source := New(Options{Socket: socket, Timeout: patient})
	t.Cleanup(func() { _ = source.Close() })
	return service, source
}

func list(ctx context.Context, source *Source) (*api.ListPodResourcesResponse, error) {
	return call(ctx, source, source.limiter, func(ctx context.Context, client api.PodResourcesListerClient) (*api.ListPodResourcesResponse, error) {
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
		code   codes.Code
		calls  int64
	}{
		{
			name:   "answers",
			script: func(context.Context, int64) (*api.ListPodResourcesResponse, error) { return empty, nil },
			code:   codes.OK, calls: 1,
		},
		{
			name: "limited twice",
			script: func(_ context.Context, call int64) (*api.ListPodResourcesResponse, error) {
				if call <= 2 {
					return nil, limited
				}
				return empty, nil
			},
			code: codes.OK, calls: 3,
		},
		{
			name:   "too large is not limited",
			script: func(context.Context, int64) (*api.ListPodResourcesResponse, error) { return nil, tooLarge },
			code:   codes.ResourceExhausted, calls: 1,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			service, source := serve(t, row.script)
			_, err := list(t.Context(), source)
			if status.Code(err) != row.code {
				t.Errorf("got %v, want %v", err, row.code)
			}
			if calls := service.calls.Load(); calls != row.calls {
				t.Errorf("%d calls, want %d", calls, row.calls)
			}
		})
	}
}

// TestCallTimesOut checks the error if the kubelet gives no answer in time. The time is simulated.
func TestCallTimesOut(t *testing.T) {
	for _, row := range []struct {
		name   string
		method func(context.Context) error
		want   error
		calls  int
	}{
		{"limited for ever", func(context.Context) error { return limited }, limited, 5}, // at 0, 50, 150, 350 and 750 ms
		{"hangs", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, context.DeadlineExceeded, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source, calls := New(Options{Socket: "none", Timeout: time.Second}), 0
				_, err := call(t.Context(), source, source.limiter, func(ctx context.Context, _ api.PodResourcesListerClient) (any, error) {
					calls++
					return nil, row.method(ctx)
				})
				if !errors.Is(err, row.want) || calls != row.calls {
					t.Errorf("got %v after %d calls, want %v after %d", err, calls, row.want, row.calls)
				}
				if err := source.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestAnswerOverFourMiB(t *testing.T) {
	_, source := serve(t, func(context.Context, int64) (*api.ListPodResourcesResponse, error) {
		return &api.ListPodResourcesResponse{PodResources: []*api.PodResources{{Name: strings.Repeat("x", 5<<20)}}}, nil
	})
	if _, err := list(t.Context(), source); err != nil {
		t.Error(err)
	}
}

func TestOwnRateLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := New(Options{Socket: "none"})
		begin := time.Now()
		for range 15 { // a burst of 5, then one each 50 ms
			_, err := call(t.Context(), source, source.limiter, func(context.Context, api.PodResourcesListerClient) (any, error) { return nil, nil })
			if err != nil {
				t.Fatal(err)
			}
		}
		took := time.Since(begin) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if took.Round(time.Millisecond) != 500*time.Millisecond {
			t.Errorf("15 calls took %v", took)
		}
		if err := source.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestPodsGoFirst has a pod's question answered while background questions have used up their rate.
func TestPodsGoFirst(t *testing.T) {
	service, source := serve(t, func(context.Context, int64) (*api.ListPodResourcesResponse, error) {
		return &api.ListPodResourcesResponse{}, nil
	})
	source.limiter = rate.NewLimiter(0, 0)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	for _, ask := range []func(context.Context) ([]sharing.Allocation, error){source.Held, source.HeldTogether} {
		if _, err := ask(ctx); err != nil && !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrIncomplete) {
			t.Fatal(err)
		}
	}
	if asked := service.calls.Load(); asked != 1 {
		t.Errorf("the kubelet was asked %d times, want once, for the pod", asked)
	}
}

func TestClose(t *testing.T) {
	_, source := serve(t, func(context.Context, int64) (*api.ListPodResourcesResponse, error) {
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
	if _, err := source.Held(t.Context()); !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "connection is closing") {
		t.Errorf("got %v", err)
	}
	if err := New(Options{}).Close(); err != nil {
		t.Errorf("closing what was never opened: %v", err)
	}

	// The client's reader ends with its connection.
	deadline := time.Now().Add(patient)
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

// crowd is the number of concurrent callers in the tests.
const crowd = 20

// answers asks without a deadline, and checks that the answer is want.
func answers(t *testing.T, s *shared[int], want int, call func(context.Context, func()) (int, error)) {
	t.Helper()
	if got, err := s.ask(t.Context(), call); got != want || err != nil {
		t.Errorf("got %d, %v, want %d", got, err, want)
	}
}

// atOnce answers so.
func atOnce(answer int) func(context.Context, func()) (int, error) {
	return func(_ context.Context, begins func()) (int, error) {
		begins()
		return answer, nil
	}
}

func TestSharedByWhoWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShared[int]()
		turn, calls := make(chan struct{}), 0
		call := func(_ context.Context, begins func()) (int, error) {
			<-turn
			begins()
			calls++
			return calls, nil
		}
		var asking sync.WaitGroup
		for range crowd {
			asking.Go(func() { answers(t, s, 1, call) })
		}
		synctest.Wait() // All of them ask.
		close(turn)
		asking.Wait()
		answers(t, s, 2, call)
	})
}

// TestSharedIsNoOlderThanTheQuestion asks while a call is under way: one more call follows, for all who ask
// before it begins.
func TestSharedIsNoOlderThanTheQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShared[int]()
		answer, turn, calls := make(chan struct{}), make(chan struct{}), 1
		next := func(_ context.Context, begins func()) (int, error) {
			calls++
			<-turn
			begins()
			return calls, nil
		}
		var asking sync.WaitGroup
		asking.Go(func() {
			answers(t, s, 1, func(_ context.Context, begins func()) (int, error) {
				begins()
				<-answer
				return 1, nil
			})
		})
		synctest.Wait()
		for range crowd {
			asking.Go(func() { answers(t, s, 2, next) })
		}
		synctest.Wait()
		if calls != 1 {
			t.Error("two calls at a time")
		}
		close(answer)
		synctest.Wait()
		asking.Go(func() { answers(t, s, 2, next) })
		synctest.Wait()
		close(turn)
		asking.Wait()
	})
}

// TestSharedOutlivesTheFirst has the caller that makes the call give up: by the kubelet's limit for a client, or
// when its time is over.
func TestSharedOutlivesTheFirst(t *testing.T) {
	for _, row := range []struct {
		name string
		call func(ctx context.Context, begins func()) (int, error)
	}{
		{"waiting", func(ctx context.Context, _ func()) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}},
		{"asking", func(ctx context.Context, begins func()) (int, error) {
			begins()
			<-ctx.Done()
			return 0, ctx.Err()
		}},
		{"told that it would be too late", func(ctx context.Context, begins func()) (int, error) {
			limiter := rate.NewLimiter(rate.Every(time.Hour), 1)
			limiter.Allow()
			return 0, limiter.Wait(ctx)
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newShared[int]()
				s.turn <- struct{}{} // As if another caller were calling.
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				var asking sync.WaitGroup
				asking.Go(func() {
					if _, err := s.ask(ctx, row.call); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("the first got %v", err)
					}
				})
				synctest.Wait()
				for range crowd {
					asking.Go(func() { answers(t, s, 2, atOnce(2)) })
				}
				synctest.Wait()
				<-s.turn
				asking.Wait()
			})
		})
	}
}

// TestSharedFails gives one error to all concurrent callers, and an answer to the next.
func TestSharedFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShared[int]()
		s.turn <- struct{}{}
		refused := errors.New("refused")
		var asking sync.WaitGroup
		for range crowd {
			asking.Go(func() {
				_, err := s.ask(t.Context(), func(context.Context, func()) (int, error) { return 0, refused })
				if !errors.Is(err, refused) {
					t.Errorf("got %v", err)
				}
			})
		}
		synctest.Wait()
		<-s.turn
		asking.Wait()
		answers(t, s, 2, atOnce(2))
	})
}

// TestSharedWaitEnds has a caller that waits for another's call give up, before that call begins or after.
func TestSharedWaitEnds(t *testing.T) {
	for _, begun := range []bool{false, true} {
		t.Run(fmt.Sprint("begun ", begun), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newShared[int]()
				answer := make(chan struct{})
				var asking sync.WaitGroup
				asking.Go(func() {
					answers(t, s, 1, func(_ context.Context, begins func()) (int, error) {
						if begun {
							begins()
						}
						<-answer
						return 1, nil
					})
				})
				synctest.Wait()
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				if _, err := s.ask(ctx, atOnce(2)); !errors.Is(err, context.Canceled) {
					t.Errorf("got %v", err)
				}
				close(answer)
				asking.Wait()
				answers(t, s, 3, atOnce(3))
			})
		})
	}
}
