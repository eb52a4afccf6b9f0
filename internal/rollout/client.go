package rollout

import (
	"cmp"
	"context"
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
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/wake"
)

const (
	// requestTime limits one request.
	requestTime = 10 * time.Second
	// listTime limits a list of all Nodes, spread is the time over which a cut watch comes back.
	listTime, spread = 5 * time.Minute, time.Second
	// atOnce is how many Nodes are written at once.
	atOnce = 16
	// fieldManager is the field manager that the API server records for these writes.
	fieldManager = "virgate-rollout"
	// configMaps are the resource that keeps rollouts.
	configMaps = "configmaps"
)

// Client starts and drives rollouts, one at a time.
type Client struct {
	// Holder identifies the caller, to people and as the driver. It must be unique per program.
	Holder string
	// Progress is called from Drive's goroutine when a node or the phase has changed; nil disables
	// it.
	Progress func(*Rollout)
	// Notice is called from any goroutine with other messages for the user; nil disables it.
	Notice func(string)
	// Lists, Watches and Writes count the requests.
	Lists, Watches, Writes atomic.Int64

	api       rest.Interface
	namespace string
	// lease is how long this program's lease lasts, outwait how long another's: see drive.go.
	lease, outwait time.Duration
}

// NewClient returns a Client and does not connect yet. The namespace is Virgate's own, where
// rollouts are kept.
func NewClient(config *rest.Config, namespace, holder string) (*Client, error) {
	api, err := cluster.API(config, "virgate-rollout")
	if err != nil {
		return nil, err
	}
	return &Client{
		api:       api,
		namespace: namespace,
		Holder:    holder,
		lease:     leaseTime,
		outwait:   leaseTime,
	}, nil
}

func (c *Client) notice(format string, arguments ...any) {
	if c.Notice != nil {
		c.Notice(fmt.Sprintf(format, arguments...))
	}
}

// list reads all Nodes page by page, and returns the list's version. The API server does not select
// Nodes, because a rollout can change the very labels that selected them.
func (c *Client) list(ctx context.Context, keep func(*corev1.Node)) (version string, err error) {
	err = cluster.Pages(ctx, &c.Lists, c.api, "", "nodes", metav1.ListOptions{}, func(list *corev1.NodeList) {
		version = list.ResourceVersion
		for i := range list.Items {
			keep(&list.Items[i])
		}
	})
	return version, err
}

