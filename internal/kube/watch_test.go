package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/watchserver"
)

// seen is a Store that keeps the document a of one ConfigMap, and why it is not followed.
type seen struct {
	mu   sync.Mutex
	text string
	err  error
	// missing is true if a list was without the ConfigMap; complaints counts failures.
	missing    bool
	complaints int
}

func (s *seen) Update(object any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if configMap, ok := object.(*corev1.ConfigMap); ok {
		s.text = configMap.Data["a"]
	}
}

func (s *seen) Delete(any) {}

func (s *seen) Replace(objects []any, _ string) {
	if len(objects) == 0 {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.missing = true
		return
	}
	s.Update(objects[0])
}

func (s *seen) Failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
	if err != nil {
		s.complaints++
	}
}

// sees waits until the document is that text.
func (s *seen) sees(t *testing.T, text string) {
	t.Helper()
	await.Until(t, "the document", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.text != text {
			return fmt.Errorf("sees %q, %w; want %q", s.text, s.err, text)
		}
		return nil
	})
}

func document(text string) runtime.Object {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "profiles"}, Data: map[string]string{"a": text}}
}

// newTestWatcher watches the server, and reconnects soon.
func newTestWatcher(server *watchserver.Server, into Store) *watcher {
	return &watcher{
		list: server.List, watch: server.Watch, store: into,
		pace: pace{backoff: wait.Backoff{Duration: time.Millisecond, Cap: time.Millisecond, Factor: 2, Steps: 1}, spread: time.Millisecond, answer: time.Hour},
	}
}

// follow watches the server until the test ends, and returns what was seen.
func follow(t *testing.T, server *watchserver.Server, change func(*watcher)) *seen {
	t.Helper()
	s := &seen{}
	w := newTestWatcher(server, s)
	change(w)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); w.run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return s
}

// TestServerThatHangs checks that requests without an answer, or with one that comes too late, are given up
// and repeated, and that no watch costs another list.
func TestServerThatHangs(t *testing.T) {
	server := watchserver.New()
	server.Change("profiles", document("four"))
	var lists, watches atomic.Int32
	c := follow(t, server, func(w *watcher) {
		w.pace.answer = time.Millisecond
		list, open := w.list, w.watch
		w.list = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			if lists.Add(1) == 1 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return list(ctx, options)
		}
		w.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			switch watches.Add(1) {
			case 1:
				<-ctx.Done()
				return nil, ctx.Err()
			case 2:
				<-ctx.Done() // The answer was on its way.
			}
			return open(ctx, options)
		}
	})
	c.sees(t, "four")
	await.True(t, "a third watch", func() bool { return watches.Load() > 2 })
	server.Change("profiles", document("ten"))
	c.sees(t, "ten")
	if answered, _ := server.Answered(); answered != 1 {
		t.Errorf("%d lists were answered", answered)
	}
}

// TestWatchThatIsForgotten checks that the client ends a watch that the server does not end in time.
func TestWatchThatIsForgotten(t *testing.T) {
	server := watchserver.New()
	server.Change("profiles", document("four"))
	var watches atomic.Int32
	c := follow(t, server, func(w *watcher) {
		w.pace.life = time.Millisecond
		open := w.watch
		w.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			if watches.Add(1) == 1 {
				return watch.NewFake(), nil // sends nothing, forever
			}
			return open(ctx, options)
		}
	})
	c.sees(t, "four")
	server.Change("profiles", document("ten"))
	c.sees(t, "ten")
}

// TestGarbage checks that an unreadable event leads to a list, so that the same event does not come again forever.
func TestGarbage(t *testing.T) {
	garbage := map[string]watch.Event{
		"an error":                 {Type: watch.Error, Object: &metav1.Status{Status: "Failure", Code: http.StatusInternalServerError, Message: "unable to decode an event"}},
		"an error without content": {Type: watch.Error},
		"no object":                {Type: watch.Modified},
		"an object without a name": {Type: watch.Modified, Object: &metav1.Status{}},
	}
	for name, event := range garbage {
		t.Run(name, func(t *testing.T) {
			server := watchserver.New()
			server.Change("profiles", document("four"))
			c := follow(t, server, func(w *watcher) {
				open := w.watch
				w.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
					if options.ResourceVersion != "2" { // from the first list
						return open(ctx, options)
					}
					server.Expire() // The next list has another version.
					events := watch.NewFakeWithChanSize(1, false)
					events.Action(event.Type, event.Object)
					events.Stop()
					return events, nil
				}
			})
			c.sees(t, "four")
			server.Change("profiles", document("ten"))
			c.sees(t, "ten")
		})
	}
}

// TestAnswersThatAreNone checks that an answer that is not a list does not count as an empty list, which would mean
// that the ConfigMap is gone.
func TestAnswersThatAreNone(t *testing.T) {
	for name, answer := range map[string]runtime.Object{
		"a status": &metav1.Status{Status: "Success"}, "an object": document("four"), "nothing": nil,
	} {
		t.Run(name, func(t *testing.T) {
			server := watchserver.New()
			server.Change("profiles", document("four"))
			var asked atomic.Int32
			c := follow(t, server, func(w *watcher) {
				list := w.list
				w.list = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
					if asked.Add(1) < 3 {
						return answer, nil
					}
					return list(ctx, options)
				}
			})
			c.sees(t, "four")
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.missing {
				t.Error("the ConfigMap was gone meanwhile")
			}
		})
	}
}

