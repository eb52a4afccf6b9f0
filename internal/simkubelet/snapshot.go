package simkubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
)

// Snapshot is a copy of the kubelet's state. It shares no memory with the kubelet.
type Snapshot struct {
	Up bool // a process runs
	// Resources maps names to all resources that the process knows, and all that a Register call
	// ever named. While the kubelet is down they have no devices.
	Resources map[string]Resource
	// Pods are the pods that are not deleted, in the order of AddPod.
	Pods []PodStatus
	// Violations are all violations so far, oldest first.
	Violations []string
}

// Resource is a resource in the kubelet's memory, with counters since New.
type Resource struct {
	// Devices are sorted by ID.
	Devices []Device
	// Capacity counts all devices, Allocatable the healthy ones, held or not.
	Capacity, Allocatable        int
	Streams                      int // open now
	StreamsOpened, StreamsClosed int
	// Registrations counts Register calls, including refused and unanswered ones.
	Registrations int
	Lists         int // received
	// Socket is the name of the socket that was registered last; empty for none.
	Socket string
	// Connected is true if the resource has an endpoint that is not stopped.
	Connected bool
}

// Device is a device as the kubelet sees it.
type Device struct {
	ID string
	// Healthy is false for all devices of a resource that is not connected.
	Healthy bool
}

// counter returns a resource's counters since New, never nil. The caller holds the lock.
func (k *Kubelet) counter(resource string) *Resource {
	if k.counters[resource] == nil {
		k.counters[resource] = &Resource{}
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

// wait is a call of Await.
type wait struct {
	// states are those that it has not looked at yet. The kubelet's lock guards them.
	states []Snapshot
	// more has a value when there are some.
	more chan struct{}
}

// Await blocks until the condition holds for the kubelet's state. It sees every state from the call on,
// however short. The error wraps the context's and contains the last state.
func (k *Kubelet) Await(ctx context.Context, condition func(Snapshot) bool) error {
	w := &wait{more: make(chan struct{}, 1)}
	k.mu.Lock()
	k.waits[w] = true
	w.states = []Snapshot{k.snapshot()}
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.waits, w)
	}()
	for {
		k.mu.Lock()
		states := w.states
		w.states = nil
		k.mu.Unlock()
		if slices.ContainsFunc(states, condition) {
			return nil
		}
		select {
		case <-w.more:
		case <-ctx.Done():
			return fmt.Errorf("await kubelet state: %w; last: %s", ctx.Err(), k.Snapshot())
		}
	}
}

// tell tells those who wait, and OnChange, of a new state. The caller holds the lock.
func (k *Kubelet) tell() {
	if len(k.waits) == 0 && k.options.OnChange == nil {
		return
	}
	snapshot := k.snapshot()
	if k.options.OnChange != nil {
		k.options.OnChange(snapshot)
	}
	for w := range k.waits {
		w.states = append(w.states, snapshot)
		select {
		case w.more <- struct{}{}:
		default:
		}
	}
}

// String returns one line: each resource with allocatable/capacity and its streams.
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
		Violations: slices.Clone(k.violations),
	}
	for name, c := range k.counters {
		s.Resources[name] = *c
	}
	if k.process != nil {
		for name, devices := range k.process.devices {
			r := s.Resources[name]
			r.Capacity, r.Allocatable = devices.capacity(), len(devices.healthy)
			for _, id := range sets.List(devices.healthy.Union(devices.unhealthy)) {
				r.Devices = append(r.Devices, Device{ID: id, Healthy: devices.healthy.Has(id)})
			}
			s.Resources[name] = r
		}
		for name, endpoint := range k.process.endpoints {
			r := s.Resources[name]
			r.Connected = endpoint.stopped.IsZero()
			s.Resources[name] = r
		}
	}
	for _, pod := range k.podsInOrder() {
		s.Pods = append(s.Pods, k.podStatus(pod))
	}
	return s
}

func (k *Kubelet) reportStatus(p *process) {
	for tick := time.Tick(k.options.StatusPeriod); ; {
		k.lock()
		k.updateStatus(p)
		k.unlock()
		select {
		case <-tick:
		case <-p.stopping:
			return
		}
	}
}

// updateStatus does what the kubelet does when it reports the node's capacity (GetCapacity). Only
// updateStatus removes resources: those whose endpoint has been stopped for longer than StopGrace.
// The caller holds the lock.
func (k *Kubelet) updateStatus(p *process) {
	removed := false
	for resource := range p.devices {
		endpoint := p.endpoints[resource]
		if endpoint == nil || !endpoint.stopped.IsZero() &&
			k.options.Now().Sub(endpoint.stopped) > k.options.StopGrace {
			delete(p.endpoints, resource)
			delete(p.devices, resource)
			removed = true
		}
	}
	if removed {
		k.writeCheckpoint(p)
	}
}

// Event is something that happened in a kubelet, for Options.OnEvent.
type Event struct {
	Kind EventKind
	// Resource is the resource's name; empty for events without a resource.
	Resource string
	// Devices is set for ListReceived, in the order of the list, and for Allocated, sorted by ID.
	Devices []Device
	// Pod is the pod's UID; set for Allocated and PodEnded.
	Pod string
	// ByKubelet is set for StreamEnded if the kubelet ended the stream.
	ByKubelet bool
}

// EventKind is the kind of an event.
type EventKind string

// The kinds of events.
const (
	// Started and Stopped are about a process. Its streams end after Stopped.
	Started EventKind = "started"
	Stopped EventKind = "stopped"
	// RegisterCalled comes before the call is answered or refused.
	RegisterCalled EventKind = "register called"
	// StreamOpened and StreamEnded are about ListAndWatch.
	StreamOpened EventKind = "stream opened"
	StreamEnded  EventKind = "stream ended"
	// ListReceived comes after the kubelet has processed a list.
	ListReceived EventKind = "list received"
	// Allocated: a pod now holds devices for one of its containers.
	Allocated EventKind = "allocated"
	// PodEnded: a pod no longer holds any devices.
	PodEnded EventKind = "pod ended"
)

// notify passes an event to Options.OnEvent. The caller holds the lock.
func (k *Kubelet) notify(event Event) {
	if k.options.OnEvent != nil {
		k.options.OnEvent(event)
	}
}
