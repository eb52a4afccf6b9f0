package e2e

import (
	"fmt"
	"maps"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

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

// vitals are of a pod what changes when anything happens to it.
type vitals struct {
	UID, Container, GPU string
	Phase               v1.PodPhase
	Restarts            int32
}

func (c *cluster) vitals(t *testing.T, names []string) map[string]vitals {
	t.Helper()
	all := map[string]vitals{}
	for _, name := range names {
		pod, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		status := pod.Status.ContainerStatuses[0]
		all[name] = vitals{
			string(pod.UID), status.ContainerID, c.printedVariable(t, name, "NVIDIA_VISIBLE_DEVICES"),
			pod.Status.Phase, status.RestartCount,
		}
	}
	return all
}

// undisturbed says whether the pods live on as before.
func (c *cluster) undisturbed(t *testing.T, before map[string]vitals) {
	t.Helper()
	if difference := cmp.Diff(before, c.vitals(t, slices.Sorted(maps.Keys(before)))); difference != "" {
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
	c.await(t, time.Minute, "the container of "+name+" to start again", func() error {
		status := c.awaitPhase(t, name, v1.PodRunning).Status.ContainerStatuses[0]
		if status.RestartCount == before.Status.ContainerStatuses[0].RestartCount || status.State.Running == nil {
			return fmt.Errorf("it is %v", status.State)
		}
		return nil
	})
}

// fill has pods take what is left beside the holders, and fails if a GPU has more
// or fewer than its shares, or if one more pod gets any.
func (c *cluster) fill(t *testing.T, holders []string, gpus, shares int) {
	t.Helper()
	full := append(slices.Clone(holders), c.hold(t, "filler", gpus*shares-len(holders))...)
	count := map[string]int{}
	for _, each := range c.vitals(t, full) {
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
	c.create(t, pod("excess", shared, 1))
	c.awaitUnscheduled(t, "excess", "Insufficient "+shared)
}
