package plugin

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/sharing"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// RefusalReason is one word for why Allocate refused. The words are the values of a metric's label.
type RefusalReason string

const (
	// UnknownDevice means that the resource has no such device.
	UnknownDevice RefusalReason = "unknown_device"
	// UnhealthyDevice means that the unit is faulty.
	UnhealthyDevice RefusalReason = "unhealthy"
	// TooMany means that a container may have only one share.
	TooMany RefusalReason = "too_many"
	// SameUnit means that the devices should be on distinct units, but are not.
	SameUnit RefusalReason = "same_unit"
	// SeveralUnits means that the devices should be on one unit, but are not.
	SeveralUnits RefusalReason = "several_units"
	// NotReady means that the node lacks something that the grant needs.
	NotReady RefusalReason = "not_ready"
	// MIGChange means that the MIG layout of the unit's GPU is being changed.
	MIGChange RefusalReason = "repartitioning"
	// Switching means that the unit is leaving the mode in which it was requested.
	Switching RefusalReason = "switching"
	// ByDRA means that the unit is offered by Dynamic Resource Allocation.
	ByDRA RefusalReason = "by_dra"
	// Internal means that no kubelet makes such a request.
	Internal RefusalReason = "internal"
)

var refusalReasons = [...]RefusalReason{
	UnknownDevice, UnhealthyDevice, TooMany, SameUnit, SeveralUnits, NotReady, MIGChange, Switching, ByDRA, Internal,
}

// RefusalReasons returns all reasons.
func RefusalReasons() []RefusalReason { return slices.Clone(refusalReasons[:]) }

// index returns the reason's place in refusalReasons.
func (r RefusalReason) index() int { return slices.Index(refusalReasons[:], r) }

// refusalError is a refusal as gRPC sends it, with the reason under which it is counted.
type refusalError struct {
	reason RefusalReason
	status *status.Status
}

func refusef(reason RefusalReason, code codes.Code, format string, arguments ...any) error {
	return &refusalError{reason, status.Newf(code, format, arguments...)}
}

func (e *refusalError) Error() string { return e.status.Err().Error() }

// GRPCStatus returns what the kubelet receives.
func (e *refusalError) GRPCStatus() *status.Status { return e.status }

func reasonOf(err error) RefusalReason {
	if refused, ok := errors.AsType[*refusalError](err); ok {
		return refused.reason
	}
	return Internal
}

func closedDevice(resource, id string) error {
	return refusef(Switching, codes.FailedPrecondition, "%s: device %s is no longer offered: the profile has changed",
		resource, id)
}

func (g *generation) refuseClosed(ids []string) error {
	for _, id := range ids {
		if at, ok := g.choices.Index(id); ok && g.list.Entries[at].RefusesAllocate {
			return closedDevice(g.resource.Name, id)
		}
	}
	return nil
}

func (c *counters) refusals() map[RefusalReason]uint64 {
	counts := make(map[RefusalReason]uint64, len(refusalReasons))
	for i, reason := range refusalReasons {
		counts[reason] = c.refused[i].Load()
	}
	return counts
}

type refusal struct {
	// devices are the first requested devices, as the log shows them.
	devices   []string
	requested int
	err       error
}

func newRefusal(ids []string, err error) refusal {
	shown := make([]string, 0, shownDevices)
	for _, id := range ids[:min(len(ids), shownDevices)] {
		shown = append(shown, quoteID(id))
	}
	return refusal{shown, len(ids), err}
}

const (
	// refusalBurst and refusalInterval limit how often refusals are logged. The kubelet causes few;
	// another client may cause thousands a second.
	refusalBurst    = 20
	refusalInterval = time.Second
	// shownDevices and shownBytes limit how much of a request is shown.
	shownDevices, shownBytes = 16, 128
)

// refusalLog logs refusals. It is for one goroutine.
type refusalLog struct {
	log     *slog.Logger
	limiter *rate.Limiter
	// silent counts the refusals since the last logged one.
	silent int
}

func newRefusalLog(log *slog.Logger) *refusalLog {
	return &refusalLog{log: log, limiter: rate.NewLimiter(rate.Every(refusalInterval), refusalBurst)}
}

func (l *refusalLog) write(ctx context.Context, refused refusal) {
	if !l.limiter.Allow() {
		l.silent++
		return
	}
	attributes := []slog.Attr{
		slog.Any("devices", refused.devices), slog.Int("requested", refused.requested), slog.Any("error", refused.err),
	}
	if l.silent > 0 {
		attributes = append(attributes, slog.Int("unlogged", l.silent))
		l.silent = 0
	}
	l.log.LogAttrs(ctx, slog.LevelWarn, "allocation refused", attributes...)
}

// quoteID returns a device ID for a message: quoted, and truncated beyond the length of any valid ID.
func quoteID(id string) string {
	if len(id) <= shownBytes {
		return strconv.Quote(id)
	}
	return strconv.Quote(id[:shownBytes]) + "…"
}

// refusedUnits are the units whose devices Allocate refuses.
type refusedUnits struct {
	// mutex guards byReason.
	mutex    sync.Mutex
	byReason map[RefusalReason]map[string]string
	// all has every unit of byReason once. The map is replaced and never changed, so that Allocate
	// can read it without a lock.
	all atomic.Pointer[map[string]unitRefusal]
}

type unitRefusal struct {
	reason RefusalReason
	text   string
}

func newRefusedUnits() *refusedUnits {
	u := &refusedUnits{byReason: map[RefusalReason]map[string]string{}}
	u.all.Store(&map[string]unitRefusal{})
	return u
}

// check returns an error if one of the devices belongs to a refused unit, even if no list has the
// device any more.
func (u *refusedUnits) check(resource string, ids []string) error {
	all := *u.all.Load()
	if len(all) == 0 {
		return nil // A request may have millions of IDs.
	}
	for _, id := range ids {
		unit, _, _ := sharing.ParseDeviceID(id)
		if r, refused := all[unit]; refused {
			return refusef(r.reason, codes.FailedPrecondition, "%s: device %s %s", resource, id, r.text)
		}
	}
	return nil
}

func (u *refusedUnits) set(reason RefusalReason, units map[string]string) {
	u.mutex.Lock()
	defer u.mutex.Unlock()
	u.byReason[reason] = maps.Clone(units)
	all := map[string]unitRefusal{}
	for _, reason := range slices.Backward(refusalReasons[:]) {
		for unit, text := range u.byReason[reason] {
			all[unit] = unitRefusal{reason, text}
		}
	}
	u.all.Store(&all)
}

// SetRefusals makes every later Allocate of these units' devices fail for the given reason. It
// replaces the units that were set for that reason before. The text of each unit completes the
// sentence "the device …". If Withdrawn is true after this call, and a reading of the holders after
// that finds none, there will be none. It may be called from any goroutine.
func (m *Manager) SetRefusals(reason RefusalReason, units map[string]string) {
	m.refusedUnits.set(reason, units)
}
