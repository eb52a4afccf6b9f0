package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/virgate/virgate/internal/wake"
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

// FieldManager is the name under which the API records what Virgate wrote.
const FieldManager = "virgate"

// Client makes requests to the API server. Clients whose RESTConfig has the same path share a connection.
type Client struct {
	rest.Interface
	// Timeout limits the time until a request is answered.
	Timeout time.Duration
}

// NewClient returns a Client and does not connect yet. It knows the types of core/v1 and resource/v1.
func NewClient(config *rest.Config) (*Client, error) {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return newSharedConnection(next) })
	config.ContentType = runtime.ContentTypeProtobuf
	client, err := CoreClient(config)
	if err != nil {
		return nil, err
	}
	return &Client{client, 15 * time.Second}, nil
}

// CoreClient returns client-go's client for core/v1, which also knows the types of resource/v1. It has
// no rate limit: who makes requests limits them. client-go's typed clients need the types of all of
// Kubernetes, 200 packages more to compile.
func CoreClient(config *rest.Config) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), resourceapi.AddToScheme(scheme),
		metav1.AddMetaToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	config = rest.CopyConfig(config)
	config.QPS = -1
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	return client, nil
}

// Do makes a request once, and returns when it is answered or Timeout is over. client-go would repeat
// it after exactly the time that the server asks for, or one second, which is the same on all nodes
// (v0.36, rest/with_retry.go).
func (c *Client) Do(ctx context.Context, request *rest.Request) rest.Result {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	return request.MaxRetries(0).Do(ctx)
}

// Insist is Do, but repeats a request that the server refuses for now, after a random time that is at
// least what the server asks for. It needs no more than Timeout.
func (c *Client) Insist(ctx context.Context, request *rest.Request) rest.Result {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	for {
		result := c.Do(ctx, request)
		asked := askedFor(result.Error())
		if asked == 0 || !wake.Sleep(ctx, asked) {
			return result
		}
	}
}

// Write makes a request that writes body as JSON; what names it in errors. The caller knows what it
// wrote, so the answer is only the metadata.
func (c *Client) Write(ctx context.Context, what string, request *rest.Request, body any) error {
	data, err := json.Marshal(body)
	if err == nil {
		err = c.Do(ctx, MetadataOnly(request.Param("fieldManager", FieldManager).Body(data))).Error()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Remove deletes the object at the path if it is as stated, not another one that has replaced it.
func (c *Client) Remove(ctx context.Context, only metav1.Preconditions, path ...string) error {
	body, err := json.Marshal(metav1.DeleteOptions{Preconditions: &only})
	if err != nil {
		return err
	}
	return c.Do(ctx, c.Delete().AbsPath(path...).SetHeader("Content-Type", runtime.ContentTypeJSON).Body(body)).Error()
}

// MetadataOnly requests an object's metadata, without spec and status (API Concepts, "Metadata-only
// fetches").
func MetadataOnly(request *rest.Request) *rest.Request { return as(request, "PartialObjectMetadata") }

func as(request *rest.Request, kind string) *rest.Request {
	kind = ";as=" + kind + ";g=meta.k8s.io;v=v1"
	return request.SetHeader("Accept", runtime.ContentTypeProtobuf+kind+","+runtime.ContentTypeJSON+kind+","+
		runtime.ContentTypeJSON)
}

// Query says which objects are wanted.
type Query struct {
	// What names the objects in messages: "node n1".
	What string
	// Path is that of the group and version, "" for core/v1.
	Path, Resource string
	// Namespace is "" for objects without a namespace, and for all namespaces.
	Namespace string
	// Selector is nil for all objects.
	Selector fields.Selector
	// MetadataOnly leaves out spec and status.
	MetadataOnly bool
}

// ByName selects one object; RBAC's resourceNames allow a list and a watch with it.
func ByName(name string) fields.Selector { return fields.OneTermEqualSelector("metadata.name", name) }

func (c *Client) request(q Query, options metav1.ListOptions) *rest.Request {
	if q.Selector != nil {
		options.FieldSelector = q.Selector.String()
	}
	r := c.Get().NamespaceIfScoped(q.Namespace, q.Namespace != "").Resource(q.Resource).
		VersionedParams(&options, metav1.ParameterCodec).MaxRetries(0)
	if q.Path != "" {
		r.AbsPath(q.Path)
	}
	switch {
	case q.MetadataOnly && options.Watch:
		MetadataOnly(r)
	case q.MetadataOnly:
		as(r, "PartialObjectMetadataList")
	}
	return r
}

// List lists the objects, all at once.
func (c *Client) List(ctx context.Context, q Query, into runtime.Object) error {
	if err := c.Insist(ctx, c.request(q, metav1.ListOptions{})).Into(into); err != nil {
		return fmt.Errorf("list %s: %w", q.What, err)
	}
	return nil
}

// page is the number of objects that Pages reads at once.
const page = 500

// Pages lists the objects page by page, for lists that grow with the cluster.
func Pages[T any, L interface {
	*T
	runtime.Object
	metav1.ListInterface
}](ctx context.Context, c *Client, q Query, each func(L)) error {
	for options := (metav1.ListOptions{Limit: page}); ; {
		list := L(new(T))
		if err := c.Do(ctx, c.request(q, options)).Into(list); err != nil {
			return fmt.Errorf("list %s: %w", q.What, err)
		}
		each(list)
		options.Continue = list.GetContinue()
		if options.Continue == "" {
			return nil
		}
	}
}
