// Package status is what a running Virgate says of itself and its node, as JSON and on its page, and the
// texts that those who show it share. It knows values alone, and is pure.
package status

import (
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Status is what a running Virgate does, at one moment. It is made again for each reader.
// Its JSON names are an interface: names are added, and none changes its meaning.
type Status struct {
	// Node is the Node object's name; empty when it is not known.
	Node    string `json:"node,omitempty"`
	Version string `json:"version"`
	Role    Role   `json:"role"`
	// Ready is what /readyz answers; Unready has the reasons why it is not.
	Ready   bool     `json:"ready"`
	Unready []string `json:"unready"`
	Profile Profile  `json:"profile"`
	// Waits are the units that pods hold in another way than the profile offers them.
	Waits []nodereport.Wait `json:"waits"`
	// At is when this was said, and HoldersAt when the kubelet was asked who holds what:
	// for this answer, if it answers in time. HoldersAt is nil when that is not known.
	At        time.Time  `json:"at"`
	HoldersAt *time.Time `json:"holdersAt"`
	// KubeletKnown says that what the kubelet holds and has applied could be read
	// when it was last needed; HoldersKnown that who holds what could be read.
	KubeletKnown bool `json:"kubeletKnown"`
	HoldersKnown bool `json:"holdersKnown"`
	// Attributed says that it is known which container uses how much.
	Attributed bool `json:"attributed"`
	// Resources are those that the kubelet is told of or that wait for their units, by name.
	Resources []Resource `json:"resources"`
	// GPUs are the node's GPUs by index, as last seen.
	GPUs []GPU `json:"gpus"`
	// Layouts are the GPUs that Virgate partitions, by index.
	Layouts []nodereport.GPULayout `json:"layouts"`
	// Elsewhere are units that containers hold and that the node does not show,
	// such as a partition that was destroyed, by ID.
	Elsewhere []Unit `json:"elsewhere"`
	// DRA is what is offered by Dynamic Resource Allocation; nil where nothing is.
	DRA *DRA `json:"dra,omitempty"`
	// Unread says why the GPUs cannot be read now; empty when they can.
	Unread string `json:"unread,omitempty"`
	// Warnings are the plan's, and what cannot be granted, kept or read now.
	Warnings []string `json:"warnings"`
}

// Role is what a program does on its node.
type Role string

const (
	// RoleStarting waits until it knows whether it may serve.
	RoleStarting Role = "starting"
	// RoleStandby waits to serve when another program ends.
	RoleStandby Role = "standby"
	// RoleServing serves the kubelet.
	RoleServing Role = "serving"
	// RoleDraining withdraws everything before it ends.
	RoleDraining Role = "draining"
)

// Profile is how far the wanted profile has come.
type Profile struct {
	State nodereport.ProfileState `json:"state"`
	// Since is when it came into State.
	Since time.Time `json:"since"`
	// Wanted is the profile that should be in force, as far as it is known.
	Wanted nodereport.ProfileRef `json:"wanted"`
	// Applied is the one whose lists the kubelet has; nil before the first.
	Applied *nodereport.ProfileRef `json:"applied"`
	// Delayed is when a changed ConfigMap is taken, in place of the one that Wanted comes from: its rules
	// spread it over the nodes. It is nil when none waits.
	Delayed *time.Time `json:"delayed,omitempty"`
	// Problem is the first thing that is wrong with a rejected profile, Error all of them,
	// one a line. For one that is not known yet they say why; otherwise they are empty.
	Problem string `json:"problem,omitempty"`
	Error   string `json:"error,omitempty"`
}

// Resource is how one resource is served now.
type Resource struct {
	Name string `json:"name"`
	// Strategy is sharing.Resource.Strategy; empty when the plan no longer has it.
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
	// Held counts devices that containers hold under its name, Free the healthy ones of
	// its list that nobody holds; nil when the holders are not known.
	Held *int `json:"held"`
	Free *int `json:"free"`
	// Refused counts the Allocate calls that were refused, by those reasons that came up.
	Refused map[plugin.RefusalReason]uint64 `json:"refused,omitempty"`
}

// GPU is one GPU.
type GPU struct {
	UUID string `json:"uuid"`
	// Index and DriverIndex are those of sharing.GPU.
	Index       int    `json:"index"`
	DriverIndex string `json:"driverIndex,omitempty"`
	Model       string `json:"model"`
	// Memory is in bytes.
	Memory uint64 `json:"memory"`
	MIG    bool   `json:"mig"`
	// Health is the GPU's own; a partition has one beside it.
	Health Health `json:"health"`
	// Settings are those of the driver that the profile asks for.
	Settings []GPUSetting `json:"settings,omitempty"`
	// MPS are the MPS daemons of the GPU and its partitions.
	MPS []nodereport.MPSState `json:"mps,omitempty"`
	// Use is how it is used as a whole; nil where that was not measured.
	Use *Use `json:"use,omitempty"`
	// Units are the GPU's partitions by index, or else the GPU itself.
	Units []Unit `json:"units"`
}

// Unit is a whole GPU or a partition.
type Unit struct {
	// ID is its UUID, Index the driver's: "2", "2:0"; empty when it is not known.
	ID    string `json:"id"`
	Index string `json:"index,omitempty"`
	// Profile is a partition's MIG profile; empty for a whole GPU.
	Profile string `json:"profile,omitempty"`
	// Placement is that of its GPU instance, in memory slots; nil for a whole GPU.
	Placement *mig.Placement `json:"placement,omitempty"`
	// Memory is in bytes; 0 when unknown.
	Memory uint64 `json:"memory,omitempty"`
	// Resource is the name under which it is listed now, by Replicas devices; empty and
	// 0 when it is not. A unit that waits for its holders is listed under the old name.
	Resource string `json:"resource,omitempty"`
	Replicas int    `json:"replicas"`
	Health   Health `json:"health"`
	// Holders hold devices of it, by namespace, pod, container and resource.
	Holders []Holder `json:"holders"`
}

// Held is the number of the unit's devices that containers hold.
func (u Unit) Held() int {
	count := 0
	for _, holder := range u.Holders {
		count += len(holder.Devices)
	}
	return count
}

// Health is the health of a GPU or partition.
type Health struct {
	State sharing.HealthState `json:"state"`
	// Reason says what is or was wrong; empty for a healthy unit.
	Reason string `json:"reason,omitempty"`
	// Explanation is sharing.UnitHealth's: what XIDs mean, and what ends the fault.
	Explanation string `json:"explanation,omitempty"`
	// Since is when it came into State; nil when that is not known.
	Since *time.Time `json:"since,omitempty"`
}

// Holder is a container with the devices of one unit that it holds.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Resource is the name under which it holds them, maybe an older one; by a claim, the
	// DRA driver's.
	Resource string   `json:"resource"`
	Devices  []string `json:"devices"`
	// Claim and AnyGPU are those of sharing.Allocation.
	Claim  string `json:"claim,omitempty"`
	AnyGPU bool   `json:"anyGPU,omitempty"`
	// Use is how it uses the unit; nil where that is not known.
	Use *Use `json:"use,omitempty"`
}

