package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/virgate/virgate/test/await"
)

// workspace is the namespace of the tests' pods.
const workspace = "default"

// podName is the variable with the pod's name in each container.
const podName = "POD_NAME"

// pod returns a pod that requests this number of the resource.
func pod(name, resourceName string, count int64) *v1.Pod {
	grace := int64(1)
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: workspace},
		Spec: v1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			RestartPolicy:                 v1.RestartPolicyNever,
			// They need neither their own network nor a token, and making these takes time.
			HostNetwork:                  true,
			AutomountServiceAccountToken: new(false),
			Containers: []v1.Container{{
				Name: "work", Image: workloadImage, Env: []v1.EnvVar{{Name: podName, Value: name}},
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
	c.pods[pod.Name] = pod
	c.created[t] = append(c.created[t], pod.Name)
	t.Cleanup(func() {
		c.delete(t, c.created[t]) // The first cleanup deletes all, so that they end at the same time.
		delete(c.created, t)
		c.remove(t, pod.Name)
	})
}

// createAgain replaces a pod that the kubelet has refused.
func (c *cluster) createAgain(t *testing.T, name string) {
	t.Helper()
	c.remove(t, name)
	if _, err := c.client.CoreV1().Pods(workspace).Create(t.Context(), c.pods[name], metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// remove deletes the pods and waits until they are gone.
func (c *cluster) remove(t *testing.T, names ...string) {
	t.Helper()
	c.delete(t, names)
	pods := c.client.CoreV1().Pods(workspace)
	for _, name := range names {
		if err := gone(func() error {
			_, err := pods.Get(context.WithoutCancel(t.Context()), name, metav1.GetOptions{})
			return err
		}); err != nil {
			t.Errorf("pod %s does not go: %v", name, err)
		}
	}
}

// delete deletes those of the pods that exist.
func (c *cluster) delete(t *testing.T, names []string) {
	t.Helper()
	for _, name := range names {
		_ = c.client.CoreV1().Pods(workspace).Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{})
	}
}

// gone waits until get does not find the object. Cleanups may call it: without an API server it does not
// wait.
func gone(get func() error) error {
	return await.Condition(nil, func() error {
		err := get()
		switch {
		case apierrors.IsNotFound(err), utilnet.IsConnectionRefused(err):
			return nil
		case err == nil:
			return errors.New("it is there")
		}
		return err
	})
}

// run creates the pod and waits until it runs.
func (c *cluster) run(t *testing.T, pod *v1.Pod) {
	t.Helper()
	c.create(t, pod)
	c.awaitPhase(t, pod.Name, v1.PodRunning)
}

// awaitPhase waits until the pod is in that phase. The scheduler binds a pod by the node's status, which may
// be older or newer than the kubelet's own state. If the kubelet therefore refuses the pod, awaitPhase
// creates it again, as its owner would do.
func (c *cluster) awaitPhase(t *testing.T, name string, phase v1.PodPhase) *v1.Pod {
	t.Helper()
	var got *v1.Pod
	c.await(t, fmt.Sprintf("pod %s to be %s", name, phase), func() error {
		var err error
		if got, err = c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if phase == v1.PodRunning && got.Status.Phase == v1.PodFailed && overtaken(got) {
			c.report.note("pod "+name+", created again", got.Status.Reason)
			c.createAgain(t, name)
			return errNotYet
		}
		if got.Status.Phase == phase {
			return nil
		}
		if err := never(got, phase); err != nil {
			return err
		}
		return fmt.Errorf("it is %s: %s: %s", got.Status.Phase, got.Status.Reason, got.Status.Message)
	})
	return got
}

// printed returns what the pod's container has printed about its GPUs: lines of "env NAME=VALUE" and
// "device PATH".
func (c *cluster) printed(t *testing.T, name string) []string {
	t.Helper()
	return c.printedBy(t, name, "")
}

// printedBy returns what that container of the pod has printed; "" means its only one.
func (c *cluster) printedBy(t *testing.T, name, container string) []string {
	t.Helper()
	var lines []string
	c.await(t, "pod "+name+"'s output", func() error {
		stream, err := c.client.CoreV1().Pods(workspace).GetLogs(name, &v1.PodLogOptions{Container: container}).Stream(t.Context())
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

// printedVariable returns a variable of the pod's container; empty if it is not set.
func (c *cluster) printedVariable(t *testing.T, name, variable string) string {
	t.Helper()
	for _, line := range c.printed(t, name) {
		if value, ok := strings.CutPrefix(line, "env "+variable+"="); ok {
			return value
		}
	}
	return ""
}

// unexpectedAdmission is the reason of a pod that the kubelet refuses because a device plugin refused it,
// or had too few devices.
const unexpectedAdmission = "UnexpectedAdmissionError"

// outOf begins the reason of a pod that the kubelet refuses because its copy of the node's status has too
// few devices.
const outOf = "OutOfnvidia.com/"

// runAll creates the pods and waits until all of them run. They are deleted together at the end of the
// test.
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

// gpus returns what each pod sees of the node's GPUs.
func (c *cluster) gpus(t *testing.T, pods []*v1.Pod) []string {
	t.Helper()
	seen := make([]string, len(pods))
	for i, each := range pods {
		seen[i] = c.printedVariable(t, each.Name, "NVIDIA_VISIBLE_DEVICES")
	}
	return seen
}

// awaitInsufficient creates a pod for one device and waits until the scheduler says that there are too few.
// The scheduler may learn of a smaller number later than the test does: if the kubelet then refuses the
// pod, it is created again.
func (c *cluster) awaitInsufficient(t *testing.T, name, resource string) {
	t.Helper()
	c.create(t, pod(name, resource, 1))
	c.await(t, fmt.Sprintf("pod %s to find too few of %s", name, resource), func() error {
		got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got.Status.Phase == v1.PodFailed && overtaken(got) {
			c.createAgain(t, name)
			return errNotYet
		}
		for _, condition := range got.Status.Conditions {
			if condition.Type == v1.PodScheduled && condition.Status == v1.ConditionFalse && strings.Contains(condition.Message, "Insufficient "+resource) {
				return nil
			}
		}
		if got.Status.Phase != v1.PodPending {
			return await.Never("it is %s: %s: %s", got.Status.Phase, got.Status.Reason, got.Status.Message)
		}
		return fmt.Errorf("it is %s, %v", got.Status.Phase, got.Status.Conditions)
	})
}

// shared is the resource of the default profile.
const shared = "nvidia.com/gpu"

// hold runs pods with one share each and returns their names.
func (c *cluster) hold(t *testing.T, prefix string, count int) []string {
	t.Helper()
	names, pods := make([]string, count), make([]*v1.Pod, count)
	for i := range count {
		names[i] = fmt.Sprintf("%s-%d", prefix, i)
		pods[i] = pod(names[i], shared, 1)
	}
	c.runAll(t, pods)
	return names
}

// podState is the part of a pod that changes when anything happens to it.
type podState struct {
	UID, Container, GPU string
	Phase               v1.PodPhase
	Restarts            int32
}

func (c *cluster) podStates(t *testing.T, names []string) map[string]podState {
	t.Helper()
	all := map[string]podState{}
	for _, name := range names {
		pod, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(pod.Status.ContainerStatuses) == 0 {
			t.Fatalf("pod %s has no container: %v", name, pod.Status)
		}
		status := pod.Status.ContainerStatuses[0]
		all[name] = podState{
			string(pod.UID), status.ContainerID, c.printedVariable(t, name, "NVIDIA_VISIBLE_DEVICES"),
			pod.Status.Phase, status.RestartCount,
		}
	}
	return all
}

// undisturbed checks that the pods live on as before.
func (c *cluster) undisturbed(t *testing.T, before map[string]podState) {
	t.Helper()
	if difference := cmp.Diff(before, c.podStates(t, slices.Sorted(maps.Keys(before)))); difference != "" {
		t.Errorf("pods were disturbed (-before +after):\n%s", difference)
	}
}

// restart kills the pod's container and waits until it runs again.
func (c *cluster) restart(t *testing.T, name string) {
	t.Helper()
	before := c.awaitPhase(t, name, v1.PodRunning)
	for _, process := range processes(t, before) {
		if err := syscall.Kill(process, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	c.await(t, "the container of "+name+" to start again", func() error {
		status := c.awaitPhase(t, name, v1.PodRunning).Status.ContainerStatuses[0]
		if status.RestartCount == before.Status.ContainerStatuses[0].RestartCount || status.State.Running == nil {
			return fmt.Errorf("it is %v", status.State)
		}
		return nil
	})
}

// fill has pods take what the holders leave, and fails if a GPU has more or fewer pods than its shares, or
// if one more pod gets a share.
func (c *cluster) fill(t *testing.T, holders []string, gpus, shares int) {
	t.Helper()
	full := append(slices.Clone(holders), c.hold(t, "filler", gpus*shares-len(holders))...)
	for _, name := range full {
		c.awaitPhase(t, name, v1.PodRunning) // A pod that waited before is not necessarily the next.
	}
	count := map[string]int{}
	for _, each := range c.podStates(t, full) {
		count[each.GPU]++
	}
	if len(count) != gpus {
		t.Errorf("pods have %v, want %d GPUs", count, gpus)
	}
	for gpu, pods := range count {
		if pods != shares {
			t.Errorf("%s is given to %d pods, want %d", gpu, pods, shares)
		}
	}
	c.awaitInsufficient(t, "excess", shared)
}
