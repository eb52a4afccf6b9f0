package plugin

// Status is how the last plan is served now.
type Status struct {
	// Served says that the last plan that was applied has been taken up. A
	// resource of the plan that is not in Resources then has only units that are
	// still held in another way.
	Served bool
	// KubeletSeen says that what the kubelet holds and has applied could be read
	// when it was last needed. Without it no list loses a device.
	KubeletSeen bool
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
	// Sent says that the kubelet was given the list as it is now. With one stream
	// open the kubelet then has it.
	Sent bool
	// Listed are the devices of the list, those on their way out included.
	Listed []Entry
	// Registrations, StreamsOpened, Lists and Granted count since the server
	// started; SameUnit are the grants of two devices of one unit to a container.
	Registrations, StreamsOpened, Lists, Granted, SameUnit uint64
	// Refused counts refused calls by why; it has every reason.
	Refused map[Reason]uint64
	// Allocated and Failed are how long calls of Allocate took that were granted
	// and that were refused, Preferred those of GetPreferredAllocation.
	Allocated, Failed, Preferred Latency
}

// Status returns how the last plan is served now.
func (m *Manager) Status() Status {
	plan, serving := m.plan.Load(), m.status.Load()
	status := make([]ResourceStatus, len(serving.servers))
	for i, s := range serving.servers {
		current, sent := s.current.Load(), s.sent.Load()
		list := current.list
		status[i] = ResourceStatus{
			Name: s.name, Streams: int(s.streams.Load()),
			Devices: len(list.Entries), Dropped: !list.Dropped.IsZero(),
			Sent:          sent != nil && sent.superseded == current.superseded,
			Registrations: s.counters.registrations.Load(), StreamsOpened: s.counters.streams.Load(),
			Lists: s.counters.lists.Load(), Granted: s.counters.granted.Load(), SameUnit: s.counters.sameUnit.Load(),
			Listed: list.Entries, Refused: s.counters.refusals(),
			Allocated: s.counters.allocated.read(), Failed: s.counters.failed.read(), Preferred: s.counters.preferred.read(),
		}
		for _, e := range list.Entries {
			if e.Healthy {
				status[i].Healthy++
			}
			if e.Phase != Offered {
				status[i].Leaving++
			}
		}
	}
	return Status{Served: plan == serving.plan, KubeletSeen: serving.seen, Resources: status}
}

// Changed receives when Status may answer otherwise, once for any number of
// changes since the last receipt. It is for one reader.
func (m *Manager) Changed() <-chan struct{} { return m.changed }
