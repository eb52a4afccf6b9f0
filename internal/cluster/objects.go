// Package cluster reads what all Nodes of a cluster report about their GPUs, and which pods hold
// them.
//
// It reads Nodes and pods and, with the right to pods/portforward, each node's status page. It writes
// nothing. The names of what Virgate writes to a Node come from internal/nodestatus, and the format
// of a status page from internal/status.
//
// Files: objects.go is what is kept of Nodes and pods; view.go the pure functions that make tables
// of it; read.go the requests; watch.go keeps the data up to date; serve.go shows it in a browser;
// why.go explains why a pod waits, from what whyread.go reads.
package cluster

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

const (
	// profileLabel and layoutLabel choose a node's profile and its MIG layout. NVIDIA's
	// config-manager and mig-manager use the same labels.
	profileLabel, layoutLabel = "nvidia.com/device-plugin.config", "nvidia.com/mig.config"
	countLabel, modelLabel    = "nvidia.com/gpu.count", "nvidia.com/gpu.product"
	// appLabel marks Virgate's own pods. Their port statusPort serves the status page.
	appLabel, app, statusPort = "app.kubernetes.io/name", "virgate", "http"
)

// Node is the part of a Node that is kept.
type Node struct {
	Name string
	// NotReady is why the node cannot be asked; "" if its kubelet reports.
	NotReady string
	// Cordoned is true if no new pod may be scheduled there.
	Cordoned bool
	// Wanted is the profile that the node's label names, or that rules have chosen according to
	// Virgate. State is how far it is applied. Applied, Source and Generation describe the profile
	// in force.
	Wanted, State, Applied, Source, Generation string
	// WantedBy is the reason for Wanted, and Rules identifies a list of rules; both are empty
	// without rules.
	WantedBy, Rules string
	// Layout is the MIG layout that its label names, LayoutState how far it is applied.
	Layout, LayoutState string
	// Model and GPUs come from the feature labels; GPUs is 0 without them.
	Model string
	GPUs  int
	// Condition is GPUSharingReady; its Type is empty if it was never written.
	Condition corev1.NodeCondition
	// Capacity and Allocatable hold only the resources of the domain.
	Capacity, Allocatable map[string]int64
}

// offered is the node's capacity of the resource without the devices that its profile no longer has.
// The kubelet goes on counting these, as it does faulty ones, until they have left its list. Without a
// status page they cannot be told apart.
func (n Node) offered(name string, page *status.Status) int64 {
	capacity := n.Capacity[name]
	released := func(warning string) bool { return strings.Contains(warning, nodereport.ReleasedUntil) }
	if page == nil || n.Condition.Status != corev1.ConditionTrue || n.switching() ||
		slices.ContainsFunc(page.Warnings, released) {
		return capacity // What a switch, a release or a pause has withdrawn comes back.
	}
	at := slices.IndexFunc(page.Resources, func(r status.Resource) bool { return r.Name == name })
	if at < 0 {
		return capacity
	}
	gone := capacity - n.Allocatable[name]
	for _, gpu := range page.GPUs {
		for _, unit := range gpu.Units {
			if unit.Resource == name && unit.Health.State != sharing.Healthy {
				gone -= int64(unit.Replicas)
			}
		}
	}
	r := page.Resources[at]
	leaving := int64(r.Leaving) + max(0, capacity-int64(r.Devices))
	return capacity - max(0, min(leaving, gone))
}

// Pod is the part of a pod that is kept: of pods that want or hold GPUs, and Virgate's own.
type Pod struct {
	Namespace, Name, Node string
	// Ended is true if it holds nothing any more.
	Ended bool
	// Requests are its requests of the domain, as the scheduler counts them.
	Requests map[string]int64
	// Devices are what it holds according to the kubelet, from Kubernetes 1.36 on.
	Devices []Device
	// StatusPort is the status page's port of Virgate's own pod; 0 for other pods.
	StatusPort int32
}

func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Device is a device that a container holds.
type Device struct{ Resource, ID, Container, Health string }

// Status is a node's status page, or why it was not read. If both are set, Page is the last one
// that a Watcher has read.
type Status struct {
	Page   *status.Status
	Unread string
}

// notYet is Unread before a Watcher has asked.
const notYet = "not read yet"

// TrimNode returns the part of a Node that is kept.
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

// ours reports whether the node has GPUs or had Virgate.
func (n Node) ours() bool {
	return len(n.Capacity) > 0 || n.Wanted != "" || n.State != "" || n.Generation != "" || n.Condition.Type != "" ||
		n.GPUs > 0
}

// trimPod returns the part of a pod that is kept; ok is false if the pod has nothing to do with
// GPUs. Only pods with Virgate's label in the given namespace are Virgate's own: elsewhere anyone
// could use that label.
func trimPod(p *corev1.Pod, domain, namespace string) (kept Pod, ok bool) {
	kept = Pod{
		Namespace: p.Namespace,
		Name:      p.Name,
		Node:      p.Spec.NodeName,
		Requests:  ofDomain(wanted(p), domain),
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

// stale is the age of a condition from which its node counts as silent:
// docs/reference/kubernetes-objects.md.
const stale = 15 * time.Minute
