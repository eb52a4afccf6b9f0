package sharing

import (
	"errors"

	"github.com/virgate/virgate/mig"
)

// Cut is how a board is cut now, as its driver lists it: exactly, and with what
// speaks against changing it.
type Cut struct {
	Board BoardID
	// Geometry is what the board can be cut into; the zero one for a board without
	// MIG.
	Geometry mig.Geometry
	// MIG is the mode now, Pending that after the next reset of the board.
	MIG, Pending bool
	// Busy says that processes use a board without MIG mode, or that nobody can
	// tell. With MIG mode each compute instance says it for itself.
	Busy bool
	// Instances are all GPU instances, by placement, also those without a compute
	// instance.
	Instances []mig.Instance
}

// What a change of a board can meet, for errors.Is.
var (
	// ErrInUse says that the driver sees a partition or board in use, whoever uses
	// it.
	ErrInUse = errors.New("in use")
	// ErrNoPermission says that this process may not change how boards are cut.
	ErrNoPermission = errors.New("not permitted")
	// ErrResetRequired says that the board has to be reset before it can go on.
	ErrResetRequired = errors.New("the GPU must be reset")
)

// Arrangement is how a board is or should be cut, with the places.
type Arrangement struct {
	MIG bool
	// Partitions are by placement.
	Partitions []mig.Placed
}

// Arrangement is how the board is cut now.
func (c Cut) Arrangement() Arrangement {
	now := Arrangement{MIG: c.MIG}
	for _, instance := range c.Instances {
		for _, compute := range instance.Computes {
			now.Partitions = append(now.Partitions, mig.Placed{Profile: instance.Partition(compute), Placement: instance.Placement})
		}
	}
	return now
}

// Recut is a change of a board that has begun: it must be finished, or undone,
// before the board is used again.
type Recut struct {
	// GPU is the board's UUID.
	GPU string
	// Before is how it was cut, After how it should be.
	Before, After Arrangement
}

// CutJournal is what must be known of boards that Virgate cuts after a crash or
// a reboot.
type CutJournal struct {
	// Underway are the changes that have begun and not ended.
	Underway []Recut
	// Enabled are the UUIDs of the boards that Virgate keeps in MIG mode. Nobody
	// has been given one as a whole, so whoever finds the mode off may enable it
	// again.
	Enabled []string
}
