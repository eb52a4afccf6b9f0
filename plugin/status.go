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
	// Registrations, StreamsOpened, Lists, Granted and Refused count since the
	// server started.
	Registrations, StreamsOpened, Lists, Granted, Refused uint64
}

// Status returns how the last plan is served now.
func (m *Manager) Status() Status {
	plan, serving := m.plan.Load(), m.status.Load()
	status := make([]ResourceStatus, len(serving.servers))
	for i, s := range serving.servers {
		list := s.current.Load().list
		status[i] = ResourceStatus{
			Name: s.name, Streams: int(s.streams.Load()),
			Devices: len(list.Entries), Dropped: !list.Dropped.IsZero(),
			Registrations: s.counters.registrations.Load(), StreamsOpened: s.counters.streams.Load(),
			Lists: s.counters.lists.Load(), Granted: s.counters.granted.Load(), Refused: s.counters.refused.Load(),
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
