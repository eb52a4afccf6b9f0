package kubelet

import (
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// pod is a pod with one container, which asks for devices of one resource. It is
// immutable.
type pod struct {
	*v1.Pod
	resource string
	count    int
	// devices are what the container got, sorted; nil before it is admitted.
	devices []string
}

// container is the only one.
func (p *pod) container() *v1.Container { return &p.Spec.Containers[0] }

// pods are the node's active pods: those that wait for their admission and
// those that run.
type pods struct {
	mu     sync.Mutex
	made   int
	active []*pod
	// cleaning is held while the device manager forgets the pods that were not
	// active when it began.
	cleaning sync.Mutex
}

// add makes a pod and returns it, active and without devices.
func (p *pods) add(resourceName string, count int) *pod {
	p.cleaning.Lock()
	defer p.cleaning.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made++
	name := fmt.Sprintf("pod-%05d", p.made)
	wanted := v1.ResourceList{v1.ResourceName(resourceName): *resource.NewQuantity(int64(count), resource.DecimalSI)}
	made := &pod{
		Pod: &v1.Pod{
			ObjectMeta: meta.ObjectMeta{Namespace: "test", Name: name, UID: types.UID("uid-" + name)},
			Spec: v1.PodSpec{Containers: []v1.Container{{
				Name: "main", Resources: v1.ResourceRequirements{Limits: wanted, Requests: wanted},
			}}},
		},
		resource: resourceName, count: count,
	}
	p.active = append(p.active, made)
	return made
}

// run says what an admitted pod got, and returns the pod that runs.
func (p *pods) run(admitted *pod, devices []string) *pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	running := *admitted
	running.devices = devices
	for i, other := range p.active {
		if other == admitted {
			p.active[i] = &running
		}
	}
	return &running
}

func (p *pods) remove(gone *pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active = slices.DeleteFunc(p.active, func(other *pod) bool { return other == gone })
}

// running returns the pods that have their devices, oldest first.
func (p *pods) running() []*pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.active), func(pod *pod) bool { return pod.devices == nil })
}

func (p *pods) isRunning(pod *pod) bool { return slices.Contains(p.running(), pod) }

// holds says that a running pod holds the device.
func (p *pods) holds(resource, id string) bool {
	return slices.ContainsFunc(p.running(), func(pod *pod) bool {
		return pod.resource == resource && slices.Contains(pod.devices, id)
	})
}

// GetActivePods is for the device manager and PodResources.
func (p *pods) GetActivePods() []*v1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	active := make([]*v1.Pod, len(p.active))
	for i, pod := range p.active {
		active[i] = pod.Pod
	}
	return active
}

// GetPods is for PodResources.
func (p *pods) GetPods() []*v1.Pod { return p.GetActivePods() }

// GetPodByName is for PodResources.
func (p *pods) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, pod := range p.GetActivePods() {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, true
		}
	}
	return nil, false
}
