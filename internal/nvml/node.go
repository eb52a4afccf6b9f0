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
	// Logger logs faults, recoveries and what could not be read; nil disables it.
	Logger *slog.Logger
	// Rescan is the interval at which GPUs and partitions are enumerated; 30 s when zero.
	Rescan time.Duration
	// Probe is the interval at which the GPUs' condition is read; 10 s when zero.
	Probe time.Duration
	// Backoff is the pause after the failure of a driver call on which everything else depends:
	// opening the driver, listing the GPUs, waiting for events. It doubles with every failure in a
	// row, up to 30 s; 1 s when zero.
	Backoff time.Duration
	// FailOnInitError makes Watch return if the driver cannot be opened at the start.
	FailOnInitError bool
	// Store keeps fatal errors across a restart, and Known keeps the GPUs with their indexes. Set
	// both or neither.
	Store Store[FatalHealth]
	Known Store[KnownGPU]
	// Boot is this machine's boot ID; empty if unknown.
	Boot string
	// Kernel is the machine's kernel; nil disables its checks.
	Kernel Kernel
}

// FatalHealth is a unit's fatal errors, as a Store keeps them across a restart of the program.
type FatalHealth struct {
	// GPU is the GPU's UUID. Unit is the UUID of the GPU or of its partition.
	GPU  string `json:"gpu"`
	Unit string `json:"unit"`
	// Reasons has at least one element, in order of arrival. XIDs has the XID of each reason, 0 for
	// none.
	Reasons []string  `json:"reasons"`
	XIDs    []uint64  `json:"xids,omitempty"`
	Since   time.Time `json:"since"`
	// Boot is the machine's boot ID, and Driver is the driver's version; empty if unknown. Another
	// boot or driver means that the GPU has been reset; different marks may mean it.
	Boot   string `json:"boot,omitempty"`
	Driver string `json:"driver,omitempty"`
	Marks
}

// KnownGPU is a GPU, without links, as a Store keeps it across a restart of the program.
type KnownGPU struct {
	sharing.GPU
	// Boot is the machine's boot ID when the GPU was in it; empty if unknown.
	Boot string `json:"boot,omitempty"`
	// Provisional is true if Index is temporary: the driver's index belongs to another GPU, which
	// may be gone.
	Provisional bool `json:"provisional,omitempty"`
}

// Store keeps a list across a restart of the program. A Node calls one method at a time, and none
// before RestoreHealth.
type Store[T any] interface {
	// Load returns what the last Save stored; an empty list if there was none.
	Load() ([]T, error)
	// Save returns when the list, which may be empty, is stored. Only the end of Watch waits for
	// it.
	Save([]T) error
}

// Node holds the node's GPUs, kept up to date by Watch.
type Node struct {
	lib     Library
	options Options
	log     *slog.Logger
	current atomic.Pointer[snapshot]
	report  atomic.Pointer[sharing.HealthReport]
	rules   atomic.Pointer[sharing.HealthRules]
	// resets counts how often each GPU was seen to be reset, by UUID.
	resets atomic.Pointer[map[string]int]
	// requests go to the publisher, commands to the poller.
	requests chan request
	commands chan command
	// paused holds the UUIDs of the GPUs that must not be registered for events.
	paused sync.Map
	gate   *gate
}

// snapshot is what Inventory returns. It is never changed.
type snapshot struct {
	gpus     []sharing.GPU
	versions Versions
	// unlisted is what Unlisted returns.
	unlisted string
	err      error
	// complete is what Complete returns.
	complete bool
}

