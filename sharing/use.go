package sharing

import "strings"

// Use is how a unit is offered or held: under which name, and how containers share it. A unit has
// one use at a time; from one to another it goes only when nobody holds it.
type Use struct {
	// Resource is the name at the device plugin. It is empty for a claim, whose device has none.
	Resource string
	Mode     Mode
}

// Mode is how the containers that have a unit share it. Modes are compared by ==; the zero value is
// that of a unit that is not offered.
type Mode struct {
	// Name is "exclusive", "time-slicing" or "mps", as in the DRA attribute sharing.
	Name string
	// Shares is the number of shares by MPS, and 0 in other modes: a share by MPS is a fixed part of
	// the unit, but time-slices of 4 and of 10 are the same to a container.
	Shares int
}

// The modes besides those of MPS.
var (
	Exclusive  = Mode{Name: "exclusive"}
	TimeSliced = Mode{Name: "time-slicing"}
)

// MPSMode is the mode of a unit that has so many shares by MPS.
func MPSMode(shares int) Mode { return Mode{"mps", shares} }

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

// Mode is what the device's ID says. It is asked of every listed device in every step of the
// device plugin, so IDs that begin with the unit's are not parsed whole.
func (d Device) Mode() Mode {
	rest, ok := strings.CutPrefix(d.ID, d.Unit)
	replica, shared := strings.CutPrefix(rest, replicaMark)
	switch {
	case ok && rest == "":
		return Exclusive
	case ok && shared && !strings.Contains(replica, shareMark):
		return TimeSliced
	}
	return ModeOf(d.ID)
}

// ModeOf is what a device ID says; what is not the ID of a replica is that of an exclusive unit.
func ModeOf(id string) Mode {
	switch _, _, shares, shared := parseDeviceID(id); {
	case !shared:
		return Exclusive
	case shares > 0:
		return MPSMode(shares)
	}
	return TimeSliced
}
