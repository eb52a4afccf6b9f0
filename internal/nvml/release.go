package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/sharing"
)

// gate keeps this program from having GPUs open that it has released. A driver resets no
// GPU that anybody has open; NVML opens a GPU when it is looked up and closes it with the
// last Shutdown, which is what nvml.h calls to initialize. So to let go of one GPU, all
// sessions of the program have to end, and no later one may look that GPU up.
type gate struct {
	// reopen asks the poller to end its session and to begin another.
	reopen chan struct{}

	mu sync.Mutex
	// released has the driver's index of each released GPU by UUID, -1 while unknown.
	released map[string]int
	// opened is NVML's count of Init less Shutdown. looked has the indexes that were looked
	// up since it was 0, allLooked says that all were, and handles has those that came of it.
	opened    int
	looked    map[int]bool
	allLooked bool
	handles   map[Device]int
	// closing is not nil while Init waits for the end of all sessions; ending says that it
	// waits no more, because the program ends.
	closing chan struct{}
	ending  bool
	// paused says that no session begins once all pausedGPUs are released; changed is closed when
	// that may be over.
	paused     bool
	pausedGPUs []string
	changed    chan struct{}
}

func newGate() *gate {
	return &gate{
		reopen:   make(chan struct{}, 1),
		released: map[string]int{},
		looked:   map[int]bool{},
		handles:  map[Device]int{},
		changed:  make(chan struct{}),
	}
}

// releasedError is what looking up a released GPU returns, without asking the driver.
type releasedError struct{ gpu string }

func (e *releasedError) Error() string { return e.gpu + " is released" }

// gateMethods are those that call looks at.
var gateMethods = []string{"Init", "Shutdown", "DeviceGetHandleByIndex", "DeviceGetUUID"}

// call is the Interceptor.
func (g *gate) call(call Call, do func() (any, error)) (any, error) {
	if err := g.enter(call); err != nil {
		return nil, err
	}
	answer, err := do()
	g.mu.Lock()
	defer g.mu.Unlock()
	_, hung := errors.AsType[*AbandonedError](err)
	switch {
	case call.Method == "Init" && err != nil, call.Method == "Shutdown" && !hung:
		g.end()
	case err != nil:
	case call.Method == "DeviceGetHandleByIndex":
		g.handles[answer.(Device)] = call.Arguments[0].(int)
	case call.Method == "DeviceGetUUID":
		gpu := answer.(string)
		index, looked := g.handles[call.Arguments[0].(Device)] // That of an event may be none of them.
		// Another index: the driver counts its GPUs otherwise now.
		if at, released := g.released[gpu]; released && looked && at != index {
			g.released[gpu] = index
			g.startClosing()
			return nil, &releasedError{gpu}
		}
	}
	return answer, err
}

// end counts the end of a session. It must be called with the lock.
func (g *gate) end() {
	g.opened = max(0, g.opened-1)
	if g.opened == 0 {
		clear(g.looked)
		clear(g.handles)
		g.allLooked = false
		g.stopClosing(g.closing)
	}
}

// isOpen says whether a session may have the GPU at that index open, -1 for an unknown one, or the
// driver while that is to be closed as a whole. It must be called with the lock.
func (g *gate) isOpen(index int) bool {
	return g.looked[index] || g.allLooked || g.opened > 0 && (index < 0 || g.closed())
}

// closed says that the driver is to be closed as a whole. It must be called with the lock.
func (g *gate) closed() bool {
	return g.paused && !slices.ContainsFunc(g.pausedGPUs, func(gpu string) bool {
		_, released := g.released[gpu]
		return !released
	})
}

// tellChange has awaitOpen look again. It must be called with the lock.
func (g *gate) tellChange() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// awaitOpen waits until a session may begin, or until ctx ends, and says whether it had to wait.
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

// enter comes before each call: it has Init wait, and refuses to look released GPUs up.
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
		if g.closed() {
			return &releasedError{"the driver"}
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

// closeLimit is how long all sessions may take to end: longer than a look at how GPUs are used.
const closeLimit = 10 * time.Second

// startClosing asks all sessions to end, and lets none begin before they have. It must be
// called with the lock.
func (g *gate) startClosing() {
	select {
	case g.reopen <- struct{}{}:
	default:
	}
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

// closeAll asks all sessions to end, and others to begin when they have.
func (g *gate) closeAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.startClosing()
}

// stopClosing lets sessions begin again, unless that closing is over and maybe another one
// under way.
func (g *gate) stopClosing(closing chan struct{}) {
	if closing != nil && closing == g.closing {
		close(closing)
		g.closing = nil
	}
}

// stop keeps nobody waiting any more: the program ends.
func (g *gate) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ending = true
	g.stopClosing(g.closing)
}

