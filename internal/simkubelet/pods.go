package simkubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Pod is a pod to run. Its name can be used again after DeletePod.
type Pod struct {
	Namespace, Name string
	Containers      []Container
}

// Container is a container of a Pod. Its name must be valid and unique in the pod, as if the API
// server had checked it.
type Container struct {
	Name string
	// Requests maps resources to numbers of devices. An explicit 0 needs no device, but is rejected
	// while the resource has no healthy one.
	Requests map[string]int
	// Init is true for a container that ends before the others start; later containers of the pod
	// get its devices first.
	Init bool
	// Claims are what DRA drivers have allocated to the container. This kubelet calls no driver: it
	// only lists them.
	Claims []Claim
}

// Claim is a ResourceClaim in the pod's namespace.
type Claim struct {
	Name    string
	Devices []ClaimDevice
}

// ClaimDevice is a device of a claim, with its CDI entries.
type ClaimDevice struct {
	Driver, Pool, Name string
	CDI                []string
}

// Phase is a pod's phase.
type Phase string

// The phases of a pod. A failed pod never runs again.
const (
	Pending Phase = "Pending"
	Running Phase = "Running"
	Failed  Phase = "Failed"
)

// PodStatus is a pod as the kubelet sees it.
type PodStatus struct {
	Namespace, Name string
	// UID distinguishes pods that had the same name.
	UID   string
	Phase Phase
	// Message is the status message of a failed pod; empty for others.
	Message string
	// Containers are in the pod's order. They hold nothing unless the pod is running.
	Containers []ContainerStatus
}

// ContainerStatus is a container with the devices that were allocated to it.
type ContainerStatus struct {
	Name string
	// Grants are sorted by resource name.
	Grants []Grant
}

// Grant is what a container got for one resource.
type Grant struct {
	Resource string
	// Devices are the device IDs, sorted.
	Devices []string
	// Response is the plugin's response to Allocate when the pod was admitted. It must not be
	// changed.
	Response *api.ContainerAllocateResponse
}

// Devices returns the container's devices of a resource, sorted; nil for none.
func (c ContainerStatus) Devices(resource string) []string {
	for _, grant := range c.Grants {
		if grant.Resource == resource {
			return grant.Devices
		}
	}
	return nil
}

// Env returns the environment that plugins gave the container. If two resources set the same
// variable, the first resource by name wins. In a real kubelet the choice is random at each start
// of the container.
func (c ContainerStatus) Env() map[string]string {
	env := map[string]string{}
	for _, grant := range slices.Backward(c.Grants) {
		maps.Copy(env, grant.Response.GetEnvs())
	}
	return env
}

// AdmissionError is the error of a pod that the kubelet has rejected for good.
type AdmissionError struct {
	// Message is the pod's status.message, in the kubelet's words.
	Message string
	// Cause is the reason; a plugin's gRPC error keeps its code.
	Cause error
}

// Error returns the pod's status.reason with the message.
func (e *AdmissionError) Error() string { return "UnexpectedAdmissionError: " + e.Message }

func (e *AdmissionError) Unwrap() error { return e.Cause }

type podKey struct{ namespace, name string }

// pod is a pod that AddPod has added and DeletePod has not deleted.
type pod struct {
	Pod
	uid string
	// added is the pod's number in the order of AddPod.
	added   int
	phase   Phase
	message string
	// containersRunning is false before the pod's start and after a reboot.
	containersRunning bool
}

// ordered returns the containers in the order of their admission: init containers first.
func (p *pod) ordered() []Container {
	isInit := func(c Container) bool { return c.Init }
	init := slices.DeleteFunc(slices.Clone(p.Containers), func(c Container) bool { return !isInit(c) })
	return append(init, slices.DeleteFunc(slices.Clone(p.Containers), isInit)...)
}

// ErrNoPod is the error for a pod or container that does not exist.
var ErrNoPod = errors.New("no such pod")

