package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// unexpectedAdmission is the reason of a pod that the kubelet does not take because
// a device plugin refused, or had not so many devices.
const unexpectedAdmission = "UnexpectedAdmissionError"

// runAll creates the pods and waits until all of them run. They go together at the
// end of the test.
func (c *cluster) runAll(t *testing.T, pods []*v1.Pod) {
	t.Helper()
	for _, each := range pods {
		c.create(t, each)
	}
	t.Cleanup(func() { c.removeAll(t, pods) })
	for _, each := range pods {
		c.awaitPhase(t, each.Name, v1.PodRunning)
	}
}

// removeAll deletes the pods and waits until they are gone.
func (c *cluster) removeAll(t *testing.T, pods []*v1.Pod) {
	t.Helper()
	for _, each := range pods {
		_ = c.client.CoreV1().Pods(each.Namespace).Delete(context.WithoutCancel(t.Context()), each.Name, metav1.DeleteOptions{})
	}
	for _, each := range pods {
		c.remove(t, each.Name)
	}
}

// clear removes all of the tests' pods.
func (c *cluster) clear(t *testing.T) {
	t.Helper()
	left, err := c.client.CoreV1().Pods(workspace).List(context.WithoutCancel(t.Context()), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pods := make([]*v1.Pod, len(left.Items))
	for i := range left.Items {
		pods[i] = &left.Items[i]
	}
	c.removeAll(t, pods)
}

// gpus are what each pod sees of the node's GPUs.
func (c *cluster) gpus(t *testing.T, pods []*v1.Pod) []string {
	t.Helper()
	seen := make([]string, len(pods))
	for i, each := range pods {
		seen[i] = c.printedVariable(t, each.Name, "NVIDIA_VISIBLE_DEVICES")
	}
	return seen
}

// awaitUnscheduled waits until the scheduler has said that of a pod.
func (c *cluster) awaitUnscheduled(t *testing.T, name, want string) {
	t.Helper()
	c.await(t, time.Minute, fmt.Sprintf("pod %s to be unscheduled: %s", name, want), func() error {
		got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range got.Status.Conditions {
			if condition.Type == v1.PodScheduled && condition.Status == v1.ConditionFalse && strings.Contains(condition.Message, want) {
				return nil
			}
		}
		return fmt.Errorf("it is %s, %v", got.Status.Phase, got.Status.Conditions)
	})
}
