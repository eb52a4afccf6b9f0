package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/virgate/virgate/internal/wake"
)

// watcher keeps a store up to date with a few objects of the API server. client-go's Reflector does
// the bookkeeping: it lists once, watches from there, and lists again if the server has forgotten
// that version. The watcher makes the requests. It adds deadlines, which the Reflector does not
// set, and spreads the requests over time, so that the nodes of a cluster do not come back
// together: see docs/internals/scale.md.
type watcher struct {
	// what names the objects in messages: "node n1".
	what  string
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
	store Store
	pace  pace

	// retry is the backoff of watches that fail or are cut. opened is when the last watch began,
	// due when the server should end it.
	retry       wait.Backoff
	opened, due time.Time
	// listing is held during a list, which the Reflector does not wait for when it ends (v0.36,
	// tools/cache/reflector.go).
	listing sync.Mutex
}

// Store receives what a watch sees, from one goroutine at a time.
type Store interface {
	// Update gets an object that is new or has changed, Delete one that is gone.
	Update(object any)
	Delete(object any)
	// Replace gets the objects of a list, and the list's version.
	Replace(objects []any, version string)
	// Failed gets why the objects cannot be watched; nil when they can be again.
	Failed(error)
}

// reflected is a Store as the Reflector wants it.
type reflected struct{ Store }

func (r reflected) Add(object any) error    { return r.Update(object) }
func (r reflected) Update(object any) error { r.Store.Update(object); return nil }
func (r reflected) Delete(object any) error { r.Store.Delete(object); return nil }

func (r reflected) Replace(objects []any, version string) error {
	r.Store.Replace(objects, version)
	return nil
}

func (reflected) Resync() error { return nil }

// pace holds a watcher's times.
type pace struct {
	// backoff is the wait after failures. A list resets it, and so does a watch that stays open for
	// at least the longest wait.
	backoff wait.Backoff
	// spread is the time over which the nodes of a cluster come back if their watches are cut at
	// once, for example when an API server ends: each waits for a random part of it. For 10,000
	// nodes that is 2,000 connections a second.
	spread time.Duration
	// answer limits the wait for an answer to a request. list limits a list; 0 means answer.
	answer, list time.Duration
	// life limits a watch; 0 means a minute longer than the server was asked for. HTTP/2's pings
	// notice a lost connection earlier.
	life time.Duration
}

func defaultPace() pace {
	return pace{
		backoff: Backoff(300*time.Millisecond, 20*time.Second),
		spread:  5 * time.Second,
		answer:  15 * time.Second,
	}
}

// watchTimeout is the shortest time until the server ends a watch; the longest is twice that.
const watchTimeout = 30 * time.Minute

// Follow lists and watches with the given requests and keeps the store up to date until ctx ends.
// Each list must be complete and finish within list; it may be empty if the store has already taken
// the items page by page. After a watch was cut, it comes back at a random time within spread, so
// that many clients do not come back at once.
func Follow(ctx context.Context, requests cache.ListWatch, what string, into Store, list, spread time.Duration) {
	w := &watcher{
		what:  what,
		list:  requests.ListWithContextFunc,
		watch: requests.WatchFuncWithContext,
		store: into,
		pace:  defaultPace(),
	}
	w.pace.list, w.pace.spread = list, spread
	w.run(ctx)
}

// Follow lists and watches the objects and keeps the store up to date until ctx ends.
func (c *Client) Follow(ctx context.Context, q Query, into Store) { c.watcher(q, into).run(ctx) }

// Watch watches the objects from a version on, for 30 to 60 minutes. Who watches lists again when the
// watch ends.
func (c *Client) Watch(ctx context.Context, q Query, version string) (watch.Interface, error) {
	timeout := int64(wait.Jitter(watchTimeout, 1) / time.Second)
	return c.watcher(q, nil).open(ctx, metav1.ListOptions{ResourceVersion: version, TimeoutSeconds: &timeout})
}

// watcher returns the watcher of these objects, which limits its requests itself.
func (c *Client) watcher(q Query, into Store) *watcher {
	pace := defaultPace()
	pace.answer = c.Timeout
	return &watcher{
		what:  q.What,
		store: into,
		pace:  pace,
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return c.request(q, options).Do(ctx).Get()
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			return c.request(q, options).Watch(ctx)
		},
	}
}

func (w *watcher) run(ctx context.Context) {
	w.retry = w.pace.backoff
	backoff := w.pace.backoff
	requests := &cache.ListWatch{ListWithContextFunc: w.listNow, WatchFuncWithContext: w.watchFrom}
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(requests, w), nil,
		reflected{w.store},
		cache.ReflectorOptions{
			Name:            w.what,
			TypeDescription: w.what,
			MinWatchTimeout: watchTimeout,
			Backoff:         &backoff,
			Logger:          &klog.Logger{},
		})
	// A stream that breaks in the middle of an event is only a cut watch, which needs no list. An
	// event that can never be read does need one: it returns with each watch from that version.
	reflector.MaxInternalErrorRetryDuration = w.pace.spread
	// The store gets everything that the Reflector would log; the zero Logger is silent.
	reflector.RunWithContext(klog.NewContext(ctx, klog.Logger{}))
	w.listing.Lock()
	defer w.listing.Unlock()
}