// AddPod admits a pod and starts its containers. Pods are admitted one at a time: if the plugin
// hangs in Allocate, all others wait, because calls to plugins have no deadline. The end of ctx
// cancels such a call.
//
// A rejected pod stays, as Failed, and the error is an *AdmissionError. A pod whose admission was
// interrupted by the kubelet's stop is forgotten.
//
// There is no scheduler, so a pod that would never be bound to the node is rejected here. A real
// kubelet runs a pod without devices if it has never heard of the resource.
func (k *Kubelet) AddPod(ctx context.Context, spec Pod) (PodStatus, error) {
	name := spec.Namespace + "/" + spec.Name
	p, leave, err := k.beginAdmission(ctx)
	if err != nil {
		return PodStatus{}, fmt.Errorf("add pod %s: %w", name, err)
	}
	defer leave()

	key := podKey{spec.Namespace, spec.Name}
	k.lock()
	if k.pods[key] != nil {
		k.unlock()
		return PodStatus{}, fmt.Errorf("add pod %s: the name is in use", name)
	}
	k.podsAdded++
	added := &pod{
		Pod:   spec,
		uid:   fmt.Sprintf("00000000-0000-4000-8000-%012d", k.podsAdded),
		added: k.podsAdded,
		phase: Pending,
	}
	k.pods[key] = added
	p.knownPods.Insert(added.uid)
	k.unlock()
	err = newAdmission(k, p, added).run(ctx)

	k.lock()
	defer k.unlock()
	switch down := k.process != p; {
	case err == nil:
		added.phase, added.containersRunning = Running, true
	case down:
		delete(k.pods, key)
		k.notify(Event{Kind: PodEnded, Pod: added.uid})
		err = fmt.Errorf("add pod %s: %w: %w", name, ErrDown, err)
	default:
		err = k.reject(added, err)
	}
	return k.podStatus(added), err
}

// beginAdmission locks the allocation mutex, and keeps the process from ending until leave is
// called. That does not take long, because a stop ends calls to plugins.
func (k *Kubelet) beginAdmission(ctx context.Context) (p *process, leave func(), err error) {
	if err := k.admission.Acquire(ctx, 1); err != nil {
		return nil, nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p = k.process
	if p == nil {
		k.admission.Release(1)
		return nil, nil, ErrDown
	}
	p.goroutines.Add(1)
	return p, func() {
		p.goroutines.Done()
		k.admission.Release(1)
	}, nil
}

// reject makes the pod Failed, in the kubelet's words (pkg/kubelet/cm/admission/
// errors.go; rejectPod in pkg/kubelet/kubelet.go). The caller holds the lock.
func (k *Kubelet) reject(failed *pod, cause error) error {
	rejection := &AdmissionError{
		fmt.Sprintf("Pod was rejected: Allocate failed due to %v, which is unexpected", cause), cause,
	}
	failed.phase = Failed
	failed.message = rejection.Message
	failed.containersRunning = false
	k.notify(Event{Kind: PodEnded, Pod: failed.uid})
	return rejection
}

// DeletePod ends a pod. The plugin is not informed, and the checkpoint lists the pod until the
// kubelet frees its devices and writes the file again.
func (k *Kubelet) DeletePod(namespace, name string) error {
	k.lock()
	defer k.unlock()
	key := podKey{namespace, name}
	deleted := k.pods[key]
	if deleted == nil {
		return fmt.Errorf("delete pod %s/%s: %w", namespace, name, ErrNoPod)
	}
	delete(k.pods, key)
	k.notify(Event{Kind: PodEnded, Pod: deleted.uid})
	if k.process != nil {
		k.checkUnits(k.process)
	}
	return nil
}

// livePods returns the UIDs of the pods that have not failed. The caller holds the lock.
func (k *Kubelet) livePods() idSet {
	live := idSet{}
	for _, pod := range k.pods {
		if pod.phase != Failed {
			live.Insert(pod.uid)
		}
	}
	return live
}

func (k *Kubelet) podsInOrder() []*pod {
	return slices.SortedFunc(maps.Values(k.pods), func(a, b *pod) int { return cmp.Compare(a.added, b.added) })
}

// podStatus returns no devices while the kubelet is down, because it shows the kubelet's memory.
// The caller holds the lock.
func (k *Kubelet) podStatus(of *pod) PodStatus {
	status := PodStatus{
		Namespace: of.Namespace,
		Name:      of.Name,
		UID:       of.uid,
		Phase:     of.phase,
		Message:   of.message,
	}
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
	for _, resource := range k.process.podDevices.resourcesOf(of.uid, container) {
		info := k.process.podDevices[allocationKey{of.uid, container, resource}]
		status.Grants = append(status.Grants, Grant{resource, sets.List(info.ids()), info.response})
	}
	return status
}
