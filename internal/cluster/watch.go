package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/wake"
)

// Watcher keeps a Snapshot up to date. It lists Nodes and pods once and watches them from there. It
// requests each status page every 30 s, and at once if a node's profile or Virgate's pod has
// changed. It keeps in memory only what a Snapshot holds.
//
// It restores a broken connection, with growing pauses. Until then the last data stays, and
// Snapshot.Lost explains it.
type Watcher struct {
	client  *Client
	options Options
	pace    watchPace
	// fail ends Run with an error.
	fail context.CancelCauseFunc

	// mutex guards the fields below.
	mutex sync.Mutex
	nodes followed[Node]
	pods  followed[Pod]
	pages map[string]*statusPage
	// reviewed is true once the right to read status pages is known; denied is why it is missing.
	reviewed bool
	denied   string
	// virgates are derived from pods. changed is true if the last snapshot lacks something.
	virgates map[string]Pod
	changed  bool
	// began is when there was first something to show.
	began  time.Time
	latest *Snapshot
	newer  chan struct{}
}

// watchPace holds the times of a Watcher.
type watchPace struct {
	// tick is the interval of its checks, least the shortest time between two snapshots.
	tick, least time.Duration
	// first is how long the first snapshot waits for status pages. later is the interval at which
	// pages are read again. A snapshot is also made after later if nothing has changed, to show the
	// age of heartbeats. kept is how long a page that cannot be read any more is still shown.
	first, later, kept time.Duration
	// list limits a list; spread is kube.Follow's.
	list, spread time.Duration
}

// statusPage is the state of one node's status page.
type statusPage struct {
	status Status
	// read is when status.Page was read.
	read time.Time
	// due is when it is requested next. asking is true while it is being requested or queued.
	due    time.Time
	asking bool
	// of identifies what was requested last: the page differs by profile and by pod.
	of string
}

// NewWatcher returns a Watcher, which does nothing before Run. It ignores AllTimeout: only the
// number of concurrent requests is limited.
func (c *Client) NewWatcher(o Options) *Watcher {
	w := &Watcher{
		client:  c,
		options: o,
		pages:   map[string]*statusPage{},
		newer:   make(chan struct{}),
		pace: watchPace{
			tick:   200 * time.Millisecond,
			least:  time.Second,
			first:  2 * time.Second,
			later:  30 * time.Second,
			kept:   2 * time.Minute,
			list:   5 * time.Minute,
			spread: time.Second,
		},
	}
	w.nodes = followed[Node]{
		w:         w,
		what:      "nodes",
		selectors: o.nodeSelectors(),
		key:       func(n Node) string { return n.Name },
		list:      func(ctx context.Context) ([]Node, string, error) { return c.nodes(ctx, o) },
		trim: func(object any) (Node, bool) {
			if n, ok := object.(*corev1.Node); ok {
				return o.node(n)
			}
			return Node{}, false
		},
	}
	w.pods = followed[Pod]{
		w:         w,
		what:      "pods",
		selectors: o.podSelectors(),
		key:       Pod.String,
		list:      func(ctx context.Context) ([]Pod, string, error) { return c.pods(ctx, o) },
		trim: func(object any) (Pod, bool) {
			if p, ok := object.(*corev1.Pod); ok {
				return trimPod(p, o.Domain, o.Namespace)
			}
			return Pod{}, false
		},
	}
	return w
}

// Latest returns the last snapshot, which is never modified, and a channel that is closed when
// there is a newer one: at most once a second, and every 30 s if nothing changes. The snapshot is
// nil before the first, which waits up to 2 s for status pages. Pages that come later have
// Status.Unread "not read yet". Any number of callers may wait.
func (w *Watcher) Latest() (*Snapshot, <-chan struct{}) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.latest, w.newer
}

// Run watches until ctx ends, and then returns nil. It fails if Nodes cannot be listed and watched
// at first, since wrong credentials will not mend themselves. If pods or status pages cannot be
// read, the snapshots record it. Call it once.
func (w *Watcher) Run(parent context.Context) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	w.fail = cancel
	var running sync.WaitGroup
	running.Go(func() { w.nodes.follow(ctx) })
	running.Go(func() { w.pods.follow(ctx) })
	running.Go(func() { w.review(ctx) })
	running.Go(func() { w.loop(ctx) })
	running.Wait()
	if parent.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// review checks periodically whether status pages may be read.