// ByClaim says by which claim it holds them; "" for devices of a device plugin.
func (h Holder) ByClaim() string {
	switch {
	case h.AnyGPU:
		return "claim " + h.Claim + ", of unknown GPUs"
	case h.Claim != "":
		return "claim " + h.Claim
	}
	return ""
}

// Use is how a GPU is used as a whole, or a unit by one container; nil is unknown.
type Use struct {
	// Memory is in use, in bytes.
	Memory *float64 `json:"memory,omitempty"`
	// SM is the ratio, 0 to 1, of the GPU's multiprocessors in use.
	SM *float64 `json:"sm,omitempty"`
	// Celsius is a GPU's temperature.
	Celsius *float64 `json:"celsius,omitempty"`
	// Throttled are the reasons why a GPU is slower than it could be.
	Throttled []sharing.ThrottleReason `json:"throttled,omitempty"`
	// Contended says that several containers compute on a GPU that has no time to spare;
	// MaxShare is then the busiest one's part, 0 to 1, of what all of them compute.
	Contended bool     `json:"contended,omitempty"`
	MaxShare  *float64 `json:"maxShare,omitempty"`
	// Unattributed is what processes use that belong to no holder, by cause.
	Unattributed []sharing.UnattributedUtilization `json:"unattributed,omitempty"`
	// Processes are those of a container.
	Processes int `json:"processes,omitempty"`
	// OverShare is the memory in bytes that a container uses beyond its fair share.
	OverShare *float64 `json:"overShare,omitempty"`
	// Limit is the memory in bytes that the profile lets a container use; OverLimit says that
	// it has used more for longer than the grace.
	Limit     *float64 `json:"limit,omitempty"`
	OverLimit bool     `json:"overLimit,omitempty"`
}

// GPUSetting is a setting of the driver for a GPU, which the profile asks for or which is to be
// as it was before an earlier profile.
type GPUSetting struct {
	// Setting is the profile's key, timeSlice or computeMode.
	Setting string       `json:"setting"`
	Value   string       `json:"value"`
	State   SettingState `json:"state"`
	// Reason says why it is not applied; empty when it is.
	Reason string `json:"reason,omitempty"`
}

// SettingState is how far a setting is.
type SettingState string

const (
	// SettingApplied says that the driver has it.
	SettingApplied SettingState = "applied"
	// SettingWaiting says that the GPU is in use, or cannot be asked now.
	SettingWaiting SettingState = "waiting"
	// SettingFailed says that it could not be made. It is tried again.
	SettingFailed SettingState = "failed"
)
