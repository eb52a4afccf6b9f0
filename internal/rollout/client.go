package rollout

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/virgate/virgate/internal/cluster"
)

const (
	// page is how many Nodes one list has, and requestTime how long a request may take.
	page        = 500
	requestTime = 10 * time.Second
	// atOnce is how many Nodes are written at once.
	atOnce = 16
	// fieldManager is the name under which the API keeps what is written here.
	fieldManager = "virgate-rollout"
)

// Client begins rollouts and drives them. It drives one at a time.
type Client struct {
	// Holder says who calls, for people and as the driver's name: no two programs have the same.
	Holder string
	// Progress is called from Drive's goroutine when a node has changed or the phase has;
	// nil for nobody.
	Progress func(*Rollout)
	// Notice is called from any goroutine with what should be known beside that; nil for nobody.
	Notice func(string)
	// Lists, Watches and Writes count the requests.
	Lists, Watches, Writes atomic.Int64

	core rest.Interface
	// lease is how long the lease of this program lasts, outwait how long another one's: see drive.go.
	lease, outwait time.Duration
}

// NewClient makes a Client; it does not connect yet.
func NewClient(config *rest.Config, holder string) (*Client, error) {
	core, err := cluster.Core(config, "virgate-rollout")
	if err != nil {
		return nil, err
	}
	return &Client{core: core, Holder: holder, lease: leaseTime, outwait: leaseTime}, nil
}

func (c *Client) notice(format string, arguments ...any) {
	if c.Notice != nil {
		c.Notice(fmt.Sprintf(format, arguments...))
	}
}

// list reads all Nodes, page by page, and the version of the list. What a rollout changes can
// be what it was selected by, so the API server does not select.
func (c *Client) list(ctx context.Context, keep func(*corev1.Node)) (version string, err error) {
	for next := ""; ; {
		var list corev1.NodeList
		c.Lists.Add(1)
		request := c.core.Get().Resource("nodes").Param("limit", strconv.Itoa(page)).Timeout(3 * requestTime)
		if next != "" {
			request.Param("continue", next)
		}
		if err := request.Do(ctx).Into(&list); err != nil {
			return "", fmt.Errorf("list nodes: %w", err)
		}
		for i := range list.Items {
			keep(&list.Items[i])
		}
		if next = list.Continue; next == "" {
			return list.ResourceVersion, nil
		}
	}
}

// nodes are all Nodes as they are now, by name.
func (c *Client) nodes(ctx context.Context) (nodes []Node, err error) {
	_, err = c.list(ctx, func(n *corev1.Node) { nodes = append(nodes, nodeOf(n)) })
	slices.SortFunc(nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return nodes, err
}

// get reads one Node; found is false where there is none.
func (c *Client) get(ctx context.Context, name string) (n Node, found bool, err error) {
	var object corev1.Node
	c.Lists.Add(1)
	err = c.core.Get().Resource("nodes").Name(name).Timeout(requestTime).Do(ctx).Into(&object)
	if apierrors.IsNotFound(err) {
		return Node{}, false, nil
	}
	if err != nil {
		return Node{}, false, fmt.Errorf("read node %s: %w", name, err)
	}
	return nodeOf(&object), true, nil
}

// change is a patch of a Node's metadata. Keys that are nil are removed.
type change struct{ annotations, labels map[string]*string }

// keep sets the annotation to the value; a nil value, of whatever type, removes it.
func (p *change) keep(annotation string, value any) error {
	if p.annotations == nil {
		p.annotations = map[string]*string{}
	}
	p.annotations[annotation] = nil
	if value == nil {
		return nil
	}
	data, err := json.Marshal(value)
	text := string(data)
	p.annotations[annotation] = &text
	return err
}

// tries is how often a write is tried that the API server does not answer, retryPause the time
// between two tries.
const tries, retryPause = 4, 250 * time.Millisecond

// patch changes the Node if it is as n was read, and returns it as it is then. An answer that was
// lost shows as a conflict when it is tried again.
func (c *Client) patch(ctx context.Context, n Node, p change) (Node, error) {
	metadata := map[string]any{"resourceVersion": n.Version}
	if p.annotations != nil {
		metadata["annotations"] = p.annotations
	}
	if p.labels != nil {
		metadata["labels"] = p.labels
	}
	body, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return n, err
	}
	for try := 1; ; try++ {
		var object corev1.Node
		c.Writes.Add(1)
		err = c.core.Patch(types.MergePatchType).Resource("nodes").Name(n.Name).Param("fieldManager", fieldManager).
			Body(body).Timeout(requestTime).MaxRetries(0).Do(ctx).Into(&object)
		if err == nil {
			return nodeOf(&object), nil
		}
		if gone(err) || refused(err) || try == tries || pause(ctx, retryPause) != nil {
			return n, fmt.Errorf("change node %s: %w", n.Name, err)
		}
	}
}

