package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// Cause is why a node does not take a pod. The causes from CauseHeld to CauseOther correspond to
// plugins of the Kubernetes scheduler: NodeUnschedulable, TaintToleration, NodeAffinity,
// NodeResourcesFit.
type Cause string

// The causes.
const (
	// CauseNoResource: the node has no resource of that name. CauseProfile is added if the profile
	// that should provide it is rejected or not yet applied.
	CauseNoResource Cause = "noResource"
	CauseProfile    Cause = "profile"
	// CauseTooSmall: the node's capacity is too small. CauseUnhealthy: too many devices are unhealthy.
	CauseTooSmall  Cause = "tooSmall"
	CauseUnhealthy Cause = "unhealthy"
	// CauseSwitching: enough only once the node has all devices of the profile that it is switching
	// to.
	CauseSwitching Cause = "switching"
	CauseHeld      Cause = "held"
	CauseCordoned  Cause = "cordoned"
	CauseTaint     Cause = "taint"
	CauseNotReady  Cause = "notReady"
	CauseAffinity  Cause = "affinity"
	// CauseOther: cpu, memory, the number of pods, or another resource outside the domain.
	CauseOther Cause = "otherResource"
	// CauseFits: none of the above.
	CauseFits Cause = "fits"
)

// Candidate is a node as seen by one pod. It holds what does not depend on other pods, so that the
// Node's labels need not be kept.
type Candidate struct {
	Node
	// Barriers keep the pod away even if everything is free.
	Barriers []Barrier
	// Offers is what is allocatable of the pod's requested resources outside the domain.
	Offers corev1.ResourceList
}

// Barrier is a cause with its explanation.
type Barrier struct {
	Cause Cause  `json:"cause"`
	Text  string `json:"text"`
}

// Question is a pod, and what was read to explain why it waits.
type Question struct {
	Pod    *corev1.Pod
	Domain string
	Nodes  []Candidate
	// Pods are the pods with GPUs. Used is, by node, what all its pods use of the resources outside
	// the domain that Pod requests. PodsUnread is why neither is known.
	Pods       []Pod
	Used       map[string]corev1.ResourceList
	PodsUnread string
	// Namespace is Virgate's own. Statuses are the status pages that were read, by node;
	// StatusUnread is why none was read.
	Namespace    string
	Statuses     map[string]Status
	StatusUnread string
}

// Answer explains why a pod waits. Its JSON names are an interface, like View's.
type Answer struct {
	Pod string `json:"pod"`
	// State is waiting, running, starting, refused, ended or noGPU.
	State    string           `json:"state"`
	Verdict  string           `json:"verdict"`
	Requests map[string]int64 `json:"requests"`
	Node     string           `json:"node,omitempty"`
	Groups   []WhyGroup       `json:"nodes"`
	// Help is what would let it run, Notes is further information.
	Help  []string `json:"help"`
	Notes []string `json:"notes"`
}

// WhyGroup are nodes with the same causes.
type WhyGroup struct {
	Causes []Barrier `json:"causes"`
	Nodes  []string  `json:"names"`
	// Holders are the pods that hold what it wants there.
	Holders []string `json:"holders,omitempty"`
	// Details are Virgate's reports about GPUs that pods do not get: faults, releases, DRA, a
	// switch.
	Details []string `json:"details,omitempty"`
}

// wanted returns the pod's requests as the scheduler counts them, with 1 for the pod itself.
func wanted(p *corev1.Pod) corev1.ResourceList {
	list := resourcehelper.PodRequests(p, resourcehelper.PodResourcesOptions{UseStatusResources: true})
	list[corev1.ResourcePods] = resource.MustParse("1")
	maps.DeleteFunc(list, func(_ corev1.ResourceName, q resource.Quantity) bool { return q.IsZero() })
	return list
}

