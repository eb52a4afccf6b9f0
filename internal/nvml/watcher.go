package nvml

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// backoffLimit is the longest pause between two tries.
const backoffLimit = 30 * time.Second

// watcher is the side of a Node that talks to the driver: it opens it, looks at
// the boards at intervals, listens for events, and hands over what it sees.
type watcher struct {
	lib      Library
	options  Options
	log      *slog.Logger
	passes   chan pass
	events   chan Event
	monitors chan map[string]string
	errands  <-chan errand
	mutes    *mutes
	// again has room for one wish to read the boards before the time.
	again    chan struct{}
	activity *activity
	// reported is the last problem that was logged.
	reported string
	// dead has the boards with a dead handle that were not read since; like looked
	// it outlives a session.
	dead map[string]bool
	// looked are the errands that wait for the next look. They outlive a session:
	// a look that fails is made up for when the driver is open again.
	looked []chan struct{}
}

func newWatcher(n *Node) *watcher {
	return &watcher{
		lib: n.lib, options: n.options, log: n.log, activity: newActivity(), errands: n.errands, mutes: &n.mutes,
		passes: make(chan pass), events: make(chan Event), monitors: make(chan map[string]string),
		again: make(chan struct{}, 1), dead: map[string]bool{},
	}
}

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

// session opens the driver and looks at the boards until that fails or ctx ends.
// That it worked says that they could be read at least once.
func (w *watcher) session(ctx context.Context) (worked bool, err error) {
	if err := w.open(); err != nil {
		return false, fmt.Errorf("open the driver: %w", err)
	}
	defer w.close()
	boards := newScanner(w.lib, w.activity, w.dead)
	defer boards.looking.Wait()
	// After the wait for events, which takes a moment in which boards may be reset.
	defer boards.farewell(ctx)
	listening := newListener(w)
	defer listening.stop(ctx)
	version := w.version()
	scanned := time.Time{}
	for {
		var p pass
		// An interval too few is better than a scan put off by a moment.
		if now := time.Now(); now.Sub(scanned) >= w.options.Rescan-w.options.Probe/2 {
			scanned, p = now, boards.scan(ctx)
		} else {
			p = boards.probe(ctx)
		}
		if p.err != nil {
			return worked, p.err
		}
		worked, p.driver = true, version
		w.report(p.problems)
		if !w.hand(ctx, p, listening) {
			return worked, nil
		}
		for _, look := range w.looked {
			close(look)
		}
		w.looked = nil
		for waiting := time.After(min(w.options.Rescan, w.options.Probe)); waiting != nil; {
			select {
			case <-ctx.Done():
				return worked, nil
			case <-waiting:
				waiting = nil
			case <-w.again:
				scanned, waiting = time.Time{}, nil
			case e := <-w.errands:
				if e.do != nil {
					e.do(listening)
				}
				close(e.done)
				w.looked = append(w.looked, e.looked)
				scanned, waiting = time.Time{}, nil
			case o := <-boards.outcomes:
				if !w.hand(ctx, boards.late(o), listening) {
					return worked, nil
				}
			case <-listening.retry:
				listening.retry, waiting = nil, nil
			case end := <-listening.ended:
				listening.fail(ctx, end)
				scanned, waiting = time.Time{}, nil
			}
		}
	}
}

// hand gives the pass to the owner, who must know the handles before events come
// from them, and then listens to the boards.
func (w *watcher) hand(ctx context.Context, p pass, listening *listener) bool {
	if !send(ctx, w.passes, p) {
		return false
	}
	listening.renew(ctx, p.readings)
	return true
}

func (w *watcher) open() error {
	defer w.activity.begin("Init")()
	return w.lib.Init()
}

func (w *watcher) close() {
	defer w.activity.begin("Shutdown")()
	if err := w.lib.Shutdown(); err != nil {
		w.log.Warn("the driver could not be closed", "error", err)
	}
}

// version is the driver's, "" when it does not tell.
func (w *watcher) version() string {
	defer w.activity.begin("SystemGetDriverVersion")()
	version, err := w.lib.SystemGetDriverVersion()
	if err != nil {
		return ""
	}
	return version
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
