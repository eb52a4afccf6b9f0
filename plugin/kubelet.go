package plugin

import (
	"context"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Kubelet tells what the kubelet knows of devices. Manager calls it from one
// goroutine of its own, servers call Serving from theirs; no call holds up a
// list, an allocation or the end of the program.
type Kubelet interface {
	// Held returns who holds which devices now. It fails rather than return an
	// incomplete answer. An allocation without a namespace may be of a pod that
	// is gone, which the kubelet forgets at the latest when it next gets a list.
	Held(ctx context.Context) ([]sharing.Allocation, error)
	// Applied returns the devices that the kubelet believes to be Healthy, by
	// resource.
	Applied(ctx context.Context) (map[string][]string, error)
	// Serving says whether the kubelet is connected to a plugin that offers
	// Healthy devices of the resource.
	Serving(ctx context.Context, resource string) (bool, error)
}

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