// IsWatchListSemanticsUnSupported makes the Reflector list and then watch. Servers before
// Kubernetes 1.27 ignore the request to begin a watch with a list, and the Reflector would wait for
// the list's end forever.
func (*watcher) IsWatchListSemanticsUnSupported() bool { return true }

// listNow makes the Reflector's lists. Unlike the Reflector, it requests the present state, not
// that of a server's cache: no old profile must come back.
func (w *watcher) listNow(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
	w.listing.Lock()
	defer w.listing.Unlock()
	w.retry, w.due = w.pace.backoff, time.Time{}
	asking, cancel := context.WithTimeout(ctx, cmp.Or(w.pace.list, w.pace.answer))
	defer cancel()
	list, err := w.list(asking, metav1.ListOptions{})
	if err == nil && !meta.IsListType(list) {
		err = fmt.Errorf("the answer is a %T", list)
	}
	if described, ok := list.(metav1.ListInterface); ok && err == nil && described.GetContinue() != "" {
		// The Reflector would request the rest, and get the same part, forever.
		err = errors.New("the answer is a part of the list, which was not asked for")
	}
	if err != nil {
		err = fmt.Errorf("list %s: %w", w.what, err)
		if ctx.Err() == nil {
			w.store.Failed(err)
			wake.Sleep(ctx, askedFor(err)) // The Reflector waits for its backoff as well.
		}
		return nil, err
	}
	return list, nil
}

// watchFrom makes the Reflector's watches. It retries until the server answers or has forgotten the
// version. Without it, the Reflector would list after most failures, and come back at once after a
// cut watch.
func (w *watcher) watchFrom(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	if time.Since(w.opened) > w.retry.Cap {
		w.retry = w.pace.backoff
	}
	if time.Now().Before(w.due) {
		wake.Sleep(ctx, w.retry.Step()+time.Duration(rand.Float64()*float64(w.pace.spread)))
	}
	for {
		events, err := w.open(ctx, options)
		switch {
		case err == nil:
			w.opened = time.Now()
			w.due = w.opened.Add(time.Duration(*options.TimeoutSeconds) * time.Second)
			w.store.Failed(nil)
			return events, nil
		case ctx.Err() != nil, apierrors.IsResourceExpired(err), apierrors.IsGone(err):
			return nil, err
		}
		w.store.Failed(err)
		wake.Sleep(ctx, Pause(&w.retry, err))
	}
}

// open requests a watch once, with a deadline for the answer and one for the watch.
func (w *watcher) open(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	timeout := time.Duration(*options.TimeoutSeconds) * time.Second
	watching, cancel := context.WithTimeout(ctx, cmp.Or(w.pace.life, timeout+time.Minute))
	late := time.AfterFunc(w.pace.answer, cancel)
	events, err := w.watch(watching, options)
	answered := late.Stop()
	if err == nil && !answered {
		// The watch has been canceled. The Reflector would list all objects after it.
		events.Stop()
		err = context.DeadlineExceeded
	}
	if err != nil {
		cancel()
		if !answered && ctx.Err() == nil {
			return nil, fmt.Errorf("watch %s: no answer in %s", w.what, w.pace.answer)
		}
		return nil, fmt.Errorf("watch %s: %w", w.what, err)
	}
	context.AfterFunc(watching, events.Stop)
	return openWatch{events, cancel}, nil
}

type openWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

func (o openWatch) Stop() {
	o.cancel()
	o.Interface.Stop()
}

// Backoff returns the waits between tries that fail. They double from first to longest, and each is
// randomly extended to at most twice as much, so that nodes which fail together come back apart.
func Backoff(first, longest time.Duration) wait.Backoff {
	retry := wake.Backoff(first, longest)
	retry.Jitter = 1
	return retry
}

// Pause returns how long to wait after a request that failed: the backoff's next wait, and the delay
// that the API server asks for.
func Pause(retry *wait.Backoff, err error) time.Duration { return retry.Step() + askedFor(err) }

// askedFor returns the delay that the API server asks for, randomly extended to at most twice as
// much: it sends the same delay, up to 32 s, to all clients that it refuses (k8s.io/apiserver
// v0.36, dropped_requests_tracker.go).
func askedFor(err error) time.Duration {
	seconds, _ := apierrors.SuggestsClientDelay(err)
	return wait.Jitter(time.Duration(seconds)*time.Second, 1)
}
