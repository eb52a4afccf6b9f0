// Package nodereport has the values that describe the state of a node: which profile is in force,
// what became of the MIG layouts, and whether pods can get what is offered.
//
// internal/agent and internal/migchange make them, internal/nodestatus writes them to the
// Kubernetes API, and the status page shows them. The package itself decides and sends nothing.
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
	// ProfileApplied means that the profile is in force: the kubelet has applied the lists of its plan.
	ProfileApplied ProfileState = "applied"
	// ProfilePending means that the profile is accepted, or not known yet, and that the kubelet
	// does not have its lists yet.
	ProfilePending ProfileState = "pending"
	// ProfileSwitching means that the kubelet has the profile's lists, but some GPUs and partitions
	// are not yet offered as the profile wants: they have to become free first.
	ProfileSwitching ProfileState = "switching"
	// ProfileRejected means that the profile cannot be used; the last good one stays in force.
	ProfileRejected ProfileState = "rejected"
)

// ProfileStates returns all states.
func ProfileStates() []ProfileState {
	return []ProfileState{ProfileApplied, ProfilePending, ProfileSwitching, ProfileRejected}
}

// ProfileRef identifies a profile.
type ProfileRef struct {
	// Name is its key in a ConfigMap or its file in a folder; empty if there is only one profile.
	Name string `json:"name,omitempty"`
	// Source is where it was read, in words: "ConfigMap gpu/profiles".
	Source string `json:"source,omitempty"`
	// Generation is the same for the same resolved profile; empty for a profile that could not be
	// resolved.
	Generation string `json:"generation,omitempty"`
	// By is why the node has this profile, in words: "rule 2 of ConfigMap gpu/profiles", "label …",
	// "default: …"; empty if there is nothing to choose from.
	By string `json:"by,omitempty"`
	// Rule is the number of the rule in By, counted from 1; 0 for none. Rules identifies the list
	// of rules; empty if there is none.
	Rule  int    `json:"rule,omitempty"`
	Rules string `json:"rules,omitempty"`
}

// Chosen returns what was chosen, and why: "time-slicing-4 by rule 2 of ConfigMap gpu/profiles".
func (p ProfileRef) Chosen() string {
	return strings.TrimSpace(cmp.Or(p.Name, "no named profile") + " by " + p.By)
}

// ChosenBy returns the kind of By, its first word: "label", "rule", "default", "fallback".
func (p ProfileRef) ChosenBy() string {
	word, _, _ := strings.Cut(p.By, " ")
	return strings.TrimSuffix(word, ":")
}

// SameProfile reports whether both are the same profile, for whatever reason they were chosen.
func (p ProfileRef) SameProfile(other ProfileRef) bool {
	return p.Name == other.Name && p.Source == other.Source && p.Generation == other.Generation
}

// Same reports whether both are the same profile and, if rules choose, were chosen for the same
// reason. An edited list of rules may choose the same.
func (p ProfileRef) Same(other ProfileRef) bool {
	return p.SameProfile(other) && (p.By == other.By || p.Rules == "" && other.Rules == "")
}

// Wait is a unit that cannot be offered as the profile wants until the pods are gone that hold it
// in another way.
type Wait struct {
	// GPU is the UUID of the GPU, Unit is the UUID of the GPU or partition, and Index is the
	// driver's: "2", "2:0".
	GPU   string `json:"gpu"`
	Unit  string `json:"unit"`
	Index string `json:"index"`
	// Resource is the name under which it is held.
	Resource string `json:"resource"`
	// Pods are the holders as "namespace/name", sorted; empty while the kubelet does not
	// name them.
	Pods []string `json:"pods"`
	// Since is when the profile first wanted the unit in another way.
	Since time.Time `json:"since"`
}

// Name returns "GPU 3 (GPU-…)" or "partition 3:0 (MIG-…)".
func (w Wait) Name() string {
	what := "GPU"
	if w.Unit != w.GPU {
		what = "partition"
	}
	return fmt.Sprintf("%s %s (%s)", what, w.Index, w.Unit)
}

// String returns "GPU 3 (GPU-…), held as nvidia.com/gpu by ns/pod".
func (w Wait) String() string {
	return fmt.Sprintf("%s, held as %s by %s", w.Name(), w.Resource,
		cmp.Or(strings.Join(w.Pods, ", "), sharing.UnnamedHolder))
}

// ReleasedUntil is part of the warning about a released GPU. Readers recognize the warning by it.
const ReleasedUntil = "is not offered: it is released until "

// Waiting returns what a switch waits for: one sentence for each GPU without its layout, and one
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

