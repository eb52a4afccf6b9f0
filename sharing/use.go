package sharing

// Use is how a unit is offered or held: under which name, and how containers share it. A unit has
// one use at a time; from one to another it goes only when nobody holds it, or see CanBecome.
type Use struct {
	// Resource is the name at the device plugin. It is empty for a claim, whose device has none.
	Resource string
	Mode     Mode
}

// CanBecome says that a pod keeps its device when the unit goes from u to next: a whole unit that is
// time-sliced under the same name. The device is one of its shares from then on.
func (u Use) CanBecome(next Use) bool {
	return u.Resource == next.Resource && u.Mode == Exclusive && next.Mode == TimeSliced
}

// Mode is how the containers that have a unit share it. Modes are compared by ==; the zero value is
// that of a unit that is not offered.
type Mode struct {
	// Kind tells the modes apart. It is small, because every listed device has a mode.
	Kind ModeKind
	// Shares is the number of shares by MPS, and 0 in other modes: a share by MPS is a fixed part of
	// the unit, but time-slices of 4 and of 10 are the same to a container.
	Shares int
}

// ModeKind is a mode without the number of shares; the zero value is that of no mode.
type ModeKind uint8

// String is "exclusive", "time-slicing" or "mps", as in the DRA attribute sharing.
func (k ModeKind) String() string { return [...]string{"", "exclusive", "time-slicing", "mps"}[k] }

// The modes besides those of MPS.
var (
	Exclusive  = Mode{Kind: 1}
	TimeSliced = Mode{Kind: 2}
)

// MPSMode is the mode of a unit that has so many shares by MPS.
func MPSMode(shares int) Mode { return Mode{Kind: 3, Shares: shares} }

// Mode is how the unit is planned to be shared.
func (u Unit) Mode() Mode {
	switch {
	case u.Replicas < 2:
		return Exclusive
	case u.MPS.Shares > 0:
		return MPSMode(u.MPS.Shares)
	}
	return TimeSliced
}

// ModeOf is what a device ID says; what is not the ID of a replica is that of an exclusive unit. In
// a list it may be one of its time-slices, see Use.CanBecome and plugin.Entry.
func ModeOf(id string) Mode {
	switch _, _, shares, shared := parseDeviceID(id); {
	case !shared:
		return Exclusive
	case shares > 0:
		return MPSMode(shares)
	}
	return TimeSliced
}
