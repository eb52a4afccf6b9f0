package simkubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Snapshot is what the kubelet knows at one moment. It shares no memory with
// the kubelet.
type Snapshot struct {
	// Up says that a process runs.
	Up bool
	// Resources are by name: all that a process knows and all that ever were
	// named in a Register call. While the kubelet is down they have no devices.
	Resources map[string]Resource
	// Node is the node's status as last published.
	Node map[string]Quantity
	// Pods are those not deleted, in the order in which they were added.
	Pods []PodStatus
	// Violations are all so far, oldest first.
	Violations []string
}

// Resource is one resource in the kubelet's memory, with counters that outlive
// a restart.
type Resource struct {
	// Devices are sorted by ID.
	Devices []Device
	// Capacity counts all devices, Allocatable the healthy ones, held or not.
	Capacity, Allocatable int
	// Streams is the number of ListAndWatch streams open now.
	Streams int
	// StreamsOpened and StreamsClosed count streams since New.
	StreamsOpened, StreamsClosed int
	// Registrations counts Register calls since New, refused and unanswered
	// ones too.
	Registrations int
	// Lists counts lists received since New.
	Lists int
	// Socket is the path, in the device-plugins directory, that was registered
	// last; empty for none.
	Socket string
	// Connected says that the resource has an endpoint that is not stopped.
	Connected bool
}

// Device is a device as the kubelet judges it.
type Device struct {
	ID string
	// Healthy is false for every device of a resource that is not connected.
	Healthy bool
	// NUMA are the device's NUMA nodes, sorted; nil for none.
	NUMA []int64
}

// counters are a resource's numbers since New.
type counters struct {
	registrations, streamsOpened, streamsClosed, lists int

	socket string
}

// counter is never nil. The caller holds the lock.
func (k *Kubelet) counter(resource string) *counters {
	if k.counters[resource] == nil {
		k.counters[resource] = &counters{}
	}
	return k.counters[resource]
}

// Snapshot returns the state now.
func (k *Kubelet) Snapshot() Snapshot {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.snapshot()
}

// Violations returns all violations so far, oldest first.
func (k *Kubelet) Violations() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.violations)
}

// Await blocks until the condition holds of the kubelet's state. It looks at
// every state in which something has changed, and may skip one that was
// superseded at once. Its error wraps the context's and shows the resources.
func (k *Kubelet) Await(ctx context.Context, condition func(Snapshot) bool) error {
	for {
		k.mu.Lock()
		snapshot, changed := k.snapshot(), k.changed
		k.mu.Unlock()
		if condition(snapshot) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("await kubelet state: %w; last: %s", ctx.Err(), snapshot)
		}
	}
}

// String is one line: each resource with allocatable/capacity and its streams.
func (s Snapshot) String() string {
	var line strings.Builder
	fmt.Fprintf(&line, "up=%t pods=%d violations=%d", s.Up, len(s.Pods), len(s.Violations))
	for _, name := range slices.Sorted(maps.Keys(s.Resources)) {
		r := s.Resources[name]
		fmt.Fprintf(&line, " %s=%d/%d,streams=%d,registrations=%d,lists=%d",
			name, r.Allocatable, r.Capacity, r.Streams, r.Registrations, r.Lists)
	}
	return line.String()
}

func (k *Kubelet) snapshot() Snapshot {
	s := Snapshot{
		Up:         k.process != nil,
		Resources:  map[string]Resource{},
		Node:       maps.Clone(k.node),
		Violations: slices.Clone(k.violations),
	}
	for name, c := range k.counters {
		s.Resources[name] = Resource{
			Streams:       c.streamsOpened - c.streamsClosed,
			StreamsOpened: c.streamsOpened,
			StreamsClosed: c.streamsClosed,
			Registrations: c.registrations,
			Lists:         c.lists,
			Socket:        c.socket,
		}
	}
	if k.process != nil {
		for name, devices := range k.process.devices {
			r := s.Resources[name]
			r.Capacity, r.Allocatable = devices.capacity(), len(devices.healthy)
			for _, id := range devices.healthy.union(devices.unhealthy).sorted() {
				r.Devices = append(r.Devices, Device{ID: id, Healthy: devices.healthy.has(id), NUMA: nodesOf(devices.all[id])})
			}
			s.Resources[name] = r
		}
		for name, endpoint := range k.process.endpoints {
			r := s.Resources[name]
			r.Connected = endpoint.stopped.IsZero()
			s.Resources[name] = r
		}
	}
	for _, pod := range k.podsByAge() {
		s.Pods = append(s.Pods, k.podStatus(pod))
	}
	return s
}