// NewCandidate judges a Node for the pod. It is pure.
func NewCandidate(p *corev1.Pod, n *corev1.Node, domain string) Candidate {
	c := Candidate{Node: TrimNode(n, domain), Offers: corev1.ResourceList{}}
	add := func(cause Cause, format string, arguments ...any) {
		c.Barriers = append(c.Barriers, Barrier{cause, fmt.Sprintf(format, arguments...)})
	}
	tolerates := func(taint corev1.Taint) bool {
		return slices.ContainsFunc(p.Spec.Tolerations,
			func(t corev1.Toleration) bool { return t.ToleratesTaint(klog.Logger{}, &taint, true) })
	}
	if n.Spec.Unschedulable && !tolerates(
		corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}) {
		add(CauseCordoned, "cordoned")
	}
	var taints []string
	notReady := ""
	for _, taint := range n.Spec.Taints {
		switch text := taint.ToString(); {
		case taint.Effect == corev1.TaintEffectPreferNoSchedule || tolerates(taint) ||
			taint.Key == corev1.TaintNodeUnschedulable && n.Spec.Unschedulable:
		case taint.Key == corev1.TaintNodeNotReady || taint.Key == corev1.TaintNodeUnreachable:
			notReady = cmp.Or(c.NotReady, "the node is not ready")
		case !slices.Contains(taints, text):
			taints = append(taints, text)
		}
	}
	if notReady != "" {
		add(CauseNotReady, "%s", strings.TrimSuffix(notReady, ": "))
	}
	if len(taints) > 0 {
		add(CauseTaint, "the taint %s is not tolerated", strings.Join(taints, ", "))
	}
	if matches, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(n); err != nil || !matches {
		var missing []string
		for _, key := range slices.Sorted(maps.Keys(p.Spec.NodeSelector)) {
			if value, has := n.Labels[key]; !has || value != p.Spec.NodeSelector[key] {
				missing = append(missing, key+"="+p.Spec.NodeSelector[key])
			}
		}
		switch {
		case err != nil:
			add(CauseAffinity, "the required node affinity is wrong: %v", err)
		case len(missing) > 0:
			add(CauseAffinity, "the node selector %s does not match", strings.Join(missing, ","))
		default:
			add(CauseAffinity, "the required node affinity does not match")
		}
	}
	for name := range wanted(p) {
		if offer, has := n.Status.Allocatable[name]; has && !strings.HasPrefix(string(name), domain+"/") {
			c.Offers[name] = offer
		}
	}
	return c
}

