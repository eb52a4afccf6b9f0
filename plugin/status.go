package plugin

import (
	"time"

	"github.com/virgate/virgate/sharing"
)

// Status is how the last plan is served now.
type Status struct {
	// Served says that the lists are made for the last plan that was applied. A
	// resource of the plan that is not in Resources then has only units that are still
	// held in another sharing mode.
	Served bool
	// KubeletSeen says that what the kubelet holds and has applied could be read
	// when it was last needed. While it cannot, no device is removed from a list.
	KubeletSeen bool
	// Holders are who held which devices when that could last be read. While a unit
	// waits for its holders, they are half a second old at most.
	Holders []sharing.Allocation
	// Resources are by name.
	Resources []ResourceStatus
}

// ResourceStatus is how one resource is served now.
type ResourceStatus struct {
	Name string
	// Streams is how many ListAndWatch streams the kubelet has open; 1 is right.
	Streams int
	// Devices is how many devices the list has, Healthy how many of them the
	// kubelet may hand out, Leaving how many are on their way out.
	Devices, Healthy, Leaving int
	// Dropped says that the plan does not have the resource any more.
	Dropped bool
	// Applied says that the kubelet has the list as it is now: it was sent, and a
	// reading after that showed its Healthy devices, and none that are Unhealthy.
	Applied bool
	// Listed are the devices of the list, those on their way out included.
	Listed []Entry
	// Units are those that are offered under the name, or held in a mode that they
	// are to leave. Replicas counts such devices.
	Units []sharing.Unit
	// Registrations, Lists and Granted count since the server started; SameUnit are the
	// grants of two devices of one unit to a container.
	Registrations, Lists, Granted, SameUnit uint64
	// Refused counts refused calls by reason; it has every reason.
	Refused map[RefusalReason]uint64
}

// Status returns how the last plan is served now.
func (m *Manager) Status() Status {
	plan, serving := m.plan.Load(), m.status.Load()
	status := make([]ResourceStatus, len(serving.servers))
	for i, s := range serving.servers {
		current := s.current.Load()
		list := current.list
		status[i] = ResourceStatus{
			Name: s.name, Streams: int(s.streams.Load()),
			Devices: len(list.Entries), Dropped: !list.Dropped.IsZero(),
			Applied:       s.applied.Load() == current.version,
			Registrations: s.counters.registrations.Load(),
			Lists:         s.counters.lists.Load(), Granted: s.counters.granted.Load(), SameUnit: s.counters.sameUnit.Load(),
			Listed: list.Entries, Refused: s.counters.refusals(),
		}
		for _, e := range list.Entries {
			if e.Healthy {
				status[i].Healthy++
			}
			if e.Phase != Offered {
				status[i].Leaving++
			}
			if e.Phase != Offered && (e.Phase != Closing || !e.Switching) {
				continue
			}
			last := len(status[i].Units) - 1 // A unit's devices stand together.
			if last < 0 || status[i].Units[last].ID != e.Unit {
				unit := current.units[e.Unit]
				unit.Replicas = 0
				status[i].Units, last = append(status[i].Units, unit), last+1
			}
			status[i].Units[last].Replicas++
		}
	}
	return Status{Served: plan == serving.plan, KubeletSeen: serving.kubeletSeen, Holders: serving.holders, Resources: status}
}

// Changed receives when Status may answer otherwise, once for any number of
// changes since the last receipt. It is for one reader.
func (m *Manager) Changed() <-chan struct{} { return m.changed }

// CallMetrics measures how long the kubelet's calls take. Run's goroutine calls it.
type CallMetrics interface {
	// Start is called before a resource's server starts, Stop after it has stopped.
	Start(resource string) CallObservers
	Stop(resource string)
}

// CallObservers measure the calls of one resource: Allocate, by whether it was
// granted, and GetPreferredAllocation. They must not block.
type CallObservers struct{ Granted, Refused, Preferred Observer }

// Observer takes a duration in seconds; a prometheus.Histogram is one.
type Observer interface{ Observe(seconds float64) }

// SetCallMetrics has calls measured; without it they are not. Call it before Run.
func (m *Manager) SetCallMetrics(metrics CallMetrics) { m.callMetrics = metrics }

func observe(observer Observer, took time.Duration) {
	if observer != nil {
		observer.Observe(took.Seconds())
	}
}
