package policy

import (
	"context"
	"log/slog"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// byName selects the one object; RBAC's resourceNames cover a list and a watch
// with it.
func byName(name string) string {
	return fields.OneTermEqualSelector("metadata.name", name).String()
}

// node follows the metadata of the named Node.
func (a *API) node(name string, into sink, log *slog.Logger) *feed {
	nodes := a.metadata.Resource(schema.GroupVersionResource{Version: "v1", Resource: "nodes"})
	return &feed{
		what: "node " + name, into: into, log: log,
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.FieldSelector = byName(name)
			return nodes.List(ctx, options)
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = byName(name)
			return nodes.Watch(ctx, options)
		},
	}
}

// objects follows whole objects of one namespace, "" for all.
func (a *API) objects(what, resource, namespace, selector string, into sink, log *slog.Logger) *feed {
	return &feed{
		what: what, into: into, log: log,
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.FieldSelector = selector
			return a.core.Get().NamespaceIfScoped(namespace, namespace != "").Resource(resource).
				VersionedParams(&options, metav1.ParameterCodec).Do(ctx).Get()
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector, options.Watch = selector, true
			return a.core.Get().NamespaceIfScoped(namespace, namespace != "").Resource(resource).
				VersionedParams(&options, metav1.ParameterCodec).Watch(ctx)
		},
	}
}
