// Package status has what a running Virgate says about itself and its node, as JSON and on its
// page, and the texts shared by everything that shows this. It handles only values, and is pure.
package status

import (
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Status is what a running Virgate does at one moment. It is made again for each reader. Its JSON
// names are an interface: names may be added, but none changes its meaning.
type Status struct {
	// Node is the name of the Node object; empty if it is not known.
	Node    string `json:"node,omitempty"`
	Version string `json:"version"`
	Role    Role   `json:"role"`
	// Ready is what /readyz answers. Unready has the reasons why the node is not ready.
	Ready   bool     `json:"ready"`
	Unready []string `json:"unready"`
	Profile Profile  `json:"profile"`
	// Waits are the units that pods hold in another way than the profile offers them.
	Waits []nodereport.Wait `json:"waits"`
	// At is when this status was made. HoldersAt is when the kubelet was asked for the holders: for
	// this answer, if the kubelet answers in time. HoldersAt is nil if that is not known.
	At        time.Time  `json:"at"`
	HoldersAt *time.Time `json:"holdersAt"`
	// KubeletKnown is true if what the kubelet holds and has applied could be read when it was last
	// needed. HoldersKnown is true if the holders could be read.
	KubeletKnown bool `json:"kubeletKnown"`
	HoldersKnown bool `json:"holdersKnown"`
	// Attributed is true if it is known which container uses how much.
	Attributed bool `json:"attributed"`
	// Resources are the resources that are listed to the kubelet or that wait for their units, by name.
	Resources []Resource `json:"resources"`
	// GPUs are the node's GPUs by index, as last seen.
	GPUs []GPU `json:"gpus"`
	// Layouts are the GPUs that Virgate partitions, by index.
	Layouts []nodereport.GPULayout `json:"layouts"`
	// Elsewhere are units that containers hold and that the node does not show, by ID. A destroyed
	// partition is one example.
	Elsewhere []Unit `json:"elsewhere"`
	// DRA is what is offered by Dynamic Resource Allocation; nil if nothing is.
	DRA *DRA `json:"dra,omitempty"`
	// Unread says why the GPUs cannot be read now; empty if they can.
	Unread string `json:"unread,omitempty"`
	// Warnings are the plan's warnings, and what cannot be granted, kept or read now.
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
	// Since is when the profile came into State.
	Since time.Time `json:"since"`
	// Wanted is the profile that should be in force, as far as it is known.
	Wanted nodereport.ProfileRef `json:"wanted"`
	// Applied is the profile whose lists the kubelet has; nil before the first.
	Applied *nodereport.ProfileRef `json:"applied"`
	// Delayed is when a changed ConfigMap takes effect, in place of the one that Wanted comes from:
	// its rules spread the change over the nodes. It is nil if no change waits.
	Delayed *time.Time `json:"delayed,omitempty"`
	// Problem is the first problem of a rejected profile, and Error is all of its problems, one per
	// line. For a profile that is not known yet they say why; otherwise they are empty.
	Problem string `json:"problem,omitempty"`
	Error   string `json:"error,omitempty"`
}

// Resource is how one resource is served now.
type Resource struct {
	Name string `json:"name"`
	// Strategy is sharing.Resource.Strategy; empty if the plan no longer has the resource.
	Strategy string `json:"strategy,omitempty"`
	// Dropped is true if the plan no longer has the resource.
	Dropped bool `json:"dropped"`
	// Streams is how many streams the kubelet has open for it; 1 is right.
	Streams int `json:"streams"`
	// Devices, Healthy and Leaving count devices in the resource's list: all of them, the ones that
	// the kubelet may hand out, and the ones on their way out.
	Devices int `json:"devices"`
	Healthy int `json:"healthy"`
	Leaving int `json:"leaving"`
	// Held counts the devices that containers hold under the resource's name. Free counts the healthy
	// devices in its list that no container holds. Both are nil if the holders are not known.
	Held *int `json:"held"`
	Free *int `json:"free"`
	// Refused counts the refused Allocate calls, by the reasons that came up.
	Refused map[plugin.RefusalReason]uint64 `json:"refused,omitempty"`
}

// GPU is one GPU.
type GPU struct {
	UUID string `json:"uuid"`
	// Index and DriverIndex are as in sharing.GPU.
	Index       int    `json:"index"`
	DriverIndex string `json:"driverIndex,omitempty"`
	Model       string `json:"model"`
	// Memory is in bytes.
	Memory uint64 `json:"memory"`
	MIG    bool   `json:"mig"`
	// Health is the health of the GPU itself; a partition has its own.
	Health Health `json:"health"`
	// Settings are the driver's settings that the profile asks for.
	Settings []GPUSetting `json:"settings,omitempty"`
	// MPS are the MPS daemons of the GPU and its partitions.
	MPS []nodereport.MPSState `json:"mps,omitempty"`
	// Use is how the GPU is used as a whole; nil if that was not measured.
	Use *Use `json:"use,omitempty"`
	// Units are the GPU's partitions by index. The GPU itself is the last unit if it has no
	// partitions, or is still listed or held as a whole.
	Units []Unit `json:"units"`
}

// Unit is a whole GPU or a partition.
type Unit struct {
	// ID is the unit's UUID. Index is the driver's: "2", "2:0"; empty if it is not known.
	ID    string `json:"id"`
	Index string `json:"index,omitempty"`
	// Profile is a partition's MIG profile; empty for a whole GPU.
	Profile string `json:"profile,omitempty"`
	// Placement is where its GPU instance lies, in memory slots; nil for a whole GPU.
	Placement *mig.Placement `json:"placement,omitempty"`
	// Memory is in bytes; 0 when unknown.
	Memory uint64 `json:"memory,omitempty"`
	// Resource is the name under which the unit is listed now, and Replicas is its number of
	// devices there; empty and 0 if it is not listed. A unit that waits for its holders is listed
	// under the old name.
	Resource string `json:"resource,omitempty"`
	Replicas int    `json:"replicas"`
	Health   Health `json:"health"`
	// Holders are the containers that hold devices of the unit, by namespace, pod, container and
	// resource.
	Holders []Holder `json:"holders"`
}

// Held returns the number of the unit's devices that containers hold.
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
	// Explanation is as in sharing.UnitHealth: what XIDs mean, and what ends the fault.
	Explanation string `json:"explanation,omitempty"`
	// Since is when the unit came into State; nil if that is not known.
	Since *time.Time `json:"since,omitempty"`
}

