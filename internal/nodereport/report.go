// Package nodereport has the values in which the program says how its node is:
// which profile is in force, what became of the MIG layouts, and whether pods can
// be given what is offered.
//
// internal/agent and internal/migchange make them, internal/nodestatus writes them
// to the Kubernetes API, and the status page shows them. The package decides and
// sends nothing.
package nodereport

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// ProfileState is how far the profile that should be in force has come.
type ProfileState string

const (
	// ProfileApplied says that it is: the kubelet has applied the lists of its plan.
	ProfileApplied ProfileState = "applied"
	// ProfilePending says that it is accepted, or not known yet, and that the
	// kubelet does not have its lists yet.
	ProfilePending ProfileState = "pending"
	// ProfileSwitching says that the kubelet is told of it, but not yet of every GPU and
	// partition as it wants them: those have to be free first.
	ProfileSwitching ProfileState = "switching"
	// ProfileRejected says that it cannot be used; the last good one stays in
	// force.
	ProfileRejected ProfileState = "rejected"
)

// ProfileStates are all states.
func ProfileStates() []ProfileState {
	return []ProfileState{ProfileApplied, ProfilePending, ProfileSwitching, ProfileRejected}
}

// ProfileRef says which profile is meant.
type ProfileRef struct {
	// Name is its key in a ConfigMap or its file in a folder; empty where there
	// is only one.
	Name string `json:"name,omitempty"`
	// Source is where it was read, for people: "ConfigMap gpu/profiles".
	Source string `json:"source,omitempty"`
	// Generation is the same for the same resolved profile; empty for one that
	// could not be resolved.
	Generation string `json:"generation,omitempty"`
	// By is why it is the node's, for people: "rule 2 of ConfigMap gpu/profiles", "label …",
	// "default: …"; empty where there is nothing to choose from.
	By string `json:"by,omitempty"`
	// Rule is the number of that rule, counted from 1; 0 for none. Rules tells one list of rules from
	// another; it is empty where there is none.
	Rule  int    `json:"rule,omitempty"`
	Rules string `json:"rules,omitempty"`
}

// Chosen says what was chosen, and why: "time-slicing-4 by rule 2 of ConfigMap gpu/profiles".
func (p ProfileRef) Chosen() string {
	return strings.TrimSpace(cmp.Or(p.Name, "no named profile") + " by " + p.By)
}

// ChosenBy is the kind of By, its first word: "label", "rule", "default", "fallback".
func (p ProfileRef) ChosenBy() string {
	word, _, _ := strings.Cut(p.By, " ")
	return strings.TrimSuffix(word, ":")
}

// SameProfile says that both are the same profile, chosen for whatever reason.
func (p ProfileRef) SameProfile(other ProfileRef) bool {
	return p.Name == other.Name && p.Source == other.Source && p.Generation == other.Generation
}

// Same says that both are the same profile and, where rules choose, for the same reason. A list of
// rules that was edited may give the same.
func (p ProfileRef) Same(other ProfileRef) bool {
	return p.SameProfile(other) && (p.By == other.By || p.Rules == "" && other.Rules == "")
}

// Wait is a unit that cannot be offered as the profile wants it before the pods are gone
// that hold it in another way.
type Wait struct {
	// GPU is the UUID of the GPU, Unit that of the GPU or the partition, and Index the
	// driver's: "2", "2:0".
	GPU   string `json:"gpu"`
	Unit  string `json:"unit"`
	Index string `json:"index"`
	// Resource is the name under which it is held.
	Resource string `json:"resource"`
	// Pods are the holders as "namespace/name", sorted; empty while the kubelet does not
	// name them.
	Pods []string `json:"pods"`
	// Since is when the profile first wanted the unit otherwise.
	Since time.Time `json:"since"`
}

// Name is "GPU 3 (GPU-…)" or "partition 3:0 (MIG-…)".
func (w Wait) Name() string {
	what := "GPU"
	if w.Unit != w.GPU {
		what = "partition"
	}
	return fmt.Sprintf("%s %s (%s)", what, w.Index, w.Unit)
}

// String is "GPU 3 (GPU-…), held as nvidia.com/gpu by ns/pod".
func (w Wait) String() string {
	return fmt.Sprintf("%s, held as %s by %s", w.Name(), w.Resource,
		cmp.Or(strings.Join(w.Pods, ", "), sharing.UnnamedHolder))
}

// ReleasedUntil is in the warning of a GPU that is released, by which others tell it.
const ReleasedUntil = "is not offered: it is released until "

// Waiting is what a switch waits for: one sentence for each GPU without its layout, and
// for each unit of the other GPUs that waits for its holders.
func Waiting(layouts []GPULayout, waits []Wait) []string {
	var texts []string
	told := map[string]bool{}
	for _, gpu := range layouts {
		told[gpu.GPU] = gpu.State == LayoutPending || gpu.State == LayoutBlocked
		if told[gpu.GPU] {
			texts = append(texts, gpu.String())
		}
	}
	for _, w := range waits {
		if !told[w.GPU] {
			texts = append(texts, w.String()+", since "+w.Since.UTC().Format(time.RFC3339))
		}
	}
	return texts
}