// errStillOpen says that a session of this program does not end.
var errStillOpen = errors.New(
	"this program still has it open, because a driver call is not answered: to let go of it, restart Virgate")

// release keeps the GPU at the index closed, and returns when it is. While calls hang it
// has no session end: that would help nothing, and the driver might not open again.
func (g *gate) release(ctx context.Context, gpu string, index int, hung string) error {
	g.mu.Lock()
	g.released[gpu] = index
	if open := g.isOpen(index); !open || hung != "" {
		g.mu.Unlock()
		if open {
			return fmt.Errorf("%w (%s)", errStillOpen, hung)
		}
		return nil
	}
	g.startClosing()
	closed := g.closing
	g.mu.Unlock()
	select {
	case <-closed:
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopClosing(closed)
	if g.isOpen(index) {
		return errStillOpen
	}
	return nil
}

// index is where the driver has the released GPU, -1 if that is unknown.
func (g *gate) index(gpu string) (index int, released bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	index, released = g.released[gpu]
	return index, released
}

// Library is the Node's library. Whatever else in this program uses the GPUs must go through
// it, so that Release can close them.
func (n *Node) Library() Library { return n.lib }

// OpenAll calls use, which opens all GPUs through a session of its own, as NVIDIA's library for
// CDI does. NVML counts it with this program's. The error says that a GPU is released; use
// is not called then.
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

// Pause closes the driver as a whole while all these GPUs, by UUID, are released, and without any of
// them at once: a driver's module cannot be unloaded while anybody has a file of it open, and a
// session that has looked up no GPU may have. It replaces an earlier one, and does not wait. Inventory
// then stays as it was.
func (n *Node) Pause(gpus []string) {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	n.gate.paused, n.gate.pausedGPUs = true, gpus
	if n.gate.closed() && n.gate.opened > 0 {
		n.gate.startClosing()
	}
	n.gate.tellChange()
}

// Resume ends Pause.
func (n *Node) Resume() {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	n.gate.paused, n.gate.pausedGPUs = false, nil
	n.gate.tellChange()
}

// Closed says that the driver is closed as a whole.
func (n *Node) Closed() bool {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	return n.gate.closed()
}

// KeepReleased keeps closed the GPUs that an earlier run had released. They come by UUID, with
// the driver's index, -1 while unknown. It must be called before Watch.
func (n *Node) KeepReleased(gpus map[string]int) {
	n.gate.mu.Lock()
	defer n.gate.mu.Unlock()
	for gpu, index := range gpus {
		n.gate.released[gpu] = index
	}
}

// SetReleased replaces what is kept closed by these GPUs, by UUID, with the driver's index, -1 while
// unknown, and returns when no session has one of them open, or ctx ends. It is for a Node that is not
// watched.
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

// Release lets go of the GPU of that UUID until Restore, so that it can be reset: events,
// handles and, because NVML closes nothing else, the session with the driver. What is
// known of the GPU stays as it is. Events of other GPUs are missed for a moment. It
// returns the driver's index of the GPU. The error says that a driver call hangs, that the
// GPU is not known, or that ctx ended; the GPU then is not looked up any more either.
func (n *Node) Release(ctx context.Context, gpu string) (index int, err error) {
	index = -1
	known := false
	ended := n.request(ctx, func(p *publisher) {
		var state *gpuState
		state, known = p.tracker.gpus[gpu]
		if known && state.listed {
			index = state.driverIndex
		}
		p.handleMonitors(map[string]string{gpu: "it is released"})
	})
	switch {
	case ended != nil:
		err = ended
	case !known && !n.Closed(): // After a restart in a pause, no GPU was read.
		err = errNoUnit
	default:
		err = n.gate.release(ctx, gpu, index, deadlinesOf(n.lib).hung())
	}
	if err != nil {
		return index, fmt.Errorf("let go of %s: %w", gpu, err)
	}
	return index, nil
}

// Restore undoes Release, and returns when the GPU was read again. wasReset says that it
// was reset meanwhile. The error says that ctx ended first.
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
	n.gate.tellChange()
	n.gate.mu.Unlock()
	return n.Refresh(ctx)
}

// addReleased adds a GPU that an earlier run knew and had released, and that is not looked
// up: it is as it was.
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
