package chart

import (
	"bufio"
	"errors"
	"io"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

// decode reads every object strictly as Kubernetes' own type: an unknown field is an error.
func decode(t *testing.T, manifest string) []runtime.Object {
	t.Helper()
	types := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, monitoring.AddToScheme} {
		if err := add(types); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(types, serializer.EnableStrict).UniversalDeserializer()
	documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(manifest)))
	var objects []runtime.Object
	for {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := decoder.Decode(text, nil, nil)
		if runtime.IsMissingKind(err) {
			continue // The document has only comments.
		}
		if err != nil {
			t.Errorf("%v in:\n%s", err, text)
			continue
		}
		objects = append(objects, object)
	}
}

// configMap returns the data of the ConfigMap with the profiles.
func configMap(t *testing.T, objects []runtime.Object) map[string]string {
	t.Helper()
	for _, object := range objects {
		if m, ok := object.(*corev1.ConfigMap); ok && strings.HasSuffix(m.Name, "-profiles") {
			return m.Data
		}
	}
	t.Fatal("no ConfigMap with profiles")
	return nil
}
