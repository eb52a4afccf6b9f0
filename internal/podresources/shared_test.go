package podresources

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
)

// crowd is who asks at once in the tests.
const crowd = 20

// answers asks without end, and holds the answer to be want.
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

// TestSharedIsNoOlderThanTheQuestion asks while a call is under way: one more call
// is made, after it, for all who ask until that begins.
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

// TestSharedOutlivesTheFirst has the one that makes the call give up: as soon as it
// may be told, as by the kubelet's limit for a client, or when its time is over.
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
				s.turn <- struct{}{} // Somebody else's.
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

// TestSharedFails has those who asked together get one error, and the next who
// asks an answer.
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

// TestSharedWaitEnds has one of those who wait for another's call give up: for its
// answer, or for it to be over.
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
