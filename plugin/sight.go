package plugin

import (
	"cmp"
	"context"
	"time"
)

// idSet is a set of device IDs by resource.
type idSet map[string]map[string]struct{}

func (s idSet) has(resource, id string) bool {
	_, ok := s[resource][id]
	return ok
}

func (s idSet) add(resource, id string) {
	if s[resource] == nil {
		s[resource] = map[string]struct{}{}
	}
	s[resource][id] = struct{}{}
}

// Sight is what was last seen of the kubelet.
type Sight struct {
	held    idSet
	applied idSet
	// doubtful are the held devices of which the kubelet does not say which pod
	// has them; see Kubelet.Held.
	doubtful idSet
	// heldAt and appliedAt are when the reading began; zero when it never
	// succeeded.
	heldAt, appliedAt time.Time
	// heldKnown and appliedKnown say that the last reading succeeded. When it
	// failed, held and applied are the last that did.
	heldKnown, appliedKnown bool
}

// look reads both and keeps from last what cannot be read now. The error says
// what could not.
func look(ctx context.Context, k Kubelet, last Sight, now func() time.Time) (Sight, error, error) {
	next := last
	next.heldKnown, next.appliedKnown = false, false

	// Applied first: a device that has left it is free for good if Held, read
	// afterwards, does not show it.
	began := now()
	applied, appliedErr := k.Applied(ctx)
	if appliedErr == nil {
		next.applied, next.appliedAt, next.appliedKnown = idSet{}, began, true
		for resource, ids := range applied {
			for _, id := range ids {
				next.applied.add(resource, id)
			}
		}
	}

	began = now()
	held, heldErr := k.Held(ctx)
	if heldErr == nil {
		next.held, next.doubtful, next.heldAt, next.heldKnown = idSet{}, idSet{}, began, true
		for _, allocation := range held {
			for _, id := range allocation.Devices {
				next.held.add(allocation.Resource, id)
				if allocation.Namespace == "" {
					next.doubtful.add(allocation.Resource, id)
				}
			}
		}
	}
	return next, appliedErr, heldErr
}

// watchKubelet looks at the kubelet when asked and hands on what it saw.
func (m *Manager) watchKubelet(ctx context.Context, looks <-chan struct{}, sights chan<- Sight) {
	var last Sight
	complained := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-looks:
		}
		var appliedErr, heldErr error
		last, appliedErr, heldErr = look(ctx, m.options.Kubelet, last, m.options.Now)
		complaint := ""
		if err := cmp.Or(heldErr, appliedErr); err != nil && ctx.Err() == nil {
			complaint = err.Error()
		}
		if complaint != complained && complaint != "" {
			m.options.Logger.Warn("kubelet not seen, no list loses a device", "error", complaint)
		}
		complained = complaint
		select {
		case sights <- last:
		case <-ctx.Done():
			return
		}
	}
}
