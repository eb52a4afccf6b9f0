package e2e

import (
	"fmt"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
)

// life is a pod's; times are zero for what has not been.
type life struct {
	resource          string
	bound, ran, ended time.Time
	refused           time.Time
	refusal           string
	beingDeleted      bool
}

func (d *diary) takePod(pod *v1.Pod, deleted bool) {
	l := d.lives[pod.Name]
	if l == nil {
		l = &life{}
		d.lives[pod.Name] = l
	}
	for name := range pod.Spec.Containers[0].Resources.Limits {
		l.resource = string(name)
	}
	now := time.Now()
	l.beingDeleted = l.beingDeleted || pod.DeletionTimestamp != nil
	if pod.Spec.NodeName != "" {
		keepFirst(&l.bound, now)
	}
	switch pod.Status.Phase {
	case v1.PodRunning:
		keepFirst(&l.ran, now)
	case v1.PodFailed, v1.PodSucceeded:
		keepFirst(&l.ended, now)
		if l.ran.IsZero() && !l.beingDeleted && overtaken(pod) {
			keepFirst(&l.refused, now)
			l.refusal = pod.Status.Reason + ": " + pod.Status.Message
		} else if !l.beingDeleted && l.refused.IsZero() {
			d.wrong = append(d.wrong, fmt.Sprintf("pod %s is %s: %s: %s", pod.Name, pod.Status.Phase, pod.Status.Reason, pod.Status.Message))
		}
	}
	for _, container := range pod.Status.ContainerStatuses {
		if container.RestartCount > 0 {
			d.wrong = append(d.wrong, fmt.Sprintf("pod %s was restarted", pod.Name))
		}
		if waiting := container.State.Waiting; waiting != nil && waiting.Reason != "ContainerCreating" && !l.beingDeleted {
			d.wrong = append(d.wrong, fmt.Sprintf("pod %s: %s: %s", pod.Name, waiting.Reason, waiting.Message))
		}
	}
	if deleted {
		keepFirst(&l.ended, now)
	}
}

// overtaken says that the kubelet had no device for the pod any more.
func overtaken(pod *v1.Pod) bool {
	if pod.Status.Reason != unexpectedAdmission {
		return strings.HasPrefix(pod.Status.Reason, "OutOfnvidia.com/")
	}
	return strings.Contains(pod.Status.Message, "requested number of devices unavailable") ||
		strings.Contains(pod.Status.Message, "no healthy devices present")
}

func keepFirst(moment *time.Time, now time.Time) {
	if moment.IsZero() {
		*moment = now
	}
}

// deleting is told before a pod is deleted, so that nothing comes between.
func (d *diary) deleting(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lives[name] == nil {
		d.lives[name] = &life{}
	}
	d.lives[name].beingDeleted = true
}

// runs says that the pod runs and is to go on.
func (d *diary) runs(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.lives[name]
	return l != nil && l.runs()
}

func (l *life) runs() bool { return !l.ran.IsZero() && l.ended.IsZero() && !l.beingDeleted }

// decided says that the pod has run or was refused.
func (d *diary) decided(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.lives[name]
	return l != nil && (!l.ran.IsZero() || !l.refused.IsZero())
}

// isRefused says that the kubelet has not taken the pod.
func (d *diary) isRefused(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.lives[name]
	return l != nil && !l.refused.IsZero()
}

// allRan says which pods have not run yet, nor been refused or deleted before.
func (d *diary) allRan() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, l := range d.lives {
		if l.ran.IsZero() && l.refused.IsZero() && !l.beingDeleted {
			return fmt.Errorf("pod %s does not: %+v", name, *l)
		}
	}
	return nil
}

// running is how many pods run.
func (d *diary) running() (count int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range d.lives {
		if l.runs() {
			count++
		}
	}
	return count
}
