package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	// Rescan is the time between two looks at what there is; 30 s when zero.
	Rescan time.Duration
	// Probe is the time between two looks at how the boards fare; 10 s when zero.
	Probe time.Duration
	// Backoff is the pause after a driver call that the rest depends on has
	// failed: opening the driver, listing the GPUs, waiting for events. It
	// doubles with every failure in a row, up to 30 s; 1 s when zero.
	Backoff time.Duration
	// Observer is told of every change of a unit's health; nil for nobody.
	Observer Observer
	// Store keeps fatal errors for a restart; nil for none.
	Store Store
	// Boot is this machine's boot ID, "" when unknown.
	Boot string
}

// Observer is told of changes of health.
type Observer interface {
	// HealthChanged is called from Watch's goroutine, in the order of the changes,
	// before the inventory shows them. It must not block.
	HealthChanged(change sharing.HealthChange)
}

// Node is the node's GPUs, kept up to date by Watch.
type Node struct {
	lib     Library
	options Options
	log     *slog.Logger
	current atomic.Pointer[snapshot]
	report  atomic.Pointer[sharing.HealthReport]
	rules   atomic.Pointer[sharing.HealthRules]
	orders  chan order
	// errands are for the goroutine that talks to the driver.
	errands chan errand
	mutes   mutes
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
	if options.Probe <= 0 {
		options.Probe = 10 * time.Second
	}
	if options.Backoff <= 0 {
		options.Backoff = time.Second
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	n := &Node{lib: lib, options: options, log: options.Logger.With("component", "nvml"), orders: make(chan order), errands: make(chan errand)}
	n.current.Store(&snapshot{err: ErrNotReady})
	n.report.Store(&sharing.HealthReport{})
	n.SetHealth(sharing.DefaultHealthRules())
	return n
}

// Inventory is the GPUs as Watch last saw them, by index, with their faults.
// It asks nothing of the driver, may be called from any goroutine, and what it
// returns must not be modified.
//
// An error says why the driver cannot be read now; errors.Is finds ErrNotReady
// or the return code in it. The GPUs are then those of the last time that it
// could be, none if it never could. One unreadable board is no error: it has a
// Fault when it was known before, and is absent when it was not. A board that
// the driver no longer lists stays, as lost, because its pods still hold it.
func (n *Node) Inventory() ([]sharing.GPU, error) {
	now := n.current.Load()
	return now.gpus, now.err
}

// Health is the health behind the inventory's faults, empty before the first
// look. It may be called from any goroutine, and what it returns must not be
// modified.
func (n *Node) Health() sharing.HealthReport { return *n.report.Load() }

// SetHealth makes rules those by which later errors and readings are judged.
// What was judged before stays as it is. It may be called from any goroutine;
// the rules must not be modified after that.
func (n *Node) SetHealth(rules sharing.HealthRules) { n.rules.Store(&rules) }

// moment is now, with the rules in force.
func (n *Node) moment() moment { return moment{now: time.Now(), rules: *n.rules.Load()} }

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
	w := newWatcher(n)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.run(ctx)
	}()
	o := &owner{Node: n, known: newLedger(), changed: changed, degraded: map[string]string{}}
	for {
		select {
		case p := <-w.passes:
			o.look(p)
		case event := <-w.events:
			if o.listen(event) {
				w.lookAgain()
			}
		case degraded := <-w.monitors:
			o.monitor(degraded)
		case order := <-n.orders:
			o.obey(order)
		case <-ctx.Done():
			select {
			case <-ended:
				return nil
			case <-time.After(abandonAfter):
				return fmt.Errorf("abandoned %s, which the driver does not answer", w.activity)
			}
		}
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
