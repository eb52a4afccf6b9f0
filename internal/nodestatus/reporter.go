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

	"github.com/virgate/virgate/internal/nodereport"
)

// Options are what a Reporter needs.
type Options struct {
	// Config says how to reach the API.
	Config *rest.Config
	// Node is the name of this node's Node object.
	Node string
	// Events writes Events about the Node.
	Events bool
	// Condition writes the Node's condition GPUSharingReady, and Heartbeat is how often it
	// is written again while it says the same; 0 for never. With it, Announce may be called.
	Condition bool
	Heartbeat time.Duration
	// Annotations writes the Node's annotations and its labels.
	Annotations bool
	// Features says where feature labels go; the zero value for nowhere.
	Features FeatureOutput
	// RemoveStale removes resources that were stopped from the Node's capacity,
	// when they have been 0 for long enough.
	RemoveStale bool
	// Logger gets what could not be written; nil for none.
	Logger *slog.Logger
}

// Reporter writes the last report to the Node.
type Reporter struct {
	options Options
	client  client
	loops   []*writeLoop
	queue   *eventQueue

	announcer *announcer

	// mutex guards what Report leaves for the loops.
	mutex sync.Mutex
	// last is the last report; nil before the first.
	last *nodereport.Report
}

// New makes a reporter, which asks nothing of the API before Run. It fails when
// options.Config cannot be used.
func New(options Options) (*Reporter, error) { return newReporter(options, defaultTiming()) }

type timing struct {
	// settle is how long a change waits for more before it is written, and pace
	// the least time between two writes of one thing.
	settle, pace time.Duration
	// spread is the time over which the nodes of a cluster report what they all see
	// at once, such as an edit of their ConfigMap: each waits for a random part of it.
	spread time.Duration
	// retry is the wait after failed writes, withoutNode the longest while there is
	// no such Node. Both are random up to twice of that.
	retry       wait.Backoff
	withoutNode time.Duration
	// request is how long one request may take.
	request time.Duration
	// repeat is the least time between two writes of one event.
	repeat time.Duration
	// blocked is how long a GPU's layout must be blocked until that is an event: the
	// kubelet names a pod for a moment after its end.
	blocked time.Duration
	// between is the time in which one more event may be written once burst have been.
	between time.Duration
	burst   int
	// grace is how long after its end a resource's removal may be asked for. The
	// kubelet needs 5 min to give it up, and puts it back before that
	// (pkg/kubelet/cm/devicemanager/types.go, endpointStopGracePeriod).
	grace time.Duration
}

func defaultTiming() timing {
	return timing{
		settle: 500 * time.Millisecond,
		pace:   time.Second,
		spread: 5 * time.Second,
		retry: wait.Backoff{
			Duration: 500 * time.Millisecond,
			Factor:   2,
			Jitter:   1,
			Steps:    10,
			Cap:      time.Minute,
		},
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

// Report sets what is to be written. It does not wait, and may be called from any
// goroutine and before Run. The report must not be changed afterwards.
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
			signal(t.woken)
		} else {
			signal(t.spread)
		}
	}
}

// NodeReplaced says that the Node may not say any more what was written to it:
// it was deleted and made anew, say. Nothing is written again without it. It does
// not wait, and may be called from any goroutine and before Run.
func (r *Reporter) NodeReplaced() {
	for _, t := range r.loops {
		signal(t.replaced)
	}
}

// lastReport is nil before the first one.
func (r *Reporter) lastReport() *nodereport.Report {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.last
}

// Run writes until ctx ends, and returns when every request has ended. What is
// not written then stays unwritten.
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

