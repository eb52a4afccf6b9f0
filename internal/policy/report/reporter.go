package report

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/sharing"
)

// Options are what a Reporter needs.
type Options struct {
	// Config says how to reach the API.
	Config *rest.Config
	// Node is the name of this node's Node object.
	Node string
	// Events writes Events about the Node.
	Events bool
	// Condition writes the Node's condition GPUSharingReady.
	Condition bool
	// Annotations writes the Node's annotations and its labels.
	Annotations bool
	// RemoveStale removes resources that were stopped from the Node's capacity,
	// when they have been 0 for long enough.
	RemoveStale bool
	// Logger gets what could not be written; nil for none.
	Logger *slog.Logger
}

// Reporter brings the Node to what the last report says.
type Reporter struct {
	tasks  []*task
	queue  *queue
	events bool

	// mutex guards what Report leaves for the tasks.
	mutex sync.Mutex
	// last is the last report; nil before the first.
	last *sharing.NodeReport
}

// New makes a reporter, which asks nothing of the API before Run. It fails when
// options.Config cannot be used.
func New(options Options) (*Reporter, error) { return newReporter(options, defaultTiming()) }

// timing is how long what waits.
type timing struct {
	// settle is how long a change waits for more before it is written, and pace
	// the least time between two writes of one thing.
	settle, pace time.Duration
	// spread is the time over which the nodes of a cluster tell what they all see
	// at once, as an edit of their ConfigMap: each waits for a part of it by chance.
	spread time.Duration
	// firstRetry is the pause after a failed write; it doubles up to lastRetry, or
	// up to lastLook while there is no such Node.
	firstRetry, lastRetry, lastLook time.Duration
	// request is how long one request may take.
	request time.Duration
	// repeat is the least time between two writes of one event.
	repeat time.Duration
	// between is the time in which one more event may be written once burst of
	// them have been.
	between time.Duration
	burst   int
	// grace is how long after its end a resource's removal may be asked for. The
	// kubelet needs 5 min to give it up, and puts it back before that
	// (pkg/kubelet/cm/devicemanager/types.go, endpointStopGracePeriod).
	grace time.Duration
}

func defaultTiming() timing {
	return timing{
		settle: 250 * time.Millisecond, pace: time.Second, spread: 5 * time.Second,
		firstRetry: time.Second, lastRetry: 2 * time.Minute, lastLook: 15 * time.Second, request: 15 * time.Second,
		repeat: 30 * time.Second, between: 10 * time.Second, burst: 25,
		grace: 5*time.Minute + 30*time.Second,
	}
}

func newReporter(options Options, timing timing) (*Reporter, error) {
	client, err := connect(options.Config, options.Node, timing.request)
	if err != nil {
		return nil, err
	}
	log := options.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &Reporter{queue: newQueue(timing), events: options.Events}
	add := func(name string, write writer) {
		r.tasks = append(r.tasks, newTask(write, timing, log.With("component", "report", "writes", name)))
	}
	if options.Annotations {
		add("annotations", &metadata{reports: r, client: client})
	}
	if options.Condition {
		add("condition", &condition{reports: r, client: client})
	}
	if options.Events {
		add("events", &postman{queue: r.queue, client: client, log: log.With("component", "report")})
	}
	if options.RemoveStale {
		add("stale resources", &remover{reports: r, client: client, grace: timing.grace})
	}
	return r, nil
}

// Report makes report what the Node should say. It does not wait, may be called
// from any goroutine, and before Run. The report must not be changed
// afterwards.
func (r *Reporter) Report(report sharing.NodeReport) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.last != nil && reflect.DeepEqual(*r.last, report) {
		return
	}
	if r.events {
		at := time.Now()
		for _, n := range notices(r.last, report) {
			r.queue.add(n, at)
		}
	}
	alone := r.last == nil || alone(*r.last, report)
	r.last = &report
	for _, t := range r.tasks {
		if alone {
			t.wake()
		} else {
			t.wakeAmongMany()
		}
	}
}

// NodeReplaced says that the Node may not say any more what was written to it:
// it was deleted and made anew, say. Nothing is written again without it. It does
// not wait, and may be called from any goroutine and before Run.
func (r *Reporter) NodeReplaced() {
	for _, t := range r.tasks {
		t.restart()
	}
}

// reports has the last report; ok is false before the first.
type reports interface {
	report() (report sharing.NodeReport, ok bool)
}

// report implements reports.
func (r *Reporter) report() (report sharing.NodeReport, ok bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.last == nil {
		return sharing.NodeReport{}, false
	}
	return *r.last, true
}

// Run writes until ctx ends, and returns when every request has ended. What is
// not written then stays unwritten.
func (r *Reporter) Run(ctx context.Context) error {
	var running sync.WaitGroup
	for _, t := range r.tasks {
		running.Go(func() { t.run(ctx) })
	}
	running.Wait()
	return nil
}
