package nodestatus

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/wake"
)

// Options are what a Reporter needs.
type Options struct {
	// Config says how to reach the API.
	Config *rest.Config
	// Node is the name of this node's Node object.
	Node string
	// Events writes Events about the Node.
	Events bool
	// Condition writes the Node's condition GPUSharingReady, and allows Announce to be called.
	// Heartbeat is how often the condition is written again without a change; 0 for never.
	Condition bool
	Heartbeat time.Duration
	// Annotations writes the Node's annotations and its labels.
	Annotations bool
	// Features is where feature labels are written; the zero value for nowhere.
	Features FeatureOutput
	// RemoveStale removes stopped resources from the Node's capacity once they have been 0 for long
	// enough.
	RemoveStale bool
	// Logger logs what could not be written; nil disables it.
	Logger *slog.Logger
}

// Reporter writes the latest report to the Node.
type Reporter struct {
	options Options
	client  client
	loops   []*writeLoop
	queue   *eventQueue

	announcer *announcer

	// mutex guards what Report leaves for the loops.
	mutex sync.Mutex
	// last is the latest report; nil before the first.
	last *nodereport.Report
}

// New returns a reporter. It makes no request before Run. It fails if options.Config cannot be used.
func New(options Options) (*Reporter, error) { return newReporter(options, defaultTiming()) }

type timing struct {
	// settle is how long a change waits for further changes before it is written. pace is the
	// shortest time between two writes of one loop.
	settle, pace time.Duration
	// spread is the time over which the nodes of a cluster report a change that they all see at
	// once, such as an edit of their ConfigMap: each node waits for a random part of it.
	spread time.Duration
	// retry is the wait after failed writes. withoutNode is the longest wait while there is no such
	// Node. Both are random, up to twice the value.
	retry       wait.Backoff
	withoutNode time.Duration
	// request is how long one request may take.
	request time.Duration
	// repeat is the shortest time between two writes of one event.
	repeat time.Duration
	// blocked is how long a GPU's layout must be blocked before that is an event: the kubelet still
	// names a pod for a moment after its end.
	blocked time.Duration
	// between is how long it takes until one more event may be written after burst events.
	between time.Duration
	burst   int
	// grace is how long after the end of a resource its removal may be requested. The kubelet takes
	// 5 min to give it up, and would put it back before that
	// (pkg/kubelet/cm/devicemanager/types.go, endpointStopGracePeriod).
	grace time.Duration
}

func defaultTiming() timing {
	return timing{
		settle:      500 * time.Millisecond,
		pace:        time.Second,
		spread:      5 * time.Second,
		retry:       kube.Backoff(500*time.Millisecond, time.Minute),
		withoutNode: 7500 * time.Millisecond,
		request:     15 * time.Second,
		repeat:      30 * time.Second,
		blocked:     3 * time.Second,
		between:     10 * time.Second,
		burst:       25,
		grace:       5*time.Minute + 30*time.Second,
	}
}

func newReporter(options Options, timing timing) (*Reporter, error) {
	var client client
	onlyFile := options.Features.Kind == FeaturesToFile && !options.Events && !options.Condition &&
		!options.Annotations && !options.RemoveStale
	if !onlyFile {
		var err error
		client, err = connect(options.Config, options.Node, timing.request)
		if err != nil {
			return nil, err
		}
	}
	log := cmp.Or(options.Logger, slog.New(slog.DiscardHandler))
	r := &Reporter{
		options:   options,
		client:    client,
		queue:     newEventQueue(timing),
		announcer: newAnnouncer(client, log.With("component", "report")),
	}
	add := func(wanted bool, what string, newWriter func() writer) {
		if wanted {
			r.loops = append(r.loops, newWriteLoop(newWriter, r.lastReport, timing,
				log.With("component", "report", "writes", what)))
		}
	}
	toNode := options.Features.Kind == FeaturesToNode
	add(options.Annotations || toNode, "annotations", func() writer {
		return &metadata{
			client:    client,
			noProfile: !options.Annotations,
			features:  toNode,
			log:       log.With("component", "report"),
		}
	})
	add(options.Features.Kind == FeaturesToFile, "feature labels",
		func() writer { return featureFile{options.Features.File} })
	add(options.Features.Kind == FeaturesToNFD, "feature labels",
		func() writer { return &NodeFeature{client: client, FeatureOutput: options.Features} })
	add(options.Condition, "condition",
		func() writer { return &condition{client: client, heartbeat: options.Heartbeat} })
	add(options.Events, "events", func() writer {
		return &eventWriter{
			queue:  r.queue,
			client: client,
			log:    log.With("component", "report"),
		}
	})
	add(options.RemoveStale, "stale resources", func() writer {
		return &staleResources{
			client: client,
			grace:  timing.grace,
			done:   map[nodereport.GoneResource]bool{},
		}
	})
	return r, nil
}

