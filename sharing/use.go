package sharing

// Use is how a unit is offered or held: its resource name, and how containers share it. A unit has
// one use at a time. The use changes only when no pod holds the unit; CanBecome is the exception.
type Use struct {
	// Resource is the device plugin's resource name. It is empty for a claim, whose device has no
	// resource name.
	Resource string
	Mode     Mode
}

// CanBecome reports whether a pod keeps its device when the use changes from u to next: a whole
// unit becomes time-sliced under the same name, and the device one of its shares.
func (u Use) CanBecome(next Use) bool {
	return u.Resource == next.Resource && u.Mode == Exclusive && next.Mode == TimeSliced
}

// Mode is how the containers that have a unit share it. Modes can be compared with ==. The zero
// value is for a unit that is not offered.
type Mode struct {
	// Kind is the kind of mode. It is small, because every listed device has a mode.
	Kind ModeKind
	// Shares is the number of MPS shares, and 0 in other modes. An MPS share is a fixed part of the
	// unit, but time-slices of 4 and of 10 are the same to a container.
	Shares int
}

// ModeKind is a mode without the number of shares. The zero value is no mode.
type ModeKind uint8

// String returns "exclusive", "time-slicing" or "mps", as in the DRA attribute sharing.
func (k ModeKind) String() string { return [...]string{"", "exclusive", "time-slicing", "mps"}[k] }

// The modes other than MPS.
var (
	Exclusive  = Mode{Kind: 1}
	TimeSliced = Mode{Kind: 2}
)

// MPSMode returns the mode of a unit with this many MPS shares.
func MPSMode(shares int) Mode { return Mode{Kind: 3, Shares: shares} }

// Mode returns how the plan shares the unit.
func (u Unit) Mode() Mode {
	switch {
	case u.Replicas < 2:
		return Exclusive
	case u.MPS.Shares > 0:
		return MPSMode(u.MPS.Shares)
	}
	return TimeSliced
}

// ModeOf returns the mode that a device ID names. Any text that is not the ID of a replica is taken
// as the ID of an exclusive unit. In a list, that device may be one of the unit's time-slices; see
// Use.CanBecome and plugin.Entry.
func ModeOf(id string) Mode {
	switch _, _, shares, shared := parseDeviceID(id); {
	case !shared:
		return Exclusive
	case shares > 0:
		return MPSMode(shares)
	}
	return TimeSliced
}
