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
	// RecordAnnotation has a node's Progress.
	RecordAnnotation = "virgate.github.io/rollout"
	// ProfileLabel chooses a node's profile.
	ProfileLabel = "nvidia.com/device-plugin.config"
	// LayoutLabel chooses its MIG layout.
	LayoutLabel = "nvidia.com/mig.config"
)

// Place is how far a node has come.
type Place string

const (
	// Waiting says that its turn has not come.
	Waiting Place = "waiting"
	// Pending says that its label is set, and that the node has not said that it follows.
	Pending Place = "pending"
	// Done says that it has what it should, and is well.
	Done Place = "done"
	// Failed says why the rollout stopped.
	Failed Place = "failed"
	// Skipped says that it had failed, and that somebody chose to go on without it.
	Skipped Place = "skipped"
	// Undoing says that its label is as it was, and that the node has not said that it follows.
	Undoing Place = "undoing"
	// Undone says that its label is as it was.
	Undone Place = "undone"
	// Left says that it was not undone, because somebody else had changed its label.
	Left Place = "left"
)

// Places are all of them.
func Places() []Place {
	return []Place{Waiting, Pending, Done, Failed, Skipped, Undoing, Undone, Left}
}

// Phase is what a rollout does.
type Phase string

const (
	// Claiming says that its nodes are not known to be its own, and none has a label of it.
	Claiming Phase = "claiming"
	// Running says that it goes on, if somebody drives it.
	Running Phase = "running"
	// Paused says that somebody paused it, or --pause-after.
	Paused Phase = "paused"
	// Stopped says that a node is in the way.
	Stopped Phase = "stopped"
	// Finished says that all nodes have what they should, but those that were skipped.
	Finished Phase = "finished"
	// TakingBack says that it is being undone.
	TakingBack Phase = "undoing"
	// TakenBack says that it has been.
	TakenBack Phase = "undone"
)

// Ended says that nothing is left to do, so that another rollout may have the nodes.
func (p Phase) Ended() bool { return p == Finished || p == TakenBack }

// Params are what was asked for. They lie in the rollout's ConfigMap.
type Params struct {
	ID string `json:"id"`
	// Label is set to To; MIG says that it names a MIG layout and no profile.
	Label string `json:"label"`
	To    string `json:"to"`
	MIG   bool   `json:"mig,omitempty"`
	// By says who started it, Started when, and Selector which nodes were meant.
	By       string    `json:"by"`
	Started  time.Time `json:"started"`
	Selector string    `json:"selector,omitempty"`
	// Max is how many nodes may be under way at once, and a wave has that many.
	Max int `json:"max"`
	// Timeout is how long a node may take, in seconds.
	Timeout int `json:"timeout"`
	// Domain is that of the resources. AllowIll does not look at those that are not allocatable.
	Domain   string `json:"domain"`
	AllowIll bool   `json:"allowIll,omitempty"`
}

// Record is a node's part in a rollout.
type Record struct {
	Params
	// From is what the label was when the rollout began, nil where there was none.
	From *string
	Wave int
	Progress
}

// Progress is how far a node has come. It is all that lies on the Node, where the node can write
// it too: what it says there is about itself alone.
type Progress struct {
	Rollout string `json:"rollout"`
	Place   Place  `json:"place"`
	// Reason says why it is there, for people.
	Reason string `json:"reason,omitempty"`
	// Set says that the rollout has set the label, and did not only find it.
	Set bool `json:"set,omitempty"`
	// Since is when the label was last set, or when somebody last asked to wait for the node again.
	Since time.Time `json:"since,omitzero"`
	// Before is what the node said when the label was set.
	Before Said `json:"before,omitzero"`
	// Applied is since when it says what it should, while it is not well yet.
	Applied time.Time `json:"applied,omitzero"`
	// Trusted says that it was done before: what it says is of this rollout.
	Trusted bool `json:"trusted,omitempty"`
	// Ill is how many devices were the fewest not allocatable since it was done.
	Ill int64 `json:"ill,omitempty"`
}

