package agent

import (
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Status is what a running Virgate does, at one moment. It is made anew for
// each reader and never changed. Its JSON names are an interface: names are
// added, and none changes its meaning.
type Status struct {
	// Node is the Node object's name; empty when it was not told.
	Node    string `json:"node,omitempty"`
	Version string `json:"version"`
	Role    Role   `json:"role"`
	// Ready and Unready are as /readyz has them: Unready says why not, and has
	// nothing when Ready.
	Ready   bool          `json:"ready"`
	Unready []string      `json:"unready"`
	Profile ProfileStatus `json:"profile"`
	// KubeletKnown says that what the kubelet holds and has applied could be read
	// when it was last needed; HoldersKnown that who holds what could be read.
	KubeletKnown bool `json:"kubeletKnown"`
	HoldersKnown bool `json:"holdersKnown"`
	// Attributed says that it is known which container uses how much.
	Attributed bool `json:"attributed"`
	// Resources are those that the kubelet is told of, and those that are planned
	// and wait for their units, by name.
	Resources []ResourceStatus `json:"resources"`
	// GPUs are the node's boards by index, as last seen.
	GPUs []GPUStatus `json:"gpus"`
	// Layouts are the boards that Virgate cuts, by index.
	Layouts []sharing.BoardLayout `json:"layouts"`
	// Elsewhere are units that containers hold and that the node does not show,
	// such as a partition that was cut away, by ID.
	Elsewhere []UnitStatus `json:"elsewhere"`
	// Unread says why the GPUs cannot be read now; empty when they can.
	Unread string `json:"unread,omitempty"`
	// Warnings are the plan's, and what cannot be granted or kept now.
	Warnings []string `json:"warnings"`
}

// Role is what a program does on its node.
type Role string

const (
	// RoleStarting waits until it knows whether it may serve.
	RoleStarting Role = "starting"
	// RoleStandby is ready to serve in the place of another program.
	RoleStandby Role = "standby"
	// RoleServing serves the kubelet.
	RoleServing Role = "serving"
	// RoleDraining withdraws everything before it ends.
	RoleDraining Role = "draining"
)

// ProfileStatus is how far the wanted profile has come.
type ProfileStatus struct {
	State sharing.ProfileState `json:"state"`
	// Since is when it came into State.
	Since time.Time `json:"since"`
	// Wanted is the profile that should be in force, as far as it is known.
	Wanted sharing.ProfileRef `json:"wanted"`
	// Applied is the one whose lists the kubelet has; nil before the first.
	Applied *sharing.ProfileRef `json:"applied"`
	// Problem is the first thing wrong with a rejected profile, Error all that is,
	// one a line. Of one that is not known yet they say why; else they are empty.
	Problem string `json:"problem,omitempty"`
	Error   string `json:"error,omitempty"`
}

// ResourceStatus is how one resource is served now.
type ResourceStatus struct {
	Name string `json:"name"`
	// Strategy is sharing.Resource.Strategy; empty for a resource that the plan
	// does not have any more.
	Strategy string `json:"strategy,omitempty"`
	// Dropped says that the plan does not have it any more.
	Dropped bool `json:"dropped"`
	// Streams is how many streams the kubelet has open for it; 1 is right.
	Streams int `json:"streams"`
	// Devices, Healthy and Leaving count devices of its list: all, those that the
	// kubelet may hand out, and those on their way out.
	Devices int `json:"devices"`
	Healthy int `json:"healthy"`
	Leaving int `json:"leaving"`
	// Held counts devices that containers hold under its name, Free planned ones
	// that are healthy and that nobody holds; nil when the holders are not known.
	Held *int `json:"held"`
	Free *int `json:"free"`
	// Refused counts the Allocate calls that were refused since it is served, by
	// why; without reasons that never came up.
	Refused map[plugin.Reason]uint64 `json:"refused,omitempty"`
}

// GPUStatus is one board.
type GPUStatus struct {
	UUID  string `json:"uuid"`
	Index int    `json:"index"`
	Model string `json:"model"`
	// Memory is in bytes.
	Memory uint64 `json:"memory"`
	// MIG says that MIG mode is enabled.
	MIG bool `json:"mig"`
	// Health is the board's own; a partition has one beside it.
	Health HealthStatus `json:"health"`
	// Use is how it is used as a whole; nil where that was not measured.
	Use *UseStatus `json:"use,omitempty"`
	// Units are the board's partitions by index, or else the board itself.
	Units []UnitStatus `json:"units"`
}

// UnitStatus is a whole GPU or a partition.
type UnitStatus struct {
	// ID is its UUID, Index the driver's: "2", "2:0"; empty when it is not known.
	ID    string `json:"id"`
	Index string `json:"index,omitempty"`
	// Profile is a partition's MIG profile; empty for a whole GPU.
	Profile string `json:"profile,omitempty"`
	// Placement is where its GPU instance lies, in memory slots; nil for a whole
	// GPU.
	Placement *mig.Placement `json:"placement,omitempty"`
	// Memory is in bytes; 0 when unknown.
	Memory uint64 `json:"memory,omitempty"`
	// Resource is the name under which it is offered now, by Replicas devices;
	// empty and 0 when it is not.
	Resource string       `json:"resource,omitempty"`
	Replicas int          `json:"replicas"`
	Health   HealthStatus `json:"health"`
	// Holders are the containers that hold devices of it, by namespace, pod,
	// container and resource.
	Holders []Holder `json:"holders"`
}

// Held is the number of the unit's devices that containers hold.
func (u UnitStatus) Held() int {
	count := 0
	for _, holder := range u.Holders {
		count += len(holder.Devices)
	}
	return count
}

// HealthStatus is the health of a board or partition.
type HealthStatus struct {
	State sharing.HealthState `json:"state"`
	// Reason says what is or was wrong; empty for a healthy unit.
	Reason string `json:"reason,omitempty"`
	// Since is when it came into State; nil when that is not known.
	Since *time.Time `json:"since,omitempty"`
}

// Holder is a container with the devices of one unit that it holds.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Resource is the name under which it holds them, maybe an older one.
	Resource string   `json:"resource"`
	Devices  []string `json:"devices"`
	// Use is how it uses the unit; nil where that is not known.
	Use *UseStatus `json:"use,omitempty"`
}

