package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/sharing"
)

// gate prevents this program from having GPUs open that it has released. A driver cannot reset a
// GPU that any program has open. NVML opens a GPU at the latest when the GPU is looked up, which
// nvml.h calls to initialize it, and closes it with the last Shutdown. So to close one GPU, all
// sessions of the program have to end, and no later session may look that GPU up. Drivers of R580
// already open GPUs in Init: then there is no session at all while a GPU is released.
type gate struct {
	// gpuOpen reports whether this process has a GPU open; nil if that cannot be found out.
	gpuOpen func() bool
	// reopen asks the poller to end its session and to start another.
	reopen wake.Signal

	mu sync.Mutex
	// released holds the driver's index of each released GPU, by UUID; -1 while unknown.
	released map[string]int
	// opened counts as NVML does: calls of Init minus calls of Shutdown. looked holds the indexes
	// looked up since opened was last 0. allLooked means that all were. handles holds the resulting
	// handles.
	opened    int
	looked    map[int]bool
	allLooked bool
	handles   map[Device]int
	// initOpens is true if Init alone opens GPUs. mustRead counts the reasons for a session although
	// a GPU is released: at the start nothing is known of the others, and a GPU that is taken back
	// has to be read.
	initOpens bool
	mustRead  int
	// closing is not nil while Init waits for the end of all sessions. ending means that Init no
	// longer waits, because the program ends.
	closing chan struct{}
	ending  bool
	// paused means that no session starts once all pausedGPUs are released. changed is closed when
	// that may have ended.
	paused     bool
	pausedGPUs []string
	changed    chan struct{}
}

func newGate() *gate {
	return &gate{
		mustRead: 1,
		reopen:   wake.NewSignal(),
		released: map[string]int{},
		looked:   map[int]bool{},
		handles:  map[Device]int{},
		changed:  make(chan struct{}),
	}
}

// releasedError is the error of looking up a released GPU, without a driver call.
type releasedError struct{ gpu string }

func (e *releasedError) Error() string { return e.gpu + " is released" }

func (e *releasedError) Is(target error) bool { return target == sharing.ErrReleased }

// gateMethods are the methods that call handles.
var gateMethods = []string{"Init", "Shutdown", "DeviceGetHandleByIndex", "DeviceGetUUID"}

// call is the gate's Interceptor.
func (g *gate) call(call Call, do func() (any, error)) (any, error) {
	if err := g.enter(call); err != nil {
		return nil, err
	}
	answer, err := do()
	g.mu.Lock()
	defer g.mu.Unlock()
	if call.Method == "Init" && err == nil && len(g.looked) == 0 && !g.allLooked && g.gpuOpen != nil {
		g.initOpens = g.gpuOpen()
		if g.closed() {
			g.startClosing()
		}
	}
	_, hung := errors.AsType[*AbandonedError](err)
	switch {
	case call.Method == "Init" && err != nil, call.Method == "Shutdown" && !hung:
		g.end()
	case err != nil:
	case call.Method == "DeviceGetHandleByIndex":
		g.handles[answer.(Device)] = call.Arguments[0].(int)
	case call.Method == "DeviceGetUUID":
		gpu := answer.(string)
		index, looked := g.handles[call.Arguments[0].(Device)] // The handle of an event may be none of them.
		// If the index differs, the driver now numbers its GPUs differently.
		if at, released := g.released[gpu]; released && looked && at != index {
			g.released[gpu] = index
			g.startClosing()
			return nil, &releasedError{gpu}
		}
	}
	return answer, err
}

// end records the end of a session. g.mu must be held.
func (g *gate) end() {
	g.opened = max(0, g.opened-1)
	if g.opened == 0 {
		clear(g.looked)
		clear(g.handles)
		g.allLooked = false
		g.stopClosing(g.closing)
	}
}

// isOpen reports whether a session may have the GPU at that index open, -1 for an unknown index. It
// also returns true while the whole driver is to be closed but is still open. g.mu must be held.
func (g *gate) isOpen(index int) bool {
	return g.looked[index] || g.allLooked || g.opened > 0 && (index < 0 || g.opensAll() || g.closed())
}