// Leave says in the condition, if the Node has it, that nobody serves this node any more.
// It is called when Run has returned and no successor is there, and waits for the API
// server for a moment only: what it cannot write, the heartbeat's age tells.
func (r *Reporter) Leave(ctx context.Context) {
	if !r.options.Condition {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	left := nodereport.Report{
		Ready:   nodereport.ConditionUnknown,
		Reason:  "Stopped",
		Message: "Virgate has ended on this node, and nobody serves its GPUs until it starts again",
	}
	c := &condition{client: r.client}
	err := c.read(ctx)
	if err == nil && c.written.Type != "" {
		_, err = c.write(ctx, left)
	}
	if err != nil {
		cmp.Or(r.options.Logger, slog.New(slog.DiscardHandler)).Warn(
			"the condition does not say that nobody serves this node", "error", err)
	}
}

type writer interface {
	// write writes what is otherwise in the last report than what it wrote last, from the
	// loop's goroutine. again is when to call it even if nothing is new; 0 for never.
	write(ctx context.Context, report nodereport.Report) (again time.Duration, err error)
}

// writeLoop calls one writer when there is something to write. Each writer has a
// loop of its own, because where one may not write, another may.
type writeLoop struct {
	// writer comes from newWriter, and is replaced when the Node, and with it what was
	// written, may be gone.
	writer    writer
	newWriter func() writer

	report func() *nodereport.Report
	timing timing
	log    *slog.Logger
	// woken says that there is something new, which does not end a backoff; spread
	// that many nodes have to write the same at once, so that each waits a random
	// while; replaced that the Node is another one, so that everything is written again.
	woken, spread chan struct{}
	replaced      chan struct{}
	// retry is the backoff of failures in a row, logged the last one that was logged.
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
		woken:     make(chan struct{}, 1),
		spread:    make(chan struct{}, 1),
		replaced:  make(chan struct{}, 1),
	}
}

func signal(signal chan<- struct{}) {
	select {
	case signal <- struct{}{}:
	default:
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
			// Some of the other nodes write first, unless what comes concerns this node only.
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

// try writes until it works or ctx ends, and returns when to write again.
func (l *writeLoop) try(ctx context.Context) (again time.Duration) {
	for {
		// What came until here is written by this attempt.
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
			// What was written is gone with the Node; the next one has none of it.
			l.writer = l.newWriter()
		}
		if text := err.Error(); text != l.logged {
			l.logged = text
			l.log.Warn("not written, trying again", "error", err)
		}
		l.pause(ctx, l.pauseAfter(err), nil)
	}
}

// pause waits until the time is over, end receives, ctx ends or the Node is another one.
func (l *writeLoop) pause(ctx context.Context, wait time.Duration, end <-chan struct{}) {
	select {
	case <-time.After(wait):
	case <-ctx.Done():
	case <-end:
	case <-l.replaced:
		l.writer = l.newWriter()
		l.retry = l.timing.retry
		signal(l.woken)
	}
}

// pauseAfter is how long to wait after a failure: longer each time, never the same
// on all nodes, and on top of what the API server asks for.
func (l *writeLoop) pauseAfter(err error) time.Duration {
	pause := l.retry.Step()
	if apierrors.IsNotFound(err) {
		pause = min(pause, wait.Jitter(l.timing.withoutNode, 1))
	}
	seconds, _ := apierrors.SuggestsClientDelay(err)
	return pause + wait.Jitter(time.Duration(seconds)*time.Second, 1)
}

// concernsThisNodeOnly says that other nodes have no such change at the same time:
// the start, the health of units, that the node can or cannot serve, a profile of
// another name (labels are changed node by node) by the same rules, the progress of MIG changes, and the
// end of pods that a switch waits for.
// All else follows from the text of a profile, which an edit changes on many nodes
// at once; so does that a node cannot serve while a profile is on its way.
func concernsThisNodeOnly(last, next nodereport.Report) bool {
	started := last.Applied == (nodereport.ProfileRef{})
	served := last.Ready != next.Ready && last.State != nodereport.ProfilePending &&
		next.State != nodereport.ProfilePending
	chosen := last.Wanted.Name != next.Wanted.Name && last.Wanted.Rules == next.Wanted.Rules
	ended := len(next.Waits) < len(last.Waits)
	return started || served || !slices.Equal(last.OverLimit, next.OverLimit) || chosen || ended ||
		progressed(last.Layouts, next.Layouts) || !reflect.DeepEqual(last.Units, next.Units)
}

// progressed says that GPUs have come nearer to the layouts that were already wanted.
func progressed(last, next []nodereport.GPULayout) bool {
	same := slices.EqualFunc(last, next,
		func(a, b nodereport.GPULayout) bool { return a.GPU == b.GPU && a.Wanted == b.Wanted })
	return same && !reflect.DeepEqual(last, next)
}
