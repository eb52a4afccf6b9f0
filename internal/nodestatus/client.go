package nodestatus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// fieldManager is the name under which the API records what Virgate wrote.
const fieldManager = "virgate"

// client makes the requests of this package to the Kubernetes API, mainly about one Node and its Events.
type client struct {
	rest    rest.Interface
	node    string
	timeout time.Duration
}

// connect returns a client for the named Node. It does not connect yet.
func connect(config *rest.Config, node string, timeout time.Duration) (client, error) {
	if config == nil {
		return client{}, errors.New("report to the API: no way to reach it")
	}
	if node == "" {
		return client{}, errors.New("report to the API: this node's name is not known")
	}
	// There are few requests, and writeLoop and eventQueue limit their number. Answers are decoded
	// here; the library decodes only refusals.
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.QPS = -1
	rest, err := rest.RESTClientFor(config)
	if err != nil {
		return client{}, fmt.Errorf("report to the API: %w", err)
	}
	return client{
		rest:    rest,
		node:    node,
		timeout: timeout,
	}, nil
}

// node has the fields that are read from a Node.
type node struct {
	Metadata struct {
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Status struct {
		Conditions []corev1.NodeCondition `json:"conditions"`
		Capacity   map[string]string      `json:"capacity"`
	} `json:"status"`
}

func (c client) read(ctx context.Context) (node, error) {
	var n node
	data, err := c.do(ctx, c.rest.Get().Resource("nodes").Name(c.node))
	if err == nil {
		err = json.Unmarshal(data, &n)
	}
	if err != nil {
		return node{}, fmt.Errorf("read node %s: %w", c.node, err)
	}
	return n, nil
}

// metadata returns the Node's metadata, including who wrote which field.
func (c client) metadata(ctx context.Context) (metav1.ObjectMeta, error) {
	var object metav1.PartialObjectMetadata
	data, err := c.do(ctx, c.rest.Get().Resource("nodes").Name(c.node).SetHeader("Accept", metadataOnly))
	if err == nil {
		err = json.Unmarshal(data, &object)
	}
	if err != nil {
		return metav1.ObjectMeta{}, fmt.Errorf("read node %s: %w", c.node, err)
	}
	return object.ObjectMeta, nil
}

// metadataOnly requests only the metadata of an object.
const metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

func (c client) patchNode(ctx context.Context, kind types.PatchType, body any, part ...string) error {
	return c.send(ctx, "patch node "+c.node, c.rest.Patch(kind).Resource("nodes").Name(c.node).SubResource(part...),
		body)
}

// createEvent creates the event. If an event of that name exists, it is this one, created by a
// request whose answer was lost.
func (c client) createEvent(ctx context.Context, event *corev1.Event) error {
	request := c.rest.Post().Namespace(event.Namespace).Resource("events").SetHeader("Content-Type",
		runtime.ContentTypeJSON)
	if err := c.send(ctx, "create event "+event.Reason, request, event); !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

func (c client) patchEvent(ctx context.Context, name string, body any) error {
	request := c.rest.Patch(types.StrategicMergePatchType).Namespace(metav1.NamespaceDefault).Resource("events").Name(
		name)
	return c.send(ctx, "patch event "+name, request, body)
}

// send makes a request that writes. The caller knows what it wrote, so the answer is only the metadata.
func (c client) send(ctx context.Context, what string, request *rest.Request, body any) error {
	data, err := json.Marshal(body)
	if err == nil {
		_, err = c.do(ctx, request.Param("fieldManager", fieldManager).Body(data).
			SetHeader("Accept", metadataOnly))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// do makes one request and does not retry; writeLoop decides when to try again.
func (c client) do(ctx context.Context, request *rest.Request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	result := request.MaxRetries(0).Do(ctx)
	if err := result.Error(); err != nil {
		return nil, err
	}
	return result.Raw()
}