// NewNode returns the Node for the library. It does not open or call the library before Watch.
func NewNode(lib Library, options Options) *Node {
	options.Rescan = cmp.Or(options.Rescan, 30*time.Second)
	options.Probe = cmp.Or(options.Probe, 10*time.Second)
	options.Backoff = cmp.Or(options.Backoff, time.Second)
	options.Logger = cmp.Or(options.Logger, slog.New(slog.DiscardHandler))
	gate := newGate()
	if options.Kernel != nil {
		gate.gpuOpen = options.Kernel.GPUOpen
	}
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

// Inventory returns the GPUs as Watch last saw them, by index, with their faults. It does not call
// the driver and may be called from any goroutine. The caller must not modify the result.
//
// The error is the reason why the driver cannot be read now; errors.Is finds sharing.ErrNotRead or
// the return code in it. The GPUs are then the last ones that were read, or none if there never
// were any. A single unreadable GPU is not an error: it has a fault if it was known before, and is
// absent otherwise. A GPU that the driver no longer lists stays, with the fault that it is lost,
// because its pods still hold it.
func (n *Node) Inventory() ([]sharing.GPU, error) {
	now := n.current.Load()
	return now.gpus, now.err
}

// Complete reports whether Inventory has every GPU that the machine has had since its boot, except
// those that an operator had forgotten. It is false until a scan has identified all GPUs, and
// before RestoreHealth.
func (n *Node) Complete() bool { return n.current.Load().complete }

// Versions returns the versions of the driver from which Inventory comes.
func (n *Node) Versions() Versions { return n.current.Load().versions }

// Health returns the health behind the inventory's faults; empty before the first scan. It may be
// called from any goroutine. The caller must not modify the result.
func (n *Node) Health() sharing.HealthReport { return *n.report.Load() }

// SetHealthRules sets the rules for judging later errors and readings. Earlier judgements stay. It
// may be called from any goroutine; the caller must not modify the rules afterwards.
func (n *Node) SetHealthRules(rules sharing.HealthRules) { n.rules.Store(&rules) }

// moment returns the current time with the current rules.
func (n *Node) moment() moment { return moment{now: time.Now(), rules: *n.rules.Load()} }

// Watch keeps the inventory up to date until ctx ends. It must be called only once. It calls
// changed, from its own goroutine, after the first scan and whenever Inventory's result has
// changed. If the driver is missing or fails, Watch tries again and does not return, except at the
// start with FailOnInitError.
//
// It returns nil when ctx and all goroutines have ended. A call that the driver does not answer is
// abandoned after half a second, and the error names the call.
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

// request is work for Watch's goroutine on the data that it owns. done is closed when the work is
// done and published.
type request struct {
	do   func(*publisher)
	done chan struct{}
}

// request has Watch's goroutine run do, and returns when it has.
func (n *Node) request(ctx context.Context, do func(*publisher)) error {
	r := request{do: do, done: make(chan struct{})}
	if !send(ctx, n.requests, r) {
		return ctx.Err()
	}
	<-r.done
	return nil
}

// ClearHealth records an operator's confirmation that the selected units may be used again; for a
// GPU this includes its partitions. It returns the units' health after that, by GPU and partition.
// Faults that a probe still finds stay. The error means that there is no such unit, or that ctx
// ended before Watch ran.
func (n *Node) ClearHealth(ctx context.Context, selector sharing.Selector) (units []sharing.UnitHealth, err error) {
	if ended := n.request(ctx, func(p *publisher) {
		units, err = p.tracker.clear(selector, n.moment())
	}); ended != nil {
		return nil, fmt.Errorf("clear the health of %s: %w", selector, ended)
	}
	return units, err
}

// RestoreHealth must be called when this program begins to serve the node. It loads the fatal
// errors and the indexes that an earlier program stored, and from then on this program stores its
// own. It returns when the inventory shows them. The error means that ctx ended before Watch ran.
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
	// do may be nil to request only a scan.
	do func(*listener)
	// done is closed when do has returned or, if do is nil, when the publisher has a scan that
	// began after the command.
	done chan struct{}
}

// command has the poller run do, and returns when it is done.
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

// Refresh returns when Inventory shows the driver's state, read after the call. A GPU that answers
// late may still be missing. The error means that ctx ended first, as it does while the driver
// cannot be opened.
func (n *Node) Refresh(ctx context.Context) error {
	err := n.command(ctx, nil)
	if err == nil {
		// The publisher handles the scan before this request, because the scan was sent first.
		err = n.request(ctx, func(*publisher) {})
	}
	if err != nil {
		return fmt.Errorf("look at the GPUs again: %w", err)
	}
	return nil
}

// PauseEvents removes the GPU with that UUID from the event set until resume is called; the caller
// must call it. A driver changes a GPU's MIG mode only if no program uses the GPU. Other GPUs'
// events are missed for a moment. PauseEvents waits for the end of the current wait for events, but
// not if the GPU is already paused. The error means that ctx ended first.
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

// Resets returns how often the GPU with that UUID was seen to be reset.
func (n *Node) Resets(gpu string) int {
	if resets := n.resets.Load(); resets != nil {
		return (*resets)[gpu]
	}
	return 0
}
