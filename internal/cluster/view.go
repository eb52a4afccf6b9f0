package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Snapshot is what was read.
type Snapshot struct {
	At    time.Time
	Nodes []Node
	Pods  []Pod
	// PodsUnread is why the pods were not read, StatusUnread why no status page was requested; ""
	// if they were.
	PodsUnread, StatusUnread string
	// Lost is since when and why a Watcher receives no changes; "" if it receives them.
	Lost string
	// Statuses holds the results for the requested status pages, by node.
	Statuses map[string]Status
}

// View is what users see. Its JSON names are an interface: names may be added, and none changes its
// meaning.
type View struct {
	At      time.Time    `json:"at"`
	Nodes   []NodeView   `json:"nodes"`
	GPUs    []GPUView    `json:"gpus"`
	Tenants []TenantView `json:"tenants"`
	// Rules are the reasons for the nodes' profiles, if a list of rules chooses them.
	Rules []RuleView `json:"rules"`
	// Notes list what is not known.
	Notes []string `json:"notes"`
}

// NodeView is one node.
type NodeView struct {
	Name string `json:"name"`
	// Wanted is the profile that should be in force, Applied the one that is.
	Wanted string `json:"wanted,omitempty"`
	// By is the reason for Wanted: "rule 2 of ConfigMap gpu/profiles". Rules identifies a list of
	// rules. Both are empty if there are no rules and the status page was not read.
	By    string `json:"by,omitempty"`
	Rules string `json:"rules,omitempty"`
	// Delayed is when the node applies a changed ConfigMap; nil if none waits or the status page
	// was not read.
	Delayed *time.Time            `json:"delayed,omitempty"`
	Applied nodereport.ProfileRef `json:"applied"`
	// State is how far the wanted profile is applied; empty if unknown.
	State nodereport.ProfileState `json:"state,omitempty"`
	// Problem is why it is rejected, or what keeps pods from getting devices.
	Problem string `json:"problem,omitempty"`
	// GPUs is how many the node has; nil if unknown.
	GPUs      *int                   `json:"gpus"`
	Models    []string               `json:"models"`
	Resources []ResourceView         `json:"resources"`
	Layouts   []nodereport.GPULayout `json:"layouts"`
	// Layout is the MIG layout that the node's label names, LayoutState how far it is applied.
	Layout      string `json:"layout,omitempty"`
	LayoutState string `json:"layoutState,omitempty"`
	// Heartbeat is when Virgate last wrote its condition; nil if it never did.
	Heartbeat *time.Time `json:"heartbeat"`
	// Unread is why the status page was not read.
	Unread string `json:"unread,omitempty"`
}

// RuleView is a rule, or another reason for a profile, and how far its nodes are.
type RuleView struct {
	// By is the reason: "rule 2 of ConfigMap gpu/profiles". Rule is the number in it; 0 for other
	// reasons.
	By   string `json:"by"`
	Rule int    `json:"rule,omitempty"`
	// Profile is the profile that it chooses; empty if the list of rules is rejected. Rules
	// identifies the list: while a change spreads, nodes have different lists.
	Profile string `json:"profile,omitempty"`
	Rules   string `json:"rules"`
	// Nodes is how many nodes it chooses for. Applied of them have the profile, Rejected refuse it.
	Nodes    int `json:"nodes"`
	Applied  int `json:"applied"`
	Rejected int `json:"rejected"`
	// Delayed counts the nodes that have not yet applied a changed ConfigMap, from the status pages
	// that were read.
	Delayed int `json:"delayed"`
	// Problems lists why nodes refuse it, with the nodes, sorted.
	Problems []string `json:"problems,omitempty"`
}

// ResourceView is one resource of a node.
type ResourceView struct {
	Name        string `json:"name"`
	Allocatable int64  `json:"allocatable"`
	// Unhealthy counts the devices of the capacity that are not allocatable. If the status page is known, it
	// leaves out those that the profile no longer has.
	Unhealthy int64 `json:"unhealthy"`
	// Held is what the node's pods have requested, and Free what the scheduler can still assign;
	// nil if the pods are unknown.
	Held *int64 `json:"held"`
	Free *int64 `json:"free"`
}

