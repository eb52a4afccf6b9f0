package cluster

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing"
)

// gpuNode has 4 GPUs, 8 CPUs and room for 110 pods.
func gpuNode(name string, change ...func(*corev1.Node)) *corev1.Node {
	list := func() corev1.ResourceList {
		list := quantities("nvidia.com/gpu", 4)
		list["pods"], list["memory"] = resource.MustParse("110"), resource.MustParse("16Gi")
		return list
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name}}, Status: corev1.NodeStatus{Capacity: list(), Allocatable: list()}}
	for _, f := range change {
		f(n)
	}
	return n
}

// waitingPod requests count GPUs and 1 CPU, in namespace a; with a node, it holds them.
func waitingPod(name, node string, count int64, change ...func(*corev1.Pod)) *corev1.Pod {
	requests := quantities("nvidia.com/gpu", count)
	requests["cpu"] = resource.MustParse("1")
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}, Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: requests}}}}}
	for _, f := range change {
		f(p)
	}
	return p
}

func tainted(key string, effect corev1.TaintEffect) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: effect}) }
}

func ask(p *corev1.Pod, nodes []*corev1.Node, pods []*corev1.Pod, pages map[string]Status) Answer {
	q := Question{Pod: p, Domain: "nvidia.com", Used: map[string]corev1.ResourceList{}, Statuses: pages}
	for _, n := range nodes {
		q.Nodes = append(q.Nodes, NewCandidate(p, n, q.Domain))
	}
	for _, other := range pods {
		q.add(other)
	}
	return Why(q)
}

// saidOf is a short form of an answer: the verdict, "causes: nodes" of each group, helps and notes.
func saidOf(a Answer) []string {
	said := []string{a.State, a.Verdict}
	for _, g := range a.Groups {
		var causes []string
		for _, c := range g.Causes {
			causes = append(causes, fmt.Sprintf("%s (%s)", c.Cause, c.Text))
		}
		said = append(said, strings.TrimSuffix(fmt.Sprintf("%s: %s < %s", strings.Join(g.Nodes, ","), strings.Join(causes, " + "), strings.Join(g.Holders, ",")), " < "))
		said = append(said, g.Details...)
	}
	for _, h := range a.Help {
		said = append(said, "help: "+h)
	}
	return append(said, a.Notes...)
}

const unscheduledNote = "no scheduler has said anything of it; it is for the one named default-scheduler"