// UseStatus is how a board is used as a whole, or a unit by one container. What
// is not known is nil.
type UseStatus struct {
	// Memory is in use, in bytes.
	Memory *float64 `json:"memory,omitempty"`
	// SM is the ratio, 0 to 1, of the board's multiprocessors in use.
	SM *float64 `json:"sm,omitempty"`
	// Celsius is a board's temperature.
	Celsius *float64 `json:"celsius,omitempty"`
	// Throttled are the reasons why a board is slower than it could be.
	Throttled []sharing.ThrottleReason `json:"throttled,omitempty"`
	// Contended says that several containers compute on a board that has no time
	// to spare; MaxShare is then the part, 0 to 1, that the busiest one has of what
	// all of them compute.
	Contended bool     `json:"contended,omitempty"`
	MaxShare  *float64 `json:"maxShare,omitempty"`
	// Unattributed are what uses a board and is no holder's, by cause; without
	// causes of which there is no process.
	Unattributed []UnattributedStatus `json:"unattributed,omitempty"`
	// Processes are those of a container.
	Processes int `json:"processes,omitempty"`
	// OverShare is the memory in bytes that a container uses beyond its fair share.
	OverShare *float64 `json:"overShare,omitempty"`
}

// UnattributedStatus is what processes use on a board that are no holder's.
type UnattributedStatus struct {
	Cause     sharing.UnattributedCause `json:"cause"`
	Processes int                       `json:"processes"`
	// Memory and SM are as in UseStatus.
	Memory *float64 `json:"memory,omitempty"`
	SM     *float64 `json:"sm,omitempty"`
}