// GPUView is a whole GPU or a partition or, without the node's status page, a unit that a pod
// holds.
type GPUView struct {
	Node string `json:"node"`
	// Index, Model and Profile are known only from the status page.
	Index   string `json:"index,omitempty"`
	ID      string `json:"id"`
	Model   string `json:"model,omitempty"`
	Profile string `json:"profile,omitempty"`
	// Placement is the position of a partition in its GPU's Slots memory slots.
	Placement *mig.Placement `json:"placement,omitempty"`
	Slots     int            `json:"slots,omitempty"`
	// Resource is the name under which it is offered or held. Replicas is the number of its
	// devices; 0 if unknown.
	Resource string `json:"resource,omitempty"`
	Replicas int    `json:"replicas"`
	// Sharing is "exclusive", "shared", or the plan's word for it; "" if unknown.
	Sharing string `json:"sharing,omitempty"`
	Held    int    `json:"held"`
	// Health comes from the status page or the kubelet; "" if neither reports it.
	Health  string       `json:"health,omitempty"`
	Reason  string       `json:"reason,omitempty"`
	Use     *status.Use  `json:"use,omitempty"`
	Holders []HolderView `json:"holders"`
}

// HolderView is a container that holds a GPU, or a share of it.
type HolderView struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Devices is how many of its shares the container holds.
	Devices int `json:"devices"`
}

func (h HolderView) String() string { return h.Namespace + "/" + h.Pod }

// TenantView is a namespace with pods that request GPUs.
type TenantView struct {
	Namespace string `json:"namespace"`
	// Pods counts its pods on a node, Waiting its pods without a node.
	Pods    int `json:"pods"`
	Waiting int `json:"waiting"`
	// Resources counts what its pods on nodes have requested.
	Resources map[string]int64 `json:"resources"`
	// Units is how many GPUs and partitions it is known to hold, alone or shared.
	Units int `json:"units"`
	// SharesWith counts, by other namespace, the units that both hold.
	SharesWith map[string]int `json:"sharesWith"`
}

// NewView makes the tables from what was read. It is pure.
func NewView(s Snapshot) View {
	view := View{
		At:      s.At,
		Nodes:   []NodeView{},
		GPUs:    []GPUView{},
		Tenants: []TenantView{},
		Rules:   []RuleView{},
		Notes:   []string{},
	}
	held := map[string]map[string]int64{}
	devices := map[string][]Pod{}
	for _, pod := range s.Pods {
		if pod.Ended || pod.Node == "" {
			continue
		}
		if held[pod.Node] == nil {
			held[pod.Node] = map[string]int64{}
		}
		for name, count := range pod.Requests {
			held[pod.Node][name] += count
		}
		if len(pod.Devices) > 0 {
			devices[pod.Node] = append(devices[pod.Node], pod)
		}
	}
	if s.Lost != "" {
		view.Notes = append(view.Notes, s.Lost)
	}
	if s.PodsUnread != "" {
		view.Notes = append(view.Notes,
			"pods not read, so who holds what is known from status pages alone: "+s.PodsUnread)
	}
	if s.StatusUnread != "" {
		view.Notes = append(view.Notes, "no status page read, so only GPUs that a pod holds are known: "+s.StatusUnread)
	}
	var unread []string
	for _, node := range slices.SortedFunc(slices.Values(s.Nodes),
		func(a, b Node) int { return strings.Compare(a.Name, b.Name) }) {
		status := s.Statuses[node.Name]
		if status.Page == nil && status.Unread != "" && status.Unread != notYet {
			unread = append(unread, fmt.Sprintf("%s (%s)", node.Name, status.Unread))
		}
		v := nodeView(node, status, s.At)
		for _, name := range slices.Sorted(maps.Keys(merged(node.Capacity, held[node.Name]))) {
			r := ResourceView{
				Name:        name,
				Allocatable: node.Allocatable[name],
				Unhealthy:   max(0, node.offered(name, status.Page)-node.Allocatable[name]),
			}
			if s.PodsUnread == "" {
				r.Held = new(held[node.Name][name])
				r.Free = new(max(0, r.Allocatable-*r.Held))
			}
			v.Resources = append(v.Resources, r)
		}
		view.Nodes = append(view.Nodes, v)
		if status.Page != nil {
			view.GPUs = append(view.GPUs, gpusOfStatus(node.Name, *status.Page)...)
		} else {
			view.GPUs = append(view.GPUs, gpusOfPods(node, devices[node.Name])...)
		}
	}
	if len(unread) > 0 {
		view.Notes = append(view.Notes,
			fmt.Sprintf("the status page of %s was not read, so only GPUs that a pod holds are known there: %s",
				Count(len(unread), "node"), Some(unread, 3)))
	}
	view.Tenants = tenants(s.Pods, view.GPUs)
	view.Rules = rulesOf(view.Nodes)
	return view
}

