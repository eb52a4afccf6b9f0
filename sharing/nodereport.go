package sharing

import "time"

// ProfileState is how far the profile that should be in force has come.
type ProfileState string

const (
	// ProfileApplied says that it is: the kubelet has the lists of its plan.
	ProfileApplied ProfileState = "applied"
	// ProfilePending says that it is accepted, or not known yet, and that the
	// kubelet does not have its lists yet.
	ProfilePending ProfileState = "pending"
	// ProfileRejected says that it cannot be used; the last good one stays in
	// force.
	ProfileRejected ProfileState = "rejected"
)

// ProfileStates are all states.
func ProfileStates() []ProfileState {
	return []ProfileState{ProfileApplied, ProfilePending, ProfileRejected}
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
}

// NodeReport is what the Kubernetes API should say of a node. It is a value: two
// equal ones say the same.
type NodeReport struct {
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
	// Layouts are the boards that Virgate cuts, by index.
	Layouts []BoardLayout
	// LayoutRefused says that the MIG layout which the node's label names cannot
	// be had, so that Layouts are those of the last one that could.
	LayoutRefused bool
	// Units is the health of all units, by board and partition index.
	Units []UnitHealth
	// Gone are the resources that this program has advertised and stopped, by
	// name.
	Gone []GoneResource
}

// LayoutState is the state of the wanted MIG layout in the words of the label
// nvidia.com/mig.config.state, as mig-manager has them: "success", "pending" or
// "failed"; "" when no board has a wanted layout.
func (r NodeReport) LayoutState() string {
	if r.LayoutRefused {
		return "failed"
	}
	state := ""
	for _, board := range r.Layouts {
		switch {
		case board.State == LayoutFailed:
			return "failed"
		case board.State != LayoutApplied:
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
