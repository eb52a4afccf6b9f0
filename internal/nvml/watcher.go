package nvml

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// backoffLimit is the longest pause between two tries.
const backoffLimit = 30 * time.Second

// watcher is the side of a Node that talks to the driver: it opens it, reads
// the boards at intervals, listens for events, and hands over what it sees.
type watcher struct {
	lib     Library
	options Options
	log     *slog.Logger
	passes  chan pass
	events  chan Event
	// again has room for one wish to read the boards before the time.
	again chan struct{}
	// call is what the driver was last asked, for the message that it does not
	// answer.
	call atomic.Pointer[string]
	// reported is the last problem that was logged.
	reported string
}

func newWatcher(lib Library, options Options, log *slog.Logger) *watcher {
	w := &watcher{
		lib: lib, options: options, log: log,
		passes: make(chan pass), events: make(chan Event), again: make(chan struct{}, 1),
	}
	w.doing("Init")
	return w
}

func (w *watcher) doing(call string) { w.call.Store(&call) }

// lookAgain asks for a pass before the time. It never blocks.
func (w *watcher) lookAgain() {
	select {
	case w.again <- struct{}{}:
	default:
	}
}

// run opens the driver, and opens it again after it failed, until ctx ends.
func (w *watcher) run(ctx context.Context) {
	pause := w.options.Backoff
	for {
		worked, err := w.session(ctx)
		if ctx.Err() != nil {
			return
		}
		if worked {
			pause = w.options.Backoff
		}
		if !send(ctx, w.passes, pass{err: err}) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, backoffLimit)
	}
}

// session opens the driver and reads the boards until that fails or ctx ends.
// That it worked says that they could be read at least once.
func (w *watcher) session(ctx context.Context) (worked bool, err error) {
	w.doing("Init")
	if err := w.lib.Init(); err != nil {
		return false, fmt.Errorf("open the driver: %w", err)
	}
	defer func() {
		w.doing("Shutdown")
		if err := w.lib.Shutdown(); err != nil {
			w.log.Warn("the driver could not be closed", "error", err)
		}
	}()
	boards := newScanner(w.lib, w.doing)
	listening := newListener(w)
	defer listening.stop()
	for {
		p := boards.pass(ctx)
		if p.err != nil {
			return worked, p.err
		}
		worked = true
		w.report(p.problems)
		// The owner must know the handles before events come from them.
		if !send(ctx, w.passes, p) {
			return worked, nil
		}
		listening.renew(ctx, p.readings)
		select {
		case <-ctx.Done():
			return worked, nil
		case <-time.After(w.options.Rescan):
		case <-w.again:
		case <-listening.retry:
			listening.retry = nil
		case end := <-listening.ended:
			listening.fail(end)
		}
	}
}

// report logs what could not be read, when it is something new.
func (w *watcher) report(problems error) {
	if text := message(problems); text != w.reported {
		w.reported = text
		if problems != nil {
			w.log.Warn("not every GPU could be read", "error", problems)
		}
	}
}

// send hands the value over; false when ctx ended first.
func send[T any](ctx context.Context, to chan<- T, value T) bool {
	select {
	case to <- value:
		return true
	case <-ctx.Done():
		return false
	}
}
