package plugin

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

// Status returns how each resource is served now, by name.
func (m *Manager) Status() []ResourceStatus {
	servers := m.status.Load().servers
	status := make([]ResourceStatus, len(servers))
	for i, s := range servers {
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
	return status
}