// gone says that another try needs the Node to be read again: it is another one, or none.
func gone(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// refused says that trying again would not help.
func refused(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)
}

// store has the Nodes as they were last seen, by a Reflector or in the answer to a write.
type store struct {
	mutex sync.Mutex
	nodes map[string]Node
	// changed says that something is otherwise; filled is closed after the first list.
	changed chan struct{}
	filled  chan struct{}
	once    sync.Once
}

func newStore() *store {
	return &store{nodes: map[string]Node{}, changed: make(chan struct{}, 1), filled: make(chan struct{})}
}

func (s *store) wake() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// put keeps the Node, unless a later one is kept: an answer may overtake the watch.
func (s *store) put(n Node) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if last, found := s.nodes[n.Name]; !found || !later(last.Version, n.Version) {
		s.nodes[n.Name] = n
		s.wake()
	}
}

// remove forgets the Node, unless a later one is kept.
func (s *store) remove(name, version string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if last, found := s.nodes[name]; found && !later(last.Version, version) {
		delete(s.nodes, name)
		s.wake()
	}
}

func (s *store) list() []Node {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return slices.Collect(maps.Values(s.nodes))
}

// later compares resource versions (Kubernetes API Concepts, "Resource versions": numbers of one
// order). What is none is taken for not later, so that the last one heard counts.
func later(a, b string) bool {
	x, errX := strconv.ParseUint(a, 10, 64)
	y, errY := strconv.ParseUint(b, 10, 64)
	return errX == nil && errY == nil && x > y
}

// Add and the next four methods implement cache.ReflectorStore.
func (s *store) Add(object any) error { return s.Update(object) }

func (s *store) Update(object any) error {
	if n, ok := object.(*corev1.Node); ok {
		s.put(nodeOf(n))
	}
	return nil
}

func (s *store) Delete(object any) error {
	if n, ok := object.(*corev1.Node); ok {
		s.remove(n.Name, n.ResourceVersion)
	}
	return nil
}

func (s *store) Replace(objects []any, version string) error {
	there := map[string]bool{}
	for _, object := range objects {
		if n, ok := object.(*corev1.Node); ok {
			there[n.Name] = true
			s.put(nodeOf(n))
		}
	}
	for _, n := range s.list() {
		if !there[n.Name] {
			s.remove(n.Name, version)
		}
	}
	s.once.Do(func() { close(s.filled) })
	s.wake()
	return nil
}

func (*store) Resync() error { return nil }

// follow keeps the store up to date until ctx ends.
func (c *Client) follow(ctx context.Context, s *store, failed func(error)) {
	requests := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			list := &corev1.NodeList{}
			version, err := c.list(ctx, func(n *corev1.Node) {
				n.ManagedFields, n.Status.Images = nil, nil // The most of a Node, for nothing.
				list.Items = append(list.Items, *n)
			})
			list.ResourceVersion = version
			if err != nil && ctx.Err() == nil {
				failed(err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			c.Watches.Add(1)
			request := c.core.Get().Resource("nodes").Param("watch", "true").Param("resourceVersion", options.ResourceVersion).Param("allowWatchBookmarks", "true")
			if options.TimeoutSeconds != nil {
				request.Param("timeoutSeconds", strconv.FormatInt(*options.TimeoutSeconds, 10))
			}
			w, err := request.Watch(ctx)
			if err != nil && ctx.Err() == nil {
				failed(fmt.Errorf("watch nodes: %w", err))
			}
			return w, err
		},
	}
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(requests, plainLists{}), &corev1.Node{}, s, cache.ReflectorOptions{
		Name: "nodes", Backoff: &wait.Backoff{Duration: 300 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 6, Cap: 10 * time.Second}, Logger: &klog.Logger{},
	})
	reflector.RunWithContext(klog.NewContext(ctx, klog.Logger{}))
}

// plainLists tells the Reflector to list and then to watch: page by page.
type plainLists struct{}

// IsWatchListSemanticsUnSupported is what the Reflector asks for.
func (plainLists) IsWatchListSemanticsUnSupported() bool { return true }

var (
	// ErrStopped says that a node is in the way.
	ErrStopped = errors.New("the rollout has stopped")
	// ErrInterrupted says that the driver was ended from outside, and that somebody can go on.
	ErrInterrupted = errors.New("interrupted")
)
