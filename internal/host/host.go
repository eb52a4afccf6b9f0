package host

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Specs keeps the node's CDI specs. A Host calls it from one goroutine.
type Specs interface {
	// Write sees to it that the specs have entries for the boards and for the
	// extra classes, and returns the qualified names of all entries that a
	// runtime finds now. Where all is in place it only looks. The error says what
	// could not be done; names are valid with an error too. It may ask the driver
	// and block.
	Write(ctx context.Context, gpus []sharing.GPU, extras []string) (names []string, err error)
}

// Options are a Host's settings.
type Options struct {
	// Root is where this process sees the host's "/"; empty for "/".
	Root string
	// DevRoot is the folder on the host that has the driver's dev; empty for "/".
	DevRoot string
	// Specs keeps the CDI specs; nil where there are none to be had.
	Specs Specs
	// Interval is the time between two looks at the files; 1 s when zero.
	Interval time.Duration
	// Patience is how long Prepare waits for new CDI specs; 2 s when zero.
	Patience time.Duration
	Logger   *slog.Logger
}

// Host has a node's file system made ready for grants.
type Host struct {
	options Options
	log     *slog.Logger
	poke    chan struct{}
	// over is closed when Watch is to end: it may write no more.
	over chan struct{}
	// late says that a Prepare has gone without the specs that it asked for.
	late atomic.Bool

	mu sync.Mutex
	// order is the last one, given is what Prepare answered to it.
	order   order
	given   plugin.Host
	entries entries
}

// order is what a plan needs.
type order struct {
	grants sharing.Grants
	gpus   []sharing.GPU
	// done is closed when its specs are written or cannot be; nil for no order.
	done chan struct{}
}

// New returns a Host that has not looked yet.
func New(options Options) *Host {
	if options.Interval <= 0 {
		options.Interval = time.Second
	}
	if options.Patience <= 0 {
		options.Patience = 2 * time.Second
	}
	return &Host{options: options, log: options.Logger.With("component", "host"), poke: make(chan struct{}, 1), over: make(chan struct{})}
}

// Prepare says what the node has for the plan's grants. CDI specs for new boards
// are written by Watch, for which it waits Options.Patience at most, and no longer
// than Watch runs; units that then have no entry have an obstacle. What is returned
// must not be changed.
func (h *Host) Prepare(grants sharing.Grants, gpus []sharing.GPU) plugin.Host {
	o := order{grants: grants, gpus: gpus, done: make(chan struct{})}
	h.mu.Lock()
	h.order = o
	h.mu.Unlock()
	if grants.CDI() {
		select {
		case h.poke <- struct{}{}:
		default:
		}
		if !h.late.Load() {
			select {
			case <-o.done:
			case <-h.over:
			case <-time.After(h.options.Patience):
				h.late.Store(true)
			}
		}
	}
	found := h.look(driverFolder(grants))
	h.mu.Lock()
	defer h.mu.Unlock()
	h.given = assemble(grants, h.options.DevRoot, gpus, found, h.entries)
	return h.given
}

// driverFolder is the host's folder whose driver is to be mounted; empty for
// none.
func driverFolder(grants sharing.Grants) string {
	if grants.By(sharing.DriverMounts) {
		return grants.DriverHostPath
	}
	return ""
}

// abandonAfter is how long Watch waits at its end for specs that are being
// made: no driver call can be cancelled.
const abandonAfter = 500 * time.Millisecond

// Watch does what Prepare orders, and calls changed, from its own goroutine,
// when Prepare would answer otherwise than it last did. It is called once and
// returns when ctx ends; an error says that a driver call was left behind.
func (h *Host) Watch(ctx context.Context, changed func()) error {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.serve(ctx, changed)
	}()
	<-ctx.Done()
	close(h.over)
	select {
	case <-ended:
		return nil
	case <-time.After(abandonAfter):
		return errors.New("abandoned the CDI specs, for which the driver does not answer")
	}
}

func (h *Host) serve(ctx context.Context, changed func()) {
	tick := time.NewTicker(h.options.Interval)
	defer tick.Stop()
	for {
		ticked := false
		select {
		case <-ctx.Done():
			return
		case <-h.poke:
		case <-tick.C:
			ticked = true
		}
		h.mu.Lock()
		o := h.order
		h.mu.Unlock()
		if o.done == nil {
			continue
		}
		if o.grants.CDI() {
			h.write(ctx, o)
		}
		h.late.Store(false)
		if ticked && h.differs() {
			changed()
		}
	}
}

// write has the specs written that the order needs, and keeps what came of it.
func (h *Host) write(ctx context.Context, o order) {
	var names []string
	err := errNoSpecs
	if h.options.Specs != nil {
		names, err = h.options.Specs.Write(ctx, o.gpus, o.grants.Extras())
	}
	next := entries{names: make(map[string]bool, len(names))}
	for _, name := range names {
		next.names[name] = true
	}
	if err != nil {
		next.problem = err.Error()
	}
	h.mu.Lock()
	if next.problem != h.entries.problem && err != nil {
		h.log.Warn("cdi specs incomplete", "error", err)
	}
	h.entries = next
	h.mu.Unlock()
	select {
	case <-o.done:
	default:
		close(o.done)
	}
}

var errNoSpecs = errors.New("this program cannot make CDI specs")

// differs says that Prepare would answer otherwise now.
func (h *Host) differs() bool {
	h.mu.Lock()
	o := h.order
	h.mu.Unlock()
	found := h.look(driverFolder(o.grants))
	h.mu.Lock()
	defer h.mu.Unlock()
	return !reflect.DeepEqual(assemble(o.grants, h.options.DevRoot, o.gpus, found, h.entries), h.given)
}
