package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/virgate/virgate/internal/agent"
)

const (
	// page is how many objects one list has: with resourceVersion=0 the API server ignores a
	// limit and sends 30,000 pods at once, 100 MB or so.
	page = 500
	// atOnce is how many status pages are asked for at once. One that has not come after patience
	// leaves its place to the next node's, as long as there are no more than late of those: so
	// slow nodes do not hold up the others.
	atOnce, late = 32, 64
	patience     = 250 * time.Millisecond
	// maxStatus bounds a status page, in bytes.
	maxStatus = 4 << 20
	// listTimeout is how long a list may take, of one page.
	listTimeout = 30 * time.Second
)

// Options say what is read.
type Options struct {
	// Selector selects Nodes by labels, Names by name; empty for all that have to do with GPUs.
	Selector string
	Names    []string
	// Domain is that of the resources.
	Domain string
	// Namespace is where Virgate's own pods are.
	Namespace string
	// StatusTimeout is how long a node's status page may take, AllTimeout all of them together.
	// StatusTimeout 0 reads none.
	StatusTimeout, AllTimeout time.Duration
}

// Config says how to reach the API server as kubectl does: by the kubeconfig file at path, or
// KUBECONFIG, or ~/.kube/config, or as a pod does. It also returns the context's namespace.
func Config(path, context string) (config *rest.Config, namespace string, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = path
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: context})
	if config, err = loader.ClientConfig(); err == nil {
		namespace, _, err = loader.Namespace()
	}
	if err != nil {
		return nil, "", fmt.Errorf("find the API server: %w", err)
	}
	return config, namespace, nil
}

// Client reads from the API server.
type Client struct {
	core rest.Interface
	// Lists and Pages count the requests: for lists and rights, and for status pages.
	Lists, Pages atomic.Int64
}

// NewClient makes a Client; it does not connect yet.
func NewClient(config *rest.Config) (*Client, error) {
	scheme := runtime.NewScheme()
	err := corev1.AddToScheme(scheme)
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	config = rest.CopyConfig(config)
	config.UserAgent = "virgate-cluster" // In the API server's logs and metrics.
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.QPS = -1 // Lists come one after the other, and atOnce bounds the others.
	core, restErr := rest.RESTClientFor(config)
	if err = errors.Join(err, restErr); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	return &Client{core: core}, nil
}

// Read reads Nodes and pods, and then the status pages. That pods or status pages cannot be read
// is part of the snapshot and no error.
func (c *Client) Read(ctx context.Context, o Options) (Snapshot, error) {
	s := Snapshot{Statuses: map[string]Status{}}
	var lists errgroup.Group
	lists.Go(func() (err error) {
		s.Nodes, err = c.nodes(ctx, o)
		return err
	})
	lists.Go(func() error {
		var err error
		if s.Pods, err = c.pods(ctx, o); err != nil {
			s.PodsUnread = err.Error()
		}
		return nil
	})
	if err := lists.Wait(); err != nil {
		return s, err
	}
	if err := ctx.Err(); err != nil {
		return s, err
	}
	if o.Selector != "" || len(o.Names) > 0 {
		s.Pods = slices.DeleteFunc(s.Pods, func(p Pod) bool {
			return p.Node != "" && !slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.Name == p.Node })
		})
	}
	if o.StatusTimeout > 0 && s.PodsUnread == "" {
		s.Statuses, s.StatusUnread = c.statuses(ctx, o, s)
	}
	s.At = time.Now()
	return s, nil
}

// list goes through all pages of a resource, and has each object kept as soon as its page is there.
func (c *Client) list(ctx context.Context, resource string, selectors map[string]string, into interface {
	runtime.Object
	metav1.ListInterface
}, keep func(),
) error {
	for {
		request := c.core.Get().Resource(resource).Param("limit", strconv.Itoa(page)).Timeout(listTimeout)
		for name, value := range selectors {
			if value != "" {
				request.Param(name, value)
			}
		}
		if next := into.GetContinue(); next != "" {
			request.Param("continue", next)
		}
		into.SetContinue("")
		c.Lists.Add(1)
		if err := request.Do(ctx).Into(into); err != nil {
			return fmt.Errorf("list %s: %w", resource, err)
		}
		if keep(); into.GetContinue() == "" {
			return nil
		}
	}
}

func (c *Client) nodes(ctx context.Context, o Options) (kept []Node, err error) {
	var list corev1.NodeList
	err = c.list(ctx, "nodes", map[string]string{"labelSelector": o.Selector}, &list, func() {
		for i := range list.Items {
			node := trimNode(&list.Items[i], o.Domain)
			if slices.Contains(o.Names, node.Name) || len(o.Names) == 0 && node.ours() {
				kept = append(kept, node)
			}
		}
		list.Items = nil
	})
	for _, name := range o.Names {
		if err == nil && !slices.ContainsFunc(kept, func(n Node) bool { return n.Name == name }) {
			return nil, fmt.Errorf("there is no such node, or the selector does not select it: %s", name)
		}
	}
	return kept, err
}

