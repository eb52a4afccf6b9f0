package nodestatus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/kube"
)

// client makes the requests of this package to the Kubernetes API, mainly about one Node and its Events.
type client struct {
	*kube.Client
	node string
}

// connect returns a client for the named Node. It does not connect yet. There are few requests, and
// writeLoop and eventQueue limit their number.
func connect(config *rest.Config, node string, timeout time.Duration) (client, error) {
	if config == nil {
		return client{}, errors.New("report to the API: no way to reach it")
	}
	if node == "" {
		return client{}, errors.New("report to the API: this node's name is not known")
	}
	api, err := kube.NewClient(config)
	if err != nil {
		return client{}, fmt.Errorf("report to the API: %w", err)
	}
	api.Timeout = timeout
	return client{api, node}, nil
}

func (c client) read(ctx context.Context) (*corev1.Node, error) {
	var n corev1.Node
	if err := c.Do(ctx, c.Get().Resource("nodes").Name(c.node)).Into(&n); err != nil {
		return nil, fmt.Errorf("read node %s: %w", c.node, err)
	}
	return &n, nil
}

// metadata returns the Node's metadata, including who wrote which field.
func (c client) metadata(ctx context.Context) (metav1.ObjectMeta, error) {
	var object metav1.PartialObjectMetadata
	if err := c.Do(ctx, kube.MetadataOnly(c.Get().Resource("nodes").Name(c.node))).Into(&object); err != nil {
		return metav1.ObjectMeta{}, fmt.Errorf("read node %s: %w", c.node, err)
	}
	return object.ObjectMeta, nil
}

func (c client) patchNode(ctx context.Context, kind types.PatchType, body any, part ...string) error {
	return c.Write(ctx, "patch node "+c.node, c.Patch(kind).Resource("nodes").Name(c.node).SubResource(part...), body)
}

// pointerPart returns the key as a part of a JSON Pointer (RFC 6901).
func pointerPart(key string) string { return strings.NewReplacer("~", "~0", "/", "~1").Replace(key) }

// createEvent creates the event. If an event of that name exists, it is this one, created by a
// request whose answer was lost.
func (c client) createEvent(ctx context.Context, event *corev1.Event) error {
	request := c.Post().Namespace(event.Namespace).Resource("events").SetHeader("Content-Type",
		runtime.ContentTypeJSON)
	if err := c.Write(ctx, "create event "+event.Reason, request, event); !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

func (c client) patchEvent(ctx context.Context, name string, body any) error {
	request := c.Patch(types.StrategicMergePatchType).Namespace(metav1.NamespaceDefault).Resource("events").Name(name)
	return c.Write(ctx, "patch event "+name, request, body)
}
