package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"

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
type Client struct{ core rest.Interface }

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
	return &Client{core}, nil
}

// Query says which objects are wanted.
type Query struct {
	// What names the objects in messages: "node n1".
	What, Resource string
	// Namespace is "" for objects without a namespace, and for all namespaces.
	Namespace string
	Selector  fields.Selector
	// MetadataOnly leaves out spec and status (API Concepts, "Metadata-only fetches").
	MetadataOnly bool
}

// ByName selects one object; RBAC's resourceNames allow a list and a watch with it.
func ByName(name string) fields.Selector { return fields.OneTermEqualSelector("metadata.name", name) }

// Follow lists and watches the objects, as protobuf, and keeps the store up to date until ctx ends.
func (c *Client) Follow(ctx context.Context, q Query, into Store) { c.watcher(q, into).run(ctx) }

func (c *Client) watcher(q Query, into Store) *watcher {
	// Each request is made once; only the watcher decides whether and when to repeat it. client-go
	// would repeat it after exactly the time that the server asks for, or one second, which is the
	// same on all nodes (v0.36, rest/with_retry.go).
	request := func(options metav1.ListOptions, kind string) *rest.Request {
		options.FieldSelector = q.Selector.String()
		r := c.core.Get().MaxRetries(0).NamespaceIfScoped(q.Namespace, q.Namespace != "").Resource(q.Resource).
			VersionedParams(&options, metav1.ParameterCodec)
		if q.MetadataOnly {
			as := ";as=" + kind + ";g=meta.k8s.io;v=v1"
			r.SetHeader("Accept", runtime.ContentTypeProtobuf+as+","+runtime.ContentTypeJSON+as)
		}
		return r
	}
	return &watcher{
		what:  q.What,
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
