package policy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// followed runs a feed of one ConfigMap until the test ends, and returns what it
// has seen.
func followed(t *testing.T, server *fakeServer, change func(*feed)) *ConfigMap {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	c := newConfigMap("gpu", "profiles", log, func(what string, into sink) *feed {
		f := server.feed(what, into, log)
		change(f)
		return f
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(ctx, func() {}) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(10 * time.Second):
			t.Error("the feed does not end")
		}
	})
	return c
}

// sees waits until the document a is that text.
func sees(t *testing.T, c *ConfigMap, text string) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		documents, err := c.Documents()
		if err == nil && documents["a"] == text {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("sees %q, %v; want %q", documents, err, text)
		}
		<-time.After(time.Millisecond)
	}
}

// TestServerThatHangs: requests that nobody answers are given up, and made again.
func TestServerThatHangs(t *testing.T) {
	server := newFakeServer()
	server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
	var lists, watches atomic.Int32
	c := followed(t, server, func(f *feed) {
		f.patience = time.Millisecond
		list, open := f.list, f.watch
		f.list = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			if lists.Add(1) == 1 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return list(ctx, options)
		}
		f.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
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
	c := followed(t, server, func(f *feed) {
		f.life = time.Millisecond
		open := f.watch
		f.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
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
			var spoilt atomic.Bool
			c := followed(t, server, func(f *feed) {
				list, open := f.list, f.watch
				f.list = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
					object, err := list(ctx, options)
					if described, ok := object.(*metav1.List); ok && spoilt.Load() {
						described.ResourceVersion = "1000"
					}
					return object, err
				}
				f.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
					if options.ResourceVersion == "1000" {
						return open(ctx, options)
					}
					spoilt.Store(true)
					w := watch.NewFakeWithChanSize(1, false)
					w.Action(event.Type, event.Object)
					return w, nil
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
			c := followed(t, server, func(f *feed) {
				list := f.list
				f.list = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
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