// TestWhy checks the answer for each cause.
func TestWhy(t *testing.T) {
	only := func(nodes ...*corev1.Node) []*corev1.Node { return nodes }
	name := func(p *corev1.Pod, from, to corev1.ResourceName) *corev1.Pod {
		r := p.Spec.Containers[0].Resources.Requests
		r[to] = r[from]
		delete(r, from)
		return p
	}
	amount := func(list corev1.ResourceList, name, value string) {
		list[corev1.ResourceName(name)] = resource.MustParse(value)
	}
	status := func(phase corev1.PodPhase, reason, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Status.Phase, p.Status.Reason, p.Status.Message = phase, reason, message }
	}
	affinity := func(key string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpExists}}}},
			}}}
		}
	}
	profile := func(state string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Labels["nvidia.com/device-plugin.config"], n.Labels["nvidia.com/device-plugin.config.state"] = "b", state
			n.Status.Conditions = []corev1.NodeCondition{{Type: "GPUSharingReady", Status: "True", Reason: "ProfileRejected", Message: "b:3: wrong"}}
		}
	}
	const wants = "a/p waits for 1 nvidia.com/gpu: "
	for _, test := range []struct {
		name  string
		pod   *corev1.Pod
		nodes []*corev1.Node
		pods  []*corev1.Pod
		want  []string
	}{
		{
			"no such resource, a name alike", name(waitingPod("p", "", 1), "nvidia.com/gpu", "nvidia.com/gpu.shared"),
			only(gpuNode("n1"), gpuNode("n2", func(n *corev1.Node) { amount(n.Status.Capacity, "nvidia.com/a100", "7") })), nil,
			[]string{"waiting", "a/p waits for nvidia.com/gpu.shared, which no node has", "n1,n2: noResource (no nvidia.com/gpu.shared)", "help: the nearest name that nodes have is nvidia.com/gpu, on 2 nodes", unscheduledNote},
		},
		{
			"no resource at all", waitingPod("p", "", 1), only(gpuNode("n1", func(n *corev1.Node) { delete(n.Status.Capacity, "nvidia.com/gpu") })), nil,
			[]string{"waiting", "a/p waits for nvidia.com/gpu, which no node has", "n1: noResource (no nvidia.com/gpu)", "help: no node has any resource of nvidia.com: is a device plugin running?", unscheduledNote},
		},
		{
			"profiles", name(waitingPod("p", "", 1), "nvidia.com/gpu", "nvidia.com/x"), only(gpuNode("n1", profile("rejected")), gpuNode("n2", profile("pending")), gpuNode("n3", profile("applied"))), nil,
			[]string{
				"waiting", "a/p waits for nvidia.com/x, which no node has",
				"n2: noResource (no nvidia.com/x) + profile (the profile b, which is wanted there, is pending)",
				"n1: noResource (no nvidia.com/x) + profile (the profile b, which is wanted there, is rejected: b:3: wrong)",
				"n3: noResource (no nvidia.com/x)",
				"help: the nearest name that nodes have is nvidia.com/gpu, on 3 nodes", "help: kubectl virgate nodes shows what became of the profiles", unscheduledNote,
			},
		},
		{
			"held", waitingPod("p", "", 3), only(gpuNode("n1"), gpuNode("n2")),
			[]*corev1.Pod{waitingPod("h1", "n1", 4), waitingPod("h2", "n2", 1), waitingPod("h3", "n2", 2), waitingPod("w", "", 4)},
			[]string{
				"waiting", "a/p waits for 3 nvidia.com/gpu: pods hold too many on all nodes that have it: 2",
				"n2: held (3 of 4 nvidia.com/gpu held, 1 free) < a/h2,a/h3", "n1: held (4 of 4 nvidia.com/gpu held, 0 free) < a/h1",
				"help: node n2 has the most free, 1: 1 pod would have to end there, such as a/h3", unscheduledNote,
			},
		},
		{
			"too many for one node", waitingPod("p", "", 5), only(gpuNode("n1"), gpuNode("n2")), nil,
			[]string{"waiting", "a/p waits for 5 nvidia.com/gpu of one node, and no node has more than 4", "n1,n2: tooSmall (4 nvidia.com/gpu at most)", "help: 4 nvidia.com/gpu can be given by one node only: request at most that, or divide the work among pods", unscheduledNote},
		},
		{
			"unhealthy", waitingPod("p", "", 2), only(gpuNode("n1", func(n *corev1.Node) { amount(n.Status.Allocatable, "nvidia.com/gpu", "1") })), nil,
			[]string{"waiting", "a/p waits for 2 nvidia.com/gpu: devices are unhealthy on all nodes that have it: 1", "n1: unhealthy (3 of 4 nvidia.com/gpu unhealthy, 1 free)", "help: 1 node could run it if all devices were healthy: see kubectl virgate gpus", unscheduledNote},
		},
		{
			"unhealthy and held", waitingPod("p", "", 2), only(gpuNode("n1", func(n *corev1.Node) { amount(n.Status.Allocatable, "nvidia.com/gpu", "1") })), []*corev1.Pod{waitingPod("h", "n1", 3)},
			[]string{"waiting", "a/p waits for 2 nvidia.com/gpu: of 1 node none can give it now", "n1: unhealthy (3 of 4 nvidia.com/gpu unhealthy) + held (3 of 4 nvidia.com/gpu held, 0 free) < a/h", "help: 1 node would take it when devices are back and pods have ended as well: n1", unscheduledNote},
		},
		{
			"switching", waitingPod("p", "", 2), only(gpuNode("n1", profile("switching"), func(n *corev1.Node) {
				amount(n.Status.Allocatable, "nvidia.com/gpu", "1")
				n.Status.Conditions[0].Reason, n.Status.Conditions[0].Message = "Switching", "1 GPU waits: 0 held as nvidia.com/gpu by a/h"
			})), nil,
			[]string{
				"waiting", "a/p waits for 2 nvidia.com/gpu: a profile is being switched on all nodes that have it: 1",
				"n1: switching (3 of 4 nvidia.com/gpu withdrawn, because the node is switching to the profile b, 1 free)",
				"n1: Switching: 1 GPU waits: 0 held as nvidia.com/gpu by a/h",
				"help: 1 node will take it when the pods have ended that its switch waits for; the profile's retireAfter.switch says how long a device stays usable for them", unscheduledNote,
			},
		},
		{
			"unhealthy, and the rest is held", waitingPod("p", "", 1), only(gpuNode("n1", func(n *corev1.Node) { amount(n.Status.Allocatable, "nvidia.com/gpu", "2") })), []*corev1.Pod{waitingPod("h", "n1", 2)},
			[]string{"waiting", "a/p waits for 1 nvidia.com/gpu: devices are unhealthy on all nodes that have it: 1", "n1: unhealthy (2 of 4 nvidia.com/gpu unhealthy, 2 held, 0 free) < a/h", "help: 1 node could run it if all devices were healthy: see kubectl virgate gpus", unscheduledNote},
		},
		{
			"switching, full", waitingPod("p", "", 1), only(gpuNode("n1", profile("switching"), func(n *corev1.Node) {
				amount(n.Status.Allocatable, "nvidia.com/gpu", "0")
				n.Status.Conditions[0].Reason, n.Status.Conditions[0].Message = "Switching", "4 GPUs wait: 0 held as nvidia.com/gpu by a/h"
			})), []*corev1.Pod{waitingPod("h", "n1", 4)},
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: a profile is being switched on all nodes that have it: 1",
				"n1: switching (4 of 4 nvidia.com/gpu withdrawn, because the node is switching to the profile b, 4 held, 0 free) < a/h", "n1: Switching: 4 GPUs wait: 0 held as nvidia.com/gpu by a/h",
				"help: 1 node will take it when the pods have ended that its switch waits for; the profile's retireAfter.switch says how long a device stays usable for them", unscheduledNote,
			},
		},
		{
			"switching to the name that it wants", name(waitingPod("p", "", 1), "nvidia.com/gpu", "nvidia.com/gpu.shared"), only(gpuNode("n1", profile("switching"), func(n *corev1.Node) {
				n.Status.Conditions[0].Reason, n.Status.Conditions[0].Message = "Switching", "4 GPUs wait: 0 held as nvidia.com/gpu by a/h"
			})), nil,
			[]string{
				"waiting", "a/p waits for nvidia.com/gpu.shared, which no node has; 1 node is switching to another profile",
				"n1: noResource (no nvidia.com/gpu.shared) + profile (the node is switching to the profile b)", "n1: Switching: 4 GPUs wait: 0 held as nvidia.com/gpu by a/h",
				"help: the nearest name that nodes have is nvidia.com/gpu, on 1 node", "help: what the switch on n1 waits for has to end there, if the profile brings the resource",
				"help: kubectl virgate nodes shows what became of the profiles", unscheduledNote,
			},
		},
		{
			"paused", waitingPod("p", "", 1), only(gpuNode("n1", func(n *corev1.Node) {
				amount(n.Status.Allocatable, "nvidia.com/gpu", "0")
				n.Status.Conditions = []corev1.NodeCondition{{Type: "GPUSharingReady", Status: "False", Reason: "PausedForMIGChange", Message: "no GPU is offered"}}
			})), nil,
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: devices are unhealthy on all nodes that have it: 1", "n1: unhealthy (4 of 4 nvidia.com/gpu unhealthy, 0 free)", "n1: PausedForMIGChange: no GPU is offered",
				"help: 1 node could run it if all devices were healthy: see kubectl virgate gpus", unscheduledNote,
			},
		},
		{
			"cordoned", waitingPod("p", "", 1), only(gpuNode("n1", func(n *corev1.Node) { n.Spec.Unschedulable = true }, tainted(corev1.TaintNodeUnschedulable, "NoSchedule"))), nil,
			[]string{"waiting", wants + "no new pod may go to all nodes that have it: 1", "n1: cordoned (cordoned)", "help: kubectl uncordon would open 1 node", unscheduledNote},
		},
		{
			"taints", waitingPod("p", "", 1), only(gpuNode("n1", tainted("x", "NoSchedule"), tainted("y", "NoExecute"), tainted("z", "PreferNoSchedule"))), nil,
			[]string{"waiting", wants + "it does not tolerate a taint of all nodes that have it: 1", "n1: taint (the taint x:NoSchedule, y:NoExecute is not tolerated)", "help: a toleration of the taint would open 1 node", unscheduledNote},
		},
		{
			"tolerated", waitingPod("p", "", 1, func(p *corev1.Pod) {
				p.Spec.Tolerations = []corev1.Toleration{{Key: "x", Operator: "Exists"}, {Key: corev1.TaintNodeUnschedulable, Operator: "Exists"}}
			}), only(gpuNode("n1", tainted("x", "NoSchedule"), func(n *corev1.Node) { n.Spec.Unschedulable = true })), nil,
			[]string{"waiting", "a/p should find a place: 1 node could give it 1 nvidia.com/gpu", "n1: fits (nothing found that keeps it away)", "help: if it goes on waiting, another rule of the scheduler keeps it away, such as affinity to pods, spreading, ports or volumes: see what the scheduler says", unscheduledNote},
		},
		{
			"not ready", waitingPod("p", "", 1), only(gpuNode("n1", tainted(corev1.TaintNodeUnreachable, "NoExecute"), func(n *corev1.Node) {
				n.Status.Conditions = []corev1.NodeCondition{{Type: "Ready", Status: "Unknown", Reason: "NodeStatusUnknown"}}
			})), nil,
			[]string{"waiting", wants + "no kubelet reports from all nodes that have it: 1", "n1: notReady (the node is not ready: NodeStatusUnknown)", "help: 1 node would take it when ready again", unscheduledNote},
		},
		{
			"node selector", waitingPod("p", "", 1, func(p *corev1.Pod) {
				p.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": "n1", "disk": "ssd"}
			}), only(gpuNode("n1")), nil,
			[]string{"waiting", wants + "its node selector or affinity leaves out all nodes that have it: 1", "n1: affinity (the node selector disk=ssd does not match)", "help: another node selector or affinity would open 1 node", unscheduledNote},
		},
		{
			"node affinity", waitingPod("p", "", 1, affinity("zone")), only(gpuNode("n1")), nil,
			[]string{"waiting", wants + "its node selector or affinity leaves out all nodes that have it: 1", "n1: affinity (the required node affinity does not match)", "help: another node selector or affinity would open 1 node", unscheduledNote},
		},
		{
			"cpu", waitingPod("p", "", 1), only(gpuNode("n1")), []*corev1.Pod{name(waitingPod("h", "n1", 8), "nvidia.com/gpu", "cpu")},
			[]string{"waiting", wants + "cpu, memory or another resource is short on all nodes that have it: 1", "n1: otherResource (not enough cpu: 1 wanted, 0 free)", "help: 1 node would take it if it requested less, or other pods ended, of what is not enough", unscheduledNote},
		},
		{
			"a node full of pods", waitingPod("p", "", 1), only(gpuNode("n1", func(n *corev1.Node) { amount(n.Status.Allocatable, "pods", "1") })), []*corev1.Pod{waitingPod("h", "n1", 1)},
			[]string{"waiting", wants + "cpu, memory or another resource is short on all nodes that have it: 1", "n1: otherResource (the node is full of pods)", "help: 1 node would take it if it requested less, or other pods ended, of what is not enough", unscheduledNote},
		},
		{
			"several causes of one node, and nominated", waitingPod("p", "", 1, func(p *corev1.Pod) {
				p.Status.NominatedNodeName = "n1"
				p.Status.Conditions = []corev1.PodCondition{{Type: "PodScheduled", Status: "False", Message: "0/2 nodes are available"}}
			}), only(gpuNode("n1"), gpuNode("n2", tainted("x", "NoSchedule"))), []*corev1.Pod{waitingPod("h1", "n1", 4), waitingPod("h2", "n2", 4)},
			[]string{
				"waiting", wants + "of 2 nodes none can give it now", "n1: held (4 of 4 nvidia.com/gpu held, 0 free) < a/h1",
				"n2: taint (the taint x:NoSchedule is not tolerated) + held (4 of 4 nvidia.com/gpu held, 0 free) < a/h2", "help: node n1 has the most free, 0: 1 pod would have to end there, such as a/h1",
				"the scheduler has made room for it by its priority, on node n1: it waits there for pods to end", "the scheduler says: 0/2 nodes are available",
			},
		},
		{
			"gates", waitingPod("p", "", 1, func(p *corev1.Pod) {
				p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
			}), only(gpuNode("n1")), nil,
			[]string{"waiting", "a/p waits for its scheduling gates: kueue.x-k8s.io/admission; no scheduler looks at it before", "help: who set the scheduling gates has to remove them; a queue such as Kueue does when it admits the pod"},
		},
		{
			"no GPU", name(waitingPod("p", "", 1), "nvidia.com/gpu", "memory"), nil, nil,
			[]string{"noGPU", "a/p requests no resource of nvidia.com, so it waits for none"},
		},
		{
			"another domain", name(waitingPod("p", "", 1), "nvidia.com/gpu", "nvidia.co/gpu"), nil, nil,
			[]string{"noGPU", "a/p requests no resource of nvidia.com, so it waits for none", "it requests nvidia.co/gpu, which is of another domain: with --domain nvidia.co that is looked at"},
		},
		{
			"refused", waitingPod("p", "n1", 1, status("Failed", "UnexpectedAdmissionError", "Allocate failed")), nil, nil,
			[]string{"refused", "a/p was refused by the kubelet of node n1: UnexpectedAdmissionError: Allocate failed", "help: a refused pod does not start again: its owner makes another, or delete and create it"},
		},
		{
			"ended", waitingPod("p", "n1", 1, status("Failed", "Evicted", "disk pressure")), nil, nil,
			[]string{"ended", "a/p has ended (Failed) and holds nothing: disk pressure"},
		},
		{
			"image", waitingPod("p", "n1", 1, func(p *corev1.Pod) {
				p.Status.Phase = "Pending"
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}}}}
			}), nil, nil,
			[]string{"starting", "a/p does not wait for a GPU: it has 1 nvidia.com/gpu of node n1, and waits there for another reason: container c: ImagePullBackOff: no such image"},
		},
		{
			"not begun", waitingPod("p", "n1", 1, status("Pending", "", "")), nil, nil,
			[]string{"starting", "a/p does not wait for a GPU: it has 1 nvidia.com/gpu of node n1, and waits there for another reason: the kubelet has not begun with its containers"},
		},
		{
			"running", waitingPod("p", "n1", 1, status("Running", "", ""), func(p *corev1.Pod) {
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", AllocatedResourcesStatus: []corev1.ResourceStatus{{Name: "nvidia.com/gpu", Resources: []corev1.ResourceHealth{{ResourceID: "GPU-1::0", Health: "Healthy"}}}}}}
			}), nil, nil,
			[]string{"running", "a/p does not wait: it has 1 nvidia.com/gpu of node n1", "container c holds GPU-1::0 of nvidia.com/gpu healthy"},
		},
		{
			"running with several shares", waitingPod("p", "n1", 4, status("Running", "", ""), func(p *corev1.Pod) {
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", AllocatedResourcesStatus: []corev1.ResourceStatus{{Name: "nvidia.com/gpu", Resources: []corev1.ResourceHealth{
					{ResourceID: "GPU-1::0", Health: "Healthy"}, {ResourceID: "GPU-2::1", Health: "Unhealthy"},
					{ResourceID: "GPU-1::3", Health: "Healthy"}, {ResourceID: "GPU-1::7", Health: "Healthy"},
				}}}}}
			}), nil, nil,
			[]string{
				"running", "a/p does not wait: it has 4 nvidia.com/gpu of node n1",
				"container c holds 3 shares of GPU-1 of nvidia.com/gpu healthy", "container c holds GPU-2::1 of nvidia.com/gpu unhealthy",
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, saidOf(ask(test.pod, test.nodes, test.pods, nil))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestWhyReads checks that the one node with room is found among more than listLimit nodes, that other pods count,
// and that a note says if they cannot be read.
func TestWhyReads(t *testing.T) {
	a := &api{}
	a.fill(listLimit + 1)
	for i := range a.nodes {
		for _, list := range []corev1.ResourceList{a.nodes[i].Status.Capacity, a.nodes[i].Status.Allocatable} {
			list["pods"], list["cpu"] = resource.MustParse("110"), resource.MustParse("9")
		}
	}
	a.pods = append(a.pods, *waitingPod("p", "", 7))
	client := a.start(t)
	answer, err := client.Why(t.Context(), options, "a", "p")
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("a/p waits for 7 nvidia.com/gpu: pods hold too many on all nodes that have it: %d", listLimit+1); answer.Verdict != want || len(answer.Groups) != 1 || len(answer.Groups[0].Holders) != listLimit+1 {
		t.Errorf("%+v, want %s", answer.Verdict, want)
	}
	// One list finds the pod, two pages have the nodes, three the pods.
	if client.Lists.Load() != 6 {
		t.Errorf("%d requests", client.Lists.Load())
	}
	a.pods[len(a.pods)-1].Spec.Containers[0].Resources.Requests = quantities("nvidia.com/gpu", 6)
	if answer, err = client.Why(t.Context(), options, "a", "p"); err != nil || !strings.HasPrefix(answer.Verdict, "a/p waits for 6 nvidia.com/gpu: cpu, memory") {
		t.Errorf("%v, %s", err, answer.Verdict) // One pod on each node has 8 of its 9.
	}
}

// TestWhyNoPod checks that a missing pod is an error that names the quota that may refuse it.
func TestWhyNoPod(t *testing.T) {
	quota := func(namespace, name, used string) corev1.ResourceQuota {
		return corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Status: corev1.ResourceQuotaStatus{
			Hard: corev1.ResourceList{"requests.nvidia.com/gpu": resource.MustParse("4"), "requests.cpu": resource.MustParse("1")},
			Used: corev1.ResourceList{"requests.nvidia.com/gpu": resource.MustParse(used), "requests.cpu": resource.MustParse("1")},
		}}
	}
	event := func(kind, owner, message string, at int64) corev1.Event {
		return corev1.Event{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: owner + message}, Reason: "FailedCreate", Message: message, LastTimestamp: metav1.Unix(at, 0),
			InvolvedObject: corev1.ObjectReference{Kind: kind, Name: owner},
		}
	}
	for _, test := range []struct {
		name   string
		quotas []corev1.ResourceQuota
		events []corev1.Event
		denied []string
		want   string
	}{
		{"none", nil, nil, nil, "there is no pod a/p"},
		{"room", []corev1.ResourceQuota{quota("a", "q", "3")}, nil, nil, "there is no pod a/p"},
		{"elsewhere", []corev1.ResourceQuota{quota("b", "q", "4")}, nil, nil, "there is no pod a/p"},
		{"a workload of that name", nil, []corev1.Event{event("Job", "p", "old", 1), event("Job", "p", "exceeded quota: q", 2), event("Job", "q", "other", 3)}, nil, "there is no pod a/p; the Job p could not make a pod: exceeded quota: q"},
		{"a Deployment of that name", nil, []corev1.Event{event("ReplicaSet", "p-6b7", "exceeded quota: q", 2)}, nil, "there is no pod a/p; the ReplicaSet p-6b7 could not make a pod: exceeded quota: q"},
		{"no right to events", nil, nil, []string{"events"}, "there is no pod a/p; what its owner says of it is not known: list events: events is forbidden"},
		{"exhausted", []corev1.ResourceQuota{quota("a", "q", "4")}, nil, nil, "there is no pod a/p; if something should have made it, the likely reason that it did not: the quota q has 4 of 4 nvidia.com/gpu used"},
		{"no right", nil, nil, []string{"resourcequotas"}, "there is no pod a/p; whether a quota keeps it from being made is not known: list resourcequotas: resourcequotas is forbidden"},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := &api{quotas: test.quotas, failures: test.events, denied: test.denied}
			if _, err := a.start(t).Why(t.Context(), options, "a", "p"); err == nil || err.Error() != test.want {
				t.Errorf("%v\nwant %s", err, test.want)
			}
		})
	}
}