// TestPartOfAList checks that if a server answers with a part of the list without being asked to, the rest is not
// requested again and again.
func TestPartOfAList(t *testing.T) {
	server := watchserver.New()
	server.Change("profiles", document("four"))
	var mended atomic.Bool
	c := follow(t, server, func(w *watcher) {
		list := w.list
		w.list = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			if !mended.Load() {
				return &metav1.List{ListMeta: metav1.ListMeta{ResourceVersion: "2", Continue: "more"}}, nil
			}
			return list(ctx, options)
		}
	})
	const told = "a part of the list"
	await.Until(t, "the error", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.err == nil || !strings.Contains(c.err.Error(), told) {
			return fmt.Errorf("error %w, want %q", c.err, told)
		}
		return nil
	})
	mended.Store(true)
	c.sees(t, "four")
}

// TestBackoff checks that waits after failures double, differ between nodes, and are never shorter than the server
// asks for.
func TestBackoff(t *testing.T) {
	w := &watcher{pace: defaultPace()}
	w.retry = w.pace.backoff
	for _, least := range []time.Duration{300, 600, 1200, 2400, 4800, 9600, 19200, 20000, 20000} {
		least *= time.Millisecond
		if wait := w.retry.Step(); wait < least || wait > 2*least {
			t.Errorf("a wait of %s, want %s to twice of it", wait, least)
		}
	}
	busy := fmt.Errorf("list: %w", apierrors.NewTooManyRequests("busy", 3))
	waits := map[time.Duration]bool{}
	for range 10 {
		wait := askedFor(busy)
		waits[wait] = true
		if wait < 3*time.Second || wait > 6*time.Second {
			t.Errorf("a wait of %s for a server that asks for 3 s", wait)
		}
	}
	if len(waits) == 1 {
		t.Errorf("all nodes come back after %v", waits)
	}
	if wait := askedFor(errors.New("away")); wait != 0 {
		t.Errorf("a wait of %s for a server that asks for nothing", wait)
	}
}

// TestNodesComeBackApart checks that if many nodes' watches are cut at once, no second gets many more than its
// share of the spread. A watch that ended normally is reopened at once, and one that is cut repeatedly is reopened
// later each time.
func TestNodesComeBackApart(t *testing.T) {
	const nodes = 1000
	synctest.Test(t, func(t *testing.T) {
		seconds := int64(watchTimeout.Seconds())
		options := metav1.ListOptions{TimeoutSeconds: &seconds}
		server := watchserver.New()
		var mu sync.Mutex
		came := map[int]int{}
		pass := func(d time.Duration) { <-time.After(d) } //nolint:forbidigo // in a synctest bubble: the time is simulated
		var all sync.WaitGroup
		for range nodes {
			all.Go(func() {
				w := newTestWatcher(server, &seen{})
				w.pace = defaultPace()
				w.watch = func(context.Context, metav1.ListOptions) (watch.Interface, error) { return watch.NewFake(), nil }
				reopen := func() time.Duration {
					began := time.Now()
					events, err := w.watchFrom(t.Context(), options)
					if err != nil {
						t.Error(err)
						return 0
					}
					events.Stop()
					return time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
				}
				if took := reopen(); took != 0 {
					t.Errorf("the first watch waits for %s", took)
				}
				pass(watchTimeout)
				if took := reopen(); took != 0 {
					t.Errorf("the watch after one that ended in its time waits for %s", took)
				}
				pass(watchTimeout / 2)
				took := reopen()
				mu.Lock()
				came[int(took.Seconds())]++
				mu.Unlock()
				for range 10 {
					took = reopen()
				}
				if took < w.pace.backoff.Cap {
					t.Errorf("after many cuts in a row a wait of %s", took)
				}
			})
		}
		all.Wait()
		for at, count := range came {
			if count > nodes/3 {
				t.Errorf("%d nodes come back in second %d: %v", count, at, came)
			}
		}
	})
}

// TestCutWatchGoesOn checks that a cut watch resumes without a list and without an error.
func TestCutWatchGoesOn(t *testing.T) {
	server := watchserver.New()
	server.Change("profiles", document("four"))
	opened := make(chan string, 10)
	c := follow(t, server, func(w *watcher) {
		open := w.watch
		w.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			opened <- options.ResourceVersion
			return open(ctx, options)
		}
	})
	c.sees(t, "four")
	<-opened
	server.Change("profiles", document("ten"))
	c.sees(t, "ten")
	server.Drop()
	if version := <-opened; version != "3" {
		t.Errorf("watched again from version %s", version)
	}
	if got, _ := server.Answered(); got != 1 {
		t.Errorf("%d lists", got)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.complaints != 0 {
		t.Errorf("%d complaints", c.complaints)
	}
}