// closed reports whether the whole driver is to be closed. g.mu must be held.
func (g *gate) closed() bool {
	return g.closedByPause() || g.opensAll() && len(g.released) > 0 && g.mustRead == 0
}

// opensAll reports whether no session may run while a GPU is released, because it would open that
// GPU. In a pause sessions run until the last GPU is released, to watch those that pods still have.
// g.mu must be held.
func (g *gate) opensAll() bool { return g.initOpens && !g.paused }

// closedByPause reports whether the whole driver is to be closed for a pause. g.mu must be held.
func (g *gate) closedByPause() bool {
	return g.paused && !slices.ContainsFunc(g.pausedGPUs, func(gpu string) bool {
		_, released := g.released[gpu]
		return !released
	})
}

// countMustRead adds to mustRead, and ends the sessions when its last reason is gone.
func (g *gate) countMustRead(more int) { g.change(func() { g.mustRead += more }) }

// change makes a change that may close the whole driver, or let sessions start.
func (g *gate) change(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
	if g.closed() && g.opened > 0 {
		g.startClosing()
	}
	g.tellChange()
}

// tellChange makes awaitOpen check again. g.mu must be held.
func (g *gate) tellChange() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// awaitOpen waits until a session may start or ctx ends. It reports whether it had to wait.
func (g *gate) awaitOpen(ctx context.Context) (waited bool) {
	for ctx.Err() == nil {
		g.mu.Lock()
		closed, changed := g.closed(), g.changed
		g.mu.Unlock()
		if !closed {
			return waited
		}
		waited = true
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	return waited
}

// enter runs before each call: it makes Init wait, and refuses look-ups of released GPUs.
func (g *gate) enter(call Call) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch call.Method {
	case "Init":
		for g.closing != nil {
			closed := g.closing
			g.mu.Unlock()
			<-closed
			g.mu.Lock()
		}
		if g.closedByPause() {
			return &releasedError{"the driver"}
		}
		if g.closed() {
			return &releasedError{slices.Min(slices.Collect(maps.Keys(g.released)))}
		}
		g.opened++
	case "DeviceGetHandleByIndex":
		index := call.Arguments[0].(int)
		for gpu, at := range g.released {
			if at == index {
				return &releasedError{gpu}
			}
		}
		g.looked[index] = true
	}
	return nil
}

// closeLimit is how long all sessions may take to end: longer than one reading of how the GPUs are
// used.
const closeLimit = 10 * time.Second

// startClosing asks all sessions to end, and lets none start before they have. g.mu must be held.
func (g *gate) startClosing() {
	g.reopen.Notify()
	if g.closing == nil && !g.ending {
		closing := make(chan struct{})
		g.closing = closing
		time.AfterFunc(closeLimit, func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.stopClosing(closing)
		})
	}
}

// closeAll asks all sessions to end. New ones start when they have.
func (g *gate) closeAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.startClosing()
}

// stopClosing lets sessions start again, unless that closing is already over; another one may then
// be in progress.
func (g *gate) stopClosing(closing chan struct{}) {
	if closing != nil && closing == g.closing {
		close(closing)
		g.closing = nil
	}
}

// stop ends the wait for closing, because the program ends.
func (g *gate) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ending = true
	g.stopClosing(g.closing)
}

// errHangs means that a session of this program does not end because a driver call hangs, errNotClosed
// that it has not ended yet.
var (
	errHangs = errors.New(
		"this program still has it open, because a driver call is not answered: to let go of it, restart Virgate")
	errNotClosed = errors.New("this program, or an nvidia-smi that it has started, still uses the driver")
)