// rulesOf groups the nodes by the reason for their profile: rules by number, then other reasons.
func rulesOf(nodes []NodeView) []RuleView {
	type reason struct{ by, profile, rules string }
	all, problems := map[reason]*RuleView{}, map[reason]map[string][]string{}
	for _, n := range nodes {
		if n.Rules == "" {
			continue
		}
		key := reason{n.By, n.Wanted, n.Rules}
		rule := all[key]
		if rule == nil {
			rule = &RuleView{
				By:      n.By,
				Profile: n.Wanted,
				Rules:   n.Rules,
			}
			_, _ = fmt.Sscanf(n.By, "rule %d of ", &rule.Rule) // 0 for another reason.
			all[key], problems[key] = rule, map[string][]string{}
		}
		rule.Nodes++
		switch n.State {
		case nodereport.ProfileApplied:
			rule.Applied++
		case nodereport.ProfileRejected:
			rule.Rejected++
			problem, _, _ := strings.Cut(n.Problem, "; an earlier one serves ") // The rest differs from node to node.
			problem = strings.TrimPrefix(problem, "ProfileRejected: the wanted profile is refused: ")
			problems[key][problem] = append(problems[key][problem], n.Name)
		}
		if n.Delayed != nil {
			rule.Delayed++
		}
	}
	rules := make([]RuleView, 0, len(all))
	for key, rule := range all {
		for problem, names := range problems[key] {
			rule.Problems = append(rule.Problems, Some(names, 3)+": "+problem)
		}
		slices.Sort(rule.Problems)
		rules = append(rules, *rule)
	}
	last := func(r RuleView) int { return cmp.Or(r.Rule, math.MaxInt) }
	slices.SortFunc(rules, func(a, b RuleView) int {
		return cmp.Or(cmp.Compare(last(a), last(b)), strings.Compare(a.By, b.By), strings.Compare(a.Profile, b.Profile),
			strings.Compare(a.Rules, b.Rules))
	})
	return rules
}

func merged(a, b map[string]int64) map[string]int64 {
	all := maps.Clone(a)
	if all == nil {
		all = map[string]int64{}
	}
	maps.Copy(all, b)
	return all
}

func nodeView(n Node, status Status, now time.Time) NodeView {
	v := NodeView{
		Name:   n.Name,
		Wanted: n.Wanted,
		By:     n.WantedBy,
		Rules:  n.Rules,
		State:  nodereport.ProfileState(n.State),
		Applied: nodereport.ProfileRef{
			Name:       n.Applied,
			Source:     n.Source,
			Generation: n.Generation,
		},
		Models:      []string{},
		Resources:   []ResourceView{},
		Layouts:     []nodereport.GPULayout{},
		Layout:      n.Layout,
		LayoutState: n.LayoutState,
		Unread:      status.Unread,
	}
	if n.GPUs > 0 {
		v.GPUs = new(n.GPUs)
	}
	if n.Model != "" {
		v.Models = append(v.Models, n.Model)
	}
	if c := n.Condition; c.Type != "" {
		v.Heartbeat = new(c.LastHeartbeatTime.Time)
		if c.Status != corev1.ConditionTrue || v.State == nodereport.ProfileRejected {
			v.Problem = strings.TrimSuffix(c.Reason+": "+c.Message, ": ")
		}
		if age := now.Sub(c.LastHeartbeatTime.Time); age > stale {
			v.Problem = strings.TrimPrefix(fmt.Sprintf("%s; nothing heard for %s", v.Problem, age.Round(time.Minute)),
				"; ")
		}
	}
	if page := status.Page; page != nil {
		v.State, v.Wanted = page.Profile.State, cmp.Or(page.Profile.Wanted.Name, v.Wanted)
		v.By = page.Profile.Wanted.By
		v.Rules = page.Profile.Wanted.Rules
		v.Delayed = page.Profile.Delayed
		if page.Profile.Applied != nil {
			v.Applied = *page.Profile.Applied
		}
		v.Problem = cmp.Or(page.Profile.Problem, page.Unread, v.Problem)
		v.Layouts = append(v.Layouts, page.Layouts...)
		v.GPUs = new(len(page.GPUs))
		v.Models = v.Models[:0]
		for _, gpu := range page.GPUs {
			if !slices.Contains(v.Models, gpu.Model) {
				v.Models = append(v.Models, gpu.Model)
			}
		}
		slices.Sort(v.Models)
	}
	if n.NotReady != "" {
		v.Problem = n.NotReady
	}
	return v
}

