package kubelet

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// rejection is why the kubelet did not admit a pod; such a pod is Failed for
// good.
type rejection struct{ reason, message string }

func (r rejection) Error() string { return r.reason + ": " + r.message }

// admit brings a new pod to the node. The error is a rejection or errCrashed.
func (k *kubelet) admit(resource string, count int) (*pod, error) {
	k.loop.Lock()
	defer k.loop.Unlock()
	p := k.pods.add(resource, count)
	if err := k.consult(p, lifecycle.AddOperation); err != nil {
		k.pods.remove(p)
		return nil, err
	}
	running, err := k.settle(p)
	if err != nil {
		k.pods.remove(p)
	}
	return running, err
}

// settle takes down what an admitted pod got.
//
// A restarted kubelet may not know it: two writers of the checkpoint can leave
// the older text. That is made good when the container starts.
func (k *kubelet) settle(p *pod) (*pod, error) {
	granted := k.granted(p)
	if len(granted) == 0 {
		if _, err := k.startContainer(p); err != nil {
			return nil, err
		}
		granted = k.granted(p)
	}
	if len(granted) != p.count {
		return nil, fmt.Errorf("%s asked for %d and got %v", p.Name, p.count, granted)
	}
	return k.pods.run(p, granted), nil
}

// remind gives every running pod that the kubelet has forgotten devices again,
// see settle. A pod for which there are none is gone.
func (k *kubelet) remind() {
	k.loop.Lock()
	defer k.loop.Unlock()
	for _, p := range k.pods.running() {
		if k.crashed.Load() || len(k.granted(p)) > 0 {
			continue
		}
		if _, err := k.settle(p); err != nil {
			k.pods.remove(p)
		}
	}
}

// granted is what the device manager says the pod has.
func (k *kubelet) granted(p *pod) []string {
	k.life.RLock()
	defer k.life.RUnlock()
	return slices.Sorted(maps.Keys(k.manager.GetDevices(string(p.UID), p.container().Name)[p.resource]))
}

// resize asks whether a running pod may be resized in place. A rejection leaves
// it as it is.
func (k *kubelet) resize(p *pod) error {
	k.loop.Lock()
	defer k.loop.Unlock()
	return k.consult(p, lifecycle.ResizeOperation)
}

func (k *kubelet) consult(p *pod, operation lifecycle.Operation) error {
	return k.survive(func() error {
		result := k.topology.Admit(&lifecycle.PodAdmitAttributes{Pod: p.Pod, Operation: operation})
		if !result.Admit {
			return rejection{result.Reason, result.Message}
		}
		return nil
	})
}

// delete ends a pod.
func (k *kubelet) delete(p *pod) {
	k.loop.Lock()
	defer k.loop.Unlock()
	k.pods.remove(p)
}

// readmit admits the running pods again, as a restarted kubelet does when it
// hears of them, and then knows that it has heard of all.
func (k *kubelet) readmit() error {
	k.loop.Lock()
	defer k.loop.Unlock()
	for _, p := range k.pods.running() {
		if err := k.consult(p, lifecycle.AddOperation); err != nil {
			return fmt.Errorf("admit the running %s again: %w", p.Name, err)
		}
	}
	k.ready.Store(true)
	return nil
}
