package nvml

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Options are a Node's settings; the zero value is usable.
type Options struct {
	// Logger gets faults, recoveries and what could not be read; nil for none.
	Logger *slog.Logger
	// Rescan is the interval at which GPUs and partitions are enumerated; 30 s when
	// zero.
	Rescan time.Duration
	// Probe is the interval at which the GPUs' condition is read; 10 s when zero.
	Probe time.Duration
	// Backoff is the pause after a failure of a driver call that everything else
	// depends on: opening the driver, listing the GPUs, waiting for events. It
	// doubles with every failure in a row, up to 30 s; 1 s when zero.
	Backoff time.Duration
	// FailOnInitError has Watch return when the driver cannot be opened at first.
	FailOnInitError bool
	// Store keeps fatal errors for a restart, Known the GPUs with their indexes; both are
	// nil or neither is.
	Store Store[FatalHealth]
	Known Store[KnownGPU]
	// Boot is this machine's boot ID, "" when unknown.
	Boot string
	// Kernel is the machine's kernel; nil for none to ask.
	Kernel Kernel
}

// FatalHealth is a unit's fatal errors, as a Store keeps them for a restart of
// the program.
type FatalHealth struct {
	// GPU is the GPU's UUID, Unit the UUID of the GPU or of its partition.
	GPU  string `json:"gpu"`
	Unit string `json:"unit"`
	// Reasons are at least one, in the order in which they came; XIDs has the XID of each, 0
	// for none.
	Reasons []string  `json:"reasons"`
	XIDs    []uint64  `json:"xids,omitempty"`
	Since   time.Time `json:"since"`
	// Boot is the boot ID of the machine, Driver the version of the driver; empty
	// when unknown. Another boot or driver means that the GPU has been reset, and other
	// marks may mean it.
	Boot   string `json:"boot,omitempty"`
	Driver string `json:"driver,omitempty"`
	Marks
}

// KnownGPU is a GPU as a Store keeps it for a restart of the program, without links.
type KnownGPU struct {
	sharing.GPU
	// Boot is the boot ID of the machine when the GPU was in it; empty when unknown.
	Boot string `json:"boot,omitempty"`
	// Provisional says that Index is for the time being: the driver's belongs to another GPU,
	// which may be gone.
	Provisional bool `json:"provisional,omitempty"`
}

// Store keeps a list for a restart of the program. A Node calls one method at a time,
// and none before RestoreHealth.
type Store[T any] interface {
	// Load returns what the last Save kept, none if there was none.
	Load() ([]T, error)
	// Save returns when the list, which may be empty, is kept. Nothing but Watch's
	// end waits for it.
	Save([]T) error
}

// Node is the node's GPUs, kept up to date by Watch.
type Node struct {
	lib     Library
	options Options
	log     *slog.Logger
	current atomic.Pointer[snapshot]
	report  atomic.Pointer[sharing.HealthReport]
	rules   atomic.Pointer[sharing.HealthRules]
	// resets has how often each GPU was seen to be reset, by UUID.
	resets atomic.Pointer[map[string]int]
	// requests are for the publisher, commands for the poller.
	requests chan request
	commands chan command
	// paused has the UUIDs of the GPUs that must not be registered for events.
	paused sync.Map
	gate   *gate
}

// snapshot is what Inventory answers; it is never changed.
type snapshot struct {
	gpus     []sharing.GPU
	versions Versions
	// unlisted is for Unlisted.
	unlisted string
	err      error
}

// NewNode returns the node behind the library. It neither opens the library nor
// calls it before Watch.
func NewNode(lib Library, options Options) *Node {
	options.Rescan = cmp.Or(options.Rescan, 30*time.Second)
	options.Probe = cmp.Or(options.Probe, 10*time.Second)
	options.Backoff = cmp.Or(options.Backoff, time.Second)
	options.Logger = cmp.Or(options.Logger, slog.New(slog.DiscardHandler))
	gate := newGate()
	n := &Node{
		lib:      Intercept(withDeadlines(lib), gate.call, gateMethods...),
		gate:     gate,
		options:  options,
		log:      options.Logger.With("component", "nvml"),
		requests: make(chan request),
		commands: make(chan command),
	}
	n.current.Store(&snapshot{err: sharing.ErrNotRead})
	n.report.Store(&sharing.HealthReport{})
	n.SetHealthRules(sharing.DefaultHealthRules())
	return n
}

// Inventory returns the GPUs as Watch last saw them, by index, with their faults.
// It does not call the driver, may be called from any goroutine, and what it
// returns must not be modified.
//
// An error says why the driver cannot be read now; errors.Is finds sharing.ErrNotRead
// or the return code in it. The GPUs are then those of the last time that it
// could be, none if it never could. One unreadable GPU is no error: it has a
// fault if it was known before, and is absent otherwise. A GPU that the driver
// no longer lists stays, with the fault that it is lost, because its pods still
// hold it.
func (n *Node) Inventory() ([]sharing.GPU, error) {
	now := n.current.Load()
	return now.gpus, now.err
}

// Versions are those of the driver that Inventory comes from.
func (n *Node) Versions() Versions { return n.current.Load().versions }

// Health is the health behind the inventory's faults, empty before the first
// scan. It may be called from any goroutine, and what it returns must not be
// modified.
func (n *Node) Health() sharing.HealthReport { return *n.report.Load() }

// SetHealthRules sets the rules by which later errors and readings are judged.
// Earlier judgements stay. It may be called from any goroutine; the rules must
// not be modified after that.
func (n *Node) SetHealthRules(rules sharing.HealthRules) { n.rules.Store(&rules) }