// nodes returns all current Nodes, sorted by name, with the resources of their domain.
func (c *Client) nodes(ctx context.Context, domain func(node string) string) (nodes []Node, err error) {
	_, err = c.list(ctx, func(n *corev1.Node) { nodes = append(nodes, nodeOf(n, domain(n.Name))) })
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	slices.SortFunc(nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return nodes, nil
}

// get reads one Node; found is false if it does not exist.
func (c *Client) get(ctx context.Context, name, domain string) (n Node, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	c.Lists.Add(1)
	object := &corev1.Node{}
	err = c.api.Get().Resource("nodes").Name(name).Do(ctx).Into(object)
	if apierrors.IsNotFound(err) {
		return Node{}, false, nil
	}
	if err != nil {
		return Node{}, false, fmt.Errorf("read node %s: %w", name, err)
	}
	return nodeOf(object, domain), true, nil
}

// tries is how often a write without an answer is tried, retryPause the time between two tries.
const tries, retryPause = 4, 250 * time.Millisecond

// write sends a write request, and repeats it if there is no answer. If only the answer was lost,
// the repetition fails with a conflict.
func (c *Client) write(ctx context.Context, what string, request func(context.Context) error) error {
	for try := 1; ; try++ {
		c.Writes.Add(1)
		asking, cancel := context.WithTimeout(ctx, requestTime)
		err := request(asking)
		cancel()
		if err == nil {
			return nil
		}
		if gone(err) || refused(err) || try == tries || !wake.Sleep(ctx, retryPause) {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
}

// change is a patch of a Node's metadata. A nil value removes its key.
type change struct{ annotations, labels map[string]*string }

// patch changes the Node if it is still at n's version, and returns the changed Node.
func (c *Client) patch(ctx context.Context, n Node, p change) (Node, error) {
	metadata := map[string]any{"resourceVersion": n.Version}
	if p.annotations != nil {
		metadata["annotations"] = p.annotations
	}
	if p.labels != nil {
		metadata["labels"] = p.labels
	}
	body := []byte(encode(map[string]any{"metadata": metadata}))
	err := c.write(ctx, "change node "+n.Name, func(ctx context.Context) error {
		object := &corev1.Node{}
		err := c.api.Patch(types.MergePatchType).Resource("nodes").Name(n.Name).Param("fieldManager", fieldManager).
			Body(body).Do(ctx).Into(object)
		if err == nil {
			n = nodeOf(object, n.domain)
		}
		return err
	})
	return n, err
}

// errNone: the rollout does not exist.
var errNone = errors.New("there is no rollout")

// plans returns the plans of all rollouts in the namespace, oldest first.
func (c *Client) plans(ctx context.Context) (plans []plan, err error) {
	var unread error
	all := metav1.ListOptions{LabelSelector: PlanLabel}
	err = cluster.Pages(ctx, &c.Lists, c.api, c.namespace, configMaps, all, func(list *corev1.ConfigMapList) {
		for i := range list.Items {
			p, err := planOf(&list.Items[i])
			unread = cmp.Or(unread, err)
			plans = append(plans, p)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list rollouts, ConfigMaps of the namespace %s: %w", c.namespace, err)
	}
	if unread != nil {
		return nil, unread
	}
	slices.SortFunc(plans, func(a, b plan) int {
		return cmp.Or(a.Started.Compare(b.Started), strings.Compare(a.ID, b.ID))
	})
	return plans, nil
}

// plan reads the plan of one rollout.
func (c *Client) plan(ctx context.Context, id string) (plan, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	c.Lists.Add(1)
	object := &corev1.ConfigMap{}
	err := c.api.Get().Namespace(c.namespace).Resource(configMaps).Name(planName + id).Do(ctx).Into(object)
	if apierrors.IsNotFound(err) {
		return plan{}, fmt.Errorf("%w %s in the namespace %s", errNone, id, c.namespace)
	}
	if err != nil {
		return plan{}, fmt.Errorf("read rollout %s, a ConfigMap of the namespace %s: %w", id, c.namespace, err)
	}
	return planOf(object)
}

// create creates the ConfigMap, and returns the plan as stored.
func (c *Client) create(ctx context.Context, p plan) (plan, error) {
	object := &corev1.ConfigMap{}
	err := c.write(ctx, "keep the rollout in the namespace "+c.namespace, func(ctx context.Context) error {
		return c.api.Post().Namespace(c.namespace).Resource(configMaps).Param("fieldManager", fieldManager).
			Body(p.configMap(c.namespace)).Do(ctx).Into(object)
	})
	if apierrors.IsAlreadyExists(err) {
		found, err := c.plan(ctx, p.ID)
		if err == nil && found.Holder != c.Holder {
			err = fmt.Errorf("rollout %s: %w: %s", p.ID, errHeld, found.Holder)
		}
		return found, err // Created before, but the answer was lost.
	}
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("%w; --virgate-namespace names Virgate's own namespace", err)
	}
	if err != nil {
		return p, err
	}
	return planOf(object)
}

// patchPlan changes the ConfigMap if it is still at p's version, and returns the changed plan.
func (c *Client) patchPlan(ctx context.Context, p plan, data map[string]string) (plan, error) {
	body := []byte(encode(map[string]any{"metadata": map[string]any{"resourceVersion": p.version}, "data": data}))
	object := &corev1.ConfigMap{}
	err := c.write(ctx, "change rollout "+p.ID, func(ctx context.Context) error {
		return c.api.Patch(types.MergePatchType).Namespace(c.namespace).Resource(configMaps).Name(planName+p.ID).
			Param("fieldManager", fieldManager).Body(body).Do(ctx).Into(object)
	})
	if err != nil {
		return p, err
	}
	return planOf(object)
}

// delete removes the ConfigMap if it is still at p's version.
func (c *Client) delete(ctx context.Context, p plan) error {
	still := &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &p.version}}
	return c.write(ctx, "delete rollout "+p.ID, func(ctx context.Context) error {
		return c.api.Delete().Namespace(c.namespace).Resource(configMaps).Name(planName + p.ID).Body(still).
			Do(ctx).Error()
	})
}

// gone reports whether the object has changed or was deleted, and must be read before another try.
func gone(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// refused reports whether trying again is useless.
func refused(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsInvalid(err) ||
		apierrors.IsBadRequest(err) || apierrors.IsAlreadyExists(err)
}

// store holds the rollout's plan and the Nodes as last seen, by a watch or in the answer to a
// write.
type store struct {
	domain string
	// failed is called when the API server does not answer what fills the store.
	failed func(error)
	// changed signals any change.
	changed wake.Signal

	mutex sync.Mutex
	nodes map[string]Node
	// plan is nil if its ConfigMap does not exist; unread is why it cannot be read.
	plan   *plan
	unread error
	// filled is closed after the first lists of both kinds.
	filled chan struct{}
	listed struct{ nodes, plan bool }
}

func newStore(domain string) *store {
	return &store{
		domain:  domain,
		nodes:   map[string]Node{},
		changed: wake.NewSignal(),
		filled:  make(chan struct{}),
	}
}

// current returns the plan as last seen.
func (s *store) current(id string) (plan, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	switch {
	case s.unread != nil:
		return plan{}, s.unread
	case s.plan == nil:
		return plan{}, fmt.Errorf("%w %s any more: its ConfigMap was deleted", errNone, id)
	}
	return *s.plan, nil
}

// rollout joins the plan with the Nodes.
func (s *store) rollout(id string) (*Rollout, error) {
	p, err := s.current(id)
	if err != nil {
		return nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return p.join(s.nodes), nil
}

// put stores the Node, unless it has a later version: an answer may overtake the watch.
func (s *store) put(n Node) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if last, found := s.nodes[n.Name]; !found || !later(last.Version, n.Version) {
		s.nodes[n.Name] = n
		s.changed.Notify()
	}
}

// remove deletes the Node, unless the store has a later version.
func (s *store) remove(name, version string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if last, found := s.nodes[name]; found && !later(last.Version, version) {
		delete(s.nodes, name)
		s.changed.Notify()
	}
}

// putPlan stores the plan, unless it has a later version.
func (s *store) putPlan(p plan) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.plan == nil || !later(s.plan.version, p.version) {
		s.plan, s.unread = &p, nil
		s.changed.Notify()
	}
}

// has records the first list of Nodes or of the plan. The caller holds the mutex.
func (s *store) has(listed *bool) {
	if whole := s.listed.nodes && s.listed.plan; !whole {
		*listed = true
		if s.listed.nodes && s.listed.plan {
			close(s.filled)
		}
	}
	s.changed.Notify()
}

// later compares resource versions (Kubernetes API Concepts, "Resource versions": numbers of one
// order). A version that is not a number is never later, so that the last one received counts.
func later(a, b string) bool {
	x, errX := strconv.ParseUint(a, 10, 64)
	y, errY := strconv.ParseUint(b, 10, 64)
	return errX == nil && errY == nil && x > y
}

// nodeStore is what kube.Follow fills with Nodes.
type nodeStore struct{ *store }

// Update and the next three methods implement kube.Store.
func (s nodeStore) Update(object any) {
	if n, ok := object.(*corev1.Node); ok {
		s.put(nodeOf(n, s.domain))
	}
}

func (s nodeStore) Delete(object any) {
	if n, ok := object.(*corev1.Node); ok {
		s.remove(n.Name, n.ResourceVersion)
	}
}

func (s nodeStore) Replace(objects []any, version string) {
	there := map[string]bool{}
	for _, object := range objects {
		if n, ok := object.(*corev1.Node); ok {
			there[n.Name] = true
			s.put(nodeOf(n, s.domain))
		}
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	maps.DeleteFunc(s.nodes, func(name string, n Node) bool { return !there[name] && !later(n.Version, version) })
	s.has(&s.listed.nodes)
}

// planStore is what kube.Follow fills with the rollout's ConfigMap.
type planStore struct{ *store }

// Update and the next three methods implement kube.Store.
func (s planStore) Update(object any) {
	if configMap, ok := object.(*corev1.ConfigMap); ok {
		p, err := planOf(configMap)
		if err == nil {
			s.putPlan(p)
			return
		}
		s.mutex.Lock()
		defer s.mutex.Unlock()
		s.unread = err
		s.changed.Notify()
	}
}

func (s planStore) Delete(any) { s.Replace(nil, "") }

func (s planStore) Replace(objects []any, _ string) {
	for _, object := range objects {
		s.Update(object)
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if len(objects) == 0 {
		s.plan, s.unread = nil, nil
	}
	s.has(&s.listed.plan)
}

func (s *store) Failed(err error) {
	if err != nil {
		s.failed(err)
	}
}

// followNodes keeps the store's Nodes up to date until ctx ends.
func (c *Client) followNodes(ctx context.Context, s *store) {
	list := func(ctx context.Context) (runtime.Object, error) {
		list := &corev1.NodeList{}
		version, err := c.list(ctx, func(n *corev1.Node) {
			n.ManagedFields, n.Status.Images = nil, nil // Most of a Node's size, and not needed.
			list.Items = append(list.Items, *n)
		})
		list.ResourceVersion = version
		return list, err
	}
	c.follow(ctx, "nodes", "", "nodes", "", list, nodeStore{s})
}

// followPlan keeps the store's plan up to date until ctx ends.
func (c *Client) followPlan(ctx context.Context, s *store, id string) {
	named := "metadata.name=" + planName + id
	list := func(ctx context.Context) (all runtime.Object, err error) {
		err = cluster.Pages(ctx, &c.Lists, c.api, c.namespace, configMaps,
			metav1.ListOptions{FieldSelector: named}, func(list *corev1.ConfigMapList) { all = list })
		return all, err
	}
	what := fmt.Sprintf("rollout %s, a ConfigMap of the namespace %s", id, c.namespace)
	c.follow(ctx, what, c.namespace, configMaps, named, list, planStore{s})
}

// follow lists and watches objects of one kind until ctx ends. With selector "" it watches all of them.
func (c *Client) follow(
	ctx context.Context,
	what, namespace, resource, selector string,
	list func(context.Context) (runtime.Object, error),
	into kube.Store,
) {
	kube.Follow(ctx, cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			return list(ctx)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			c.Watches.Add(1)
			options.FieldSelector, options.Watch = selector, true
			return c.api.Get().NamespaceIfScoped(namespace, namespace != "").Resource(resource).
				VersionedParams(&options, metav1.ParameterCodec).Watch(ctx)
		},
	}, what, into, listTime, spread)
}

var (
	// ErrStopped means that the rollout has stopped because of a node.
	ErrStopped = errors.New("the rollout has stopped")
	// ErrInterrupted means that the driver was ended from outside. The rollout can be continued.
	ErrInterrupted = errors.New("interrupted")
)
