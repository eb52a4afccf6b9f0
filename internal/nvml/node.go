package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/sharing"
)

// ErrNotReady is Inventory's error before the first look at the driver.
var ErrNotReady = errors.New("the GPUs have not been read yet")

// Options are a Node's settings; the zero value is usable.
type Options struct {
	// Logger gets faults, recoveries and what could not be read; nil for none.
	Logger *slog.Logger
	// Rescan is the time between two looks at all boards; 30 s when zero.
	Rescan time.Duration
	// Backoff is the pause after a driver call that the rest depends on has
	// failed: opening the driver, listing the GPUs, waiting for events. It
	// doubles with every failure in a row, up to 30 s; 1 s when zero.
	Backoff time.Duration
}

// Node is the node's GPUs, kept up to date by Watch.
type Node struct {
	lib     Library
	options Options
	log     *slog.Logger
	current atomic.Pointer[snapshot]
}

// snapshot is what Inventory answers; it is never changed.
type snapshot struct {
	gpus []sharing.GPU
	err  error
}

// NewNode makes the node behind the library, which it neither opens nor asks
// before Watch.
func NewNode(lib Library, options Options) *Node {
	if options.Rescan <= 0 {
		options.Rescan = 30 * time.Second
	}
	if options.Backoff <= 0 {
		options.Backoff = time.Second
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	n := &Node{lib: lib, options: options, log: options.Logger.With("component", "nvml")}
	n.current.Store(&snapshot{err: ErrNotReady})
	return n
}

// Inventory is the GPUs as Watch last saw them, by index, with their faults.
// It asks nothing of the driver, may be called from any goroutine, and what it
// returns must not be modified.
//
// An error says why the driver cannot be read now; errors.Is finds ErrNotReady
// or the return code in it. The GPUs are then those of the last time that it
// could be, none if it never could. One unreadable board is no error: it has a
// Fault when it was known before, and is absent when it was not. A board or
// partition that the driver no longer lists stays, as lost, because its pods
// still hold it.
func (n *Node) Inventory() ([]sharing.GPU, error) {
	now := n.current.Load()
	return now.gpus, now.err
}

// abandonAfter is how long Watch waits at its end for a driver call that does
// not return; no such call can be cancelled.
const abandonAfter = 500 * time.Millisecond

// Watch keeps the inventory up to date until ctx ends; call it once. It calls
// changed, from its own goroutine, after the first look and whenever Inventory
// answers differently from before. Missing or failing drivers are tried again,
// and are no reason to return.
//
// It returns nil when ctx has ended and all its goroutines have. If one is
// stuck in a driver call it is left behind, and the error names the call.
func (n *Node) Watch(ctx context.Context, changed func()) error {
	w := newWatcher(n.lib, n.options, n.log)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.run(ctx)
	}()
	known := newLedger()
	for {
		select {
		case p := <-w.passes:
			n.look(known, p, changed)
		case event := <-w.events:
			if n.listen(known, event, changed) {
				w.lookAgain()
			}
		case <-ctx.Done():
			select {
			case <-ended:
				return nil
			case <-time.After(abandonAfter):
				return fmt.Errorf("abandoned %s, which the driver does not answer", *w.call.Load())
			}
		}
	}
}

// look takes in a pass.
func (n *Node) look(known *ledger, p pass, changed func()) {
	before := n.current.Load()
	if p.err != nil {
		n.publish(&snapshot{gpus: before.gpus, err: p.err}, changed)
		return
	}
	known.enter(p)
	n.publish(&snapshot{gpus: known.inventory()}, changed)
}

// listen takes in an event, and says whether the boards must be read again to
// understand it.
func (n *Node) listen(known *ledger, event Event, changed func()) (again bool) {
	board, fault, placed := known.event(event)
	log := n.log.With("gpu", board, "type", uint64(event.Type), "data", event.Data)
	switch {
	case board == "":
		log.Warn("event of a board that is not known")
	case fault == "":
		log.Info("event that says nothing against the GPU")
	default:
		log.Warn("event against a GPU", "fault", fault, "gi", event.GI, "ci", event.CI)
	}
	now := n.current.Load()
	n.publish(&snapshot{gpus: known.inventory(), err: now.err}, changed)
	return !placed
}

func (n *Node) publish(next *snapshot, changed func()) {
	before := n.current.Load()
	if reflect.DeepEqual(before.gpus, next.gpus) && message(before.err) == message(next.err) {
		return
	}
	n.logFaults(before.gpus, next.gpus)
	if next.err != nil {
		n.log.Error("the driver cannot be read", "error", next.err)
	}
	n.current.Store(next)
	changed()
}

// logFaults tells which boards and partitions came by a fault, lost one or
// exchanged it for another.
func (n *Node) logFaults(before, now []sharing.GPU) {
	old := unitFaults(before)
	for _, gpu := range now {
		n.logFault(gpu.UUID, old[gpu.UUID], gpu.Fault)
		for _, partition := range gpu.Partitions {
			n.logFault(partition.UUID, old[partition.UUID], partition.Fault)
		}
	}
}

func (n *Node) logFault(unit, before, now string) {
	switch {
	case before == now:
	case now == "":
		n.log.Info("unit is healthy again", "unit", unit, "was", before)
	default:
		n.log.Warn("unit is faulty", "unit", unit, "fault", now)
	}
}

func unitFaults(gpus []sharing.GPU) map[string]string {
	faults := map[string]string{}
	for _, gpu := range gpus {
		faults[gpu.UUID] = gpu.Fault
		for _, partition := range gpu.Partitions {
			faults[partition.UUID] = partition.Fault
		}
	}
	return faults
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