// TestWhyDetails checks that the answer explains from a node's status page which GPUs the node lacks, with the
// remedy.
func TestWhyDetails(t *testing.T) {
	released := "GPU 1 (GPU-b) " + nodereport.ReleasedUntil + "12:00 UTC, or until virgate gpu restore"
	none := func(n *corev1.Node) { n.Status.Capacity, n.Status.Allocatable = nil, nil }
	claimed := &status.DRA{Paths: map[string]units.Path{"gpu-0": units.DRA, "gpu-1": units.LeavingDRA, "gpu-2": units.LeavingPlugin}, Claims: []dra.Claim{
		{Namespace: "b", Name: "c", Results: []dra.Result{{Device: "gpu-1"}}},
	}}
	// surplus makes a node whose kubelet counts more devices than the profile has; page is its status page, with
	// faulty shares on one GPU.
	surplus := func(capacity int64) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: nodestatus.ConditionType, Status: corev1.ConditionTrue}}
			n.Status.Capacity["nvidia.com/gpu"] = *resource.NewQuantity(capacity, resource.DecimalSI)
		}
	}
	page := func(faulty int) *status.Status {
		p := &status.Status{Resources: []status.Resource{{Name: "nvidia.com/gpu", Devices: 10, Healthy: 4, Leaving: 6 - faulty}}}
		if faulty > 0 {
			p.GPUs = []status.GPU{{UUID: "a", Health: status.Health{State: sharing.Unhealthy, Reason: "XID 79"}, Units: []status.Unit{
				{ID: "a", Resource: "nvidia.com/gpu", Replicas: faulty, Health: status.Health{State: sharing.Unhealthy}},
			}}}
		}
		return p
	}
	for _, test := range []struct {
		name string
		node *corev1.Node
		page Status
		want []string
	}{
		{
			"released", gpuNode("n1"), Status{Page: &status.Status{Warnings: []string{"other", released}}},
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: pods hold too many on all nodes that have it: 1", "n1: held (4 of 4 nvidia.com/gpu held, 0 free) < a/h", "n1: " + released,
				"help: node n1 has the most free, 0: 1 pod would have to end there, such as a/h", "help: virgate gpu restore, in Virgate's pod on n1, gives the released GPUs back", unscheduledNote,
			},
		},
		{
			"faults", gpuNode("n1"), Status{Page: &status.Status{GPUs: []status.GPU{
				{UUID: "a", Health: status.Health{State: sharing.Unhealthy, Reason: "XID 79"}, Units: []status.Unit{{ID: "a", Health: status.Health{State: sharing.Unhealthy}}}},
				{UUID: "b", Index: 1, Health: status.Health{State: sharing.Healthy}, Units: []status.Unit{{ID: "c", Index: "1:0", Health: status.Health{State: sharing.Suspect, Reason: "XID 63"}}}},
			}}},
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: pods hold too many on all nodes that have it: 1", "n1: held (4 of 4 nvidia.com/gpu held, 0 free) < a/h",
				"n1: GPU 0 is unhealthy: XID 79", "n1: partition 1:0 is suspect: XID 63", "help: node n1 has the most free, 0: 1 pod would have to end there, such as a/h", unscheduledNote,
			},
		},
		{
			"switching to another name", gpuNode("n1", func(n *corev1.Node) {
				n.Labels[profileLabel], n.Labels[nodestatus.StateLabel] = "b", "switching"
				n.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("0")
			}), Status{Page: &status.Status{Resources: []status.Resource{{Name: "nvidia.com/gpu", Dropped: true}}}},
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: a profile is being switched on all nodes that have it: 1",
				"n1: switching (4 of 4 nvidia.com/gpu withdrawn, because the node is switching to the profile b, 4 held, 0 free) < a/h",
				"help: the new profile of n1 does not offer what it wants: request what that profile has, or choose another", unscheduledNote,
			},
		},
		{
			"fewer shares than before", gpuNode("n1", surplus(10)), Status{Page: page(0)},
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: pods hold too many on all nodes that have it: 1", "n1: held (4 of 4 nvidia.com/gpu held, 0 free) < a/h",
				"help: node n1 has the most free, 0: 1 pod would have to end there, such as a/h", unscheduledNote,
			},
		},
		{
			"fewer shares than before, and a fault", gpuNode("n1", surplus(10)), Status{Page: page(2)},
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: devices are unhealthy on all nodes that have it: 1", "n1: unhealthy (2 of 6 nvidia.com/gpu unhealthy, 4 held, 0 free) < a/h",
				"n1: GPU 0 is unhealthy: XID 79", "help: 1 node could run it if all devices were healthy: see kubectl virgate gpus", unscheduledNote,
			},
		},
		{
			"another name than before", gpuNode("n1", surplus(4), func(n *corev1.Node) {
				n.Status.Allocatable["nvidia.com/gpu"], n.Status.Capacity["nvidia.com/gpu.shared"] = resource.MustParse("0"), resource.MustParse("8")
			}), Status{Page: page(0)},
			[]string{
				"waiting", "a/p waits for nvidia.com/gpu, which no node has", "n1: noResource (no nvidia.com/gpu)",
				"help: the nearest name that nodes have is nvidia.com/gpu.shared, on 1 node", unscheduledNote,
			},
		},
		{
			"DRA", gpuNode("n1", none), Status{Page: &status.Status{DRA: claimed}},
			[]string{
				"waiting", "a/p waits for nvidia.com/gpu, which no node has; DRA has GPUs of 1 node", "n1: noResource (no nvidia.com/gpu)",
				"n1: gpu-0: given out by DRA alone", "n1: gpu-1: DRA's until the claims end that have devices of them; had by b/c", "n1: gpu-2: on the way to DRA, until the pods end that hold them",
				"help: what DRA has on n1 comes free when the claims end that have it; the device plugin gets it back with a profile that does not give the resource to DRA", unscheduledNote,
			},
		},
		{
			"unread", gpuNode("n1"), Status{Unread: "no answer within 2s"},
			[]string{
				"waiting", "a/p waits for 1 nvidia.com/gpu: pods hold too many on all nodes that have it: 1", "n1: held (4 of 4 nvidia.com/gpu held, 0 free) < a/h",
				"help: node n1 has the most free, 0: 1 pod would have to end there, such as a/h",
				"faults, released GPUs and DRA are known from Virgate's status pages alone, and not all were read: no answer within 2s", unscheduledNote,
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var holders []*corev1.Pod
			if test.node.Status.Capacity != nil {
				holders = append(holders, waitingPod("h", "n1", 4))
			}
			a := ask(waitingPod("p", "", 1), []*corev1.Node{test.node}, holders, map[string]Status{"n1": test.page})
			if diff := cmp.Diff(test.want, saidOf(a)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestWhyReadsPages checks that the status pages are read of a few nodes that lack the pod's resource.
func TestWhyReadsPages(t *testing.T) {
	a := &api{status: func(node string, w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(status.Status{Node: node, Warnings: []string{"GPU 0 " + nodereport.ReleasedUntil + "noon"}})
	}}
	a.fill(mostPages + 10)
	for i := range a.nodes {
		a.nodes[i].Status.Conditions = []corev1.NodeCondition{{Type: nodestatus.ConditionType, Status: corev1.ConditionTrue}}
	}
	a.nodes[0].Spec.Taints = []corev1.Taint{{Key: "t", Effect: corev1.TaintEffectNoSchedule}} // Others are asked first.
	a.pods = append(a.pods, *waitingPod("p", "", 7))
	client := a.start(t)
	answer, err := client.Why(t.Context(), options, "a", "p")
	if err != nil {
		t.Fatal(err)
	}
	if client.Pages.Load() != mostPages || len(answer.Groups) != 2 || len(answer.Groups[0].Details) != mostPages {
		t.Errorf("%d pages, %+v", client.Pages.Load(), answer)
	}
	a.pods[len(a.pods)-1].Spec.Containers[0].Resources.Requests = quantities("nvidia.com/gpu", 6)
	if _, err = client.Why(t.Context(), options, "a", "p"); err != nil || client.Pages.Load() != mostPages {
		t.Errorf("%v, %d pages although there is room", err, client.Pages.Load())
	}
}

// TestWhyPodsUnread checks that if pods cannot be read, no node counts as full, and a note says that nodes may be
// full.
func TestWhyPodsUnread(t *testing.T) {
	p := waitingPod("p", "", 1)
	a := Why(Question{Pod: p, Domain: "nvidia.com", Nodes: []Candidate{NewCandidate(p, gpuNode("n1"), "nvidia.com")}, PodsUnread: "forbidden"})
	if a.Groups[0].Causes[0].Cause != CauseFits || len(a.Notes) == 0 || a.Notes[0] != "what pods hold is not known, so nodes may be full: forbidden" {
		t.Errorf("%+v", a)
	}
}

func TestParsePod(t *testing.T) {
	for text, want := range map[string]string{"p": "d/p", "a/p": "a/p", "pod/p": "d/p", "deployment/p": "d/p", "deployment.apps/p": "d/p", "jobs/p": "d/p", "sts/p": "d/p", "": "", "a/": "", "/p": "", "a/b/c": "", "a,b": ""} {
		namespace, name, err := ParsePod(text, "d")
		if got := namespace + "/" + name; err == nil && got != want || (err != nil) != (want == "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
