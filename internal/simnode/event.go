package simnode

import (
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// eventSet is an event set with what is registered in it and what has happened.
type eventSet struct {
	// registered are the event types by the handle they were registered with,
	// which a reset of the board makes deaf.
	registered map[nvml.Device]nvml.EventTypes
	queue      []nvml.Event
}

// supportedEvents are those of every simulated board.
const supportedEvents = nvml.EventSingleBitECC | nvml.EventDoubleBitECC | nvml.EventXIDCritical

// EventSetCreate makes an empty set.
func (n *Node) EventSetCreate() (nvml.EventSet, error) {
	if err := n.enter("EventSetCreate", nil); err != nil {
		return 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	handle := nvml.EventSet(n.handle())
	n.sets[handle] = &eventSet{registered: map[nvml.Device]nvml.EventTypes{}}
	return handle, nil
}

// DeviceGetSupportedEventTypes is the same for all boards; MIG devices have no
// events of their own.
func (n *Node) DeviceGetSupportedEventTypes(d nvml.Device) (nvml.EventTypes, error) {
	return askBoard(n, "DeviceGetSupportedEventTypes", d, func(*board) (nvml.EventTypes, nvml.Return) {
		return supportedEvents, nvml.Success
	})
}

// DeviceRegisterEvents is NOT_SUPPORTED for types that the board does not have.
func (n *Node) DeviceRegisterEvents(d nvml.Device, types nvml.EventTypes, handle nvml.EventSet) error {
	_, err := askBoard(n, "DeviceRegisterEvents", d, func(*board) (struct{}, nvml.Return) {
		set := n.sets[handle]
		switch {
		case set == nil:
			return struct{}{}, nvml.InvalidArgument
		case types&^supportedEvents != 0:
			return struct{}{}, nvml.NotSupported
		}
		set.registered[d] |= types
		return struct{}{}, nvml.Success
	})
	return err
}

// EventSetWait returns the oldest event. While a board with a handle in the set
// is lost, it returns GPU_IS_LOST at once, as nvml.h has it.
func (n *Node) EventSetWait(handle nvml.EventSet, timeout time.Duration) (nvml.Event, error) {
	const call = "EventSetWait"
	if err := n.enter(call, nil); err != nil {
		return nvml.Event{}, err
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		event, code, news := n.poll(handle)
		switch code {
		case nvml.Success:
			return event, nil
		case nvml.Timeout:
		default:
			return event, failed(call, code)
		}
		select {
		case <-news:
		case <-timer.C:
			return event, failed(call, nvml.Timeout)
		}
	}
}

// poll is what the set has now: TIMEOUT stands for nothing, and news then ends
// when it is worth another look.
func (n *Node) poll(handle nvml.EventSet) (event nvml.Event, code nvml.Return, news <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	set := n.sets[handle]
	if set == nil {
		return event, nvml.InvalidArgument, nil
	}
	if len(set.queue) > 0 {
		event, set.queue = set.queue[0], set.queue[1:]
		return event, nvml.Success, nil
	}
	for d := range set.registered {
		if b := n.devices[d].board; b.handle == d && (b.lost || b.pulled) {
			return event, nvml.GPUIsLost, nil
		}
	}
	return event, nvml.Timeout, n.news
}

// EventSetFree ends a set, and every wait on it.
func (n *Node) EventSetFree(handle nvml.EventSet) error {
	const call = "EventSetFree"
	if err := n.enter(call, nil); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sets[handle] == nil {
		return failed(call, nvml.InvalidArgument)
	}
	delete(n.sets, handle)
	n.wake()
	return nil
}

// happen puts the board's event into every set that asked for it.
func (n *Node) happen(b *board, event nvml.Event) {
	event.Device = b.handle
	for _, set := range n.sets {
		if set.registered[b.handle]&event.Type != 0 {
			set.queue = append(set.queue, event)
		}
	}
	n.wake()
}