func (c *Client) pods(ctx context.Context, o Options) (kept []Pod, err error) {
	var list corev1.PodList
	running := map[string]string{"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
	err = c.list(ctx, "pods", running, &list, func() {
		for i := range list.Items {
			if pod, ok := trimPod(&list.Items[i], o.Domain, o.Namespace); ok {
				kept = append(kept, pod)
			}
		}
		list.Items = nil
	})
	return kept, err
}

// mayProxy says why status pages may not be read; "" where they may, or that is not known.
func (c *Client) mayProxy(ctx context.Context, namespace string) string {
	review := map[string]any{
		"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
		"spec": map[string]any{"resourceAttributes": map[string]string{"verb": "get", "resource": "pods", "subresource": "proxy", "namespace": namespace}},
	}
	var answer struct {
		Status struct {
			Allowed bool `json:"allowed"`
		} `json:"status"`
	}
	body, err := json.Marshal(review)
	if err != nil {
		return ""
	}
	c.Lists.Add(1)
	data, err := c.core.Post().AbsPath("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews").
		SetHeader("Content-Type", runtime.ContentTypeJSON).SetHeader("Accept", runtime.ContentTypeJSON).Body(body).Timeout(listTimeout).Do(ctx).Raw()
	if err != nil || json.Unmarshal(data, &answer) != nil || answer.Status.Allowed {
		return ""
	}
	return "you may not get pods/proxy in the namespace " + namespace
}

// statuses reads the status pages of the nodes; unread says why none was asked for. A node's
// answer says nothing of the others, not even that it is forbidden.
func (c *Client) statuses(ctx context.Context, o Options, s Snapshot) (statuses map[string]Status, unread string) {
	virgates := map[string]Pod{}
	for _, pod := range s.Pods {
		// After a rolling update the older pod may still be there: any of them answers.
		if pod.StatusPort > 0 && pod.Name > virgates[pod.Node].Name {
			virgates[pod.Node] = pod
		}
	}
	statuses = map[string]Status{}
	if len(virgates) > 0 {
		if unread = c.mayProxy(ctx, o.Namespace); unread != "" {
			return statuses, unread
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.AllTimeout, fmt.Errorf("not answered within the %s for all nodes", o.AllTimeout))
	defer cancel()
	var mutex sync.Mutex
	set := func(node string, status Status) {
		mutex.Lock()
		defer mutex.Unlock()
		statuses[node] = status
	}
	places, waiting := make(chan struct{}, atOnce), make(chan struct{}, late)
	var asking sync.WaitGroup
	for _, node := range s.Nodes {
		pod, found := virgates[node.Name]
		switch {
		case node.NotReady != "":
			set(node.Name, Status{Unread: node.NotReady})
			continue
		case !found:
			set(node.Name, Status{Unread: "no pod of Virgate is ready there in the namespace " + o.Namespace})
			continue
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			set(node.Name, Status{Unread: context.Cause(ctx).Error()})
			continue
		}
		asking.Go(func() {
			held := give(places, waiting, patience)
			defer held()
			page, err := c.status(ctx, pod, o.StatusTimeout)
			if err != nil {
				set(node.Name, Status{Unread: err.Error()})
				return
			}
			set(node.Name, Status{Page: page})
		})
	}
	asking.Wait()
	return statuses, ""
}

// give moves who has a place to those that wait, if he has not called done after that time and
// there is room.
func give(places, waiting chan struct{}, after time.Duration) (done func()) {
	has := places
	var mutex sync.Mutex
	timer := time.AfterFunc(after, func() {
		mutex.Lock()
		defer mutex.Unlock()
		select {
		case waiting <- struct{}{}:
			if has == nil { // It was done in the meantime.
				<-waiting
				return
			}
			<-has
			has = waiting
		default:
		}
	})
	return func() {
		timer.Stop()
		mutex.Lock()
		defer mutex.Unlock()
		<-has
		has = nil
	}
}

// status asks the pod for its status page, by the API server's proxy.
func (c *Client) status(ctx context.Context, pod Pod, limit time.Duration) (*agent.Status, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %s", limit))
	defer cancel()
	c.Pages.Add(1)
	body, err := c.core.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name+":"+strconv.Itoa(int(pod.StatusPort))).
		SubResource("proxy").Suffix("api/v1/status").SetHeader("Accept", "application/json").MaxRetries(0).Stream(ctx)
	if err != nil {
		return nil, reason(ctx, err)
	}
	defer func() { _ = body.Close() }()
	data, err := io.ReadAll(io.LimitReader(body, maxStatus+1))
	if err != nil {
		return nil, reason(ctx, err)
	}
	if len(data) > maxStatus {
		return nil, fmt.Errorf("the answer is longer than %d bytes", maxStatus)
	}
	var status agent.Status
	if err := json.Unmarshal(data, &status); err != nil {
		return nil, fmt.Errorf("the answer is no status: %w", err)
	}
	if status.Node != "" && status.Node != pod.Node {
		return nil, fmt.Errorf("the answer is of node %q", status.Node)
	}
	return &status, nil
}

// reason is why there is no answer, in one line.
func reason(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	if status, ok := errors.AsType[*apierrors.StatusError](err); ok {
		code := int(status.ErrStatus.Code)
		return fmt.Errorf("the proxy answers %d %s", code, strings.TrimSpace(http.StatusText(code)))
	}
	return err
}
