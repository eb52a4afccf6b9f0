package configsource

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/test/await"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// watchedConfigMap watches one ConfigMap until the test ends, and returns what it
// has seen.
func watchedConfigMap(t *testing.T, server *fakeServer, change func(*watcher)) *ConfigMap {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	c := NewConfigMap(&Client{func(q query, into store) *watcher {
		w := server.watcher(q, into)
		change(w)
		return w
	}}, "gpu", "profiles", log)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(ctx, func() {}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return c
}

// sees waits until the document a is that text.
func sees(t *testing.T, c *ConfigMap, text string) {
	t.Helper()
	await.Until(t, "the document", func() error {
		documents, err := c.Documents()
		if err != nil || documents["a"] != text {
			return fmt.Errorf("sees %q, %w; want %q", documents, err, text)
		}
		return nil
	})
}

// TestServerThatHangs: requests that nobody answers are given up, and made again.
func TestServerThatHangs(t *testing.T) {
	server := newFakeServer()
	server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
	var lists, watches atomic.Int32
	c := watchedConfigMap(t, server, func(w *watcher) {
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
			if watches.Add(1) == 1 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return open(ctx, options)
		}
	})
	sees(t, c, four)
	server.change("profiles", fakeConfigMap(map[string]string{"a": ten}))
	sees(t, c, ten)
}

// TestWatchThatIsForgotten: a watch that the server does not end in its time is
// ended here.
func TestWatchThatIsForgotten(t *testing.T) {
	server := newFakeServer()
	server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
	var watches atomic.Int32
	c := watchedConfigMap(t, server, func(w *watcher) {
		w.pace.life = time.Millisecond
		open := w.watch
		w.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			if watches.Add(1) == 1 {
				return watch.NewFake(), nil // says nothing, for ever
			}
			return open(ctx, options)
		}
	})
	sees(t, c, four)
	server.change("profiles", fakeConfigMap(map[string]string{"a": ten}))
	sees(t, c, ten)
}

// TestGarbage: what cannot be read from a watch leads to a list, so that one bad
// event does not come again for ever.
func TestGarbage(t *testing.T) {
	garbage := map[string]watch.Event{
		"an error":                 {Type: watch.Error, Object: &metav1.Status{Status: "Failure", Code: http.StatusInternalServerError, Message: "unable to decode an event"}},
		"an error without content": {Type: watch.Error},
		"no object":                {Type: watch.Modified},
		"an object without a name": {Type: watch.Modified, Object: &metav1.Status{}},
	}
	for name, event := range garbage {
		t.Run(name, func(t *testing.T) {
			server := newFakeServer()
			server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
			c := watchedConfigMap(t, server, func(w *watcher) {
				open := w.watch
				w.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
					if options.ResourceVersion != "2" { // that of the first list
						return open(ctx, options)
					}
					server.expire() // The next list has another version.
					events := watch.NewFakeWithChanSize(1, false)
					events.Action(event.Type, event.Object)
					events.Stop()
					return events, nil
				}
			})
			sees(t, c, four)
			server.change("profiles", fakeConfigMap(map[string]string{"a": ten}))
			sees(t, c, ten)
		})
	}
}

// TestAnswersThatAreNone: a list of something else is no empty list, which would
// say that the ConfigMap is gone.
func TestAnswersThatAreNone(t *testing.T) {
	for name, answer := range map[string]runtime.Object{
		"a status": &metav1.Status{Status: "Success"}, "an object": fakeNode("n1", ""), "nothing": nil,
	} {
		t.Run(name, func(t *testing.T) {
			server := newFakeServer()
			server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
			var asked atomic.Int32
			c := watchedConfigMap(t, server, func(w *watcher) {
				list := w.list
				w.list = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
					if asked.Add(1) < 3 {
						return answer, nil
					}
					return list(ctx, options)
				}
			})
			sees(t, c, four)
			if _, err := c.Documents(); errors.Is(err, errNotThere) {
				t.Error(err)
			}
		})
	}
}

// TestPartOfAList: a server that answers with a part of the list, which nobody asks
// for, is not asked for the rest again and again.
func TestPartOfAList(t *testing.T) {
	server := newFakeServer()
	server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
	var mended atomic.Bool
	c := watchedConfigMap(t, server, func(w *watcher) {
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
		_, err := c.Documents()
		if err == nil || !strings.Contains(err.Error(), told) {
			return fmt.Errorf("error %w, want %q", err, told)
		}
		return nil
	})
	mended.Store(true)
	sees(t, c, four)
}

// TestBackoff: waits after failures double, are not the same on all nodes, and are
// never shorter than the server asks for.
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

// TestNodesComeBackApart: of many nodes whose watches are cut at once, no second
// sees many more than its share of the spread; a watch that ended in its time is
// opened again at once, and one that is cut again and again ever later.
func TestNodesComeBackApart(t *testing.T) {
	const nodes = 1000
	synctest.Test(t, func(t *testing.T) {
		seconds := int64(watchTimeout.Seconds())
		options := metav1.ListOptions{TimeoutSeconds: &seconds}
		server := newFakeServer()
		var mu sync.Mutex
		came := map[int]int{}
		pass := func(d time.Duration) { <-time.After(d) } //nolint:forbidigo // in a synctest bubble: the time is simulated
		var all sync.WaitGroup
		for range nodes {
			all.Go(func() {
				w := server.watcher(query{}, &partStore[int]{})
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

// TestCutWatchGoesOn: a watch that is cut goes on from where it was, without a
// list and without a complaint.
func TestCutWatchGoesOn(t *testing.T) {
	server := newFakeServer()
	server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
	opened := make(chan string, 10)
	var complaints atomic.Int32
	c := watchedConfigMap(t, server, func(w *watcher) {
		w.store = complaining{w.store, &complaints}
		open := w.watch
		w.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			opened <- options.ResourceVersion
			return open(ctx, options)
		}
	})
	sees(t, c, four)
	<-opened
	server.change("profiles", fakeConfigMap(map[string]string{"a": ten}))
	sees(t, c, ten)
	server.drop()
	if version := <-opened; version != "3" {
		t.Errorf("watched again from version %s", version)
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if server.lists != 1 {
		t.Errorf("%d lists", server.lists)
	}
	if got := complaints.Load(); got != 0 {
		t.Errorf("%d complaints", got)
	}
}

// complaining counts why objects could not be followed.
type complaining struct {
	store
	count *atomic.Int32
}

func (c complaining) Failed(err error) {
	if err != nil {
		c.count.Add(1)
	}
	c.store.Failed(err)
}