// release keeps the GPU at the index closed, and returns when it is closed. hung names the calls that
// hang; while there are any, release does not ask sessions to end: that would not help, and the
// driver might not open again.
func (g *gate) release(ctx context.Context, gpu string, index int, hung func() string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.released[gpu] = index
	if hung() == "" && !g.awaitRead(ctx) {
		g.keepWatching(gpu)
		return errReading
	}
	if g.isOpen(index) && hung() == "" {
		g.startClosing()
		closed := g.closing
		g.mu.Unlock()
		select {
		case <-closed:
		case <-ctx.Done():
		}
		g.mu.Lock()
		g.stopClosing(closed)
	}
	if !g.isOpen(index) {
		return nil
	}
	g.keepWatching(gpu)
	if calls := hung(); calls != "" {
		return fmt.Errorf("%w (%s)", errHangs, calls)
	}
	return errNotClosed
}

// errReading means that a session has to read GPUs, and opens the one to release meanwhile.
var errReading = errors.New("this driver opens all GPUs at once, and others are still being read")

// awaitRead waits until no GPU has to be read although another one is released, if that matters to
// this driver. It returns false if that takes too long. g.mu must be held; it is released meanwhile.
func (g *gate) awaitRead(ctx context.Context) bool {
	limit := time.After(closeLimit)
	for g.opensAll() && g.mustRead > 0 {
		changed, late := g.changed, false
		g.mu.Unlock()
		select {
		case <-changed:
		case <-limit:
			late = true
		case <-ctx.Done():
			late = true
		}
		g.mu.Lock()
		if late {
			return false
		}
	}
	return true
}

// awaitClosing waits until the sessions have ended that are asked to end, or until ctx ends.
func (g *gate) awaitClosing(ctx context.Context) {
	g.mu.Lock()
	closing := g.closing
	g.mu.Unlock()
	if closing == nil {
		return
	}
	select {
	case <-closing:
	case <-ctx.Done():
	}
}

// keepWatching gives up a release that failed if no other GPU could be watched during it. g.mu must
// be held.
func (g *gate) keepWatching(gpu string) {
	if g.opensAll() {
		delete(g.released, gpu)
		g.tellChange()
	}
}

// index returns the driver's index of the released GPU, -1 if it is unknown.
func (g *gate) index(gpu string) (index int, released bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	index, released = g.released[gpu]
	return index, released
}

// Library returns the Node's library. All other code of this program must use the GPUs through it,
// so that Release can close them.
func (n *Node) Library() Library { return n.lib }

// OpenAll calls use, which opens all GPUs through a session of its own, as NVIDIA's CDI library
// does. NVML counts that session together with this program's. If a GPU or the whole driver is
// released, OpenAll returns an error and does not call use.
func (n *Node) OpenAll(use func()) error {
	if err := n.gate.enter(Call{Method: "Init"}); err != nil {
		return err
	}
	n.gate.mu.Lock()
	released := slices.Sorted(maps.Keys(n.gate.released))
	n.gate.allLooked = n.gate.allLooked || len(released) == 0
	n.gate.mu.Unlock()
	defer func() {
		n.gate.mu.Lock()
		defer n.gate.mu.Unlock()
		n.gate.end()
	}()
	if len(released) > 0 {
		return &releasedError{released[0]}
	}
	use()
	return nil
}

// Pause closes the whole driver while all these GPUs, given by UUID, are released; without any
// GPUs, at once. A driver's module cannot be unloaded while any program has one of its files open,
// and a session may have one open even if it has looked up no GPU. Pause replaces an earlier Pause,
// and does not wait. Inventory does not change during it.
func (n *Node) Pause(gpus []string) {
	n.gate.change(func() { n.gate.paused, n.gate.pausedGPUs = true, gpus })
}

// Resume ends Pause.
func (n *Node) Resume() {
	n.gate.change(func() { n.gate.paused, n.gate.pausedGPUs = false, nil })
}

// Closed reports whether the whole driver is closed by Pause.
func (n *Node) Closed() bool {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	return n.gate.closedByPause()
}

// OpensAll reports whether each session with this driver opens all GPUs: none is read while one is
// released. In a pause that does not matter.
func (n *Node) OpensAll() bool {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	return n.gate.opensAll()
}

// ClosedFor returns the released GPUs, by UUID, if OpensAll; otherwise none.
func (n *Node) ClosedFor() []string {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	if !n.gate.opensAll() {
		return nil
	}
	return slices.Sorted(maps.Keys(n.gate.released))
}