// gpusOfStatus returns the units on the node's status page.
func gpusOfStatus(node string, page status.Status) []GPUView {
	strategies := map[string]string{}
	for _, r := range page.Resources {
		strategies[r.Name] = r.Strategy
	}
	var views []GPUView
	add := func(unit status.Unit, gpu status.GPU) {
		v := GPUView{
			Node:      node,
			Index:     unit.Index,
			ID:        unit.ID,
			Model:     gpu.Model,
			Profile:   unit.Profile,
			Placement: unit.Placement,
			Resource:  unit.Resource,
			Replicas:  unit.Replicas,
			Sharing:   strategies[unit.Resource],
			Held:      unit.Held(),
			Health:    string(unit.Health.State),
			Reason:    unit.Health.Reason,
			Holders:   []HolderView{},
		}
		v.Use = gpu.Use
		if unit.ID != gpu.UUID {
			v.Use = nil
			if gpu.Health.State != sharing.Healthy && gpu.Health.State != "" {
				v.Health, v.Reason = string(gpu.Health.State), gpu.Health.Reason
			}
		}
		if unit.Placement != nil {
			v.Slots = status.Slots(gpu)
		}
		for _, h := range unit.Holders {
			v.Holders = append(v.Holders, HolderView{h.Namespace, h.Pod, h.Container, len(h.Devices)})
		}
		views = append(views, v)
	}
	for _, gpu := range page.GPUs {
		if len(gpu.Units) == 0 {
			add(status.Unit{
				ID:     gpu.UUID,
				Index:  strconv.Itoa(gpu.Index),
				Health: gpu.Health,
			}, gpu)
		}
		for _, unit := range gpu.Units {
			add(unit, gpu)
		}
	}
	for _, unit := range page.Elsewhere {
		add(unit, status.GPU{Model: "not on this node"})
	}
	return views
}

// gpusOfPods returns the units that the node's pods hold according to the kubelet, sorted by ID.
func gpusOfPods(node Node, pods []Pod) []GPUView {
	units := map[string]*GPUView{}
	for _, pod := range pods {
		for _, device := range pod.Devices {
			id, _, shared := sharing.ParseDeviceID(device.ID)
			v := units[id]
			if v == nil {
				v = &GPUView{
					Node:     node.Name,
					ID:       id,
					Model:    node.Model,
					Resource: device.Resource,
					Sharing:  "exclusive",
					Holders:  []HolderView{},
				}
				if node.GPUs > 0 && node.Capacity[device.Resource] > int64(node.GPUs) {
					v.Sharing = "" // It may be a share, see sharing.Use.CanBecome.
				}
				units[id] = v
			}
			if shared {
				v.Sharing = "shared"
			}
			if v.Health != string(corev1.ResourceHealthStatusUnhealthy) {
				v.Health = device.Health
			}
			v.Held++
			holder := HolderView{pod.Namespace, pod.Name, device.Container, 1}
			same := func(h HolderView) bool { return h.String() == holder.String() && h.Container == holder.Container }
			if i := slices.IndexFunc(v.Holders, same); i >= 0 {
				v.Holders[i].Devices++
			} else {
				v.Holders = append(v.Holders, holder)
			}
		}
	}
	views := make([]GPUView, 0, len(units))
	for _, id := range slices.Sorted(maps.Keys(units)) {
		slices.SortFunc(units[id].Holders, func(a, b HolderView) int {
			return cmp.Or(strings.Compare(a.String(), b.String()), strings.Compare(a.Container, b.Container))
		})
		views = append(views, *units[id])
	}
	return views
}

// tenants returns the namespaces of the pods and of the units' holders, sorted by name.
func tenants(pods []Pod, gpus []GPUView) []TenantView {
	all := map[string]*TenantView{}
	of := func(namespace string) *TenantView {
		if all[namespace] == nil {
			all[namespace] = &TenantView{
				Namespace:  namespace,
				Resources:  map[string]int64{},
				SharesWith: map[string]int{},
			}
		}
		return all[namespace]
	}
	for _, pod := range pods {
		switch {
		case pod.Ended || len(pod.Requests) == 0:
		case pod.Node == "":
			of(pod.Namespace).Waiting++
		default:
			of(pod.Namespace).Pods++
			for name, count := range pod.Requests {
				of(pod.Namespace).Resources[name] += count
			}
		}
	}
	for _, gpu := range gpus {
		holders := map[string]bool{}
		for _, h := range gpu.Holders {
			holders[h.Namespace] = true
		}
		for namespace := range holders {
			of(namespace).Units++
			for other := range holders {
				if other != namespace {
					of(namespace).SharesWith[other]++
				}
			}
		}
	}
	views := make([]TenantView, 0, len(all))
	for _, namespace := range slices.Sorted(maps.Keys(all)) {
		views = append(views, *all[namespace])
	}
	return views
}