// Report sets what to write. It does not wait, and may be called from any goroutine, also before
// Run. The report must not be changed afterwards.
func (r *Reporter) Report(report nodereport.Report) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.last != nil && reflect.DeepEqual(*r.last, report) {
		return
	}
	if r.options.Events {
		at := time.Now()
		for _, n := range newEvents(r.last, report) {
			r.queue.add(n, at)
		}
	}
	ownOnly := r.last == nil || concernsThisNodeOnly(*r.last, report)
	r.last = &report
	for _, t := range r.loops {
		if ownOnly {
			t.woken.Notify()
		} else {
			t.spread.Notify()
		}
	}
}

// NodeReplaced tells the Reporter that the Node may no longer have what was written to it, for
// example because it was deleted and created again. Without this call, unchanged values are not
// written again. It does not wait, and may be called from any goroutine, also before Run.
func (r *Reporter) NodeReplaced() {
	for _, t := range r.loops {
		t.replaced.Notify()
	}
}

// lastReport returns the latest report; nil before the first.
func (r *Reporter) lastReport() *nodereport.Report {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.last
}

// Run writes until ctx ends, and returns after every request has ended. What is not written by then
// stays unwritten.
func (r *Reporter) Run(ctx context.Context) error {
	var running sync.WaitGroup
	for _, t := range r.loops {
		running.Go(func() { t.run(ctx) })
	}
	running.Wait()
	return nil
}

// leaveTimeout is how long the end of the program waits for Leave.
const leaveTimeout = 2 * time.Second

// Leave writes to the condition that no Virgate serves this node any more, and why, if that was an
// error; without one, only if the Node has the condition. Call it after Run has returned, if there is
// no successor. It waits for the API server only for a moment; if the write fails, the age of the
// heartbeat tells.
func (r *Reporter) Leave(ctx context.Context, because error) {
	if !r.options.Condition {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	left := nodereport.Report{
		Ready:   nodereport.ConditionUnknown,
		Reason:  "Stopped",
		Message: "Virgate has ended on this node, and its GPUs are not served until it starts again",
	}
	if because != nil { // It comes first, because kubectl virgate cuts long texts.
		left.Message = "Virgate has ended on this node: " + because.Error()
	}
	c := &condition{client: r.client}
	err := c.read(ctx)
	if err == nil && (c.written.Type != "" || because != nil) {
		_, err = c.write(ctx, left)
	}
	if err != nil {
		cmp.Or(r.options.Logger, slog.New(slog.DiscardHandler)).Warn(
			"the condition was not updated: it does not say that this node is not served", "error", err)
	}
}

type writer interface {
	// write writes what differs in the report from what it wrote last. The loop's goroutine calls
	// it. again is when to call it even if nothing is new; 0 for never.
	write(ctx context.Context, report nodereport.Report) (again time.Duration, err error)
}

// writeLoop calls one writer when there is something to write. Each writer has its own loop,
// because one may have a permission that another lacks.
type writeLoop struct {
	// writer is made by newWriter. It is replaced when the Node may be gone, and with it what was
	// written.
	writer    writer
	newWriter func() writer

	report func() *nodereport.Report
	timing timing
	log    *slog.Logger
	// woken signals that there is something new; it does not end a backoff. spread signals that
	// many nodes have the same to write at once, so that each waits for a random time. replaced
	// signals that the Node is a different one, so that everything is written again.
	woken, spread, replaced wake.Signal
	// retry is the backoff of consecutive failures. logged is the last failure that was logged.
	retry  wait.Backoff
	logged string
}

func newWriteLoop(
	newWriter func() writer,
	report func() *nodereport.Report,
	timing timing,
	log *slog.Logger,
) *writeLoop {
	return &writeLoop{
		newWriter: newWriter,
		report:    report,
		timing:    timing,
		log:       log,
		retry:     timing.retry,
		woken:     wake.NewSignal(),
		spread:    wake.NewSignal(),
		replaced:  wake.NewSignal(),
	}
}

func drain(signal <-chan struct{}) {
	select {
	case <-signal:
	default:
	}
}

func (l *writeLoop) run(ctx context.Context) {
	l.writer = l.newWriter()
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.replaced:
			l.writer = l.newWriter()
		case <-l.woken:
			l.pause(ctx, l.timing.settle, nil)
		case <-l.spread:
			// Let some of the other nodes write first, unless a change arrives that concerns only
			// this node.
			l.pause(ctx, time.Duration(rand.Float64()*float64(l.timing.spread)), l.woken)
			l.pause(ctx, l.timing.settle, nil)
		case <-again:
		}
		if ctx.Err() != nil {
			return
		}
		again = nil
		if wait := l.try(ctx); wait > 0 {
			again = time.After(wait)
		}
	}
}

