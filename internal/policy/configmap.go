package policy

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/virgate/virgate/configs"
)

// ConfigMap has profiles in a ConfigMap, read from the API server.
type ConfigMap struct {
	source string
	data   *single[configs.Documents]
	feed   *feed
}

// ParseConfigMapName reads NAMESPACE/NAME.
func ParseConfigMapName(s string) (namespace, name string, err error) {
	namespace, name, found := strings.Cut(s, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		return "", "", fmt.Errorf("expected NAMESPACE/NAME (got %q)", s)
	}
	return namespace, name, nil
}

// NewConfigMap makes a ConfigMap; Watch reads it.
func NewConfigMap(api *API, namespace, name string, log *slog.Logger) *ConfigMap {
	return newConfigMap(namespace, name, log, func(what string, into sink) *feed {
		return api.objects(what, "configmaps", namespace, byName(name), into, log)
	})
}

func newConfigMap(namespace, name string, log *slog.Logger, open func(what string, into sink) *feed) *ConfigMap {
	source := "ConfigMap " + namespace + "/" + name
	data := &single[configs.Documents]{
		what: source, name: name, log: log,
		project: func(object runtime.Object) (configs.Documents, bool) {
			read, ok := object.(*corev1.ConfigMap)
			if !ok {
				return nil, false
			}
			documents := make(configs.Documents, len(read.Data)+len(read.BinaryData))
			maps.Copy(documents, read.Data)
			for key, data := range read.BinaryData { // A mounted one has them too.
				documents[key] = string(data)
			}
			return documents, true
		},
		equal: maps.Equal[configs.Documents, configs.Documents],
	}
	return &ConfigMap{source: source, data: data, feed: open(source, data)}
}

// Source is what people call it: "ConfigMap gpu/profiles".
func (c *ConfigMap) Source() string { return c.source }

// Documents returns what it holds. The error is configs.ErrPending before it has
// been read, or that it is not there.
func (c *ConfigMap) Documents() (configs.Documents, error) { return c.data.value() }

// Watch follows the ConfigMap until ctx ends.
func (c *ConfigMap) Watch(ctx context.Context, changed func()) error {
	c.data.changed = changed
	c.feed.run(ctx)
	return nil
}
