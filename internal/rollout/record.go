package rollout

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/cluster"
)

const (
	// RecordAnnotation holds a node's Progress.
	RecordAnnotation = "virgate.github.io/rollout"
	// ProfileLabel chooses a node's profile.
	ProfileLabel = "nvidia.com/device-plugin.config"
	// LayoutLabel chooses its MIG layout.
	LayoutLabel = "nvidia.com/mig.config"
)

// NodeState is how far a node has come in a rollout.
type NodeState string

const (
	// Waiting means that its turn has not come.
	Waiting NodeState = "waiting"
	// Pending means that its label is set, but the node has not yet reported that it follows.
	Pending NodeState = "pending"
	// Done means that it has the profile or layout, and is healthy.
	Done NodeState = "done"
	// Failed means that the rollout stopped because of it.
	Failed NodeState = "failed"
	// Skipped means that it failed or was not ready, and someone chose to go on without it.
	Skipped NodeState = "skipped"
	// Undoing means that its label is restored, but the node has not yet reported that it follows.
	Undoing NodeState = "undoing"
	// Undone means that its label is restored.
	Undone NodeState = "undone"
	// Left means that it was not undone, because someone else had changed its label.
	Left NodeState = "left"
)

// NodeStates returns all states.
func NodeStates() []NodeState {
	return []NodeState{Waiting, Pending, Done, Failed, Skipped, Undoing, Undone, Left}
}

// Phase is what a rollout is doing.
type Phase string

const (
	// Claiming means that its nodes are not certain to be its own yet. It has set no label.
	Claiming Phase = "claiming"
	// Running means that it proceeds while a driver runs.
	Running Phase = "running"
	// Paused means that a user, --pause-after or an interruption of its driver paused it.
	Paused Phase = "paused"
	// Stopped means that a node is in the way.
	Stopped Phase = "stopped"
	// Finished means that all nodes have the profile or layout, except skipped ones.
	Finished Phase = "finished"
	// TakingBack means that it is being undone.
	TakingBack Phase = "undoing"
	// TakenBack means that it was undone.
	TakenBack Phase = "undone"
)

// Ended reports whether nothing is left to do. Another rollout may then have the nodes.
func (p Phase) Ended() bool { return p == Finished || p == TakenBack }

// Params are what was asked for. The rollout's ConfigMap holds them.
type Params struct {
	ID string `json:"id"`
	// Label is set to To. If MIG is true, To is a MIG layout, otherwise a profile.
	Label string `json:"label"`
	To    string `json:"to"`
	MIG   bool   `json:"mig,omitempty"`
	// By is who started it, Started when, and Selector selects the nodes.
	By       string    `json:"by"`
	Started  time.Time `json:"started"`
	Selector string    `json:"selector,omitempty"`
	// Max is how many nodes may be under way at once, which is the size of a wave.
	Max int `json:"max"`
	// Timeout is how long one node may take, in seconds.
	Timeout int `json:"timeout"`
	// Domain is the domain of the resources. AllowUnhealthy ignores devices that are not allocatable.
	Domain         string `json:"domain"`
	AllowUnhealthy bool   `json:"allowUnhealthy,omitempty"`
}

// Record is a node's part in a rollout.
type Record struct {
	Params
	// From is the label's value when the rollout began, nil if there was none.
	From *string
	Wave int
	Progress
}

// Progress is how far a node has come. It is all that the rollout stores on the Node. The node can
// write it too, but only about itself.
type Progress struct {
	Rollout string    `json:"rollout"`
	State   NodeState `json:"place"`
	// Reason explains State to people.
	Reason string `json:"reason,omitempty"`
	// Set is true if the rollout has set the label, and not only found it.
	Set bool `json:"set,omitempty"`
	// Since is when the label was last set, or the wait for the node last restarted.
	Since time.Time `json:"since,omitzero"`
	// Before is what the node reported when the label was set.
	Before Reported `json:"before,omitzero"`
	// Applied is since when the node follows, but has devices that are not allocatable.
	Applied time.Time `json:"applied,omitzero"`
	// Trusted is true if the node was done before: what it reports is about this rollout.
	Trusted bool `json:"trusted,omitempty"`
	// Unhealthy is the lowest number of devices that were not allocatable since it was done.
	Unhealthy int64 `json:"unhealthy,omitempty"`
}

// progressOf reads the annotation. It returns nil for one that kubectl virgate rollout cannot have written.
func progressOf(n *corev1.Node) *Progress {
	var p Progress
	err := json.Unmarshal([]byte(n.Annotations[RecordAnnotation]), &p)
	if err != nil || p.Rollout == "" || !slices.Contains(NodeStates(), p.State) {
		return nil
	}
	p.Reason = oneLine(p.Reason)
	return &p
}