// Holder is a container with the devices of one unit that it holds.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Resource is the name under which the container holds them, possibly an older one. For a claim
	// it is the name of the DRA driver.
	Resource string   `json:"resource"`
	Devices  []string `json:"devices"`
	// Claim and AnyGPU are as in sharing.Allocation.
	Claim  string `json:"claim,omitempty"`
	AnyGPU bool   `json:"anyGPU,omitempty"`
	// Use is how the container uses the unit; nil if that is not known.
	Use *Use `json:"use,omitempty"`
}

// ByClaim returns the claim by which the container holds them; "" for devices of a device plugin.
func (h Holder) ByClaim() string {
	switch {
	case h.AnyGPU:
		return "claim " + h.Claim + ", of unknown GPUs"
	case h.Claim != "":
		return "claim " + h.Claim
	}
	return ""
}

// Use is how a GPU is used as a whole, or how one container uses a unit; nil is unknown.
type Use struct {
	// Memory is the memory in use, in bytes.
	Memory *float64 `json:"memory,omitempty"`
	// SM is the ratio, 0 to 1, of the GPU's multiprocessors in use.
	SM *float64 `json:"sm,omitempty"`
	// Celsius is a GPU's temperature.
	Celsius *float64 `json:"celsius,omitempty"`
	// Throttled are the reasons why a GPU is slower than it could be.
	Throttled []sharing.ThrottleReason `json:"throttled,omitempty"`
	// Contended is true if several containers compute on a GPU that has no time to spare. Then
	// MaxShare is the busiest container's part, 0 to 1, of what all of them compute.
	Contended bool     `json:"contended,omitempty"`
	MaxShare  *float64 `json:"maxShare,omitempty"`
	// Unattributed is the use by processes that belong to no holder, by cause.
	Unattributed []sharing.UnattributedUtilization `json:"unattributed,omitempty"`
	// Processes is the number of a container's processes.
	Processes int `json:"processes,omitempty"`
	// OverShare is the memory in bytes that a container uses beyond its fair share.
	OverShare *float64 `json:"overShare,omitempty"`
	// Limit is the memory in bytes that the profile allows a container to use. OverLimit is true if
	// the container has used more for longer than the grace.
	Limit     *float64 `json:"limit,omitempty"`
	OverLimit bool     `json:"overLimit,omitempty"`
}

// GPUSetting is a setting of the driver for a GPU: one that the profile asks for, or one that is to
// be restored to what it was before an earlier profile.
type GPUSetting struct {
	// Setting is the profile's key, timeSlice or computeMode.
	Setting string       `json:"setting"`
	Value   string       `json:"value"`
	State   SettingState `json:"state"`
	// Reason says why the setting is not applied; empty if it is.
	Reason string `json:"reason,omitempty"`
}

// SettingState is how far a setting has come.
type SettingState string

const (
	// SettingApplied means that the driver has the setting.
	SettingApplied SettingState = "applied"
	// SettingWaiting means that the GPU is in use, or cannot be read now.
	SettingWaiting SettingState = "waiting"
	// SettingFailed means that the setting could not be made. It is tried again.
	SettingFailed SettingState = "failed"
)
