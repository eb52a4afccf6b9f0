package cluster

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func gpu(count int64) map[string]int64 { return map[string]int64{"nvidia.com/gpu": count} }

func condition(status corev1.ConditionStatus, reason string, age time.Duration) corev1.NodeCondition {
	return corev1.NodeCondition{Type: "GPUSharingReady", Status: status, Reason: reason, Message: "m", LastHeartbeatTime: metav1.NewTime(now.Add(-age))}
}

func pod(namespace, name, node string, devices ...string) Pod {
	p := Pod{Namespace: namespace, Name: name, Node: node, Requests: gpu(int64(max(1, len(devices))))}
	for _, id := range devices {
		p.Devices = append(p.Devices, Device{"nvidia.com/gpu", id, "c", "Healthy"})
	}
	return p
}

// TestNodes checks the first table, from Nodes, pods and status pages.
func TestNodes(t *testing.T) {
	page := &status.Status{
		Profile: status.Profile{State: nodereport.ProfileRejected, Wanted: nodereport.ProfileRef{Name: "b"}, Applied: &nodereport.ProfileRef{Name: "a"}, Problem: "b:1: wrong"},
		GPUs:    []status.GPU{{Model: "T4"}, {Model: "A100"}, {Model: "T4"}},
		Layouts: []nodereport.GPULayout{{Index: 0, Wanted: "day", State: nodereport.LayoutBlocked}},
	}
	for _, test := range []struct {
		name   string
		node   Node
		status Status
		pods   []Pod
		unread string
		note   string
		want   NodeView
	}{
		{
			name: "held, free and unhealthy", node: Node{Wanted: "a", State: "applied", Applied: "a", GPUs: 2, Model: "T4", Capacity: gpu(8), Allocatable: gpu(6), Condition: condition("True", "Serving", time.Minute)},
			pods: []Pod{pod("x", "p", "n", "GPU-1::0", "GPU-1::1"), pod("x", "q", "other"), pod("x", "r", ""), {Node: "n", Ended: true, Requests: gpu(3)}},
			want: NodeView{Wanted: "a", State: "applied", Applied: nodereport.ProfileRef{Name: "a"}, GPUs: new(2), Models: []string{"T4"}, Resources: []ResourceView{{"nvidia.com/gpu", 6, 2, new(int64(2)), new(int64(4))}}, Heartbeat: new(now.Add(-time.Minute))},
		},
		{
			name: "fewer shares than before", node: Node{State: "applied", Capacity: gpu(8), Allocatable: gpu(6), Condition: condition("True", "Serving", time.Minute)},
			status: Status{Page: &status.Status{Profile: status.Profile{State: nodereport.ProfileApplied}, Resources: []status.Resource{{Name: "nvidia.com/gpu", Devices: 8, Healthy: 6, Leaving: 2}}}},
			want:   NodeView{State: "applied", GPUs: new(0), Resources: []ResourceView{{"nvidia.com/gpu", 6, 0, new(int64(0)), new(int64(6))}}, Heartbeat: new(now.Add(-time.Minute))},
		},
		{
			name: "more held than there is", node: Node{Capacity: gpu(1), Allocatable: gpu(0)}, pods: []Pod{pod("x", "p", "n")},
			want: NodeView{Resources: []ResourceView{{"nvidia.com/gpu", 0, 1, new(int64(1)), new(int64(0))}}},
		},
		{
			name: "held under a name that the node no longer has", node: Node{Capacity: gpu(1), Allocatable: gpu(1)}, pods: []Pod{{Node: "n", Requests: map[string]int64{"nvidia.com/old": 2}}},
			want: NodeView{Resources: []ResourceView{{"nvidia.com/gpu", 1, 0, new(int64(0)), new(int64(1))}, {"nvidia.com/old", 0, 0, new(int64(2)), new(int64(0))}}},
		},
		{
			name: "pods not read", node: Node{Capacity: gpu(1), Allocatable: gpu(1)}, unread: "forbidden", note: "pods not read, so who holds what is known from status pages alone: forbidden",
			want: NodeView{Resources: []ResourceView{{"nvidia.com/gpu", 1, 0, nil, nil}}},
		},
		{
			name: "rejected", node: Node{State: "rejected", Condition: condition("True", "ProfileRejected", time.Minute)},
			want: NodeView{State: "rejected", Problem: "ProfileRejected: m", Heartbeat: new(now.Add(-time.Minute))},
		},
		{
			name: "nothing heard", node: Node{State: "applied", Condition: condition("True", "Serving", 16*time.Minute)},
			want: NodeView{State: "applied", Problem: "nothing heard for 16m0s", Heartbeat: new(now.Add(-16 * time.Minute))},
		},
		{
			name: "not ready, nothing heard", node: Node{NotReady: "the node is not ready: X", Condition: condition("False", "NotRegistered", time.Hour)}, status: Status{Unread: "the node is not ready: X"},
			note: "the status page of 1 node was not read, so only GPUs that a pod holds are known there: n (the node is not ready: X)",
			want: NodeView{Problem: "the node is not ready: X", Unread: "the node is not ready: X", Heartbeat: new(now.Add(-time.Hour))},
		},
		{
			name: "from the status page", node: Node{Wanted: "old", State: "applied", GPUs: 9, Model: "X"}, status: Status{Page: page},
			want: NodeView{Wanted: "b", State: "rejected", Problem: "b:1: wrong", Applied: nodereport.ProfileRef{Name: "a"}, GPUs: new(3), Models: []string{"A100", "T4"}, Layouts: page.Layouts},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.node.Name, test.want.Name = "n", "n"
			test.want.Models = append([]string{}, test.want.Models...)
			test.want.Resources = append([]ResourceView{}, test.want.Resources...)
			test.want.Layouts = append([]nodereport.GPULayout{}, test.want.Layouts...)
			view := NewView(Snapshot{At: now, Nodes: []Node{test.node}, Pods: test.pods, PodsUnread: test.unread, Statuses: map[string]Status{"n": test.status}})
			if diff := cmp.Diff([]NodeView{test.want}, view.Nodes); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if got := strings.Join(view.Notes, "\n"); got != test.note {
				t.Errorf("notes %q, want %q", got, test.note)
			}
		})
	}
}

