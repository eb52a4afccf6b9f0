package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/await"
)

// queueLabel is on the pods of a podQueue, with the queue's name.
const queueLabel = "virgate.test/queue"

// podQueue creates pods and follows what the scheduler and the kubelet do with each. It counts those that
// the kubelet refuses.
type podQueue struct {
	c    *cluster
	name string
	// runs is true if its pods run a container. Otherwise they have a volume that does not exist: the
	// kubelet admits such a pod, and Allocate gives it its device, before the kubelet waits for volumes.
	// Such a pod costs next to nothing, so a small machine has time for four a second.
	runs bool

	mu   sync.Mutex
	pods map[string]*queued
}

// queued is a pod of a podQueue. A time is zero until the event was seen.
type queued struct {
	resource                 string
	bound, admitted, refused time.Time
	reason                   string
	deleted                  bool
}

// newQueue returns an empty queue. Its pods are deleted at the end of the test.
func (c *cluster) newQueue(t *testing.T, name string, runs bool) *podQueue {
	t.Helper()
	q := &podQueue{c: c, name: name, runs: runs, pods: map[string]*queued{}}
	t.Cleanup(func() { q.clear(t) })
	return q
}

// add creates pods for one device of the resource each.
func (q *podQueue) add(ctx context.Context, resource string, count int) error {
	for range count {
		q.mu.Lock()
		one := pod(fmt.Sprintf("%s-%d", q.name, len(q.pods)), resource, 1)
		q.pods[one.Name] = &queued{resource: resource}
		q.mu.Unlock()
		one.Labels = map[string]string{queueLabel: q.name}
		if !q.runs {
			const absent = "absent"
			one.Spec.Volumes = []v1.Volume{{
				Name:         absent,
				VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: absent}}},
			}}
			one.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: absent, MountPath: "/" + absent}}
		}
		if _, err := q.c.client.CoreV1().Pods(workspace).Create(ctx, one, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// look asks the API server for its pods.
func (q *podQueue) look(ctx context.Context) error {
	list, err := q.c.client.CoreV1().Pods(workspace).List(ctx, metav1.ListOptions{LabelSelector: queueLabel + "=" + q.name})
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	for _, each := range list.Items {
		one := q.pods[each.Name]
		if one.bound.IsZero() && each.Spec.NodeName != "" {
			one.bound = now
		}
		switch {
		case !one.admitted.IsZero() || !one.refused.IsZero() || each.Status.StartTime == nil:
		case each.Status.Phase == v1.PodFailed:
			one.refused, one.reason = now, each.Status.Reason+": "+each.Status.Message
		case !q.runs || each.Status.Phase == v1.PodRunning:
			one.admitted = now
		}
	}
	return nil
}

// those returns the names of its pods that meet the condition, sorted.
func (q *podQueue) those(are func(*queued) bool) (names []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for name, one := range q.pods {
		if are(one) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func holds(one *queued) bool     { return !one.admitted.IsZero() && !one.deleted }
func waits(one *queued) bool     { return one.admitted.IsZero() && one.refused.IsZero() && !one.deleted }
func isBound(one *queued) bool   { return !one.bound.IsZero() }
func wasDenied(one *queued) bool { return !one.refused.IsZero() }

// end deletes the pods.
func (q *podQueue) end(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := q.c.client.CoreV1().Pods(workspace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		q.mu.Lock()
		q.pods[name].deleted = true
		q.mu.Unlock()
	}
	return nil
}

// clear deletes all of its pods and waits until they are gone.
func (q *podQueue) clear(t *testing.T) {
	t.Helper()
	q.mu.Lock()
	names := slices.Collect(maps.Keys(q.pods))
	for _, one := range q.pods {
		one.deleted = true
	}
	q.mu.Unlock()
	q.c.remove(t, names...)
}

// flow creates this many pods a second, one of each resource in turn, until the context ends. It deletes
// each admitted pod when it has lasted. most limits how many wait.
func (q *podQueue) flow(ctx context.Context, perSecond int, lasts time.Duration, most int, resources ...string) error {
	calls := context.WithoutCancel(ctx) // No call is cut off in the middle.
	create, look := time.NewTicker(time.Second/time.Duration(perSecond)), time.NewTicker(50*time.Millisecond)
	defer create.Stop()
	defer look.Stop()
	for next := 0; ; {
		var err error
		select {
		case <-ctx.Done():
			return q.settle(calls)
		case <-create.C:
			if len(q.those(waits)) < most {
				err = q.add(calls, resources[next%len(resources)], 1)
				next++
			}
		case <-look.C:
			if err = q.look(calls); err == nil {
				err = q.end(calls, q.those(func(one *queued) bool {
					return !one.deleted && (wasDenied(one) || holds(one) && time.Now().After(one.admitted.Add(lasts)))
				})...)
			}
		}
		if err != nil {
			return err
		}
	}
}

// settle waits until the kubelet has admitted or refused each bound pod.
func (q *podQueue) settle(ctx context.Context) error {
	return await.Condition(ctx.Done(), func() error {
		err := q.look(ctx)
		if open := q.those(func(one *queued) bool { return waits(one) && isBound(one) }); err == nil && len(open) > 0 {
			err = fmt.Errorf("the kubelet says nothing of %q", open)
		}
		return err
	})
}

// judge notes how many of its pods were refused, and fails the test if they are more than allowed.
func (q *podQueue) judge(t *testing.T, what string, allowed int) {
	t.Helper()
	denied := q.those(wasDenied)
	q.mu.Lock()
	defer q.mu.Unlock()
	came := 0
	for _, one := range q.pods {
		if isBound(one) {
			came++
		}
	}
	for _, name := range denied {
		one := q.pods[name]
		t.Logf("pod %s, seen bound %s, was refused %s: %s", name, one.bound.Format(clock), one.refused.Format(clock), one.reason)
	}
	q.c.report.note("refused: "+what, fmt.Sprintf("%d of %d", len(denied), came))
	if len(denied) > allowed {
		t.Errorf("%s: %d of %d pods were refused, want at most %d", what, len(denied), came, allowed)
	}
}