func (w *Watcher) review(ctx context.Context) {
	for w.options.StatusTimeout > 0 {
		denied := w.client.mayForward(ctx, w.options.Namespace)
		w.mutex.Lock()
		w.changed = w.changed || denied != w.denied
		w.reviewed, w.denied = true, denied
		w.mutex.Unlock()
		if !wake.Sleep(ctx, w.pace.later) {
			return
		}
	}
}

// loop makes the snapshots, and requests status pages, as many at once as Client.Read.
func (w *Watcher) loop(ctx context.Context) {
	places, waiting := make(chan struct{}, atOnce), make(chan struct{}, late)
	var asking sync.WaitGroup
	defer asking.Wait()
	tick := time.NewTicker(w.pace.tick)
	defer tick.Stop()
	var queue []Pod
	for {
		var place chan<- struct{}
		if len(queue) > 0 {
			place = places
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			queue = append(queue, w.step(time.Now())...)
		case place <- struct{}{}:
			pod := queue[0]
			queue = queue[1:]
			asking.Go(func() {
				held := give(places, waiting, patience)
				defer held()
				w.ask(ctx, pod)
			})
		}
	}
}

// step makes a snapshot if it is time for one, and returns the pods whose status page is due.
func (w *Watcher) step(now time.Time) (due []Pod) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if w.nodes.kept == nil || w.pods.kept == nil && w.pods.failure == nil ||
		w.options.StatusTimeout > 0 && !w.reviewed {
		return nil
	}
	if w.began.IsZero() {
		w.began = now
	}
	if w.virgates == nil || w.changed {
		w.virgates = virgatesOf(maps.Values(w.pods.kept))
	}
	asks := w.options.StatusTimeout > 0 && w.pods.kept != nil
	waits := false
	if asks && w.denied == "" {
		due, waits = w.due(now)
	}
	switch age := time.Duration(0); {
	case w.latest == nil && waits && now.Sub(w.began) < w.pace.first:
		return due
	case w.latest != nil:
		age = now.Sub(w.latest.At)
		if age < w.pace.least || !w.changed && age < w.pace.later {
			return due
		}
	}
	s := Snapshot{At: now, Statuses: map[string]Status{}}
	for _, name := range slices.Sorted(maps.Keys(w.nodes.kept)) {
		node := w.nodes.kept[name]
		s.Nodes = append(s.Nodes, node)
		if !asks || w.denied != "" {
			continue
		}
		why := unasked(node, w.virgates[name], w.options)
		if page := w.pages[name]; why == "" && page != nil {
			s.Statuses[name] = page.status
		} else {
			s.Statuses[name] = Status{Unread: why}
		}
	}
	all := w.options.Selector == "" && len(w.options.Names) == 0
	for _, name := range slices.Sorted(maps.Keys(w.pods.kept)) {
		pod := w.pods.kept[name]
		if _, here := w.nodes.kept[pod.Node]; all || pod.Node == "" || here {
			s.Pods = append(s.Pods, pod)
		}
	}
	if w.pods.kept == nil {
		s.PodsUnread = w.pods.failure.Error()
	} else if asks {
		s.StatusUnread = w.denied
	}
	s.Lost = w.lost()
	close(w.newer)
	w.latest = &s
	w.newer = make(chan struct{})
	w.changed = false
	return due
}

// due returns the pods whose status page must be requested now; waits is true if some node has not
// answered yet.
func (w *Watcher) due(now time.Time) (due []Pod, waits bool) {
	maps.DeleteFunc(w.pages, func(name string, _ *statusPage) bool {
		node, found := w.nodes.kept[name]
		return !found || unasked(node, w.virgates[name], w.options) != ""
	})
	for name, node := range w.nodes.kept {
		pod := w.virgates[name]
		if unasked(node, pod, w.options) != "" {
			continue
		}
		page := w.pages[name]
		if page == nil {
			page = &statusPage{status: Status{Unread: notYet}}
			w.pages[name] = page
		}
		waits = waits || page.status.Page == nil && (page.asking || page.due.IsZero())
		of := strings.Join([]string{node.State, node.Generation, pod.Name}, " ")
		// While the API server does not answer, it forwards nothing either: the last page stays.
		if page.asking || w.nodes.failure != nil || now.Before(page.due) && page.of == of {
			continue
		}
		page.asking, page.of = true, of
		next := w.pace.later
		if page.due.IsZero() { // Spread the further requests over time.
			next = rand.N(next)
		}
		page.due = now.Add(next)
		due = append(due, pod)
	}
	return due, waits
}

