package e2e

import (
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testManifest has the API server accept the static manifest and the node start
// its pod; without a driver here it has nothing to offer.
func testManifest(t *testing.T, c *cluster) {
	c.uninstall(t)
	// Helm leaves it, and there is none if nothing was installed before.
	_ = c.client.CoreV1().Namespaces().Delete(t.Context(), namespace, metav1.DeleteOptions{})
	c.await(t, time.Minute, "the namespace to go", func() error {
		if _, err := c.client.CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{}); err == nil {
			return errNotYet
		}
		return nil
	})
	c.apply(t, "../../../deployments/virgate.yaml")
	c.await(t, time.Minute, "the pod to run", func() error {
		pods, err := c.client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(pods.Items) != 1 {
			return fmt.Errorf("%d pods, %w", len(pods.Items), err)
		}
		if status := pods.Items[0].Status; status.Phase != v1.PodRunning {
			return fmt.Errorf("it is %s: %s", status.Phase, status.Message)
		}
		return nil
	})
}