// Report is what the Kubernetes API should say of a node. It is a value: two
// equal ones say the same.
type Report struct {
	State ProfileState
	// Wanted is the profile that should be in force, as far as it is known;
	// Applied is the one whose lists the kubelet has, zero before the first.
	Wanted, Applied ProfileRef
	// Problem is the first thing wrong with a rejected profile: file, path and
	// value; empty for one that is not rejected.
	Problem string
	// Ready says whether pods can be given what the profile in force offers, in
	// the words of Kubernetes' conditions.
	Ready ConditionStatus
	// Reason is one CamelCase word why, Message a sentence for people.
	Reason, Message string
	// Layouts are the GPUs that Virgate partitions, by index.
	Layouts []GPULayout
	// NoLayout says that the profile in force asks for no MIG layout; false while there is none.
	NoLayout bool
	// LayoutRefused says that the MIG layout which the node's label names cannot
	// be had, so that Layouts are those of the last one that could.
	LayoutRefused bool
	// LayoutsLeft says that another program makes the MIG layouts and tells their state.
	LayoutsLeft bool
	// Renumbering is that of sharing.Renumbering.
	Renumbering string
	// Units is the health of all units, by GPU and partition index.
	Units []sharing.UnitHealth
	// Hit are the pods, as "namespace/name", that hold each unit which is suspect or
	// unhealthy, by its UUID; for a GPU those of its partitions too.
	Hit map[string][]string
	// Waits are the units for whose holders the profile waits, by GPU and partition index.
	Waits []Wait
	// Features are the labels that say what GPUs the node has and how they are shared; nil
	// while that is not known, or where nobody wants them.
	Features map[string]string
	// OverLimit are the containers that have used more memory of a unit than the profile lets
	// them for longer than its grace, by unit and container.
	OverLimit []OverLimit
	// Gone are the resources that this program has advertised and stopped, by
	// name.
	Gone []GoneResource
}

// OverLimit is a container that has used more memory of a unit than its limit for longer than
// the grace.
type OverLimit struct {
	Unit string
	sharing.Container
	// Text is what was found when the grace was over.
	Text string
	// Evicted says that its pod is evicted, Refused why it is not although it should be.
	Evicted bool
	Refused string
}

// What can keep a pod from being evicted.
var (
	// ErrDisruptionBudget says that a PodDisruptionBudget does not allow it now.
	ErrDisruptionBudget = errors.New("a PodDisruptionBudget does not allow it now")
	// ErrMayNotEvict says that this program may not evict pods.
	ErrMayNotEvict = errors.New(
		"this Virgate may not evict pods: it takes --evict-over-limit and the rights to create pods/eviction and to " +
			"delete pods, which are the chart's memoryGuard.evict")
	// ErrPodGone says that there is no such pod any more.
	ErrPodGone = errors.New("the pod is gone")
)

// LayoutState is the state of the wanted MIG layout in the words of the label
// nvidia.com/mig.config.state, as mig-manager has them: "success", "pending" or
// "failed"; "" when no GPU has a wanted layout.
func (r Report) LayoutState() string {
	if r.LayoutRefused {
		return "failed"
	}
	state := ""
	for _, gpu := range r.Layouts {
		switch {
		case gpu.State == LayoutFailed:
			return "failed"
		case gpu.State != LayoutApplied:
			state = "pending"
		case state == "":
			state = "success"
		}
	}
	return state
}

// ConditionStatus is a condition's status in the Kubernetes API.
type ConditionStatus string

const (
	// ConditionTrue says that it holds.
	ConditionTrue ConditionStatus = "True"
	// ConditionFalse says that it does not.
	ConditionFalse ConditionStatus = "False"
	// ConditionUnknown says that too little is known yet.
	ConditionUnknown ConditionStatus = "Unknown"
)

// GoneResource is a resource that is not advertised any more.
type GoneResource struct {
	Name string
	// Since is when its server stopped.
	Since time.Time
}

// LayoutState is how far a GPU has come on its way to the wanted layout.
type LayoutState string

const (
	// LayoutApplied says that the GPU has its layout.
	LayoutApplied LayoutState = "applied"
	// LayoutPending says that it is being changed: devices are being withdrawn, or
	// partitions made.
	LayoutPending LayoutState = "pending"
	// LayoutBlocked says that partitions in use are in the way. What could be done
	// without them has been, unless the profile refuses that.
	LayoutBlocked LayoutState = "blocked"
	// LayoutFailed says that the driver refused, and that the GPU is as it was;
	// or that the GPU cannot have the layout.
	LayoutFailed LayoutState = "failed"
	// LayoutResetRequired says that another MIG mode waits for a reset of the
	// GPU or a reboot.
	LayoutResetRequired LayoutState = "reset-required"
)

// LayoutStates are all states.
func LayoutStates() []LayoutState {
	return []LayoutState{LayoutApplied, LayoutPending, LayoutBlocked, LayoutFailed, LayoutResetRequired}
}

// GPULayout is what layout a GPU is to have of those that Virgate partitions, and
// how far it is.
type GPULayout struct {
	// GPU and Index name the GPU.
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// Wanted is the layout's name.
	Wanted string      `json:"wanted"`
	State  LayoutState `json:"state"`
	// Reason says why the state is not LayoutApplied; empty when it is.
	Reason string `json:"reason,omitempty"`
	// MIG, Slots and Instances are how the GPU was partitioned when last looked at:
	// the mode, how many memory slots it has and what lies in them.
	MIG       bool           `json:"mig"`
	Slots     int            `json:"slots"`
	Instances []mig.Instance `json:"instances,omitempty"`
	// Unreachable is how many free slots nothing can be placed in now.
	Unreachable int `json:"unreachable,omitempty"`
	// Resettable says that a reset of the GPU activates a pending MIG mode; false where that
	// takes a reboot.
	Resettable bool `json:"-"`
}

// String says that the GPU does not have its layout, and why.
func (l GPULayout) String() string {
	return fmt.Sprintf("GPU %d (%s) does not have layout %s: %s", l.Index, l.GPU, l.Wanted,
		cmp.Or(l.Reason, "it is being changed"))
}
