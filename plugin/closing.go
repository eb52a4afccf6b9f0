package plugin

import (
	"maps"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"github.com/virgate/virgate/sharing"
)

// closing has the units that must not be granted because they are being changed,
// and why. It is never changed in place: Allocate reads it without a lock.
type closing struct {
	units atomic.Pointer[map[string]string]
}

func newClosing() *closing {
	c := &closing{}
	c.units.Store(&map[string]string{})
	return c
}

// refuse is the answer to a request for a closed unit; nil where none is. It
// also knows devices that no list has any more.
func (c *closing) refuse(resource string, ids []string) error {
	closed := *c.units.Load()
	if len(closed) == 0 {
		return nil
	}
	for _, id := range ids {
		unit, _, _ := sharing.ParseDeviceID(id)
		if reason, is := closed[unit]; is {
			return refusef(Recut, codes.FailedPrecondition, "%s: device %s %s", resource, id, reason)
		}
	}
	return nil
}

// change makes the next set from the last one. One goroutine calls it.
func (c *closing) change(edit func(map[string]string)) {
	next := maps.Clone(*c.units.Load())
	edit(next)
	c.units.Store(&next)
}

// Close has every later Allocate of a device of the units refused with reason,
// which completes the sentence "the device …". An Allocate that was granted has
// ended when Withdrawn says so after that, so whoever then finds no holder can
// be sure that there will be none. Close and Reopen are for one goroutine.
func (m *Manager) Close(reason string, units ...string) {
	m.closing.change(func(closed map[string]string) {
		for _, unit := range units {
			closed[unit] = reason
		}
	})
}

// Reopen takes back Close.
func (m *Manager) Reopen(units ...string) {
	m.closing.change(func(closed map[string]string) {
		for _, unit := range units {
			delete(closed, unit)
		}
	})
}