// TestGPUs checks that without a status page only the units that pods hold are shown, and with it every unit.
func TestGPUs(t *testing.T) {
	sick := pod("b", "q", "n1", "GPU-1::3")
	sick.Devices[0].Health = "Unhealthy"
	sm := 0.5
	page := &status.Status{
		Resources: []status.Resource{{Name: "nvidia.com/gpu", Strategy: "time-slicing"}},
		GPUs: []status.GPU{
			{
				UUID: "GPU-3", Index: 0, Model: "T4", Use: &status.Use{SM: &sm}, Units: []status.Unit{{
					ID: "GPU-3", Index: "0", Resource: "nvidia.com/gpu", Replicas: 4, Health: status.Health{State: sharing.Healthy}, Holders: []status.Holder{{Namespace: "c", Pod: "p", Container: "x", Devices: []string{"1", "2"}}},
				}},
			},
			{
				UUID: "GPU-4", Index: 1, Model: "A100", MIG: true, Health: status.Health{State: sharing.Unhealthy, Reason: "lost"}, Use: &status.Use{SM: &sm},
				Units: []status.Unit{{ID: "MIG-1", Index: "1:0", Profile: "1g.5gb", Health: status.Health{State: sharing.Healthy}}},
			},
			{UUID: "GPU-5", Index: 2, Model: "A100", MIG: true, Health: status.Health{State: sharing.Healthy}},
		},
		Elsewhere: []status.Unit{{ID: "MIG-9"}},
	}
	view := NewView(Snapshot{
		At: now, Nodes: []Node{{Name: "n2"}, {Name: "n1", Model: "H100"}, {Name: "n0", GPUs: 1, Capacity: map[string]int64{"nvidia.com/gpu": 4}}},
		Statuses: map[string]Status{"n2": {Page: page}},
		Pods:     []Pod{pod("a", "t", "n0", "GPU-0"), pod("b", "p", "n1", "GPU-1::0", "GPU-1::1"), sick, pod("a", "p", "n1", "GPU-1::2"), pod("a", "s", "n1", "GPU-2"), pod("z", "z", "n2", "GPU-3::0")},
	})
	want := []GPUView{
		{Node: "n0", ID: "GPU-0", Resource: "nvidia.com/gpu", Held: 1, Health: "Healthy", Holders: []HolderView{{"a", "t", "c", 1}}}, // It may be a share.
		{Node: "n1", ID: "GPU-1", Model: "H100", Resource: "nvidia.com/gpu", Sharing: "shared", Held: 4, Health: "Unhealthy", Holders: []HolderView{{"a", "p", "c", 1}, {"b", "p", "c", 2}, {"b", "q", "c", 1}}},
		{Node: "n1", ID: "GPU-2", Model: "H100", Resource: "nvidia.com/gpu", Sharing: "exclusive", Held: 1, Health: "Healthy", Holders: []HolderView{{"a", "s", "c", 1}}},
		{Node: "n2", Index: "0", ID: "GPU-3", Model: "T4", Resource: "nvidia.com/gpu", Replicas: 4, Sharing: "time-slicing", Held: 2, Health: "healthy", Use: &status.Use{SM: &sm}, Holders: []HolderView{{"c", "p", "x", 2}}},
		{Node: "n2", Index: "1:0", ID: "MIG-1", Model: "A100", Profile: "1g.5gb", Health: "unhealthy", Reason: "lost", Holders: []HolderView{}},
		{Node: "n2", Index: "2", ID: "GPU-5", Model: "A100", Health: "healthy", Holders: []HolderView{}},
		{Node: "n2", ID: "MIG-9", Model: "not on this node", Holders: []HolderView{}},
	}
	if diff := cmp.Diff(want, view.GPUs); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestTenants checks that two namespaces share if both hold the same unit, but not if they hold two partitions of a
// GPU.
func TestTenants(t *testing.T) {
	view := NewView(Snapshot{
		At: now, Nodes: []Node{{Name: "n1"}},
		Pods: []Pod{
			pod("a", "p", "n1", "GPU-1::0"), pod("a", "q", "n1", "GPU-1::1"), pod("b", "p", "n1", "GPU-1::2", "GPU-2::0"), pod("c", "p", "n1", "MIG-1"), pod("d", "p", "n1", "MIG-2"),
			pod("a", "waits", ""), {Namespace: "e", Name: "ended", Ended: true, Requests: gpu(1)}, {Namespace: "virgate", Name: "virgate", Node: "n1", StatusPort: 9400},
		},
	})
	want := []TenantView{
		{"a", 2, 1, gpu(2), 1, map[string]int{"b": 1}}, {"b", 1, 0, gpu(2), 2, map[string]int{"a": 1}},
		{"c", 1, 0, gpu(1), 1, map[string]int{}}, {"d", 1, 0, gpu(1), 1, map[string]int{}},
	}
	if diff := cmp.Diff(want, view.Tenants); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestRequests checks requests as the scheduler counts them, with init containers and sidecars.
func TestRequests(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	container := func(count int64, restart *corev1.ContainerRestartPolicy) corev1.Container {
		return corev1.Container{RestartPolicy: restart, Resources: corev1.ResourceRequirements{Requests: quantities("nvidia.com/gpu", count)}}
	}
	for _, test := range []struct {
		name             string
		init, containers []corev1.Container
		want             int64
	}{
		{"the sum", nil, []corev1.Container{container(1, nil), container(2, nil)}, 3},
		{"the largest init container", []corev1.Container{container(4, nil), container(2, nil)}, []corev1.Container{container(3, nil)}, 4},
		{"a sidecar stays", []corev1.Container{container(1, &always)}, []corev1.Container{container(3, nil)}, 4},
		{"an init container beside a sidecar", []corev1.Container{container(2, &always), container(4, nil)}, []corev1.Container{container(1, nil)}, 6},
		{"an init container before it", []corev1.Container{container(4, nil), container(2, &always)}, []corev1.Container{container(1, nil)}, 4},
		{"none", nil, []corev1.Container{container(0, nil)}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ofDomain(wanted(&corev1.Pod{Spec: corev1.PodSpec{InitContainers: test.init, Containers: test.containers}}), "nvidia.com")
			if got["nvidia.com/gpu"] != test.want || got["cpu"] != 0 {
				t.Errorf("%v, want %d", got, test.want)
			}
		})
	}
}

// TestRuleViews counts the nodes of each rule by their annotations or status pages.
func TestRuleViews(t *testing.T) {
	node := func(name, wanted, by, rules, state string, change func(*Node)) Node {
		n := Node{Name: name, Wanted: wanted, WantedBy: by, Rules: rules, State: state, Applied: wanted}
		if change != nil {
			change(&n)
		}
		return n
	}
	refused := func(serves string) func(*Node) {
		return func(n *Node) {
			n.Condition = condition("True", "ProfileRejected", time.Minute)
			n.Condition.Message = "the wanted profile is refused: no MIG; an earlier one serves " + serves
		}
	}
	const two, ten = "rule 2 of ConfigMap gpu/p", "rule 10 of ConfigMap gpu/p"
	until := now.Add(time.Minute)
	page := &status.Status{Profile: status.Profile{State: "applied", Wanted: nodereport.ProfileRef{Name: "four", By: two, Rule: 2, Rules: "old"}, Delayed: &until}}
	view := NewView(Snapshot{At: now, Nodes: []Node{
		node("n1", "ten", ten, "new", "applied", nil),
		node("n2", "four", two, "new", "applied", nil),
		node("n3", "four", two, "new", "rejected", refused("nvidia.com/gpu (8 devices, 8 healthy)")),
		node("n4", "four", two, "new", "rejected", refused("nvidia.com/gpu (4 devices, 4 healthy)")),
		node("n5", "four", two, "new", "switching", nil),
		node("n6", "four", two, "old", "applied", nil),
		node("n7", "two", "default: no rule of ConfigMap gpu/p matches", "new", "applied", nil),
		node("n8", "", "refused rules of ConfigMap gpu/p", "bad", "rejected", refused("x")),
		node("n9", "two", "", "", "applied", nil),
	}, Statuses: map[string]Status{"n6": {Page: page}}})
	want := []RuleView{
		{By: two, Rule: 2, Profile: "four", Rules: "new", Nodes: 4, Applied: 1, Rejected: 2, Problems: []string{"n3, n4: no MIG"}},
		{By: two, Rule: 2, Profile: "four", Rules: "old", Nodes: 1, Applied: 1, Delayed: 1},
		{By: ten, Rule: 10, Profile: "ten", Rules: "new", Nodes: 1, Applied: 1},
		{By: "default: no rule of ConfigMap gpu/p matches", Profile: "two", Rules: "new", Nodes: 1, Applied: 1},
		{By: "refused rules of ConfigMap gpu/p", Rules: "bad", Nodes: 1, Rejected: 1, Problems: []string{"n8: no MIG"}},
	}
	if diff := cmp.Diff(want, view.Rules); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
