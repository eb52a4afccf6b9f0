package nvml

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/virgate/virgate/sharing"
)

// eventWait is the longest duration of one wait for events. A wait cannot be interrupted, so the
// end of the program may be delayed by that long.
const eventWait = 250 * time.Millisecond

// healthEvents are the events that Virgate registers for.
const healthEvents = EventDoubleBitECC | EventXIDCritical | EventGPUUnavailable | EventRecoveryAction

// listener keeps one event set, and one goroutine that waits on it, for all GPUs. One lost GPU
// makes every later wait on its set fail (nvml.h, nvmlEventSetWait_v2: GPU_IS_LOST), so a failed
// set is discarded, and a new one is created without the GPUs that could not be read.
type listener struct {
	*poller
	// open is true while set exists; since is when it was created.
	open  bool
	set   EventSet
	since time.Time
	// registered holds the handles that were registered with this set or have no events.
	registered *sync.Map
	// doubtful holds the handles whose registration returned UNKNOWN.
	doubtful map[Device]bool
	// waiting is true while a goroutine waits on the set. The goroutine ends after halt or after
	// the first wait that fails, and sends to ended in both cases.
	waiting bool
	halt    context.CancelFunc
	ended   chan error
	// retry, if not nil, fires at the end of a pause in which no set is created. The poller's loop
	// then sets it to nil. pauses are the lengths of such pauses.
	pauses wait.Backoff
	retry  <-chan time.Time
	// degraded is the reason why a GPU's events are not received, for each GPU that was registered
	// or could not be; empty if they are received. reported is what was last sent to the publisher.
	degraded, reported map[string]string
}

func newListener(p *poller) *listener {
	return &listener{
		poller:   p,
		ended:    make(chan error, 1),
		pauses:   p.backoff(),
		degraded: map[string]string{},
		doubtful: map[Device]bool{},
	}
}

// register registers the GPUs that were read for events, with a new set if there is none. A failed
// registration is repeated after the next scan.
func (l *listener) register(ctx context.Context, readings []reading) {
	defer l.reportDegraded(ctx)
	for _, r := range readings {
		if !l.open && !l.createSet() {
			l.degraded[r.gpu.UUID] = cmp.Or(l.degraded[r.gpu.UUID], waitFails)
			continue
		}
		if _, paused := l.paused.Load(r.gpu.UUID); paused {
			l.degraded[r.gpu.UUID] = "its MIG mode is being changed"
			continue
		}
		if _, already := l.registered.Load(r.device); already {
			continue
		}
		registered, err := l.registerGPU(r.device)
		switch {
		case err != nil:
			l.degraded[r.gpu.UUID] = "not registered for events: " + cause(err)
			continue
		case !registered:
			l.degraded[r.gpu.UUID] = sharing.NoEvents
		case r.gpu.MIG && r.gpu.Denied:
			l.degraded[r.gpu.UUID] = "the driver withholds those of partitions: " + sharing.NoMIGRight
		default:
			l.degraded[r.gpu.UUID] = ""
		}
		l.registered.Store(r.device, nil)
		if registered && !l.waiting {
			waiting, halt := context.WithCancel(ctx)
			l.waiting, l.halt = true, halt
			set, registered := l.set, l.registered
			go func() { l.ended <- l.wait(ctx, waiting, set, registered) }()
		}
	}
}

// waitFails is the reason why a GPU is degraded after a wait for events has failed.
const waitFails = "waiting for events fails"

// reportDegraded sends degraded to the publisher if it has changed.
func (l *listener) reportDegraded(ctx context.Context) {
	if !maps.Equal(l.degraded, l.reported) {
		l.reported = maps.Clone(l.degraded)
		send(ctx, l.monitors, l.reported)
	}
}

func (l *listener) markAllDegraded() {
	for uuid := range l.degraded {
		l.degraded[uuid] = waitFails
	}
}

