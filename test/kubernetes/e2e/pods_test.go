package e2e

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// workspace is the namespace of the tests' pods.
const workspace = "default"

// pod is one that asks for so many of the resource.
func pod(name, resourceName string, count int64) *v1.Pod {
	grace := int64(1)
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: workspace},
		Spec: v1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			RestartPolicy:                 v1.RestartPolicyNever,
			Containers: []v1.Container{{
				Name: "work", Image: workloadImage,
				Resources: v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceName(resourceName): *resource.NewQuantity(count, resource.DecimalSI)}},
			}},
		},
	}
}

// create makes the pod and removes it at the end of the test.
func (c *cluster) create(t *testing.T, pod *v1.Pod) {
	t.Helper()
	if _, err := c.client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.remove(t, pod.Name) })
}

// remove deletes the pod and waits until it is gone.
func (c *cluster) remove(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pods := c.client.CoreV1().Pods(workspace)
	_ = pods.Delete(ctx, name, metav1.DeleteOptions{})
	for ctx.Err() == nil {
		if _, err := pods.Get(ctx, name, metav1.GetOptions{}); err != nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("pod %s does not go", name)
}

// run creates the pod and waits until it runs.
func (c *cluster) run(t *testing.T, pod *v1.Pod) {
	t.Helper()
	c.create(t, pod)
	c.awaitPhase(t, pod.Name, v1.PodRunning)
}

func (c *cluster) awaitPhase(t *testing.T, name string, phase v1.PodPhase) *v1.Pod {
	t.Helper()
	var got *v1.Pod
	c.await(t, time.Minute, fmt.Sprintf("pod %s to be %s", name, phase), func() error {
		var err error
		if got, err = c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if got.Status.Phase != phase {
			return fmt.Errorf("it is %s: %s: %s", got.Status.Phase, got.Status.Reason, got.Status.Message)
		}
		return nil
	})
	return got
}

// printed is what the pod's container has said of its GPUs: lines of "env NAME=VALUE"
// and "device PATH".
func (c *cluster) printed(t *testing.T, name string) []string {
	t.Helper()
	var lines []string
	c.await(t, time.Minute, "pod "+name+"'s output", func() error {
		stream, err := c.client.CoreV1().Pods(workspace).GetLogs(name, &v1.PodLogOptions{}).Stream(t.Context())
		if err != nil {
			return err
		}
		defer func() { _ = stream.Close() }()
		text, err := io.ReadAll(stream)
		if err != nil {
			return err
		}
		if lines = strings.Split(strings.TrimSpace(string(text)), "\n"); !slices.Contains(lines, "waiting") {
			return fmt.Errorf("only %q", lines)
		}
		return nil
	})
	return lines
}

// printedVariable is a variable of the pod's container; empty if it has none.
func (c *cluster) printedVariable(t *testing.T, name, variable string) string {
	t.Helper()
	for _, line := range c.printed(t, name) {
		if value, ok := strings.CutPrefix(line, "env "+variable+"="); ok {
			return value
		}
	}
	return ""
}