// try writes until it succeeds or ctx ends, and returns when to write again.
func (l *writeLoop) try(ctx context.Context) (again time.Duration) {
	for {
		// This attempt writes everything that has arrived until now.
		drain(l.woken)
		drain(l.spread)
		report := l.report()
		if report == nil {
			return 0
		}
		again, err := l.writer.write(ctx, *report)
		if ctx.Err() != nil {
			return 0
		}
		if err == nil {
			if l.logged != "" {
				l.log.Info("written again")
			}
			l.retry, l.logged = l.timing.retry, ""
			l.pause(ctx, l.timing.pace, nil)
			return again
		}
		if apierrors.IsNotFound(err) {
			// What was written is gone with the Node; the next Node has none of it.
			l.writer = l.newWriter()
		}
		if text := err.Error(); text != l.logged {
			l.logged = text
			l.log.Warn("not written, trying again", "error", err)
		}
		l.pause(ctx, l.pauseAfter(err), nil)
	}
}

// pause waits until the time is over, end receives, ctx ends or the Node is replaced.
func (l *writeLoop) pause(ctx context.Context, wait time.Duration, end <-chan struct{}) {
	select {
	case <-time.After(wait):
	case <-ctx.Done():
	case <-end:
	case <-l.replaced:
		l.writer = l.newWriter()
		l.retry = l.timing.retry
		l.woken.Notify()
	}
}

// pauseAfter returns how long to wait after a failure. The wait grows with each failure, differs
// from node to node, and is added to the delay that the API server asks for.
func (l *writeLoop) pauseAfter(err error) time.Duration {
	pause := kube.Pause(&l.retry, err)
	if apierrors.IsNotFound(err) {
		pause = min(pause, wait.Jitter(l.timing.withoutNode, 1))
	}
	return pause
}

// concernsThisNodeOnly reports whether the change is one that other nodes do not have at the same
// time: the start, the health of units, containers over their limit, that the node can or cannot
// serve, a profile of another name by the same rules (labels are changed node by node), the
// progress of MIG changes, and the end of pods that a switch waits for.
//
// Everything else follows from the text of a profile, which an edit changes on many nodes at once.
// So does that a node cannot serve while a profile is on its way.
func concernsThisNodeOnly(last, next nodereport.Report) bool {
	started := last.Applied == (nodereport.ProfileRef{})
	served := last.Ready != next.Ready && last.State != nodereport.ProfilePending &&
		next.State != nodereport.ProfilePending
	chosen := last.Wanted.Name != next.Wanted.Name && last.Wanted.Rules == next.Wanted.Rules
	ended := len(next.Waits) < len(last.Waits)
	return started || served || !slices.Equal(last.OverLimit, next.OverLimit) || chosen || ended ||
		progressed(last.Layouts, next.Layouts) || !reflect.DeepEqual(last.Units, next.Units)
}

// progressed reports whether GPUs have come closer to layouts that were already wanted.
func progressed(last, next []nodereport.GPULayout) bool {
	same := slices.EqualFunc(last, next,
		func(a, b nodereport.GPULayout) bool { return a.GPU == b.GPU && a.Wanted == b.Wanted })
	return same && !reflect.DeepEqual(last, next)
}
