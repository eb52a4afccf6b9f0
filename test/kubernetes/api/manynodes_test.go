package api

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// writers is how many requests at once change the Nodes: the server refuses what
// waits for too long behind others.
const writers = 16

// eachNode does it for all Nodes, several at once.
func eachNode(t *testing.T, count int, do func(name string) error) {
	t.Helper()
	var working sync.WaitGroup
	problems := make([]error, writers)
	for worker := range writers {
		working.Go(func() {
			for i := worker; i < count; i += writers {
				problems[worker] = errors.Join(problems[worker], do(nodeName(i)))
			}
		})
	}
	working.Wait()
	if err := errors.Join(problems...); err != nil {
		t.Fatal(err)
	}
}

// makeNodes makes Nodes as large as those of a cluster with feature discovery:
// 60 labels and 10 annotations, about 5 kB.
func (s *server) makeNodes(t *testing.T, count int, profile string) {
	t.Helper()
	eachNode(t, count, func(name string) error {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: profile}, Annotations: map[string]string{}}}
		for i := range 60 {
			node.Labels[fmt.Sprintf("feature.node.kubernetes.io/attribute-%02d", i)] = "a-value-of-usual-length"
		}
		for i := range 10 {
			node.Annotations[fmt.Sprintf("example.com/annotation-%02d", i)] = strings.Repeat("x", 60)
		}
		_, err := s.admin.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		return err
	})
}

// labelNodes gives all Nodes the profile.
func (s *server) labelNodes(t *testing.T, count int, profile string) {
	t.Helper()
	patch := []byte(`{"metadata":{"labels":{"` + label + `":"` + profile + `"}}}`)
	eachNode(t, count, func(name string) error {
		_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
}

// beatNodes updates the status of all Nodes, as their kubelets do every five
// minutes.
func (s *server) beatNodes(t *testing.T, count int, time string) {
	t.Helper()
	patch := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":"` + time + `"}]}}`)
	eachNode(t, count, func(name string) error {
		_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		return err
	})
}

// shelf is a ConfigMap of 4 KiB with the profile a as wanted, b and c.
func shelf(a string) map[string]string {
	shelf := map[string]string{"a": a, "b": document("4"), "c": document("10")}
	size := 0
	for _, text := range shelf {
		size += len(text)
	}
	shelf["c"] += "#" + strings.Repeat("x", 4096-size-2) + "\n"
	return shelf
}