// KeepReleased keeps closed the GPUs that an earlier run has released. gpus holds the driver's
// index by UUID, -1 while unknown. It must be called before Watch.
func (n *Node) KeepReleased(gpus map[string]int) {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	for gpu, index := range gpus {
		n.gate.released[gpu] = index
	}
}

// SetReleased replaces the set of GPUs that are kept closed. gpus holds the driver's index by UUID,
// -1 while unknown. It returns when no session has one of them open, or when ctx ends. It is for a
// Node without Watch.
func (n *Node) SetReleased(ctx context.Context, gpus map[string]int) {
	g := n.gate
	g.mu.Lock()
	clear(g.released)
	maps.Copy(g.released, gpus)
	open := slices.ContainsFunc(slices.Collect(maps.Values(gpus)), g.isOpen)
	if open {
		g.startClosing()
	}
	closed := g.closing
	g.mu.Unlock()
	if open {
		select {
		case <-closed:
		case <-ctx.Done():
		}
	}
}

// Release closes the GPU with that UUID until Restore, so that it can be reset. It gives up the
// GPU's events and handles, and the session with the driver, because NVML closes nothing else. The
// data known about the GPU stays. Events of other GPUs are missed for a moment, or until Restore if
// the driver opens GPUs in Init: then no GPU is read until then. It returns the driver's index of
// the GPU. The error means that a driver call hangs, that the GPU is unknown, or that ctx ended. If
// a call hangs, or ctx ends while sessions are ending, the GPU is no longer looked up either, unless
// the driver opens GPUs in Init: then it is watched on, like the others.
func (n *Node) Release(ctx context.Context, gpu string) (index int, err error) {
	index = -1
	known := false
	ended := n.request(ctx, func(p *publisher) {
		var state *gpuState
		state, known = p.tracker.gpus[gpu]
		if known && state.listed {
			index = state.driverIndex
		}
		if known {
			state.unwatch(time.Now())
		}
		p.handleMonitors(map[string]string{gpu: "it is released"})
	})
	switch {
	case ended != nil:
		err = ended
	case !known && !n.Closed(): // After a restart during a pause, no GPU was read.
		err = errNoUnit
	default:
		err = n.gate.release(ctx, gpu, index, deadlinesOf(n.lib).hung)
	}
	if err != nil {
		return index, fmt.Errorf("let go of %s: %w", gpu, err)
	}
	if n.OpensAll() {
		n.log.Info("no GPU is watched until the released ones are taken back: this driver opens all GPUs at once")
	}
	return index, nil
}

// Restore undoes Release, and returns when the GPU has been read again. wasReset means that the GPU
// was reset meanwhile. If the driver opens GPUs in Init and others are still released, they are open
// meanwhile, and closed again when Restore returns. The error means that ctx ended first.
func (n *Node) Restore(ctx context.Context, gpu string, wasReset bool) error {
	err := n.request(ctx, func(p *publisher) {
		if state := p.tracker.gpus[gpu]; state != nil && wasReset {
			state.lost = true
		}
	})
	if err != nil {
		return fmt.Errorf("take %s back: %w", gpu, err)
	}
	n.gate.mu.Lock()
	delete(n.gate.released, gpu)
	n.gate.mu.Unlock()
	n.gate.countMustRead(1)
	defer func() {
		n.gate.countMustRead(-1)
		n.gate.awaitClosing(ctx) // Another released GPU may be reset then.
	}()
	return n.Refresh(ctx)
}

// addReleased adds a GPU that an earlier run knew and released. The GPU is not looked up, so its
// stored state is used.
func (t *tracker) addReleased(known sharing.GPU, driverIndex int, at moment) {
	gpu := t.newGPU()
	gpu.gpu = known
	gpu.listed = true
	gpu.driverIndex = driverIndex
	for _, unit := range gpu.allUnits() {
		gpu.units[unit] = newUnitHealth(at.now)
	}
	t.gpus[known.UUID] = gpu
	t.restoreGPU(gpu, at)
}