// toUndo reports whether the node may have the rollout's label.
func (r *Record) toUndo() bool {
	return r.Set && slices.Contains([]NodeState{Pending, Done, Failed, Skipped}, r.State)
}

// Reported is what a node reports about itself. If it equals the one from when the label was set, the
// node has reported nothing since.
type Reported struct {
	// State, Profile and Generation describe the profile, Layout is the layout's state.
	State      string `json:"state,omitempty"`
	Profile    string `json:"profile,omitempty"`
	Generation string `json:"generation,omitempty"`
	Layout     string `json:"layout,omitempty"`
	// Heartbeat is the condition's last heartbeat, which changes with every write of the condition.
	Heartbeat string `json:"heartbeat,omitempty"`
	// Unhealthy is how many devices are in the capacity and not allocatable.
	Unhealthy int64 `json:"unhealthy,omitempty"`
}

// State is a rollout's state and its driver.
type State struct {
	Phase  Phase  `json:"phase"`
	Reason string `json:"reason,omitempty"`
	// PauseAt is the first wave that is not begun; 0 for none.
	PauseAt int `json:"pauseAt,omitempty"`
	// IgnoreUnhealthy is AllowUnhealthy as set by Resume.
	IgnoreUnhealthy bool `json:"ignoreUnhealthy,omitempty"`
	// Holder is the driver, which updates Renewed every few seconds; "" if there is none.
	Holder  string    `json:"holder,omitempty"`
	Renewed time.Time `json:"renewed,omitzero"`
}

// Node is the part of a Node that a rollout needs.
type Node struct {
	cluster.Node
	Version string
	Labels  map[string]string
	// domain is the domain of the resources that are kept.
	domain string
	// Progress is the annotation's content, of any rollout; nil without one.
	Progress *Progress
	// Record is the node's part in its rollout; nil without one.
	Record *Record
}

// nodeOf keeps what is needed of a Node, with resources of the domain only.
func nodeOf(n *corev1.Node, domain string) Node {
	return Node{
		Node:     cluster.TrimNode(n, domain),
		Version:  n.ResourceVersion,
		Labels:   n.Labels,
		domain:   domain,
		Progress: progressOf(n),
	}
}

// label returns the value of a label, nil without one.
func (n Node) label(name string) *string {
	if value, found := n.Labels[name]; found {
		return &value
	}
	return nil
}

func (n Node) reported() Reported {
	reported := Reported{
		State:      n.State,
		Profile:    n.Applied,
		Generation: n.Generation,
		Layout:     n.LayoutState,
	}
	if at := n.Condition.LastHeartbeatTime; !at.IsZero() {
		reported.Heartbeat = at.UTC().Format(time.RFC3339)
	}
	for name, count := range n.Capacity {
		reported.Unhealthy += max(0, count-n.Allocatable[name])
	}
	return reported
}

// Rollout is a rollout's ConfigMap joined with its Nodes.
type Rollout struct {
	Params
	State
	// Nodes are the members that exist, sorted by name.
	Nodes []Node
}

// join combines the plan with the Nodes. Membership, the label to set and the previous label come
// from the plan; a Node contributes only its own progress.
func (p plan) join(nodes map[string]Node) *Rollout {
	r := &Rollout{Params: p.Params, State: p.State}
	for i, m := range p.members {
		n, found := nodes[m.name]
		if !found {
			continue
		}
		record := Record{
			Params:   p.Params,
			From:     m.from,
			Wave:     i / p.Max,
			Progress: Progress{Rollout: p.ID, State: Waiting},
		}
		if n.Progress != nil && n.Progress.Rollout == p.ID {
			record.Progress = *n.Progress
		}
		n.Record = &record
		r.Nodes = append(r.Nodes, n)
	}
	return r
}

// Count returns how many nodes are in one of these states.
func (r *Rollout) Count(states ...NodeState) (count int) {
	for _, n := range r.Nodes {
		if slices.Contains(states, n.Record.State) {
			count++
		}
	}
	return count
}

// ParseMax reads a number of nodes, or a percentage of all nodes, rounded up.
func ParseMax(text string, nodes int) (int, error) {
	number, percent := strings.CutSuffix(text, "%")
	value, err := strconv.Atoi(number)
	if err != nil || value < 1 || percent && value > 100 {
		return 0, fmt.Errorf("expected a number of nodes from 1, or a part of them from 1%% to 100%%, got %q", text)
	}
	if percent {
		value = max(1, (nodes*value+99)/100)
	}
	return value, nil
}
