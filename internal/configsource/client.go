package configsource

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// RESTConfig finds the API server: from the kubeconfig file at path or, if path is empty, from a
// pod's service account. It does not connect.
func RESTConfig(path string) (*rest.Config, error) {
	var config *rest.Config
	var err error
	if path == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", path)
	}
	if errors.Is(err, rest.ErrNotInCluster) {
		err = errors.New("this is no pod: set --kubeconfig or KUBECONFIG")
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	config.UserAgent = "virgate" // In the API server's logs and metrics.
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return responseLimit{next} })
	return config, nil
}

// UserConfig finds the API server as kubectl does: from the kubeconfig file at path, KUBECONFIG,
// ~/.kube/config, or a pod's service account. It also returns the context's namespace.
func UserConfig(path, context string) (config *rest.Config, namespace string, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = path
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules,
		&clientcmd.ConfigOverrides{CurrentContext: context})
	config, err = loader.ClientConfig()
	if err == nil {
		namespace, _, err = loader.Namespace()
	}
	if clientcmd.IsEmptyConfig(err) {
		err = errors.New("no kubeconfig found: set --kubeconfig or KUBECONFIG")
	}
	if err != nil {
		return nil, "", fmt.Errorf("find the API server: %w", err)
	}
	return config, namespace, nil
}

// Client reads from the API server. Clients whose RESTConfig has the same path share a connection.
type Client struct {
	// watcher returns a watcher that keeps the store up to date.
	watcher func(q query, into store) *watcher
}

// NewClient returns a Client and does not connect yet.
func NewClient(config *rest.Config) (*Client, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), metav1.AddMetaToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return newSharedConnection(next) })
	config.QPS = -1 // A watcher limits itself.
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	core, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	return &Client{func(q query, into store) *watcher { return newWatcher(core, q, into) }}, nil
}

type query struct {
	// what names the objects in messages: "node n1".
	what, resource string
	// namespace is "" for objects without a namespace, and for all namespaces.
	namespace string
	selector  fields.Selector
	// metadataOnly leaves out spec and status (API Concepts, "Metadata-only fetches").
	metadataOnly bool
}

// byName selects one object; RBAC's resourceNames allow a list and a watch with it.
func byName(name string) fields.Selector { return fields.OneTermEqualSelector("metadata.name", name) }

// newWatcher returns a Client's watcher; core reads objects, or their metadata, as protobuf.
func newWatcher(core rest.Interface, q query, into store) *watcher {
	// Each request is made once; only the watcher decides whether and when to repeat it. client-go
	// would repeat it after exactly the time that the server asks for, or one second, which is the
	// same on all nodes (v0.36, rest/with_retry.go).
	request := func(options metav1.ListOptions, kind string) *rest.Request {
		options.FieldSelector = q.selector.String()
		r := core.Get().MaxRetries(0).NamespaceIfScoped(q.namespace, q.namespace != "").Resource(q.resource).
			VersionedParams(&options, metav1.ParameterCodec)
		if q.metadataOnly {
			as := ";as=" + kind + ";g=meta.k8s.io;v=v1"
			r.SetHeader("Accept", runtime.ContentTypeProtobuf+as+","+runtime.ContentTypeJSON+as)
		}
		return r
	}
	return &watcher{
		what:  q.what,
		store: into,
		pace:  defaultPace(),
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return request(options, "PartialObjectMetadataList").Do(ctx).Get()
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			return request(options, "PartialObjectMetadata").Watch(ctx)
		},
	}
}

// maxResponse limits a response, in bytes. An object has at most 1.5 MiB (etcd,
// --max-request-bytes), and the largest list is the pods of one node. A watch has no limit;
// client-go limits each of its events.
const maxResponse = 32 << 20

// responseLimit turns longer responses into errors, so that a server or proxy gone mad does not use
// up the node's memory.
type responseLimit struct{ next http.RoundTripper }

func (l responseLimit) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(request)
	if err == nil && request.URL.Query().Get("watch") == "" {
		response.Body = &limitedBody{ReadCloser: response.Body, left: maxResponse}
	}
	return response, err
}

type limitedBody struct {
	io.ReadCloser
	left int
}

func (b *limitedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("the API server's answer is longer than %d bytes", maxResponse)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// sharedConnection makes requests wait for the first one, at the start and after a lost connection,
// so that they share its connection. Otherwise each would open its own, and all but one would be
// closed unused: before a response, net/http cannot know that the server speaks HTTP/2 (Go 1.26,
// transport.go). A TLS handshake is the largest cost of a node's start for an API server.
type sharedConnection struct {
	next http.RoundTripper
	// connected is true if the last request was answered.
	connected atomic.Bool
	// first is held by the request that connects.
	first chan struct{}
}

func newSharedConnection(next http.RoundTripper) *sharedConnection {
	return &sharedConnection{next: next, first: make(chan struct{}, 1)}
}

func (s *sharedConnection) RoundTrip(request *http.Request) (*http.Response, error) {
	if !s.connected.Load() {
		select {
		case <-request.Context().Done():
			return nil, request.Context().Err()
		case s.first <- struct{}{}:
		}
		if s.connected.Load() {
			<-s.first // Another request has connected meanwhile.
		} else {
			defer func() { <-s.first }()
		}
	}
	response, err := s.next.RoundTrip(request)
	s.connected.Store(err == nil)
	if err == nil {
		response.Body = &connectionBody{response.Body, s}
	}
	return response, err
}

// connectionBody notices a lost connection, which only open responses report.
type connectionBody struct {
	io.ReadCloser
	connection *sharedConnection
}

func (b *connectionBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.connection.connected.Store(false)
	}
	return n, err
}
