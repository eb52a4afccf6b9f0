package plugin

import (
	"cmp"
	"context"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Kubelet reads what the kubelet knows about devices. Manager and each server call it from
// goroutines of their own, so that a slow answer delays no list, no allocation and no shutdown.
type Kubelet interface {
	// Held returns which containers hold which devices now. It fails rather than return an
	// incomplete answer. An allocation without a namespace may belong to a pod that is gone; the
	// kubelet forgets it when it next gets a list.
	Held(ctx context.Context) ([]sharing.Allocation, error)
	// Applied returns the devices that the kubelet considers Healthy, by resource.
	Applied(ctx context.Context) (map[string][]string, error)
	// Serving reports whether the kubelet is connected to a plugin that offers Healthy devices of
	// the resource.
	Serving(ctx context.Context, resource string) (bool, error)
}

// DeviceIDs is a set of device IDs by resource.
type DeviceIDs map[string]map[string]struct{}

func (s DeviceIDs) has(resource, id string) bool {
	_, ok := s[resource][id]
	return ok
}

func (s DeviceIDs) add(resource, id string) {
	if s[resource] == nil {
		s[resource] = map[string]struct{}{}
	}
	s[resource][id] = struct{}{}
}

// DeviceTimes are times by resource and device ID.
type DeviceTimes map[string]map[string]time.Time

func (t DeviceTimes) set(resource, id string, at time.Time) {
	if t[resource] == nil {
		t[resource] = map[string]time.Time{}
	}
	t[resource][id] = at
}

// KubeletSnapshot is the result of the latest readings of the kubelet; zero before the first.
type KubeletSnapshot struct {
	Held    DeviceIDs
	Applied DeviceIDs
	// Holders are the allocations behind Held.
	Holders []sharing.Allocation
	// Uncertain are the Held devices for which the kubelet names no pod; see Kubelet.Held.
	Uncertain DeviceIDs
	// SeenHeld is when the latest reading began that showed a named pod holding the device.
	SeenHeld DeviceTimes
	// HeldAt and AppliedAt are when the reading of Held and of Applied began; zero if none has succeeded.
	HeldAt, AppliedAt time.Time
	// HeldKnown and AppliedKnown report whether the latest reading succeeded. If not, Held and
	// Applied are from the last one that did.
	HeldKnown, AppliedKnown bool
}

// pendingGrant reports whether a device granted at that time may be held by a pod that no reading has
// shown yet. A pod that was seen and is gone delays nothing. A pod that was never seen may have
// failed to start; its grant counts until the delay has passed.
func (k KubeletSnapshot) pendingGrant(resource, id string, granted time.Time, delay time.Duration) bool {
	switch {
	case granted.IsZero():
		return false
	case k.HeldAt.IsZero():
		return true
	}
	return granted.After(k.HeldAt.Add(-delay)) && !k.SeenHeld[resource][id].After(granted)
}

func (k KubeletSnapshot) pendingGrants(granted DeviceTimes, delay time.Duration) bool {
	for resource, devices := range granted {
		for id, at := range devices {
			if k.pendingGrant(resource, id, at, delay) {
				return true
			}
		}
	}
	return false
}

// observeHeld records when devices were seen held, and forgets times too old to matter for any grant.
func (k *KubeletSnapshot) observeHeld(last DeviceTimes, remember time.Duration) {
	k.SeenHeld = DeviceTimes{}
	for resource, ids := range last {
		for id, at := range ids {
			if k.HeldAt.Sub(at) <= remember {
				k.SeenHeld.set(resource, id, at)
			}
		}
	}
	for resource, ids := range k.Held {
		for id := range ids {
			// A holder without a name may be a pod whose end the kubelet's checkpoint has missed.
			if !k.Uncertain.has(resource, id) {
				k.SeenHeld.set(resource, id, k.HeldAt)
			}
		}
	}
}

// readKubelet reads Held, Applied or both. What is not requested, or cannot be read now, it keeps
// from last.
func readKubelet(
	ctx context.Context,
	k Kubelet,
	what reading,
	last KubeletSnapshot,
	remember time.Duration,
	now func() time.Time,
) (KubeletSnapshot, error) {
	next := last
	var appliedErr, heldErr error
	// Applied comes first: a device that the kubelet no longer considers Healthy, and that no pod
	// holds in a later reading, stays free.
	if what.applied {
		began := now()
		var applied map[string][]string
		applied, appliedErr = k.Applied(ctx)
		next.AppliedKnown = appliedErr == nil
		if next.AppliedKnown {
			next.Applied, next.AppliedAt = DeviceIDs{}, began
			for resource, ids := range applied {
				next.Applied[resource] = make(map[string]struct{}, len(ids))
				for _, id := range ids {
					next.Applied.add(resource, id)
				}
			}
		}
	}
	if what.held {
		began := now()
		var held []sharing.Allocation
		held, heldErr = k.Held(ctx)
		next.HeldKnown = heldErr == nil
		if next.HeldKnown {
			next.Holders = held
			next.Held = DeviceIDs{}
			next.Uncertain = DeviceIDs{}
			next.HeldAt = began
			for _, allocation := range held {
				for _, id := range allocation.Devices {
					next.Held.add(allocation.Resource, id)
					if allocation.Namespace == "" {
						next.Uncertain.add(allocation.Resource, id)
					}
				}
			}
			next.observeHeld(last.SeenHeld, remember)
		}
	}
	return next, cmp.Or(heldErr, appliedErr)
}

// watchKubelet reads the kubelet on request, and sends the results to snapshots.
func (m *Manager) watchKubelet(ctx context.Context, requests <-chan reading, snapshots chan<- KubeletSnapshot) {
	var last KubeletSnapshot
	complained := ""
	for {
		var what reading
		select {
		case <-ctx.Done():
			return
		case what = <-requests:
		}
		var err error
		last, err = readKubelet(ctx, m.options.Kubelet, what, last, m.options.Timing.RemovalDelay, m.options.Now)
		complaint := ""
		if err != nil && ctx.Err() == nil {
			complaint = err.Error()
		}
		if complaint != complained && complaint != "" {
			m.options.Logger.Warn("kubelet state not known, no device is removed", "error", complaint)
		}
		complained = complaint
		select {
		case snapshots <- last:
		case <-ctx.Done():
			return
		}
	}
}