func (l *listener) createSet() bool {
	if l.retry != nil {
		return false
	}
	set, err := l.lib.EventSetCreate()
	if err != nil {
		l.backOff(err)
		return false
	}
	l.open = true
	l.set = set
	l.since = time.Now()
	l.registered = &sync.Map{}
	return true
}

// registerGPU registers the GPU for its events; false if it has none. After UNKNOWN the set is in
// an undefined state (nvml.h) and is replaced after a pause. The GPU must then first register with
// a set of its own, so that the other GPUs do not lose events again.
func (l *listener) registerGPU(device Device) (bool, error) {
	supported, err := l.lib.DeviceGetSupportedEventTypes(device)
	if err == nil && supported&healthEvents != 0 {
		if l.doubtful[device] {
			err = l.tryAlone(device, supported&healthEvents)
		}
		if err == nil {
			err = l.lib.DeviceRegisterEvents(device, supported&healthEvents, l.set)
			if err == nil {
				return true, nil
			}
			if errors.Is(err, Unknown) {
				l.doubtful[device] = true
				l.closeSet()
				l.markAllDegraded()
				l.backOff(err)
			}
		}
	}
	if unsupported(err) {
		return false, nil
	}
	return false, err
}

// tryAlone registers the GPU with a separate set, which it then frees.
func (l *listener) tryAlone(device Device, types EventTypes) error {
	set, err := l.lib.EventSetCreate()
	if err != nil {
		return err
	}
	return errors.Join(l.lib.DeviceRegisterEvents(device, types, set), l.lib.EventSetFree(set))
}

type receivedEvent struct {
	Event
	// uuid is the driver's UUID for a handle that was never registered; empty if there is none.
	uuid string
}

// wait sends events to the publisher until halted ends, which is not an error, or a wait fails.
// Events of the last wait are still sent, unless ctx has ended.
func (l *listener) wait(ctx, halted context.Context, set EventSet, registered *sync.Map) error {
	for halted.Err() == nil {
		event, err := l.lib.EventSetWait(set, eventWait)
		switch {
		case err == nil:
			received := receivedEvent{Event: event}
			if _, known := registered.Load(event.Device); !known {
				received.uuid, _ = l.lib.DeviceGetUUID(event.Device)
			}
			send(ctx, l.events, received)
		case !errors.Is(err, Timeout):
			return err
		}
	}
	return nil
}

// handleFailure discards the set on which a wait failed. If the set had worked for a while, it is
// replaced after the next scan, so that hardly any events of other GPUs are missed; otherwise after
// a pause. The failure tells nothing about any GPU's health: the scan finds the lost GPU.
func (l *listener) handleFailure(ctx context.Context, err error) {
	l.waiting = false
	worked := time.Since(l.since) >= l.options.Backoff
	l.freeSet()
	l.markAllDegraded()
	if worked {
		l.pauses = l.backoff()
		l.log.Warn("waiting for events failed", "error", err)
		return
	}
	l.backOff(err)
	l.reportDegraded(ctx)
}

func (l *listener) backOff(err error) {
	pause := l.pauses.Step()
	l.log.Warn("waiting for events failed", "error", err, "pause", pause)
	l.retry = time.After(pause)
}

func (l *listener) stop(ctx context.Context) {
	l.closeSet()
	l.markAllDegraded()
	l.reportDegraded(ctx)
}

// closeSet ends the waiting goroutine and then frees the set. The order matters: otherwise the
// driver would be waiting on freed memory. The next register creates another set.
func (l *listener) closeSet() {
	if l.waiting {
		l.halt()
		if err := <-l.ended; err != nil && !errors.Is(err, context.Canceled) {
			l.log.Warn("waiting for events failed", "error", err)
		}
		l.waiting = false
	}
	l.freeSet()
}

func (l *listener) freeSet() {
	if !l.open {
		return
	}
	l.open = false
	if l.halt != nil {
		l.halt()
	}
	if err := l.lib.EventSetFree(l.set); err != nil && !errors.Is(err, context.Canceled) {
		l.log.Warn("an event set could not be freed", "error", err)
	}
}
