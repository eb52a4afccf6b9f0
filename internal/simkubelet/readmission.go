package simkubelet

import (
	"context"
	"fmt"
)

// RestorePods adds the pods of the time before to a process that was started
// with Options.HoldPods, in the order of their age, as the API server's first
// answer does. A running pod is admitted unseen. One whose containers a reboot
// ended needs its very devices, Healthy, or fails.
func (k *Kubelet) RestorePods(ctx context.Context) error {
	k.mu.Lock()
	p := k.process
	k.mu.Unlock()
	if p == nil {
		return fmt.Errorf("restore pods: %w", ErrDown)
	}
	return k.restore(ctx, p)
}

func (k *Kubelet) restore(ctx context.Context, expected *process) error {
	p, leave, err := k.enter(ctx)
	if err != nil {
		return fmt.Errorf("restore pods: %w", err)
	}
	defer leave()
	if p != expected {
		return fmt.Errorf("restore pods: %w", ErrDown)
	}
	k.mu.Lock()
	var held []*pod
	for _, pod := range k.podsByAge() {
		if !p.known.has(pod.uid) && pod.phase != Failed {
			held = append(held, pod)
		}
	}
	k.mu.Unlock()
	for _, pod := range held {
		admission := admission{kubelet: k, process: p, pod: pod, reusable: map[string]set{}}
		err := admission.again(ctx)
		k.lock()
		p.known[pod.uid] = struct{}{}
		if err != nil {
			_ = k.fail(pod, err) // the pod's status tells
		} else {
			pod.containersRunning = true
		}
		k.unlock()
	}
	k.lock()
	p.sourcesReady = true
	k.unlock()
	return nil
}

// ResizePod admits a running pod once more, as an in-place resize does (on by
// default since Kubernetes 1.35). It needs the pod's devices Healthy. An error
// leaves the resize pending and the pod as it was.
func (k *Kubelet) ResizePod(ctx context.Context, namespace, name string) error {
	p, leave, err := k.enter(ctx)
	if err != nil {
		return fmt.Errorf("resize pod %s/%s: %w", namespace, name, err)
	}
	defer leave()
	k.mu.Lock()
	resized := k.pods[podKey{namespace, name}]
	k.mu.Unlock()
	if resized == nil || resized.phase != Running {
		return fmt.Errorf("resize pod %s/%s: %w", namespace, name, ErrNoPod)
	}
	admission := admission{kubelet: k, process: p, pod: resized, reusable: map[string]set{}}
	if err := admission.again(ctx); err != nil {
		return fmt.Errorf("resize pod %s/%s: %w", namespace, name, err)
	}
	return nil
}

// again admits a pod that holds devices already.
func (a *admission) again(ctx context.Context) error {
	a.checkHeldListed()
	return a.run(ctx)
}

// checkHeldListed is the place where the real kubelet, with a topology policy,
// dereferences a held device that the resource's list no longer has. A resource
// without a list in this process has no hints and does no harm.
func (a *admission) checkHeldListed() {
	k, p := a.kubelet, a.process
	k.lock()
	defer k.unlock()
	for _, holder := range p.ledger.holders() {
		devices := p.devices[holder.resource]
		if holder.uid != a.pod.uid || devices == nil || !devices.listed {
			continue
		}
		gone := set{}
		for id := range p.ledger[holder].ids() {
			if devices.all[id] == nil {
				gone[id] = struct{}{}
			}
		}
		switch {
		case len(gone) == 0:
		case k.options.NUMAAligned && devices.aligned():
			k.violate("kubelet would panic: %s: pod %s/%s is admitted again and holds devices that are not in the list: %s",
				holder.resource, a.pod.Namespace, a.pod.Name, join(gone))
		default:
			k.violate("%s: pod %s/%s is admitted again and holds devices that are not in the list (a panic with a topology policy): %s",
				holder.resource, a.pod.Namespace, a.pod.Name, join(gone))
		}
	}
}
