package cluster

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
)

const (
	// listLimit is the number of objects per list request. With resourceVersion=0 the API server would
	// ignore the limit and send 30,000 pods at once, some 100 MB.
	listLimit = 500
	// atOnce is how many status pages are requested at once. A request without an answer after
	// patience gives its place to another node, for up to late such requests. So slow nodes do not
	// hold up the others.
	atOnce, late = 32, 64
	patience     = 250 * time.Millisecond
	// maxStatus limits the size of a status page, maxHeader that of its header, in bytes.
	maxStatus, maxHeader = 4 << 20, 64 << 10
	// listTimeout limits the request for one page of a list, in seconds.
	listTimeout int64 = 30
)

// Options set what is read.
type Options struct {
	// Selector selects Nodes by labels, Names by name; empty for all Nodes with GPUs or Virgate.
	Selector string
	Names    []string
	// Domain is the domain of the resources.
	Domain string
	// Namespace is Virgate's own namespace.
	Namespace string
	// StatusTimeout limits the request for one node's status page, AllTimeout all of them together.
	// With StatusTimeout 0 no status page is read.
	StatusTimeout, AllTimeout time.Duration
}

// Client reads from the API server.
type Client struct {
	api rest.Interface
	// open opens a connection to a pod's status port. It is closed when the context ends.
	open func(context.Context, Pod) (io.ReadWriteCloser, error)
	// Lists and Pages count the requests: Lists for lists and access reviews, Pages for status
	// pages.
	Lists, Pages atomic.Int64
}

// NewClient returns a Client and does not connect yet.
func NewClient(config *rest.Config) (*Client, error) {
	api, err := API(config, "virgate-cluster")
	if err != nil {
		return nil, err
	}
	forward, err := newForwarder(config, api)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	return &Client{api: api, open: forward.open}, nil
}

// API returns a client for commands that users run. It has no rate limit, because its callers
// limit their requests. The API server records the name in its logs and metrics.
func API(config *rest.Config, name string) (rest.Interface, error) {
	config = rest.CopyConfig(config)
	config.UserAgent = name
	config.ContentType = runtime.ContentTypeJSON
	return kube.CoreClient(config)
}

