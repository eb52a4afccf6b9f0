package podresources

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// crowd is who asks at once in the tests.
const crowd = 20

// joined waits until so many ask for the call that has not begun. There is no
// other sign of it than that they wait.
func joined(t *testing.T, asking *sync.WaitGroup, release func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { asking.Wait(); close(done) }()
	select {
	case <-done:
		t.Error("they did not wait for the call")
	case <-time.After(100 * time.Millisecond):
	}
	release()
	<-done
}

func TestSharedByWhoWaits(t *testing.T) {
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
		asking.Go(func() {
			if got, err := s.ask(t.Context(), call); got != 1 || err != nil {
				t.Errorf("got %d, %v", got, err)
			}
		})
	}
	joined(t, &asking, func() { close(turn) })
	if got, err := s.ask(t.Context(), call); got != 2 || err != nil {
		t.Errorf("afterwards got %d, %v", got, err)
	}
}

// TestSharedIsNoOlderThanTheQuestion asks while a call is under way.
func TestSharedIsNoOlderThanTheQuestion(t *testing.T) {
	s := newShared[int]()
	began, answer := make(chan struct{}), make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() {
		got, err := s.ask(t.Context(), func(_ context.Context, begins func()) (int, error) {
			begins()
			close(began)
			<-answer
			return 1, nil
		})
		if got != 1 || err != nil {
			t.Errorf("got %d, %v", got, err)
		}
	})
	<-began
	for range crowd {
		asking.Go(func() {
			got, err := s.ask(t.Context(), func(_ context.Context, begins func()) (int, error) {
				begins()
				return 2, nil
			})
			if got != 2 || err != nil {
				t.Errorf("asked later, got %d, %v", got, err)
			}
		})
	}
	joined(t, &asking, func() { close(answer) })
}

// TestSharedOutlivesTheFirst has the one that makes the call give up.
func TestSharedOutlivesTheFirst(t *testing.T) {
	s := newShared[int]()
	ctx, giveUp := context.WithCancel(t.Context())
	waits := make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() {
		_, err := s.ask(ctx, func(ctx context.Context, _ func()) (int, error) {
			close(waits)
			<-ctx.Done()
			return 0, ctx.Err()
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the first got %v", err)
		}
	})
	<-waits
	for range crowd {
		asking.Go(func() {
			got, err := s.ask(t.Context(), func(_ context.Context, begins func()) (int, error) {
				begins()
				return 2, nil
			})
			if got != 2 || err != nil {
				t.Errorf("got %d, %v", got, err)
			}
		})
	}
	joined(t, &asking, giveUp)
}

// TestSharedWaitEnds has one of those who wait for another's call give up: for its
// answer, or for it to be over.
func TestSharedWaitEnds(t *testing.T) {
	for _, begun := range []bool{false, true} {
		t.Run(fmt.Sprint("begun ", begun), func(t *testing.T) {
			s := newShared[int]()
			waits, answer := make(chan struct{}), make(chan struct{})
			var asking sync.WaitGroup
			asking.Go(func() {
				_, _ = s.ask(t.Context(), func(_ context.Context, begins func()) (int, error) {
					if begun {
						begins()
					}
					close(waits)
					<-answer
					return 0, nil
				})
			})
			<-waits
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := s.ask(ctx, nil); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			close(answer)
			asking.Wait()
		})
	}
}

// GetAllocatableResources shows no device.
func (s *scripted) GetAllocatableResources(context.Context, *api.AllocatableResourcesRequest) (*api.AllocatableResourcesResponse, error) {
	s.calls.Add(1)
	return &api.AllocatableResourcesResponse{}, nil
}

// TestServingIsAskedForAllAtOnce has many resources register at once, as at a
// start: one call each would take its turn for seconds.
func TestServingIsAskedForAllAtOnce(t *testing.T) {
	service, source := serve(t, patient, nil)
	var asking sync.WaitGroup
	for range 10 * crowd {
		asking.Go(func() {
			if _, err := source.Serving(t.Context(), gpu); err != nil {
				t.Error(err)
			}
		})
	}
	asking.Wait()
	if calls := service.calls.Load(); calls > crowd {
		t.Errorf("%d calls", calls)
	}
}