// ask reads a status page.
func (w *Watcher) ask(ctx context.Context, pod Pod) {
	read, err := w.client.status(ctx, pod, w.options.StatusTimeout)
	now := time.Now()
	w.mutex.Lock()
	defer w.mutex.Unlock()
	page := w.pages[pod.Node]
	if page == nil || ctx.Err() != nil {
		return
	}
	page.asking, w.changed = false, true
	switch {
	case err == nil:
		page.status, page.read = Status{Page: read}, now
	case page.status.Page != nil && now.Sub(page.read) < w.pace.kept:
		page.status.Unread = fmt.Sprintf("%v; what is shown was said at %s", err, page.read.UTC().Format(time.RFC3339))
	default:
		page.status = Status{Unread: err.Error()}
	}
}

// lost returns Snapshot.Lost, for the connection that was lost first.
func (w *Watcher) lost() string {
	failure, since := w.nodes.failure, w.nodes.since
	if failure == nil || w.pods.failure != nil && w.pods.since.Before(since) {
		failure, since = w.pods.failure, w.pods.since
	}
	if failure == nil || w.nodes.failure == nil && w.pods.kept == nil {
		return ""
	}
	return fmt.Sprintf("not connected since %s, what is shown may be old: %v", since.UTC().Format(time.RFC3339),
		failure)
}

// followed holds a Watcher's objects of one kind. It is the store for kube.Follow.
type followed[T any] struct {
	w         *Watcher
	what      string
	selectors metav1.ListOptions
	list      func(context.Context) ([]T, string, error)
	trim      func(object any) (kept T, ok bool)
	key       func(T) string
	// listed is a list's result, until Replace stores it.
	listed map[string]T

	// kept is nil before the first list. failure is why changes do not arrive, and since when they
	// do not. followed is true once changes have arrived. The Watcher's mutex guards all of them.
	kept     map[string]T
	failure  error
	since    time.Time
	followed bool
}

func (f *followed[T]) follow(ctx context.Context) {
	kube.Follow(ctx, cache.ListWatch{
		// The Reflector gets only the list's version: it would hold 30,000 pods at once.
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			items, version, err := f.list(ctx)
			if f.known() && errors.Is(err, errNoNode) { // It existed before.
				err = nil
			}
			if err != nil {
				return nil, err
			}
			f.listed = make(map[string]T, len(items))
			for _, item := range items {
				f.listed[f.key(item)] = item
			}
			return &metav1.PartialObjectMetadataList{ListMeta: metav1.ListMeta{ResourceVersion: version}}, nil
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.LabelSelector = f.selectors.LabelSelector
			options.FieldSelector = f.selectors.FieldSelector
			options.Watch = true
			f.w.client.Lists.Add(1)
			// client-go would retry before Follow learns of a failure.
			return f.w.client.api.Get().MaxRetries(0).Resource(f.what).VersionedParams(&options,
				metav1.ParameterCodec).Watch(ctx)
		},
	}, f.what, f, f.w.pace.list, f.w.pace.spread)
}

func (f *followed[T]) known() bool {
	f.w.mutex.Lock()
	defer f.w.mutex.Unlock()
	return f.kept != nil
}

// Replace and the next three methods implement kube.Store.
func (f *followed[T]) Replace([]any, string) {
	f.w.mutex.Lock()
	defer f.w.mutex.Unlock()
	f.w.changed = f.w.changed || f.kept == nil || !reflect.DeepEqual(f.kept, f.listed)
	f.kept, f.listed = f.listed, nil
}

func (f *followed[T]) Update(object any) {
	item, ok := f.trim(object)
	if !ok {
		f.Delete(object)
		return
	}
	f.w.mutex.Lock()
	defer f.w.mutex.Unlock()
	key := f.key(item)
	// Kubelets also write without a change.
	if old, found := f.kept[key]; !found || !reflect.DeepEqual(old, item) {
		f.kept[key], f.w.changed = item, true
	}
}

func (f *followed[T]) Delete(object any) {
	item, _ := f.trim(object)
	f.w.mutex.Lock()
	defer f.w.mutex.Unlock()
	before := len(f.kept)
	delete(f.kept, f.key(item))
	f.w.changed = f.w.changed || len(f.kept) < before
}

func (f *followed[T]) Failed(err error) {
	f.w.mutex.Lock()
	defer f.w.mutex.Unlock()
	if err != nil && f.failure == nil {
		f.since = time.Now()
	}
	f.w.changed = f.w.changed || fmt.Sprint(err) != fmt.Sprint(f.failure)
	f.failure = err
	f.followed = f.followed || err == nil
	if _, nodes := any(f).(*followed[Node]); nodes && !f.followed {
		f.w.fail(err)
	}
}