// Report is what the Kubernetes API should say about a node. It is a value: two equal reports say
// the same.
type Report struct {
	State ProfileState
	// Wanted is the profile that should be in force, as far as it is known. Applied is the profile
	// whose lists the kubelet has, zero before the first.
	Wanted, Applied ProfileRef
	// Problem is the first problem of a rejected profile: file, path and value; empty if the
	// profile is not rejected.
	Problem string
	// Ready is whether pods can get what the profile in force offers, in the words of Kubernetes'
	// conditions.
	Ready ConditionStatus
	// Reason is one CamelCase word for why, and Message is a sentence for people.
	Reason, Message string
	// Layouts are the GPUs that Virgate partitions, by index.
	Layouts []GPULayout
	// NoLayout is true if the profile in force asks for no MIG layout; false while there is no profile.
	NoLayout bool
	// LayoutRefused is true if the GPUs cannot have the MIG layout that the node's label names.
	// Then Layouts are for the last layout that was possible.
	LayoutRefused bool
	// LayoutsLeft is true if another program makes the MIG layouts and reports their state.
	LayoutsLeft bool
	// Renumbering is the result of sharing.Renumbering.
	Renumbering string
	// Units is the health of all units, by GPU and partition index.
	Units []sharing.UnitHealth
	// Hit are the pods, as "namespace/name", that hold each suspect or unhealthy unit, by its UUID.
	// A GPU's pods include the pods that hold its partitions.
	Hit map[string][]string
	// Waits are the units whose holders the profile waits for, by GPU and partition index.
	Waits []Wait
	// Features are the labels that say which GPUs the node has and how they are shared; nil if that
	// is not known, or if no feature labels are wanted.
	Features map[string]string
	// OverLimit are the containers that have been over the profile's memory limit for a unit for
	// longer than its grace, by unit and container.
	OverLimit []OverLimit
	// Gone are the resources that this program has advertised and then stopped, by name.
	Gone []GoneResource
}

// OverLimit is a container that has been over its memory limit for a unit for longer than the grace.
type OverLimit struct {
	Unit string
	sharing.Container
	// Text is what was found at the end of the grace.
	Text string
	// Evicted is true if the container's pod is evicted. Refused says why the pod is not evicted
	// although it should be.
	Evicted bool
	Refused string
}

// Reasons why a pod is not evicted.
var (
	// ErrDisruptionBudget means that a PodDisruptionBudget does not allow the eviction now.
	ErrDisruptionBudget = errors.New("a PodDisruptionBudget does not allow it now")
	// ErrMayNotEvict means that this program may not evict pods, or not this one.
	ErrMayNotEvict = errors.New(
		"this Virgate may not evict pods: that requires --evict-over-limit and the rights to create pods/eviction " +
			"and to delete pods, which are the chart's memoryGuard.evict")
	// ErrPodGone means that the pod no longer exists.
	ErrPodGone = errors.New("the pod is gone")
)

// LayoutState returns the state of the wanted MIG layouts in mig-manager's words for the label
// nvidia.com/mig.config.state: "success", "pending" or "failed"; "" if no GPU has a wanted layout.
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
	// ConditionTrue means that the condition holds.
	ConditionTrue ConditionStatus = "True"
	// ConditionFalse means that the condition does not hold.
	ConditionFalse ConditionStatus = "False"
	// ConditionUnknown means that too little is known yet.
	ConditionUnknown ConditionStatus = "Unknown"
)

// GoneResource is a resource that is no longer advertised.
type GoneResource struct {
	Name string
	// Since is when its server stopped.
	Since time.Time
}

// LayoutState is how far a GPU has come on its way to the wanted layout.
type LayoutState string

const (
	// LayoutApplied means that the GPU has its layout.
	LayoutApplied LayoutState = "applied"
	// LayoutPending means that the layout is being changed: devices are being withdrawn, or
	// partitions created.
	LayoutPending LayoutState = "pending"
	// LayoutBlocked means that partitions in use block the change. What is possible without them
	// has been done, unless the profile forbids that.
	LayoutBlocked LayoutState = "blocked"
	// LayoutFailed means that the driver refused and the GPU is as it was, or that the GPU cannot
	// have the layout.
	LayoutFailed LayoutState = "failed"
	// LayoutResetRequired means that a change of the MIG mode waits for a reset of the GPU or a reboot.
	LayoutResetRequired LayoutState = "reset-required"
)

// LayoutStates returns all states.
func LayoutStates() []LayoutState {
	return []LayoutState{LayoutApplied, LayoutPending, LayoutBlocked, LayoutFailed, LayoutResetRequired}
}

// GPULayout is the wanted layout of a GPU that Virgate partitions, and how far the GPU has come.
type GPULayout struct {
	// GPU and Index name the GPU.
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// Wanted is the layout's name.
	Wanted string      `json:"wanted"`
	State  LayoutState `json:"state"`
	// Reason says why the state is not LayoutApplied; empty if it is.
	Reason string `json:"reason,omitempty"`
	// MIG, Slots and Instances are how the GPU was partitioned when it was last read: whether it is
	// in MIG mode, how many memory slots it has, and which instances are in them.
	MIG       bool           `json:"mig"`
	Slots     int            `json:"slots"`
	Instances []mig.Instance `json:"instances,omitempty"`
	// Unreachable is the number of free slots in which nothing can be placed now.
	Unreachable int `json:"unreachable,omitempty"`
	// Resettable is true if a reset of the GPU activates a pending MIG mode; false if that requires
	// a reboot.
	Resettable bool `json:"-"`
}

// String returns a sentence that the GPU does not have its layout, and why.
func (l GPULayout) String() string {
	return fmt.Sprintf("GPU %d (%s) does not have layout %s: %s", l.Index, l.GPU, l.Wanted,
		cmp.Or(l.Reason, "it is being changed"))
}
