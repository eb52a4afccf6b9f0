package simkubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// ErrNoPod is returned for a pod or container that does not exist.
var ErrNoPod = errors.New("no such pod")

// AddPod admits a pod and starts its containers. Pods are admitted one at a
// time; one whose Allocate hangs holds up all others, and no call to the plugin
// carries a deadline. When ctx ends the call to the plugin is cancelled.
//
// A pod that is turned away stays, Failed, and the error is an *AdmissionError.
// Where only the start of a container went wrong the pod is returned with the
// error. A pod whose admission the kubelet's stop cut short is forgotten.
//
// The scheduler is not played: what would never be bound to the node is turned
// away here. A real kubelet runs a pod whose resource it has never heard of
// without any device.
func (k *Kubelet) AddPod(ctx context.Context, spec Pod) (PodStatus, error) {
	name := spec.Namespace + "/" + spec.Name
	if err := spec.validate(); err != nil {
		return PodStatus{}, fmt.Errorf("add pod %s: %w", name, err)
	}
	p, leave, err := k.enter(ctx)
	if err != nil {
		return PodStatus{}, fmt.Errorf("add pod %s: %w", name, err)
	}
	defer leave()

	added, err := k.record(p, spec)
	if err != nil {
		return PodStatus{}, fmt.Errorf("add pod %s: %w", name, err)
	}
	admission := admission{kubelet: k, process: p, pod: added, reusable: map[string]set{}}
	err = admission.run(ctx)

	k.lock()
	down := k.process != p
	switch {
	case err == nil:
		added.phase, added.containersRunning = Running, true
	case down:
		delete(k.pods, added.key())
		k.tell(Event{Kind: Freed, Pod: added.uid})
		err = fmt.Errorf("add pod %s: %w: %w", name, ErrDown, err)
	default:
		err = k.fail(added, err)
	}
	status := k.podStatus(added)
	k.unlock()
	if err != nil {
		return status, err
	}
	for _, container := range added.ordered() {
		if err := admission.start(ctx, container); err != nil {
			return status, fmt.Errorf("start container %s of pod %s: %w", container.Name, name, err)
		}
	}
	return status, nil
}

// enter waits for the allocation mutex and keeps the process from ending before
// leave is called. Stopping breaks the calls to plugins, so that is soon.
func (k *Kubelet) enter(ctx context.Context) (p *process, leave func(), err error) {
	if err := k.admission.acquire(ctx); err != nil {
		return nil, nil, err
	}
	k.mu.Lock()
	p = k.process
	if p != nil {
		p.goroutines.Add(1)
	}
	k.mu.Unlock()
	if p == nil {
		k.admission.release()
		return nil, nil, ErrDown
	}
	return p, func() {
		p.goroutines.Done()
		k.admission.release()
	}, nil
}

func (k *Kubelet) record(p *process, spec Pod) (*pod, error) {
	k.lock()
	defer k.unlock()
	key := podKey{spec.Namespace, spec.Name}
	if k.pods[key] != nil {
		return nil, errors.New("the name is in use")
	}
	k.podsMade++
	added := &pod{
		Pod:   spec,
		uid:   fmt.Sprintf("00000000-0000-4000-8000-%012d", k.podsMade),
		age:   k.podsMade,
		phase: Pending,
	}
	k.pods[key] = added
	p.known[added.uid] = struct{}{}
	return added, nil
}

// fail turns a pod away. The caller holds the lock.
func (k *Kubelet) fail(failed *pod, cause error) error {
	rejection := rejected(cause)
	failed.phase, failed.message, failed.containersRunning = Failed, rejection.Message, false
	k.tell(Event{Kind: Freed, Pod: failed.uid})
	return rejection
}

// DeletePod ends a pod. The plugin is told nothing, and the checkpoint names
// the pod until the kubelet has purged it and writes again.
func (k *Kubelet) DeletePod(namespace, name string) error {
	k.lock()
	defer k.unlock()
	key := podKey{namespace, name}
	deleted := k.pods[key]
	if deleted == nil {
		return fmt.Errorf("delete pod %s/%s: %w", namespace, name, ErrNoPod)
	}
	delete(k.pods, key)
	k.tell(Event{Kind: Freed, Pod: deleted.uid})
	if k.process != nil {
		k.checkUnits(k.process)
	}
	return nil
}

// livePods are the UIDs of the pods that have not failed. The caller holds the
// lock.
func (k *Kubelet) livePods() set {
	live := set{}
	for _, pod := range k.pods {
		if pod.phase != Failed {
			live[pod.uid] = struct{}{}
		}
	}
	return live
}

func (k *Kubelet) haveLivePods() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.livePods()) > 0
}

func (k *Kubelet) podsByAge() []*pod {
	return slices.SortedFunc(maps.Values(k.pods), func(a, b *pod) int { return cmp.Compare(a.age, b.age) })
}

// podStatus shows no devices while the kubelet is down: it is its memory that
// is shown. The caller holds the lock.
func (k *Kubelet) podStatus(of *pod) PodStatus {
	status := PodStatus{Namespace: of.Namespace, Name: of.Name, UID: of.uid, Phase: of.phase, Message: of.message}
	for _, container := range of.Containers {
		status.Containers = append(status.Containers, k.containerStatus(of, container.Name))
	}
	return status
}

func (k *Kubelet) containerStatus(of *pod, container string) ContainerStatus {
	status := ContainerStatus{Name: container}
	if k.process == nil || of.phase == Failed {
		return status
	}
	for _, resource := range k.process.ledger.resourcesOf(of.uid, container) {
		holding := k.process.ledger[holder{of.uid, container, resource}]
		status.Grants = append(status.Grants, Grant{resource, holding.ids().sorted(), holding.response})
	}
	return status
}
