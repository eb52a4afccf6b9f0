package configsource

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/test/await"
)

// patience is how long anything may take on a machine that does a lot else.
const patience = await.Patience

// fakeServer has objects of one kind as an API server has them: every change
// has a version, a list says up to which, and a watch goes on from one. It can
// be away, end watches and forget old versions.
type fakeServer struct {
	mu      sync.Mutex
	version int
	objects map[string]runtime.Object
	events  []fakeEvent
	// forgotten is the version before which no watch can begin.
	forgotten int
	away      error
	watches   map[*fakeWatch]bool
	// lists and opened count requests that were answered.
	lists, opened int
}

type fakeEvent struct {
	version int
	event   watch.Event
}

func newFakeServer() *fakeServer {
	return &fakeServer{version: 1, objects: map[string]runtime.Object{}, watches: map[*fakeWatch]bool{}}
}

// fakeWatch is a watch in progress; more is closed and made anew at each event.
type fakeWatch struct {
	server *fakeServer
	out    chan watch.Event
	stop   chan struct{}
	once   sync.Once
}

func (w *fakeWatch) ResultChan() <-chan watch.Event { return w.out }
func (w *fakeWatch) Stop()                          { w.once.Do(func() { close(w.stop) }) }

// change puts the object, or with nil removes the name.
func (s *fakeServer) change(name string, object runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.objects[name]
	s.version++
	event := watch.Event{Type: watch.Modified, Object: object}
	switch {
	case object == nil && !there:
		return
	case object == nil:
		gone := old.DeepCopyObject()
		event = watch.Event{Type: watch.Deleted, Object: gone}
		delete(s.objects, name)
	case !there:
		event.Type = watch.Added
	}
	if object != nil {
		s.objects[name] = object
	}
	described, err := meta.Accessor(event.Object)
	if err != nil {
		panic(err)
	}
	described.SetResourceVersion(strconv.Itoa(s.version))
	s.events = append(s.events, fakeEvent{s.version, event})
	for w := range s.watches {
		w.out <- watch.Event{Type: event.Type, Object: event.Object.DeepCopyObject()}
	}
}

// setAway makes the server unreachable, nil reachable. Watches end.
func (s *fakeServer) setAway(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = err
	s.endWatches()
}

// expire ends all watches and forgets what happened so far, so that none can go
// on from where it was.
func (s *fakeServer) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.forgotten = s.version
	s.endWatches()
}

// drop ends all watches; they can go on from where they were.
func (s *fakeServer) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endWatches()
}

func (s *fakeServer) endWatches() {
	for w := range s.watches {
		close(w.out)
		delete(s.watches, w)
	}
}

func (s *fakeServer) list(context.Context, metav1.ListOptions) (runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return nil, s.away
	}
	s.lists++
	list := &metav1.List{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}}
	for _, object := range s.objects {
		list.Items = append(list.Items, runtime.RawExtension{Object: object.DeepCopyObject()})
	}
	return list, nil
}

func (s *fakeServer) watch(_ context.Context, options metav1.ListOptions) (watch.Interface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return nil, s.away
	}
	from, err := strconv.Atoi(options.ResourceVersion)
	if err != nil {
		return nil, fmt.Errorf("version %q: %w", options.ResourceVersion, err)
	}
	w := &fakeWatch{server: s, out: make(chan watch.Event, 10_000), stop: make(chan struct{})}
	if from < s.forgotten {
		// A server may tell by an event, too.
		gone := apierrors.NewResourceExpired("too old").Status()
		gone.Code = http.StatusGone
		w.out <- watch.Event{Type: watch.Error, Object: &gone}
		close(w.out)
		return w, nil
	}
	s.opened++
	for _, e := range s.events {
		if e.version > from {
			w.out <- watch.Event{Type: e.event.Type, Object: e.event.Object.DeepCopyObject()}
		}
	}
	s.watches[w] = true
	return w, nil
}

// watcher watches the server, and is soon there again.
func (s *fakeServer) watcher(q query, into store) *watcher {
	return &watcher{
		what: q.what, list: s.list, watch: s.watch, store: into,
		pace: pace{backoff: wait.Backoff{Duration: time.Millisecond, Cap: time.Millisecond, Factor: 2, Steps: 1}, spread: time.Millisecond, answer: time.Hour},
	}
}

func fakeNode(name, value string) runtime.Object {
	node := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if value != "" {
		node.Labels = map[string]string{labelName: value}
	}
	return node
}

func fakeConfigMap(documents map[string]string) runtime.Object {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "profiles", Namespace: "gpu"}, Data: documents}
}

const labelName = "nvidia.com/device-plugin.config"

// testNode is a node's source over two fake servers, and what it would have had
// applied.
type testNode struct {
	t           *testing.T
	nodes, maps *fakeServer
	source      *NodeSource
	mu          sync.Mutex
	applied     []string
	problem     error
	// problems counts looks that found one.
	problems int
	stop     func()
}

func newTestNode(t *testing.T, change func(*NodeSource)) *testNode {
	t.Helper()
	s := &testNode{t: t, nodes: newFakeServer(), maps: newFakeServer()}
	log := slog.New(slog.DiscardHandler)
	s.source = &NodeSource{
		Labels: NewNodeLabels(&Client{s.nodes.watcher}, "n1", labelName, log),
		Source: NewConfigMap(&Client{s.maps.watcher}, "gpu", "profiles", log),
	}
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.source.Started = started.Startup
	if change != nil {
		change(s.source)
	}
	return s
}

func (s *testNode) run() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.source.Watch(ctx, s.look) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
	})
	s.t.Cleanup(s.stop)
}

// look does what the agent does at every change.
func (s *testNode) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	selected, err := s.source.Profile()
	if s.problem = err; err != nil {
		s.problems++
		return
	}
	if next := selected.Generation; len(s.applied) == 0 || s.applied[len(s.applied)-1] != next {
		s.applied = append(s.applied, next)
	}
}

// await waits for the generation in force and a part of the problem, "" for
// none.
func (s *testNode) await(generation, problem string) {
	s.t.Helper()
	await.Until(s.t, "a profile", func() error {
		s.mu.Lock()
		have, err := "", s.problem
		if len(s.applied) > 0 {
			have = s.applied[len(s.applied)-1]
		}
		s.mu.Unlock()
		if have == generation && (err == nil) == (problem == "") && (err == nil || strings.Contains(err.Error(), problem)) {
			return nil
		}
		return fmt.Errorf("in force %q, problem %w; want %q, %q", have, err, generation, problem)
	})
}

func generation(t *testing.T, text string) string {
	t.Helper()
	config, err := configs.Parse("", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return configs.Generation(config.Profile)
}
