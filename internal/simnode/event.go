package simnode

import (
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// eventSet is an event set, with the events that no EventSetWait has returned yet.
type eventSet struct {
	// registered are the event types by device handle. A reset of the GPU invalidates the handle,
	// and the set gets no more events of the GPU.
	registered map[nvml.Device]nvml.EventTypes
	queue      []nvml.Event
	// undefined is true if registering a GPU returned UNKNOWN: the set then gets no more events.
	undefined bool
}

// supportedEvents returns the event types of every simulated GPU.
func (n *Node) supportedEvents() nvml.EventTypes {
	events := nvml.EventSingleBitECC | nvml.EventDoubleBitECC | nvml.EventXIDCritical
	if !n.is(oldDriver) {
		events |= nvml.EventGPUUnavailable | nvml.EventRecoveryAction
	}
	return events
}

func (n driver) EventSetCreate() (nvml.EventSet, error) {
	handle := nvml.EventSet(n.node.handle(target{}))
	n.node.sets[handle] = &eventSet{registered: map[nvml.Device]nvml.EventTypes{}}
	return handle, nil
}

// DeviceGetSupportedEventTypes returns the same for all GPUs; MIG devices have no events of their
// own.
func (n driver) DeviceGetSupportedEventTypes(nvml.Device) (nvml.EventTypes, error) {
	return n.node.supportedEvents(), nil
}

// DeviceRegisterEvents returns NOT_SUPPORTED for types that the GPU does not have.
func (n driver) DeviceRegisterEvents(d nvml.Device, types nvml.EventTypes, handle nvml.EventSet) error {
	set := n.node.sets[handle]
	switch {
	case set == nil:
		return nvml.InvalidArgument
	case types&^n.node.supportedEvents() != 0:
		return nvml.NotSupported
	}
	set.registered[d] |= types
	return nil
}

// EventSetWait returns the oldest event. If a GPU with a handle in the set is lost, it returns
// GPU_IS_LOST at once, as nvml.h documents.
func (n driver) EventSetWait(handle nvml.EventSet, timeout time.Duration) (nvml.Event, error) {
	for late := time.After(timeout); ; {
		event, changed, err := n.node.poll(handle)
		if changed == nil {
			return event, err
		}
		select {
		case <-changed:
		case <-late:
			return event, nvml.Timeout
		}
	}
}

// poll takes an event from the set. If there is none, it returns a channel that is closed when the
// caller should poll again.
func (n *Node) poll(handle nvml.EventSet) (event nvml.Event, changed <-chan struct{}, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	set := n.sets[handle]
	if set == nil {
		return event, nil, nvml.InvalidArgument
	}
	if len(set.queue) > 0 {
		event, set.queue = set.queue[0], set.queue[1:]
		return event, nil, nil
	}
	for d := range set.registered {
		if t := n.targets[uint64(d)]; !t.void && (t.gpu.lost || t.gpu.removed) {
			return event, nil, nvml.GPUIsLost
		}
	}
	return event, n.eventsChanged, nil
}

// EventSetFree frees a set and ends every wait for it.
func (n driver) EventSetFree(handle nvml.EventSet) error {
	if n.node.sets[handle] == nil {
		return nvml.InvalidArgument
	}
	delete(n.node.sets, handle)
	n.node.wakeWaits()
	return nil
}

// emit puts the GPU's event into every set that is registered for it. An unprivileged process gets
// no events of partitions.
func (n *Node) emit(g *simGPU, event nvml.Event) {
	event.Device = g.handle
	if n.is("unprivileged") && event.GI != nvml.WholeGPU {
		return
	}
	for _, set := range n.sets {
		if set.registered[g.handle]&event.Type != 0 && !set.undefined {
			set.queue = append(set.queue, event)
		}
	}
	n.wakeWaits()
}

// wakeWaits makes every EventSetWait poll its set again.
func (n *Node) wakeWaits() {
	close(n.eventsChanged)
	n.eventsChanged = make(chan struct{})
}

// breakSet makes the set undefined, as the return code UNKNOWN does: the set gets no more events.
func (n *Node) breakSet(handle nvml.EventSet) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if set := n.sets[handle]; set != nil {
		set.undefined = true
	}
}
