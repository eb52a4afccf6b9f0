package e2e

import (
	"context"
	"encoding/json"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// profiles makes a ConfigMap of profiles beside the release, for config.name, and
// removes it at the end of the test.
func (c *cluster) profiles(t *testing.T, name string, texts map[string]string) {
	t.Helper()
	maps := c.client.CoreV1().ConfigMaps(namespace)
	if _, err := maps.Create(t.Context(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: texts}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := maps.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
}

// createNamespace makes it unless it is there.
func (c *cluster) createNamespace(t *testing.T, name string) {
	t.Helper()
	_, err := c.client.CoreV1().Namespaces().Create(t.Context(), &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

// editProfile gives one profile of the ConfigMap another text.
func (c *cluster) editProfile(t *testing.T, name, profile, text string) {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"data": map[string]string{profile: text}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.CoreV1().ConfigMaps(namespace).Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}