// Read reads Nodes and pods, and then the status pages. If pods or status pages cannot be read, the
// snapshot records it and Read does not fail.
func (c *Client) Read(ctx context.Context, o Options) (Snapshot, error) {
	s := Snapshot{Statuses: map[string]Status{}}
	var lists errgroup.Group
	lists.Go(func() (err error) {
		s.Nodes, _, err = c.nodes(ctx, o)
		if err != nil {
			return fmt.Errorf("list nodes: %w", err)
		}
		return nil
	})
	lists.Go(func() error {
		var err error
		s.Pods, _, err = c.pods(ctx, o)
		if err != nil {
			s.PodsUnread = fmt.Sprintf("list pods: %v", err)
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

// Pages lists the objects of a resource page by page, counts the requests, and calls keep with each
// page. With namespace "" it lists all of them.
func Pages[T any, L interface {
	*T
	runtime.Object
	metav1.ListInterface
}](
	ctx context.Context,
	count *atomic.Int64,
	api rest.Interface,
	namespace, resource string,
	selectors metav1.ListOptions,
	keep func(L),
) error {
	timeout := listTimeout
	selectors.Limit, selectors.TimeoutSeconds = listLimit, &timeout
	for {
		count.Add(1)
		part := L(new(T))
		err := api.Get().NamespaceIfScoped(namespace, namespace != "").Resource(resource).
			VersionedParams(&selectors, metav1.ParameterCodec).Timeout(time.Duration(timeout) * time.Second).
			Do(ctx).Into(part)
		if err != nil {
			return err
		}
		keep(part)
		selectors.Continue = part.GetContinue()
		if selectors.Continue == "" {
			return nil
		}
	}
}

// nodeSelectors and podSelectors filter on the API server.
func (o Options) nodeSelectors() metav1.ListOptions {
	return metav1.ListOptions{LabelSelector: o.Selector}
}

func (Options) podSelectors() metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: "status.phase!=Succeeded,status.phase!=Failed"}
}

// node returns the part of a Node that is kept; ok is false if the Options do not select it.
func (o Options) node(n *corev1.Node) (kept Node, ok bool) {
	kept = TrimNode(n, o.Domain)
	return kept, slices.Contains(o.Names, kept.Name) || len(o.Names) == 0 && kept.ours()
}

func (c *Client) nodes(ctx context.Context, o Options) (kept []Node, version string, err error) {
	err = Pages(ctx, &c.Lists, c.api, "", "nodes", o.nodeSelectors(), func(list *corev1.NodeList) {
		version = list.ResourceVersion
		for i := range list.Items {
			if node, ok := o.node(&list.Items[i]); ok {
				kept = append(kept, node)
			}
		}
	})
	for _, name := range o.Names {
		if err == nil && !slices.ContainsFunc(kept, func(n Node) bool { return n.Name == name }) {
			err = fmt.Errorf("%w: %s", errNoNode, name)
		}
	}
	return kept, version, err
}

// errNoNode: a requested name does not exist.
var errNoNode = errors.New("there is no such node, or the selector does not select it")

func (c *Client) pods(ctx context.Context, o Options) (kept []Pod, version string, err error) {
	err = Pages(ctx, &c.Lists, c.api, "", "pods", o.podSelectors(), func(list *corev1.PodList) {
		version = list.ResourceVersion
		for i := range list.Items {
			if pod, ok := trimPod(&list.Items[i], o.Domain, o.Namespace); ok {
				kept = append(kept, pod)
			}
		}
	})
	return kept, version, err
}

// mayForward returns why the user may not read status pages, or "" if allowed or unknown.
func (c *Client) mayForward(ctx context.Context, namespace string) string {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(listTimeout)*time.Second)
	defer cancel()
	review := &authorizationv1.SelfSubjectAccessReview{TypeMeta: metav1.TypeMeta{
		APIVersion: "authorization.k8s.io/v1",
		Kind:       "SelfSubjectAccessReview",
	}}
	review.Spec.ResourceAttributes = &authorizationv1.ResourceAttributes{
		Verb:        "create", // Kubernetes needs it from 1.35 on; before that, get.
		Resource:    "pods",
		Subresource: "portforward",
		Namespace:   namespace,
	}
	c.Lists.Add(1)
	body, err := json.Marshal(review)
	if err == nil {
		body, err = c.api.Post().AbsPath("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews").
			SetHeader("Accept", runtime.ContentTypeJSON).Body(body).Do(ctx).Raw()
	}
	if err == nil {
		err = json.Unmarshal(body, review)
	}
	if err != nil || review.Status.Allowed {
		return ""
	}
	return "you may not get and create pods/portforward in the namespace " + namespace
}

// virgatesOf returns Virgate's own pods by node.
func virgatesOf(pods iter.Seq[Pod]) map[string]Pod {
	virgates := map[string]Pod{}
	for pod := range pods {
		// During a rolling update the older pod may still exist; either can answer.
		if pod.StatusPort > 0 && pod.Name > virgates[pod.Node].Name {
			virgates[pod.Node] = pod
		}
	}
	return virgates
}

// unasked returns why the node's status page is not requested from that pod, or "" if it is.
func unasked(node Node, virgate Pod, o Options) string {
	switch {
	case node.NotReady != "":
		return node.NotReady
	case virgate.Name == "":
		return "no pod of Virgate is ready there in the namespace " + o.Namespace
	}
	return ""
}

// statuses reads the status pages of the nodes; unread is why none was requested. An error of one
// node, even forbidden, says nothing about the others.
func (c *Client) statuses(ctx context.Context, o Options, s Snapshot) (statuses map[string]Status, unread string) {
	statuses = map[string]Status{}
	unread = c.ask(ctx, o, s.Nodes, virgatesOf(slices.Values(s.Pods)),
		func(ctx context.Context, pod Pod) (func(), error) {
			page, err := c.status(ctx, pod, o.StatusTimeout)
			return func() { statuses[pod.Node] = Status{Page: page} }, err
		}, func(node, why string) { statuses[node] = Status{Unread: why} })
	return statuses, unread
}

// ask calls answer for each node with its pod, several at once. It calls failed, and the keep that
// answer returned, one at a time. unread is why no node was asked.
func (c *Client) ask(
	ctx context.Context,
	o Options,
	nodes []Node,
	virgates map[string]Pod,
	answer func(context.Context, Pod) (keep func(), err error),
	failed func(node, why string),
) (unread string) {
	if len(virgates) > 0 {
		unread = c.mayForward(ctx, o.Namespace)
		if unread != "" {
			return unread
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.AllTimeout,
		fmt.Errorf("not answered within the %s for all nodes", o.AllTimeout))
	defer cancel()
	var mutex sync.Mutex
	fail := func(node, why string) {
		mutex.Lock()
		defer mutex.Unlock()
		failed(node, why)
	}
	places, waiting := make(chan struct{}, atOnce), make(chan struct{}, late)
	var asking sync.WaitGroup
	for _, node := range nodes {
		pod := virgates[node.Name]
		if why := unasked(node, pod, o); why != "" {
			fail(node.Name, why)
			continue
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			fail(node.Name, context.Cause(ctx).Error())
			continue
		}
		asking.Go(func() {
			held := give(places, waiting, patience)
			defer held()
			keep, err := answer(ctx, pod)
			if err != nil {
				fail(node.Name, err.Error())
				return
			}
			mutex.Lock()
			defer mutex.Unlock()
			keep()
		})
	}
	asking.Wait()
	return ""
}

// give moves the holder of a place to waiting unless it calls done within that time, if waiting has
// room. That frees its place for another node.
func give(places, waiting chan struct{}, after time.Duration) (done func()) {
	has := places
	var mutex sync.Mutex
	timer := time.AfterFunc(after, func() {
		mutex.Lock()
		defer mutex.Unlock()
		select {
		case waiting <- struct{}{}:
			if has == nil { // done was called meanwhile.
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

// status reads the pod's status page.
func (c *Client) status(ctx context.Context, pod Pod, limit time.Duration) (*status.Status, error) {
	var page status.Status
	if err := c.get(ctx, pod, limit, "/api/v1/status", &page); err != nil {
		return nil, err
	}
	return &page, notOf(page.Node, pod)
}

// get reads a path of the pod through a connection to its loopback.
func (c *Client) get(ctx context.Context, pod Pod, limit time.Duration, path string, into any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %s", limit))
	defer cancel()
	c.Pages.Add(1)
	data, err := c.fetch(ctx, pod, path)
	if err != nil {
		return reason(ctx, err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("the answer is no status: %w", err)
	}
	return nil
}

func (c *Client) fetch(ctx context.Context, pod Pod, path string) ([]byte, error) {
	connection, err := c.open(ctx, pod)
	if err != nil {
		return nil, err
	}
	defer func() { _ = connection.Close() }()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return nil, err
	}
	request.Close = true
	request.Header.Set("Accept", "application/json")
	if err := request.Write(connection); err != nil {
		return nil, err
	}
	answer, err := http.ReadResponse(bufio.NewReader(io.LimitReader(connection, maxStatus+maxHeader)), request)
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(answer.Body, maxStatus+1))
	if err != nil {
		return nil, err
	}
	switch {
	case answer.StatusCode == http.StatusOK:
	case answer.StatusCode == http.StatusNotFound:
		return nil, errNotFound
	case answer.StatusCode == http.StatusBadRequest && bytes.Contains(data, []byte("HTTPS server")): // Of net/http.
		return nil, errors.New("its Virgate requires TLS (--web-config-file), with which its page is not read")
	default:
		return nil, fmt.Errorf("its Virgate answers %d %s", answer.StatusCode, http.StatusText(answer.StatusCode))
	}
	if len(data) > maxStatus {
		return nil, fmt.Errorf("the answer is longer than %d bytes", maxStatus)
	}
	return data, nil
}

// notOf returns an error if an answer is about another node than the pod's.
func notOf(node string, pod Pod) error {
	if node != "" && node != pod.Node {
		return fmt.Errorf("the answer is of node %q", node)
	}
	return nil
}

// Forecasts asks the nodes for the result if the label had that value. If there is no answer,
// Unknown gives the reason. Options set where Virgate's pods are and the time limits.
func (c *Client) Forecasts(
	ctx context.Context,
	o Options,
	nodes []Node,
	label, value string,
) (map[string]nodereport.Forecast, error) {
	var pods []Pod
	own := metav1.ListOptions{LabelSelector: appLabel + "=" + app}
	err := Pages(ctx, &c.Lists, c.api, o.Namespace, "pods", own, func(list *corev1.PodList) {
		for i := range list.Items {
			pod, _ := trimPod(&list.Items[i], o.Domain, o.Namespace)
			pods = append(pods, pod)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list Virgate's pods in the namespace %s: %w", o.Namespace, err)
	}
	forecasts := map[string]nodereport.Forecast{}
	unread := c.ask(ctx, o, nodes, virgatesOf(slices.Values(pods)), func(ctx context.Context, pod Pod) (func(), error) {
		var f nodereport.Forecast
		err := c.get(ctx, pod, o.StatusTimeout,
			"/api/v1/forecast?"+url.Values{"label": {label}, "value": {value}}.Encode(), &f)
		if errors.Is(err, errNotFound) {
			err = errors.New("its Virgate is older and does not say, or has just ended")
		}
		return func() { forecasts[pod.Node] = f }, cmp.Or(err, notOf(f.Node, pod))
	}, func(node, why string) { forecasts[node] = nodereport.Forecast{Unknown: why} })
	if unread != "" {
		return nil, errors.New(unread)
	}
	return forecasts, nil
}

// errNotFound: the pod or the path does not exist.
var errNotFound = errors.New("the answer is 404 Not Found")

// reason explains a missing answer in one line.
func reason(ctx context.Context, err error) error {
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		<-ctx.Done() // A connection has the same deadline and may fail a moment earlier.
	}
	if ctx.Err() != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	if status, ok := errors.AsType[*apierrors.StatusError](err); ok {
		code := int(status.ErrStatus.Code)
		if code == http.StatusNotFound {
			return errNotFound
		}
		return fmt.Errorf("the API server answers %d %s", code, http.StatusText(code))
	}
	return err
}
