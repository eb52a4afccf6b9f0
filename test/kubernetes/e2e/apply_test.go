package e2e

import (
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
)

// apply creates the manifest's objects, as kubectl does, and removes them at the
// end of the test.
func (c *cluster) apply(t *testing.T, path string) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	client, err := dynamic.NewForConfig(c.config)
	if err != nil {
		t.Fatal(err)
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.client.Discovery()))
	for decoder := yaml.NewYAMLOrJSONDecoder(file, 4096); ; {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(&object.Object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if len(object.Object) == 0 {
			continue // Only a comment.
		}
		kind := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			t.Fatal(err)
		}
		var objects dynamic.ResourceInterface = client.Resource(mapping.Resource)
		if object.GetNamespace() != "" {
			objects = client.Resource(mapping.Resource).Namespace(object.GetNamespace())
		}
		options := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
		if _, err := objects.Create(t.Context(), object, options); err != nil {
			t.Fatalf("%s: create %s %s: %v", path, kind.Kind, object.GetName(), err)
		}
		t.Cleanup(func() { removeObject(t, objects, object.GetName()) })
	}
}

// removeObject deletes it and waits until what it owns is gone too.
func removeObject(t *testing.T, objects dynamic.ResourceInterface, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	foreground := metav1.DeletePropagationForeground
	err := objects.Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: &foreground})
	for err == nil {
		if ctx.Err() != nil {
			t.Errorf("%s does not go", name)
			return
		}
		_, err = objects.Get(ctx, name, metav1.GetOptions{})
	}
	if !apierrors.IsNotFound(err) {
		t.Error(err)
	}
}