// progressOf reads the annotation. One that virgate rollout has not written so is none.
func progressOf(n *corev1.Node) *Progress {
	var p Progress
	err := json.Unmarshal([]byte(n.Annotations[RecordAnnotation]), &p)
	if err != nil || p.Rollout == "" || !slices.Contains(Places(), p.Place) {
		return nil
	}
	p.Reason = oneLine(p.Reason)
	return &p
}

// toUndo says that the node may have the rollout's label.
func (r *Record) toUndo() bool {
	return r.Set && slices.Contains([]Place{Pending, Done, Failed, Skipped}, r.Place)
}

// Said is what a node says of itself. It was written before the label when it is the same as
// when the label was set.
type Said struct {
	// State, Profile and Generation are those of the profile, Layout is the state of the layout.
	State      string `json:"state,omitempty"`
	Profile    string `json:"profile,omitempty"`
	Generation string `json:"generation,omitempty"`
	Layout     string `json:"layout,omitempty"`
	// Heartbeat is that of the condition: it is written with each change of it.
	Heartbeat string `json:"heartbeat,omitempty"`
	// Ill is how many devices are in the capacity and not allocatable.
	Ill int64 `json:"ill,omitempty"`
}

// Head is what a rollout does, and who drives it.
type Head struct {
	Phase  Phase  `json:"phase"`
	Reason string `json:"reason,omitempty"`
	// PauseAt is the wave that is not begun; 0 for none.
	PauseAt int `json:"pauseAt,omitempty"`
	// IgnoreIll is AllowIll, of who resumed it.
	IgnoreIll bool `json:"ignoreIll,omitempty"`
	// Holder drives it, and says so by another Renewed every few seconds; "" for nobody.
	Holder  string    `json:"holder,omitempty"`
	Renewed time.Time `json:"renewed,omitzero"`
}

// Node is a Node with what is kept of it.
type Node struct {
	cluster.Node
	Version string
	Labels  map[string]string
	// domain is that of the resources that are kept.
	domain string
	// Progress is what its annotation says, of whatever rollout; nil without one.
	Progress *Progress
	// Record is its part in the rollout that has it; nil outside of one.
	Record *Record
}

// nodeOf keeps what is needed of a Node, and of resources those of the domain.
func nodeOf(n *corev1.Node, domain string) Node {
	return Node{
		Node:     cluster.TrimNode(n, domain),
		Version:  n.ResourceVersion,
		Labels:   n.Labels,
		domain:   domain,
		Progress: progressOf(n),
	}
}

// label is the value of the label of that name, nil without one.
func (n Node) label(name string) *string {
	if value, found := n.Labels[name]; found {
		return &value
	}
	return nil
}

func (n Node) said() Said {
	said := Said{
		State:      n.State,
		Profile:    n.Applied,
		Generation: n.Generation,
		Layout:     n.LayoutState,
	}
	if at := n.Condition.LastHeartbeatTime; !at.IsZero() {
		said.Heartbeat = at.UTC().Format(time.RFC3339)
	}
	for name, count := range n.Capacity {
		said.Ill += max(0, count-n.Allocatable[name])
	}
	return said
}

// Rollout is a rollout as its ConfigMap and its nodes have it.
type Rollout struct {
	Params
	Head
	// Nodes are those that are part of it and there, by name.
	Nodes []Node
}

// join puts the plan together with the Nodes. Who is part of the rollout, what it sets and what a
// node had are the plan's; of a Node only its own progress is taken.
func (p plan) join(nodes map[string]Node) *Rollout {
	r := &Rollout{Params: p.Params, Head: p.Head}
	for i, m := range p.members {
		n, found := nodes[m.name]
		if !found {
			continue
		}
		record := Record{
			Params:   p.Params,
			From:     m.from,
			Wave:     i / p.Max,
			Progress: Progress{Rollout: p.ID, Place: Waiting},
		}
		if n.Progress != nil && n.Progress.Rollout == p.ID {
			record.Progress = *n.Progress
		}
		n.Record = &record
		r.Nodes = append(r.Nodes, n)
	}
	return r
}

// Count is how many nodes are at one of these places.
func (r *Rollout) Count(places ...Place) (count int) {
	for _, n := range r.Nodes {
		if slices.Contains(places, n.Record.Place) {
			count++
		}
	}
	return count
}

// ParseMax reads a number of nodes, or a part of all in percent, of which a begun node counts.
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
