package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// profileLabel chooses the node's profile.
const profileLabel = "nvidia.com/device-plugin.config"

func (c *cluster) node(t *testing.T) *v1.Node {
	t.Helper()
	node, err := c.client.CoreV1().Nodes().Get(t.Context(), hostName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// awaitAllocatable waits until the node offers exactly these of NVIDIA's resources,
// but for such as it offers none of.
func (c *cluster) awaitAllocatable(t *testing.T, want map[string]int64) {
	t.Helper()
	c.await(t, 90*time.Second, fmt.Sprintf("allocatable %v", want), func() error {
		return differs(want, c.node(t).Status.Allocatable)
	})
}

// offers waits until capacity and allocatable are exactly these of NVIDIA's resources.
func (c *cluster) offers(t *testing.T, want map[string]int64) {
	t.Helper()
	c.awaitAllocatable(t, want)
	c.await(t, 90*time.Second, fmt.Sprintf("capacity %v", want), func() error {
		return differs(want, c.node(t).Status.Capacity)
	})
}

// differs says what else the resources are than these of NVIDIA's, but for such as
// there are none of.
func differs(want map[string]int64, resources v1.ResourceList) error {
	got := offered(resources)
	maps.DeleteFunc(got, func(_ string, count int64) bool { return count == 0 })
	if difference := cmp.Diff(want, got); difference != "" {
		return fmt.Errorf("it is (-want +got):\n%s", difference)
	}
	return nil
}

func offered(resources v1.ResourceList) map[string]int64 {
	found := map[string]int64{}
	for name, quantity := range resources {
		if strings.HasPrefix(string(name), "nvidia.com/") {
			found[string(name)] = quantity.Value()
		}
	}
	return found
}

// label chooses a profile of the node; "" takes the label away, also when the test
// has ended.
func (c *cluster) label(t *testing.T, profile string) {
	t.Helper()
	var value any
	if profile != "" {
		value = profile
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{profileLabel: value}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.CoreV1().Nodes().Patch(context.WithoutCancel(t.Context()), hostName, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}
