// Package cluster reads what all Nodes of a cluster say of their GPUs, and who holds them.
//
// It reads Nodes and pods, and with the right to pods/portforward each node's status page. It
// writes nothing. What others write to a Node, internal/nodestatus, and what a status page
// has, internal/agent, is taken from there.
//
// objects.go has what is kept of Nodes and pods, view.go what follows from it, which is
// pure, and read.go the requests; why.go says why a pod waits, with whyread.go to read for it.
package cluster

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/status"
)

const (
	// profileLabel and layoutLabel choose a node's profile and its MIG layout, as for
	// NVIDIA's config-manager and mig-manager.
	profileLabel, layoutLabel = "nvidia.com/device-plugin.config", "nvidia.com/mig.config"
	countLabel, modelLabel    = "nvidia.com/gpu.count", "nvidia.com/gpu.product"
	// appLabel is on Virgate's own pods, whose port of that name has the status page.
	appLabel, app, statusPort = "app.kubernetes.io/name", "virgate", "http"
)

// Node is what is kept of a Node.
type Node struct {
	Name string
	// NotReady says why nothing can be asked there; "" when the kubelet reports.
	NotReady string
	// Cordoned says that no new pod may go there.
	Cordoned bool
	// Wanted is the profile that its label names, or Virgate says it should have by rules; State is how far that has come;
	// Applied, Source and Generation are of the profile in force.
	Wanted, State, Applied, Source, Generation string
	// WantedBy says why, and Rules tells one list of rules from another; both are empty where there are no rules.
	WantedBy, Rules string
	// Layout is the MIG layout that its label names, LayoutState how far that has come.
	Layout, LayoutState string
	// Model and GPUs are those of the feature labels; GPUs is 0 without them.
	Model string
	GPUs  int
	// Condition is GPUSharingReady; its Type is empty where nobody has written it.
	Condition corev1.NodeCondition
	// Capacity and Allocatable have the resources of the domain.
	Capacity, Allocatable map[string]int64
}

// Pod is what is kept of a pod that wants or holds GPUs, or is Virgate's own.
type Pod struct {
	Namespace, Name, Node string
	// Ended says that it holds nothing any more.
	Ended bool
	// Requests are those of the domain, as the scheduler counts them.
	Requests map[string]int64
	// Devices are those that the kubelet says it holds: from Kubernetes 1.36 on.
	Devices []Device
	// StatusPort is where Virgate's own pod has its status page; 0 for other pods.
	StatusPort int32
}

func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Device is one that a container holds.
type Device struct{ Resource, ID, Container, Health string }

// Status is a node's status page, or why it was not read. Both: Page is the last that a Watcher has read.
type Status struct {
	Page   *status.Status
	Unread string
}

// notYet is Unread before a Watcher has asked.
const notYet = "not read yet"

// TrimNode keeps what is needed of a Node.
func TrimNode(n *corev1.Node, domain string) Node {
	kept := Node{
		Name:        n.Name,
		Cordoned:    n.Spec.Unschedulable,
		Wanted:      n.Labels[profileLabel],
		State:       n.Labels[nodestatus.StateLabel],
		Applied:     n.Annotations[nodestatus.ProfileAnnotation],
		Source:      n.Annotations[nodestatus.SourceAnnotation],
		Generation:  n.Annotations[nodestatus.GenerationAnnotation],
		WantedBy:    n.Annotations[nodestatus.WantedByAnnotation],
		Rules:       n.Annotations[nodestatus.RulesAnnotation],
		Layout:      n.Labels[layoutLabel],
		LayoutState: n.Labels[nodestatus.MIGStateLabel],
		Model:       n.Labels[modelLabel],
		Capacity:    ofDomain(n.Status.Capacity, domain),
		Allocatable: ofDomain(n.Status.Allocatable, domain),
	}
	kept.Wanted = cmp.Or(kept.Wanted, n.Annotations[nodestatus.WantedAnnotation])
	kept.GPUs, _ = strconv.Atoi(n.Labels[countLabel])
	for _, c := range n.Status.Conditions {
		switch {
		case c.Type == nodestatus.ConditionType:
			kept.Condition = c
		case c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue:
			kept.NotReady = "the node is not ready: " + c.Reason
		}
	}
	return kept
}

// ours says that the node has GPUs or had Virgate.
func (n Node) ours() bool {
	return len(n.Capacity) > 0 || n.Wanted != "" || n.State != "" || n.Generation != "" || n.Condition.Type != "" ||
		n.GPUs > 0
}

// trimPod keeps what is needed of a pod; ok is false where it has nothing to do with GPUs. Pods
// of that namespace with Virgate's label are Virgate's own: elsewhere anybody could name one so.
func trimPod(p *corev1.Pod, domain, namespace string) (kept Pod, ok bool) {
	kept = Pod{
		Namespace: p.Namespace,
		Name:      p.Name,
		Node:      p.Spec.NodeName,
		Requests:  requests(p, domain),
		Ended:     p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
	}
	for _, container := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		for _, resource := range container.AllocatedResourcesStatus {
			if !strings.HasPrefix(string(resource.Name), domain+"/") || container.State.Terminated != nil {
				continue
			}
			for _, device := range resource.Resources {
				kept.Devices = append(kept.Devices,
					Device{string(resource.Name), string(device.ResourceID), container.Name, string(device.Health)})
			}
		}
	}
	if p.Namespace == namespace && p.Labels[appLabel] == app && p.DeletionTimestamp == nil && ready(p) {
		for _, container := range p.Spec.Containers {
			for _, port := range container.Ports {
				if port.Name == statusPort {
					kept.StatusPort = port.ContainerPort
				}
			}
		}
	}
	return kept, len(kept.Requests) > 0 || len(kept.Devices) > 0 || kept.StatusPort > 0
}

func ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func ofDomain(list corev1.ResourceList, domain string) map[string]int64 {
	kept := map[string]int64{}
	for name, quantity := range list {
		if strings.HasPrefix(string(name), domain+"/") {
			kept[string(name)] = quantity.Value()
		}
	}
	return kept
}

// requests are what the pod takes of a node: the sum of its containers and of the init
// containers that go on running, or what one of the other init containers takes beside those
// that were started before it (Kubernetes, "Init containers", resource sharing).
func requests(p *corev1.Pod, domain string) map[string]int64 {
	running, most := map[string]int64{}, map[string]int64{}
	for _, c := range p.Spec.InitContainers {
		wants := ofDomain(c.Resources.Requests, domain)
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		for name, count := range wants {
			most[name] = max(most[name], running[name]+count)
			if sidecar {
				running[name] += count
			}
		}
	}
	for _, c := range p.Spec.Containers {
		for name, count := range ofDomain(c.Resources.Requests, domain) {
			running[name] += count
		}
	}
	for name, count := range running {
		most[name] = max(most[name], count)
	}
	maps.DeleteFunc(most, func(_ string, count int64) bool { return count == 0 })
	return most
}

// stale is the age from which on nobody says the condition any more: docs/reference/kubernetes-objects.md.
const stale = 15 * time.Minute