// Why explains why the pod waits, or that it does not. It is pure.
func Why(q Question) Answer {
	p := q.Pod
	a := Answer{
		Pod:      p.Namespace + "/" + p.Name,
		Requests: ofDomain(wanted(p), q.Domain),
		Node:     p.Spec.NodeName,
		Groups:   []WhyGroup{},
		Help:     []string{},
		Notes:    []string{},
	}
	answer := func(state, format string, arguments ...any) Answer {
		a.State, a.Verdict = state, fmt.Sprintf(format, arguments...)
		return a
	}
	if p.DeletionTimestamp != nil {
		a.Notes = append(a.Notes, "it is being deleted")
	}
	asks := countsText(a.Requests)
	switch {
	case p.Status.Phase == corev1.PodFailed && refused(p.Status.Reason):
		a.Help = append(a.Help, "a refused pod does not start again: its owner makes another, or delete and create it")
		return answer("refused", "%s was refused by the kubelet of node %s: %s: %s", a.Pod, a.Node, p.Status.Reason,
			p.Status.Message)
	case p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded:
		return answer("ended", "%s has ended (%s) and holds nothing: %s", a.Pod, p.Status.Phase,
			cmp.Or(p.Status.Message, p.Status.Reason, "no reason given"))
	case len(a.Requests) == 0:
		answer("noGPU", "%s requests no resource of %s, so it waits for none", a.Pod, q.Domain)
		for _, name := range slices.Sorted(maps.Keys(wanted(p))) {
			if domain, _, is := strings.Cut(string(name), "/"); is {
				a.Notes = append(a.Notes, fmt.Sprintf(
					"it requests %s, which is of another domain: with --domain %s that is looked at", name, domain))
			}
		}
		if a.Node != "" {
			a.Verdict += "; it is on node " + a.Node
		} else if message := scheduled(p).Message; message != "" {
			a.Notes = append(a.Notes, "the scheduler says: "+message)
		}
		return a
	case a.Node != "":
		a.Notes = append(a.Notes, deviceNotes(p, q.Domain)...)
		if waits := containersWait(p); waits != "" {
			return answer("starting",
				"%s does not wait for a GPU: it has %s of node %s, and waits there for another reason: %s", a.Pod, asks,
				a.Node, waits)
		}
		return answer("running", "%s does not wait: it has %s of node %s", a.Pod, asks, a.Node)
	case len(p.Spec.SchedulingGates) > 0:
		gates := make([]string, len(p.Spec.SchedulingGates))
		for i, gate := range p.Spec.SchedulingGates {
			gates[i] = gate.Name
		}
		a.Help = append(a.Help,
			"who set the scheduling gates has to remove them; a queue such as Kueue does when it admits the pod")
		return answer("waiting", "%s waits for its scheduling gates: %s; no scheduler looks at it before", a.Pod,
			strings.Join(gates, ", "))
	}
	a.State = "waiting"
	a.nodes(&q, asks)
	if p.Status.NominatedNodeName != "" {
		a.Notes = append(a.Notes, "the scheduler has made room for it by its priority, on node "+
			p.Status.NominatedNodeName+": it waits there for pods to end")
	}
	if message := scheduled(p).Message; message != "" {
		a.Notes = append(a.Notes, "the scheduler says: "+message)
	} else {
		a.Notes = append(a.Notes, "no scheduler has said anything of it; it is for the one named "+
			cmp.Or(p.Spec.SchedulerName, corev1.DefaultSchedulerName))
	}
	return a
}

// refused reports whether the kubelet refused the pod at admission (pkg/kubelet/lifecycle,
// cm/devicemanager and cm/topologymanager).
func refused(reason string) bool {
	return slices.Contains([]string{
		"UnexpectedAdmissionError", "TopologyAffinityError", "NodeAffinity", "InvalidNodeInfo",
	}, reason) || strings.HasPrefix(reason, "OutOf")
}

func countsText(counts map[string]int64) string {
	texts := make([]string, 0, len(counts))
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		texts = append(texts, fmt.Sprintf("%d %s", counts[name], name))
	}
	return strings.Join(texts, " and ")
}

func scheduled(p *corev1.Pod) corev1.PodCondition {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			return c
		}
	}
	return corev1.PodCondition{}
}

// containersWait returns what keeps a container of the pod from starting, or "" if nothing does.
func containersWait(p *corev1.Pod) string {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := c.State.Waiting; w != nil && w.Reason != "PodInitializing" {
			return strings.TrimSuffix(fmt.Sprintf("container %s: %s: %s", c.Name, w.Reason, w.Message), ": ")
		}
	}
	if p.Status.Phase != corev1.PodRunning && len(p.Status.ContainerStatuses) == 0 {
		return "the kubelet has not begun with its containers"
	}
	return ""
}

// deviceNotes tells the pod's devices; shares of one unit in one line.
func deviceNotes(p *corev1.Pod, domain string) (notes []string) {
	kept, _ := trimPod(p, domain, "")
	shares := map[Device][]string{}
	var units []Device
	for _, d := range kept.Devices {
		unit := d
		unit.ID, _, _ = sharing.ParseDeviceID(d.ID)
		if shares[unit] == nil {
			units = append(units, unit)
		}
		shares[unit] = append(shares[unit], d.ID)
	}
	for _, unit := range units {
		what := shares[unit][0]
		if n := len(shares[unit]); n > 1 {
			what = fmt.Sprintf("%d shares of %s", n, unit.ID)
		}
		health := strings.ToLower(unit.Health)
		note := fmt.Sprintf("container %s holds %s of %s %s", unit.Container, what, unit.Resource, health)
		notes = append(notes, strings.TrimSpace(note))
	}
	return notes
}

