package simkubelet

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
)

// RestorePods adds the pods of earlier processes, oldest first, to a process that was started with
// Options.DelayPods, as the API server's first response does. A running pod is admitted without a
// check. A pod that a reboot has stopped fails unless exactly the devices that it had are Healthy.
func (k *Kubelet) RestorePods(ctx context.Context) error {
	p, leave, err := k.beginAdmission(ctx)
	if err != nil {
		return fmt.Errorf("restore pods: %w", err)
	}
	defer leave()
	k.mu.Lock()
	var held []*pod
	for _, pod := range k.podsInOrder() {
		if !p.knownPods.Has(pod.uid) && pod.phase != Failed {
			held = append(held, pod)
		}
	}
	k.mu.Unlock()
	for _, pod := range held {
		err := newAdmission(k, p, pod).readmit(ctx)
		k.lock()
		p.knownPods.Insert(pod.uid)
		if err != nil {
			_ = k.reject(pod, err) // The pod's status has the error.
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

// ResizePod admits a running pod again, as an in-place resize does (on by default since Kubernetes
// 1.35). The pod's devices must be Healthy for that. After an error the resize stays pending and
// the pod does not change.
func (k *Kubelet) ResizePod(ctx context.Context, namespace, name string) error {
	p, leave, err := k.beginAdmission(ctx)
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
	if err := newAdmission(k, p, resized).readmit(ctx); err != nil {
		return fmt.Errorf("resize pod %s/%s: %w", namespace, name, err)
	}
	return nil
}

// readmit admits a pod that already holds devices. A real kubelet with a topology policy
// dereferences them, and panics if the resource's list no longer has one. If this process has
// received no list of a resource, there are no hints for it and nothing happens.
func (a *admission) readmit(ctx context.Context) error {
	k, p := a.kubelet, a.process
	k.lock()
	for _, key := range p.podDevices.keys() {
		devices := p.devices[key.resource]
		if key.podUID != a.pod.uid || devices == nil || devices.all == nil {
			continue
		}
		if gone := p.podDevices[key].ids().Difference(sets.KeySet(devices.all)); len(gone) > 0 {
			k.violation(
				"kubelet would panic: %s: pod %s/%s is admitted again and holds devices that are not in the list: %s",
				key.resource, a.pod.Namespace, a.pod.Name, joinSome(gone))
		}
	}
	k.unlock()
	return a.run(ctx)
}

// RestartContainer restarts a container of a running pod. The container gets the plugin's response
// from the pod's admission. The plugin and the devices' health do not matter, but the start fails
// if the resource's endpoint has been removed since.
func (k *Kubelet) RestartContainer(_ context.Context, namespace, name, container string) (ContainerStatus, error) {
	k.lock()
	defer k.unlock()
	restarted := k.pods[podKey{namespace, name}]
	if err := k.checkStart(restarted, container); err != nil {
		return ContainerStatus{}, fmt.Errorf("restart container %s of pod %s/%s: %w", container, namespace, name, err)
	}
	return k.containerStatus(restarted, container), nil
}

// checkStart returns why the container cannot be started, or nil if it can. The caller holds the
// lock.
func (k *Kubelet) checkStart(of *pod, name string) error {
	if k.process == nil {
		return ErrDown
	}
	if of == nil {
		return ErrNoPod
	}
	index := slices.IndexFunc(of.Containers, func(c Container) bool { return c.Name == name })
	switch {
	case index < 0:
		return ErrNoPod
	case of.phase != Running:
		return fmt.Errorf("pod is %s", of.phase)
	}
	for resource, count := range of.Containers[index].Requests {
		if count > 0 && k.process.endpoints[resource] == nil {
			return fmt.Errorf("endpoint not found in cache for a registered resource: %s", resource)
		}
	}
	return nil
}
