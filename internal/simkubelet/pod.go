package simkubelet

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Pod is a pod to run. Namespace and Name name it; a name is free again after
// DeletePod.
type Pod struct {
	Namespace, Name string
	Containers      []Container
}

// Container is a container of a Pod. Its name is unique in the pod.
type Container struct {
	Name string
	// Requests are device counts by resource. An explicit 0 needs no device but
	// is refused while the resource has no healthy one.
	Requests map[string]int
	// Init says that the container runs before the others and ends; the devices
	// it had are given to later containers of the pod first.
	Init bool
	// Sidecar is an init container that keeps running and keeps its devices.
	// It implies Init.
	Sidecar bool
}

func (c Container) runsBefore() bool { return c.Init || c.Sidecar }

// Phase is where a pod stands.
type Phase string

// The phases of a pod. One that failed never runs: a new pod is needed.
const (
	Pending Phase = "Pending"
	Running Phase = "Running"
	Failed  Phase = "Failed"
)

// PodStatus is a pod as the kubelet sees it.
type PodStatus struct {
	Namespace, Name string
	// UID differs between two pods of one name.
	UID   string
	Phase Phase
	// Message says why the pod failed, as its status would; else empty.
	Message string
	// Containers are in the order of the pod. Those of a pod that is not
	// running hold nothing.
	Containers []ContainerStatus
}

// ContainerStatus is a container with what it was given.
type ContainerStatus struct {
	Name string
	// Grants are by resource name.
	Grants []Grant
}

// Grant is what a container got for one resource.
type Grant struct {
	Resource string
	// Devices are the IDs, sorted.
	Devices []string
	// Response is what the plugin answered to Allocate, once, when the pod was
	// admitted. It must not be changed.
	Response *api.ContainerAllocateResponse
}

// Devices are the IDs that the container got for a resource, sorted; nil for
// none.
func (c ContainerStatus) Devices(resource string) []string {
	for _, grant := range c.Grants {
		if grant.Resource == resource {
			return grant.Devices
		}
	}
	return nil
}

// Env is the environment that plugins gave the container. Where two resources
// set one variable the first by name wins; the real kubelet draws the winner
// anew at each start of the container.
func (c ContainerStatus) Env() map[string]string {
	env := map[string]string{}
	for _, grant := range slices.Backward(c.Grants) {
		maps.Copy(env, grant.Response.GetEnvs())
	}
	return env
}

// Container returns the named container, and false when there is none.
func (s PodStatus) Container(name string) (ContainerStatus, bool) {
	for _, container := range s.Containers {
		if container.Name == name {
			return container, true
		}
	}
	return ContainerStatus{}, false
}

// AdmissionError says that the kubelet turned a pod away, for good.
type AdmissionError struct {
	// Reason is the pod's status.reason: "UnexpectedAdmissionError".
	Reason string
	// Message is the pod's status.message, in the kubelet's words.
	Message string
	// Cause is what went wrong; a plugin's gRPC error keeps its code.
	Cause error
}

func (e *AdmissionError) Error() string { return e.Reason + ": " + e.Message }

func (e *AdmissionError) Unwrap() error { return e.Cause }

// rejected words an admission's failure as the kubelet does
// (pkg/kubelet/cm/admission/errors.go; rejectPod in pkg/kubelet/kubelet.go).
func rejected(cause error) *AdmissionError {
	return &AdmissionError{
		Reason:  "UnexpectedAdmissionError",
		Message: fmt.Sprintf("Pod was rejected: Allocate failed due to %v, which is unexpected", cause),
		Cause:   cause,
	}
}

// podKey names a pod.
type podKey struct{ namespace, name string }

// pod is a pod from AddPod to DeletePod.
type pod struct {
	Pod
	uid string
	// age orders pods; the first has 1.
	age     int
	phase   Phase
	message string
	// containersRunning is false before the pod's start and after a reboot.
	containersRunning bool
}

func (p *pod) key() podKey { return podKey{p.Namespace, p.Name} }

// ordered are the containers as the kubelet goes through them.
func (p *pod) ordered() []Container {
	return slices.SortedStableFunc(slices.Values(p.Containers), func(a, b Container) int {
		return cmp.Compare(rank(a), rank(b))
	})
}

func rank(c Container) int {
	if c.runsBefore() {
		return 0
	}
	return 1
}

func (p Pod) validate() error {
	var problems []error
	if p.Name == "" {
		problems = append(problems, errors.New("pod has no name"))
	}
	names := set{}
	for _, container := range p.Containers {
		if container.Name == "" || names.has(container.Name) {
			problems = append(problems, fmt.Errorf("container name %q is empty or used twice", container.Name))
		}
		names[container.Name] = struct{}{}
		for _, resource := range slices.Sorted(maps.Keys(container.Requests)) {
			if count := container.Requests[resource]; count < 0 {
				problems = append(problems, fmt.Errorf("container %s requests %d of %s", container.Name, count, resource))
			}
		}
	}
	return errors.Join(problems...)
}
