package policy

import (
	"context"
	"log/slog"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// byName selects the one object; RBAC's resourceNames cover a list and a watch
// with it.
func byName(name string) string {
	return fields.OneTermEqualSelector("metadata.name", name).String()
}

// metadataOf asks for the metadata of objects in a list or a watch, and JSON from
// a server without protobuf (Kubernetes, API Concepts, "Metadata-only fetches").
func metadataOf(kind string) string {
	as := ";as=" + kind + ";g=meta.k8s.io;v=v1"
	return runtime.ContentTypeProtobuf + as + "," + runtime.ContentTypeJSON + as
}

// node follows the metadata of the named Node.
func (a *API) node(name string, into sink, log *slog.Logger) *feed {
	ask := func(options metav1.ListOptions, kind string) *rest.Request {
		return a.ask("nodes", "", byName(name), options).SetHeader("Accept", metadataOf(kind))
	}
	return &feed{
		what: "node " + name, into: into, log: log,
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return ask(options, "PartialObjectMetadataList").Do(ctx).Get()
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			return ask(options, "PartialObjectMetadata").Watch(ctx)
		},
	}
}

// objects follows whole objects of one namespace, "" for all.
func (a *API) objects(what, resource, namespace, selector string, into sink, log *slog.Logger) *feed {
	return &feed{
		what: what, into: into, log: log,
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return a.ask(resource, namespace, selector, options).Do(ctx).Get()
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			return a.ask(resource, namespace, selector, options).Watch(ctx)
		},
	}
}

// ask makes a request that is made once: who asks again, and when, is the
// feed's business. client-go would do so after exactly as long as the server says,
// or one second, which is the same on all nodes (v0.36, rest/with_retry.go).
func (a *API) ask(resource, namespace, selector string, options metav1.ListOptions) *rest.Request {
	options.FieldSelector = selector
	return a.core.Get().MaxRetries(0).NamespaceIfScoped(namespace, namespace != "").Resource(resource).
		VersionedParams(&options, metav1.ParameterCodec)
}
