package sharing

import "github.com/virgate/virgate/mig"

// LayoutState is how far a board has come on its way to the wanted layout.
type LayoutState string

const (
	// LayoutApplied says that the board is cut as it should be.
	LayoutApplied LayoutState = "applied"
	// LayoutPending says that it is being changed: devices are being withdrawn, or
	// partitions made.
	LayoutPending LayoutState = "pending"
	// LayoutBlocked says that partitions in use are in the way. What could be done
	// without them has been, unless the profile refuses that.
	LayoutBlocked LayoutState = "blocked"
	// LayoutFailed says that the driver refused, and that the board is as it was;
	// or that the board cannot have the layout.
	LayoutFailed LayoutState = "failed"
	// LayoutResetRequired says that another MIG mode waits for a reset of the
	// board, which Virgate never does.
	LayoutResetRequired LayoutState = "reset-required"
)

// LayoutStates are all states.
func LayoutStates() []LayoutState {
	return []LayoutState{LayoutApplied, LayoutPending, LayoutBlocked, LayoutFailed, LayoutResetRequired}
}

// BoardLayout is what a board that Virgate cuts is to be, and is.
type BoardLayout struct {
	// GPU and Index name the board.
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// Wanted is the layout's name.
	Wanted string      `json:"wanted"`
	State  LayoutState `json:"state"`
	// Reason says why the state is not LayoutApplied; empty when it is.
	Reason string `json:"reason,omitempty"`
	// MIG, Slots and Instances are how the board was cut when last looked at: the
	// mode, how many memory slots it has and what lies in them.
	MIG       bool           `json:"mig"`
	Slots     int            `json:"slots"`
	Instances []mig.Instance `json:"instances,omitempty"`
	// Unreachable is how many free slots nothing can be placed in now.
	Unreachable int `json:"unreachable,omitempty"`
}
