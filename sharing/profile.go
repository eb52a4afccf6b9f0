package sharing

// Profile is the configuration in force on a node, resolved and validated: no
// field is optional in the sense that its absence would mean something that
// the code has to look up elsewhere. Package configs makes profiles.
type Profile struct {
	// MIGStrategy says how boards with MIG enabled are offered.
	MIGStrategy MIGStrategy
	// GPUNames name whole GPUs by model; the first match wins. The last entry
	// is always {"*", "nvidia.com/gpu"}.
	GPUNames []Naming
	// MIGNames name partitions by MIG profile; the first match wins. What
	// matches none is called "nvidia.com/" + mig.Profile.ResourceName().
	MIGNames []Naming
	// Exclude selects boards and partitions that are never offered.
	Exclude []Selector
	// Shares are the time-slicing entries in the order of the document. A unit
	// belongs to the first entry that selects it; a unit of no entry is
	// exclusive.
	Shares []Share
	// OneShareOnly refuses requests for more than one device where any of them
	// is a replica (failRequestsGreaterThanOne).
	OneShareOnly bool
	// Policy is how devices are chosen where no share says otherwise.
	Policy Policy
	// DeviceIDs says by what a grant names units.
	DeviceIDs DeviceIDStrategy
	// Grants says what a container receives for its devices.
	Grants Grants
	// Health says what takes a unit out of use, and for how long.
	Health HealthRules
	// MIG says which partitions Virgate makes of the boards.
	MIG Repartition
}

// Naming gives the resource name for what matches Pattern.
type Naming struct {
	Pattern Pattern
	// Name is a fully qualified resource name, for example "nvidia.com/gpu".
	Name string
}

// Share is one time-slicing entry: which units of which resource are offered
// how often.
type Share struct {
	// Path is the entry's place in the document, for warnings:
	// "sharing.timeSlicing.resources[1]".
	Path string
	// Resource is the name that the units have before Rename.
	Resource string
	// Select chooses among the resource's units that no earlier entry took.
	Select Selection
	// Replicas is the number of devices a unit; 1 means exclusive.
	Replicas int
	// Rename is the name under which the units are offered; empty keeps
	// Resource.
	Rename string
	// Policy is how devices of the resource are chosen.
	Policy Policy
	// SpreadStrict refuses a request that would put two devices of one
	// container on one unit. Only with policy Spread.
	SpreadStrict bool
}

// Selection is all units, the first Count by board and partition index, or
// those that match a selector of List. At most one of Count and List is set.
type Selection struct {
	Count int
	List  []Selector
}

// All says that the selection takes every unit.
func (s Selection) All() bool { return s.Count == 0 && s.List == nil }

// MIGStrategy says how boards with MIG enabled are offered. The names are those
// of NVIDIA's device plugin.
type MIGStrategy string

const (
	// MIGNone withholds boards with MIG enabled: as whole GPUs they run nothing.
	MIGNone MIGStrategy = "none"
	// MIGSingle offers the partitions of the node's most numerous MIG profile
	// as if they were whole GPUs.
	MIGSingle MIGStrategy = "single"
	// MIGMixed offers each MIG profile under its own resource name.
	MIGMixed MIGStrategy = "mixed"
)

// Policy says which devices a container gets when there is a choice.
type Policy string

const (
	// Distributed takes the least used unit first.
	Distributed Policy = "distributed"
	// Packed takes the unit that pods use most first.
	Packed Policy = "packed"
	// Spread takes distinct units for one container while there are any.
	Spread Policy = "spread"
)

// DeviceIDStrategy says by what a grant names units.
type DeviceIDStrategy string

const (
	// ByUUID names units by UUID.
	ByUUID DeviceIDStrategy = "uuid"
	// ByIndex names whole GPUs by the driver's index and partitions by "g:i".
	ByIndex DeviceIDStrategy = "index"
)
