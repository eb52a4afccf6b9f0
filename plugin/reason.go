package plugin

import (
	"errors"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Reason says in a word why Allocate refused.
type Reason string

const (
	// UnknownDevice says that the resource has no such device.
	UnknownDevice Reason = "unknown_device"
	// UnhealthyDevice says that the unit is faulty.
	UnhealthyDevice Reason = "unhealthy"
	// TooMany says that a container may have one share.
	TooMany Reason = "too_many"
	// SameUnit says that the devices should be of distinct units and are not.
	SameUnit Reason = "same_unit"
	// NotReady says that the node lacks what the grant needs.
	NotReady Reason = "not_ready"
	// Recut says that the unit's board is being cut.
	Recut Reason = "recut"
	// Internal is what no kubelet asks for.
	Internal Reason = "internal"
)

const reasons = 7

// Reasons are all reasons.
func Reasons() []Reason {
	return []Reason{UnknownDevice, UnhealthyDevice, TooMany, SameUnit, NotReady, Recut, Internal}
}

// index is the reason's place among Reasons.
func (r Reason) index() int { return slices.Index(Reasons(), r) }

// refusalError is a refusal as gRPC sends it, with its reason for the count.
type refusalError struct {
	reason Reason
	status *status.Status
}

func refusef(reason Reason, code codes.Code, format string, arguments ...any) error {
	return &refusalError{reason, status.Newf(code, format, arguments...)}
}

func (e *refusalError) Error() string { return e.status.Err().Error() }

// GRPCStatus is what the kubelet receives.
func (e *refusalError) GRPCStatus() *status.Status { return e.status }

func reasonOf(err error) Reason {
	if refused, ok := errors.AsType[*refusalError](err); ok {
		return refused.reason
	}
	return Internal
}

// refusals are the counts by reason.
func (c *counters) refusals() map[Reason]uint64 {
	counts := make(map[Reason]uint64, reasons)
	for i, reason := range Reasons() {
		counts[reason] = c.refused[i].Load()
	}
	return counts
}
