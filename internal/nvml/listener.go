package nvml

import (
	"context"
	"errors"
	"maps"
	"time"
)

// eventWait is how long one wait for events lasts at most. Nothing interrupts
// it, so it is what the program's end may have to wait for.
const eventWait = 250 * time.Millisecond

// healthEvents are the events that Virgate registers for.
const healthEvents = EventDoubleBitECC | EventXIDCritical

// listener keeps one event set, and one goroutine that waits on it, for all
// boards. One lost board makes every wait on its set fail from then on
// (nvml.h, nvmlEventSetWait_v2: GPU_IS_LOST), so a set that failed is thrown
// away and a new one made without the boards that could not be read.
type listener struct {
	*watcher
	// open says that set exists; since is when it was made.
	open  bool
	set   EventSet
	since time.Time
	// asked are the handles that were registered or have no events.
	asked map[Device]bool
	// waiting says that a goroutine waits on the set; it ends with halt, or with
	// the first failing wait, and tells ended either way.
	waiting bool
	halt    context.CancelFunc
	ended   chan error
	// pause is the next back-off. While one runs, retry is its end and no set is
	// made; the watcher's loop then makes it nil.
	pause time.Duration
	retry <-chan time.Time
	// degraded says of each board that was registered, or could not be, why its
	// events are not heard; "" when they are. told is what the owner knows of it.
	degraded, told map[string]string
}

func newListener(w *watcher) *listener {
	return &listener{watcher: w, ended: make(chan error, 1), pause: w.options.Backoff, degraded: map[string]string{}}
}

// renew registers the boards that were read for events, with a new set if there
// is none. A board that has no events only has none; other failures are tried
// again with the next pass.
func (l *listener) renew(ctx context.Context, readings []reading) {
	defer l.tell(ctx)
	if !l.open && !l.create() {
		for _, r := range readings {
			if l.degraded[r.gpu.UUID] == "" {
				l.degraded[r.gpu.UUID] = noWait
			}
		}
		return
	}
	for _, r := range readings {
		if l.mutes.has(r.gpu.UUID) {
			l.degraded[r.gpu.UUID] = "its MIG mode is being changed"
			continue
		}
		if l.asked[r.device] {
			continue
		}
		registered, err := l.register(r.device)
		switch {
		case err != nil:
			l.degraded[r.gpu.UUID] = "not registered for events: " + cause(err)
			continue
		case !registered:
			l.degraded[r.gpu.UUID] = "the board has no events"
		default:
			l.degraded[r.gpu.UUID] = ""
		}
		l.asked[r.device] = true
		if registered && !l.waiting {
			l.start(ctx)
		}
	}
}

// noWait is what is degraded at every board when a wait failed.
const noWait = "waiting for events fails"

// tell hands over what is degraded, when it is something new.
func (l *listener) tell(ctx context.Context) {
	if !maps.Equal(l.degraded, l.told) {
		l.told = maps.Clone(l.degraded)
		send(ctx, l.monitors, l.told)
	}
}

// deafen says that no board is heard.
func (l *listener) deafen() {
	for uuid := range l.degraded {
		l.degraded[uuid] = noWait
	}
}

func (l *listener) create() bool {
	if l.retry != nil {
		return false
	}
	defer l.activity.begin("EventSetCreate")()
	set, err := l.lib.EventSetCreate()
	if err != nil {
		l.back(err)
		return false
	}
	l.open, l.set, l.since, l.asked = true, set, time.Now(), map[Device]bool{}
	return true
}

// register asks for the board's events; false when it has none.
func (l *listener) register(device Device) (bool, error) {
	defer l.activity.begin("DeviceRegisterEvents")()
	supported, err := l.lib.DeviceGetSupportedEventTypes(device)
	if err == nil && supported&healthEvents != 0 {
		err = l.lib.DeviceRegisterEvents(device, supported&healthEvents, l.set)
		if err == nil {
			return true, nil
		}
	}
	if unsupported(err) {
		return false, nil
	}
	return false, err
}

func (l *listener) start(ctx context.Context) {
	halted, halt := context.WithCancel(ctx)
	l.waiting, l.halt = true, halt
	go func() { l.ended <- l.wait(ctx, halted, l.set) }()
}

// wait hands over events until halted ends, which is no error, or a wait fails.
// What the last wait brings is handed over too, unless ctx has ended.
func (l *listener) wait(ctx, halted context.Context, set EventSet) error {
	for halted.Err() == nil {
		event, err := l.lib.EventSetWait(set, eventWait)
		switch {
		case err == nil:
			send(ctx, l.events, event)
		case !errors.Is(err, Timeout):
			return err
		}
	}
	return nil
}

// fail throws away the set on which a wait failed. A set that held for a while
// is replaced with the next pass, so that the other boards' events are hardly
// missed; one that failed at once only after a pause. It says nothing of any
// board's health: the pass finds out which one is lost.
func (l *listener) fail(ctx context.Context, err error) {
	l.waiting = false
	held := time.Since(l.since) >= l.options.Backoff
	l.free()
	l.deafen()
	if held {
		l.pause = l.options.Backoff
		l.log.Warn("waiting for events failed", "error", err)
		return
	}
	l.back(err)
	l.tell(ctx)
}

// back begins a pause before the next try.
func (l *listener) back(err error) {
	l.log.Warn("waiting for events failed", "error", err, "pause", l.pause)
	l.retry = time.After(l.pause)
	l.pause = min(2*l.pause, backoffLimit)
}

// stop ends listening.
func (l *listener) stop(ctx context.Context) {
	l.end()
	l.deafen()
	l.tell(ctx)
}

// end ends the waiting goroutine and then frees the set, never the other way
// round: the driver would be waiting on freed memory. The next renew makes
// another.
func (l *listener) end() {
	if l.waiting {
		end := l.activity.begin("EventSetWait")
		l.halt()
		if err := <-l.ended; err != nil {
			l.log.Warn("waiting for events failed", "error", err)
		}
		end()
		l.waiting = false
	}
	l.free()
}

func (l *listener) free() {
	if !l.open {
		return
	}
	l.open = false
	if l.halt != nil {
		l.halt()
	}
	defer l.activity.begin("EventSetFree")()
	if err := l.lib.EventSetFree(l.set); err != nil {
		l.log.Warn("an event set could not be freed", "error", err)
	}
}