// place is what keeps the pod away from a node, and what would have to end there.
type place struct {
	causes []Barrier
	free   int64
	// lacks is how many more must become free, by resource.
	lacks   map[string]int64
	holders []Pod
	// short is true if there are too few of the domain's resources.
	short bool
}

// phrases describe the one cause that keeps the pod away from all nodes that have what it wants.
var phrases = []struct {
	cause Cause
	text  string
}{
	{CauseHeld, "pods hold too many on"},
	{CauseUnhealthy, "devices are unhealthy on"},
	{CauseSwitching, "a profile is being switched on"},
	{CauseCordoned, "no new pod may go to"},
	{CauseTaint, "it does not tolerate a taint of"},
	{CauseNotReady, "no kubelet reports from"},
	{CauseAffinity, "its node selector or affinity leaves out"},
	{CauseOther, "cpu, memory or another resource is short on"},
}

// nodes groups the nodes by what keeps the pod away, and adds what would help.
func (a *Answer) nodes(q *Question, asks string) {
	holders := q.holders()
	names := map[string]int{}
	groups := map[string]*WhyGroup{}
	var best string
	var bestPlace place
	alone := map[Cause]int{} // Nodes that only this cause keeps away.
	most := map[string]int64{}
	// Nodes with released GPUs; with units in DRA; that lack healthy devices and also the end of
	// pods; that are switching and do not have the resource yet; whose new profile drops the
	// resource.
	var released, dra, both, switching, dropping []string
	for _, node := range slices.SortedFunc(slices.Values(q.Nodes),
		func(x, y Candidate) int { return strings.Compare(x.Name, y.Name) }) {
		for name := range node.Capacity {
			capacity := node.offered(name, q.Statuses[node.Name].Page)
			if capacity > 0 {
				names[name]++
			}
			most[name] = max(most[name], capacity)
		}
		at := q.judge(a.Requests, node, holders[node.Name])
		if len(at.causes) == 1 || at.causes[0].Cause == CauseNoResource {
			alone[at.causes[0].Cause]++
			if at.causes[0].Cause == CauseHeld && (best == "" || at.free > bestPlace.free) {
				best, bestPlace = node.Name, at
			}
		}
		key := fmt.Sprint(at.causes)
		if groups[key] == nil {
			groups[key] = &WhyGroup{Causes: at.causes}
		}
		groups[key].Nodes = append(groups[key].Nodes, node.Name)
		for _, p := range at.holders {
			groups[key].Holders = append(groups[key].Holders, p.String())
		}
		if at.short {
			details := node.details(q.Statuses[node.Name].Page)
			for _, text := range details {
				groups[key].Details = append(groups[key].Details, node.Name+": "+text)
			}
			seen := func(text string) bool {
				return slices.ContainsFunc(details, func(d string) bool { return strings.Contains(d, text) })
			}
			if seen(nodereport.ReleasedUntil) {
				released = append(released, node.Name)
			}
			page := q.Statuses[node.Name].Page
			if page != nil && page.DRA != nil && len(page.DRA.Paths) > 0 {
				dra = append(dra, node.Name)
			}
			if page != nil && slices.ContainsFunc(page.Resources,
				func(r status.Resource) bool { return r.Dropped && a.Requests[r.Name] > 0 }) {
				dropping = append(dropping, node.Name)
			}
			if at.causes[0].Cause == CauseUnhealthy && len(at.causes) > 1 &&
				!slices.ContainsFunc(at.causes[1:], func(b Barrier) bool { return b.Cause != CauseHeld }) {
				both = append(both, node.Name)
			}
			if at.causes[len(at.causes)-1].Cause == CauseProfile && node.switching() {
				switching = append(switching, node.Name)
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		a.Groups = append(a.Groups, *groups[key])
	}
	// Nodes that could take it come first, nodes without the resource last.
	far := func(g WhyGroup) int {
		if slices.ContainsFunc(g.Causes, func(b Barrier) bool { return b.Cause == CauseNoResource }) {
			return 100
		}
		return len(g.Causes)
	}
	slices.SortStableFunc(a.Groups, func(x, y WhyGroup) int {
		return cmp.Or(cmp.Compare(far(x), far(y)), cmp.Compare(len(y.Nodes), len(x.Nodes)))
	})
	help := func(format string, arguments ...any) { a.Help = append(a.Help, fmt.Sprintf(format, arguments...)) }
	a.Verdict = fmt.Sprintf("%s waits for %s: of %s none can give it now", a.Pod, asks, Count(len(q.Nodes), "node"))
	for _, phrase := range phrases {
		if offering := len(q.Nodes) - alone[CauseNoResource]; offering > 0 && alone[phrase.cause] == offering {
			a.Verdict = fmt.Sprintf("%s waits for %s: %s all nodes that have it: %d", a.Pod, asks, phrase.text,
				offering)
		}
	}
	if q.PodsUnread != "" {
		a.Notes = append(a.Notes, "what pods hold is not known, so nodes may be full: "+q.PodsUnread)
	}
	unread := q.StatusUnread
	for _, name := range slices.Sorted(maps.Keys(q.Statuses)) {
		unread = cmp.Or(unread, q.Statuses[name].Unread)
	}
	if unread != "" {
		a.Notes = append(a.Notes,
			"faults, released GPUs and DRA are known from Virgate's status pages alone, and not all were read: "+unread)
	}
	if alone[CauseFits] > 0 {
		a.Verdict = fmt.Sprintf("%s should find a place: %s could give it %s", a.Pod, Count(alone[CauseFits], "node"),
			asks)
		help(
			"if it goes on waiting, another rule of the scheduler keeps it away, such as affinity to pods, " +
				"spreading, ports or volumes: see what the scheduler says")
		return
	}
	for _, name := range slices.Sorted(maps.Keys(a.Requests)) {
		switch want := a.Requests[name]; {
		case names[name] == 0:
			a.Verdict = fmt.Sprintf("%s waits for %s, which no node has", a.Pod, name)
			switch {
			case len(dra) > 0:
				a.Verdict += fmt.Sprintf("; DRA has GPUs of %s", Count(len(dra), "node"))
			case len(switching) > 0:
				a.Verdict += fmt.Sprintf("; %s switching to another profile", isOrAre(len(switching), "node"))
			}
			if len(names) == 0 && len(dra) == 0 {
				help("no node has any resource of %s: is a device plugin running?", q.Domain)
			}
			if len(names) == 0 {
				continue
			}
			near := slices.SortedFunc(maps.Keys(names), func(x, y string) int {
				return cmp.Or(cmp.Compare(common(y, name), common(x, name)), strings.Compare(x, y))
			})
			help("the nearest name that nodes have is %s, on %s", near[0], Count(names[near[0]], "node"))
		case most[name] < want:
			a.Verdict = fmt.Sprintf("%s waits for %d %s of one node, and no node has more than %d", a.Pod, want, name,
				most[name])
			help("%d %s can be given by one node only: request at most that, or divide the work among pods", most[name],
				name)
		}
	}
	if best != "" {
		ending := bestPlace.toEnd()
		help("node %s has the most free, %d: %s would have to end there, such as %s", best, bestPlace.free,
			Count(len(ending), "pod"), Some(podNames(ending), 5))
	}
	for _, cause := range []struct {
		cause Cause
		what  string
	}{
		{CauseTaint, "a toleration of the taint would open %s"},
		{CauseAffinity, "another node selector or affinity would open %s"},
		{CauseCordoned, "kubectl uncordon would open %s"},
		{CauseNotReady, "%s would take it when ready again"},
		{CauseUnhealthy, "%s could run it if all devices were healthy: see kubectl virgate gpus"},
		{
			CauseSwitching,
			"%s will take it when the pods have ended that its switch waits for; the profile's retireAfter.switch " +
				"says how long a device stays usable for them",
		},
		{CauseOther, "%s would take it if it requested less, or other pods ended, of what is not enough"},
	} {
		count := alone[cause.cause]
		if cause.cause == CauseSwitching {
			count -= len(dropping)
		}
		if count > 0 {
			help(cause.what, Count(count, "node"))
		}
	}
	if len(dropping) > 0 {
		help("the new profile of %s does not offer what it wants: request what that profile has, or choose another",
			Some(dropping, 3))
	}
	if len(both) > 0 {
		help("%s would take it when devices are back and pods have ended as well: %s", Count(len(both), "node"),
			Some(both, 3))
	}
	if len(released) > 0 {
		help("virgate gpu restore, in Virgate's pod on %s, gives the released GPUs back", Some(released, 3))
	}
	if len(dra) > 0 {
		help(
			"what DRA has on %s comes free when the claims end that have it; the device plugin gets it back with a "+
				"profile that does not give the resource to DRA", Some(dra, 3))
	}
	if len(switching) > 0 {
		help("what the switch on %s waits for has to end there, if the profile brings the resource", Some(switching, 3))
	}
	for _, group := range a.Groups {
		if slices.ContainsFunc(group.Causes, func(b Barrier) bool { return b.Cause == CauseProfile }) {
			help("kubectl virgate nodes shows what became of the profiles")
			break
		}
	}
}

// holders returns the pods that have some of the domain's resources, by node.
func (q *Question) holders() map[string][]Pod {
	holders := map[string][]Pod{}
	for _, p := range q.Pods {
		if !p.Ended && len(p.Requests) > 0 {
			holders[p.Node] = append(holders[p.Node], p)
		}
	}
	return holders
}

// judge returns what keeps the pod, with these requests, away from the node.
func (q *Question) judge(requests map[string]int64, node Candidate, pods []Pod) place {
	at := place{causes: slices.Clone(node.Barriers), lacks: map[string]int64{}}
	add := func(cause Cause, format string, arguments ...any) {
		at.causes = append(at.causes, Barrier{cause, fmt.Sprintf(format, arguments...)})
	}
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		want := requests[name]
		has := node.offered(name, q.Statuses[node.Name].Page)
		allocatable := node.Allocatable[name]
		held := int64(0)
		var by []Pod
		for _, p := range pods {
			if p.Requests[name] > 0 {
				held += p.Requests[name]
				by = append(by, p)
			}
		}
		free := max(0, allocatable-held)
		switch {
		case has == 0:
			// Without the resource, other causes do not matter.
			at = place{causes: []Barrier{{CauseNoResource, "no " + name}}}
			switch state := nodereport.ProfileState(node.State); {
			case state == nodereport.ProfileRejected:
				add(CauseProfile, "the profile %s, which is wanted there, is rejected: %s", node.Wanted,
					node.Condition.Message)
			case node.switching():
				add(CauseProfile, "the node is switching to the profile %s", node.Wanted)
			case node.Wanted != "" && state != nodereport.ProfileApplied:
				add(CauseProfile, "the profile %s, which is wanted there, is %s", node.Wanted,
					cmp.Or(node.State, "not yet seen"))
			}
			at.short = true
			return at
		case has < want:
			add(CauseTooSmall, "%d %s at most", has, name)
		case free >= want:
		case has-held >= want || allocatable < want && node.switching():
			// What a switch has withdrawn is mostly held, and the switch waits for these holders.
			cause, why := node.unhealthy()
			text := fmt.Sprintf("%d of %d %s %s", has-allocatable, has, name, why)
			if held > 0 {
				text += fmt.Sprintf(", %d held", held)
			}
			add(cause, "%s, %d free", text, free)
			at.hold(by)
		default:
			if allocatable < want {
				add(CauseUnhealthy, "%d of %d %s unhealthy", has-allocatable, has, name)
			}
			add(CauseHeld, "%d of %d %s held, %d free", held, has, name, free)
			at.free += free
			at.lacks[name] = want - free
			at.hold(by)
		}
	}
	at.short = slices.ContainsFunc(at.causes, func(b Barrier) bool {
		return slices.Contains([]Cause{CauseTooSmall, CauseUnhealthy, CauseSwitching, CauseHeld}, b.Cause)
	})
	if q.PodsUnread == "" {
		wants := wanted(q.Pod)
		for _, name := range slices.Sorted(maps.Keys(wants)) {
			if strings.HasPrefix(string(name), q.Domain+"/") {
				continue
			}
			free, want := node.Offers[name].DeepCopy(), wants[name]
			free.Sub(q.Used[node.Name][name])
			switch {
			case name == corev1.ResourcePods && free.Cmp(want) < 0:
				add(CauseOther, "the node is full of pods")
			case free.Cmp(want) < 0:
				if free.Sign() < 0 {
					free = resource.Quantity{}
				}
				add(CauseOther, "not enough %s: %s wanted, %s free", name, want.String(), free.String())
			}
		}
	}
	if len(at.causes) == 0 {
		add(CauseFits, "nothing found that keeps it away")
	}
	return at
}

func (n Node) switching() bool {
	return nodereport.ProfileState(n.State) == nodereport.ProfileSwitching
}

// unhealthy returns why devices of the node are not allocatable. The kubelet reports devices that a
// switch has withdrawn like faulty ones.
func (n Node) unhealthy() (Cause, string) {
	if !n.switching() {
		return CauseUnhealthy, "unhealthy"
	}
	return CauseSwitching, "withdrawn, because the node is switching to the profile " + n.Wanted
}

// hold adds pods that hold what is wanted.
func (at *place) hold(pods []Pod) {
	for _, p := range pods {
		if !slices.ContainsFunc(at.holders, func(other Pod) bool { return other.String() == p.String() }) {
			at.holders = append(at.holders, p)
		}
	}
}

// toEnd returns pods whose end would make room, largest first, so that few have to end.
func (at place) toEnd() (pods []Pod) {
	lacks := maps.Clone(at.lacks)
	most := func(p Pod) (gives int64) {
		for name, lack := range lacks {
			gives += min(lack, p.Requests[name])
		}
		return gives
	}
	for left := slices.Clone(at.holders); ; {
		slices.SortStableFunc(left, func(x, y Pod) int { return cmp.Compare(most(y), most(x)) })
		if len(left) == 0 || most(left[0]) == 0 {
			return pods
		}
		for name := range lacks {
			lacks[name] = max(0, lacks[name]-left[0].Requests[name])
		}
		pods, left = append(pods, left[0]), left[1:]
	}
}

func podNames(pods []Pod) []string {
	names := make([]string, len(pods))
	for i, p := range pods {
		names[i] = p.String()
	}
	return names
}

func isOrAre(count int, what string) string {
	if count == 1 {
		return "1 " + what + " is"
	}
	return Count(count, what) + " are"
}

// Count formats "1 node" or "3 nodes".
func Count(count int, what string) string {
	if count == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", count, what)
}

// Some joins at most that many names, and counts the others.
func Some(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// common returns the length of the longest common prefix, in bytes.
func common(a, b string) (count int) {
	for count < min(len(a), len(b)) && a[count] == b[count] {
		count++
	}
	return count
}