// moment is now, with the rules in force.
func (n *Node) moment() moment { return moment{now: time.Now(), rules: *n.rules.Load()} }

// Watch keeps the inventory up to date until ctx ends; call it once. It calls
// changed, from its own goroutine, after the first scan and whenever Inventory
// answers differently from before. A driver that is missing or fails is tried
// again, and is no reason to return, except at the start with FailOnInitError.
//
// It returns nil when ctx and all goroutines have ended. A call that the driver
// does not answer is abandoned after half a second, and the error names it.
func (n *Node) Watch(ctx context.Context, changed func()) error {
	defer context.AfterFunc(ctx, n.gate.stop)()
	poller := newPoller(n, Until(ctx, n.lib))
	ended := make(chan error, 1)
	go func() { ended <- poller.run(ctx) }()
	p := &publisher{
		Node:     n,
		tracker:  newTracker(n.gate.index),
		changed:  changed,
		degraded: map[string]string{},
		advised:  map[string]string{},
	}
	for {
		select {
		case scanned := <-poller.scans:
			p.handleScan(scanned)
		case event := <-poller.events:
			if p.handleEvent(event) {
				poller.rescanSoon()
			}
		case degraded := <-poller.monitors:
			p.handleMonitors(degraded)
		case r := <-n.requests:
			r.do(p)
			p.publishFaults()
			close(r.done)
		case err := <-ended:
			return p.stop(err)
		case <-ctx.Done():
			return p.stop(<-ended)
		}
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// request is work for Watch's goroutine on what it owns. done is closed when it
// has been done and published.
type request struct {
	do   func(*publisher)
	done chan struct{}
}

// request has Watch's goroutine do something and returns when it has.
func (n *Node) request(ctx context.Context, do func(*publisher)) error {
	r := request{do: do, done: make(chan struct{})}
	if !send(ctx, n.requests, r) {
		return ctx.Err()
	}
	<-r.done
	return nil
}

// ClearHealth takes an operator's word that the selected units may be used again,
// for a GPU its partitions too, and returns their health after that, by GPU and
// partition. What a probe still finds wrong stays. The error says that there is
// no such unit, or that ctx ended before Watch ran.
func (n *Node) ClearHealth(ctx context.Context, selector sharing.Selector) (units []sharing.UnitHealth, err error) {
	if ended := n.request(ctx, func(p *publisher) {
		units, err = p.tracker.clear(selector, n.moment())
	}); ended != nil {
		return nil, fmt.Errorf("clear the health of %s: %w", selector, ended)
	}
	return units, err
}

// RestoreHealth is to be called when this program begins to serve the node: it
// takes over the fatal errors and the indexes that an earlier program kept in the stores,
// and from then on this one keeps its own there. It returns when the inventory shows
// them. The error says that ctx ended before Watch ran.
func (n *Node) RestoreHealth(ctx context.Context) error {
	if n.options.Store == nil {
		return nil
	}
	err := n.request(ctx, func(p *publisher) {
		stored, err := n.options.Store.Load()
		if err != nil {
			n.log.Error("fatal errors of the last run not read", "error", err)
		}
		known, err := n.options.Known.Load()
		if err != nil {
			n.log.Error("GPUs of the last run not read, indexes are the driver's", "error", err)
		}
		if p.saver == nil {
			p.saver = startSaver(n.options.Store, stored, n.log)
			p.knownSaver = startSaver(n.options.Known, known, n.log)
		}
		p.tracker.remember(known, n.options.Boot, n.moment())
		p.tracker.restore(stored, n.options.Boot, n.moment())
	})
	if err != nil {
		return fmt.Errorf("take over the fatal errors of the last run: %w", err)
	}
	return nil
}

// command is work for the poller between two scans.
type command struct {
	// do may be nil: then only a scan is wanted.
	do func(*listener)
	// done is closed when do has returned, or when the publisher has a scan that began
	// after the command.
	done chan struct{}
}

// command has the poller do something and returns when it is done.
func (n *Node) command(ctx context.Context, do func(*listener)) error {
	c := command{do: do, done: make(chan struct{})}
	if !send(ctx, n.commands, c) {
		return ctx.Err()
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Refresh returns when Inventory shows what the driver says now, read after the
// call. A GPU that answers late may still be missing. The error says that ctx
// ended first, as it does while the driver cannot be opened.
func (n *Node) Refresh(ctx context.Context) error {
	err := n.command(ctx, nil)
	if err == nil {
		// The publisher handles the scan that it was sent before it takes a request.
		err = n.request(ctx, func(*publisher) {})
	}
	if err != nil {
		return fmt.Errorf("look at the GPUs again: %w", err)
	}
	return nil
}

// PauseEvents removes the GPU of that UUID from the event set until resume is
// called, which must be done. A driver changes a GPU's MIG mode only when nobody
// uses it. Other GPUs' events are missed for a moment. It waits for the end of a wait for
// events, but not for a GPU that is paused already. The error says that ctx ended first.
func (n *Node) PauseEvents(ctx context.Context, gpu string) (resume func(), err error) {
	if _, already := n.paused.LoadOrStore(gpu, nil); already {
		return func() {}, nil
	}
	resume = func() { n.paused.Delete(gpu) }
	if err := n.command(ctx, (*listener).closeSet); err != nil {
		resume()
		return nil, fmt.Errorf("let go of %s: %w", gpu, err)
	}
	return resume, nil
}

// Resets is how often the GPU of that UUID was seen to be reset.
func (n *Node) Resets(gpu string) int {
	if resets := n.resets.Load(); resets != nil {
		return (*resets)[gpu]
	}
	return 0
}
