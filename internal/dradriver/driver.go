// Package dradriver is a node's DRA driver: it stands between the kubelet, the API server
// and the table of claims. It registers with the kubelet and answers its calls, and writes
// what the node offers as ResourceSlices.
//
// It decides nothing: which claim gets what is the table's business, and what is offered
// internal/dra's. Nothing here ends the program; what fails is said and tried again.
//
// It is not made with k8s.io/dynamic-resource-allocation, because that brings the client of
// every Kubernetes API along: 15 MB more of the program, 10 MB more in memory at rest, on each node,
// whether it serves claims or not. Read this file first, then kubelet.go and publish.go.
package dradriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/dra"
)

// Claims are the claims of this node. Its methods are called from many goroutines.
type Claims interface {
	// Prepare gives the claim its devices. It returns soon after ctx ends. A claim that is
	// prepared already gets the same answer; the kubelet tries again after an error.
	// It returns the CDI names of each of the claim's results, which the runtime adds to each
	// container that uses the result's request.
	Prepare(ctx context.Context, claim dra.Claim) (cdi [][]string, err error)
	// Unprepare takes the devices of the claim back, as Prepare. Its results are not known, and it
	// is no error if there is no such claim.
	Unprepare(claim dra.Claim) error
	// Devices are all devices that claims have, with their health. The channel is closed when
	// they are not the same any more.
	Devices() ([]dra.DeviceHealth, <-chan struct{})
}

// Options are what a Driver needs.
type Options struct {
	// Driver is the driver's name, Node the Node object's.
	Driver, Node string
	// PodUID is in the names of the sockets, so that two pods can have theirs at once; empty
	// where there is no pod.
	PodUID string
	// Dir is the driver's own, /var/lib/kubelet/plugins/<driver>; it is made. RegistryDir is the
	// kubelet's, /var/lib/kubelet/plugins_registry. Both have the same path on the host.
	Dir, RegistryDir string
	// Config says how to reach the API server.
	Config *rest.Config
	Claims Claims
	// Changed is called when State has changed, from any goroutine; nil for nobody.
	Changed func()
	// Observe is told how long each claim's call took, and how it ended, from any goroutine; nil for nobody.
	Observe func(call Call, took time.Duration, err error)
	Logger  *slog.Logger
}

// Call is what the kubelet calls for a claim.
type Call string

// The calls.
const (
	Prepare   Call = "prepare"
	Unprepare Call = "unprepare"
)

// driverStatus is how the driver is.
type driverStatus struct {
	// registered is true after the kubelet has accepted the driver, since it began to serve.
	registered bool
	// unserved is why the kubelet cannot call, unpublished why the API server does not have
	// what was published last; empty when nothing is wrong.
	unserved, unpublished string
	// slices is how many ResourceSlices the API server has, 0 before the first time, and
	// writes how many requests have changed them. failures counts the looks that ended with an error.
	slices, writes, failures int
	// written is since when the API server has what was published last; zero while it has not.
	written time.Time
	// without is what the API server has left out since this driver has run: who publishes
	// without it must not be told that all is well, and begin again.
	without dra.Features
}

// Driver is a DRA driver. At most one of a name may run on a node: who runs it has the node's lock.
type Driver struct {
	options Options
	// pool is the name of the node's only pool.
	pool   string
	rest   rest.Interface
	timing timing
	log    *slog.Logger

	// wake wakes the publisher.
	wake chan struct{}

	// mutex guards what follows.
	mutex  sync.Mutex
	status driverStatus
	// given is what was published last, nil before the first time; urgent says that it has a
	// fault that the API server does not know.
	given  []resourceapi.ResourceSlice
	urgent bool
}

type timing struct {
	// pace is the least time between two looks at the API server's slices, unless there is a
	// fault to tell. settle is how long a change that somebody else has made, such as the
	// kubelet when it starts, waits for more; it is random, up to this.
	pace, settle time.Duration
	// spread is the time over which the nodes of a cluster come back when their watches are
	// cut at once; watch is how long one lasts at least.
	spread, watch time.Duration
	// request is how long the API server may take for what one claim or one look needs.
	request time.Duration
	retry   wait.Backoff
	// beat is the time between two messages about devices' health, and between two looks at
	// the sockets. The kubelet takes what is older than 30 s for unknown (kubernetes 1.36.3,
	// pkg/kubelet/cm/dra/healthinfo.go).
	beat time.Duration
}

func defaultTiming() timing {
	return timing{
		pace:    time.Second,
		settle:  500 * time.Millisecond,
		spread:  5 * time.Second,
		watch:   30 * time.Minute,
		request: 20 * time.Second,
		retry: wait.Backoff{
			Duration: 300 * time.Millisecond,
			Factor:   2,
			Jitter:   1,
			Steps:    10,
			Cap:      30 * time.Second,
		},
		beat: 10 * time.Second,
	}
}

// New makes a driver, which does nothing before Run.
func New(options Options) (*Driver, error) {
	if options.Driver == "" || options.Node == "" || options.Config == nil {
		return nil, errors.New("a DRA driver needs its own and the Node's name, and a way to reach the API server")
	}
	scheme := runtime.NewScheme()
	err := errors.Join(resourceapi.AddToScheme(scheme), metav1.AddMetaToScheme(scheme))
	config := rest.CopyConfig(options.Config)
	config.QPS = -1 // The publisher limits itself, and the kubelet its calls.
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.APIPath, config.GroupVersion = "/apis", &resourceapi.SchemeGroupVersion
	client, clientErr := rest.RESTClientFor(config)
	if err := errors.Join(err, clientErr); err != nil {
		return nil, fmt.Errorf("DRA driver: reach the API server: %w", err)
	}
	if options.Changed == nil {
		options.Changed = func() {}
	}
	if options.Observe == nil {
		options.Observe = func(Call, time.Duration, error) {}
	}
	return &Driver{
		options: options,
		pool:    dra.PoolName(options.Node, options.Driver),
		timing:  defaultTiming(),
		wake:    make(chan struct{}, 1),
		rest:    client,
		log:     options.Logger.With("component", "dra", "driver", options.Driver),
	}, nil
}

// Run serves the kubelet and publishes until ctx ends, and returns when everything that it
// started has: no call of the kubelet is under way any more. The slices stay, for a successor.
func (d *Driver) Run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(func() error { d.serve(ctx); return nil })
	group.Go(func() error { d.publish(ctx); return nil })
	return group.Wait()
}

// State returns how the driver is, from any goroutine.
func (d *Driver) State() dra.DriverState {
	d.mutex.Lock()
	s := d.status
	d.mutex.Unlock()
	state := dra.DriverState{
		Registered:    s.registered,
		Slices:        s.slices,
		Written:       s.written,
		Writes:        s.writes,
		WriteFailures: s.failures,
		Unwritten:     s.unpublished != "",
		Without:       s.without,
	}
	for _, problem := range []string{s.unserved, s.unpublished} {
		if problem != "" {
			state.Problems = append(state.Problems, problem)
		}
	}
	return state
}

// change changes the status, and says so.
func (d *Driver) change(change func(*driverStatus)) {
	d.mutex.Lock()
	before := d.status
	change(&d.status)
	after := d.status
	d.mutex.Unlock()
	d.say("kubelet", before.unserved, after.unserved)
	d.say("ResourceSlices", before.unpublished, after.unpublished)
	before.writes, before.failures = after.writes, after.failures
	// A number that only counts is no news.
	if before != after {
		d.options.Changed()
	}
}

func (d *Driver) say(what, before, now string) {
	switch {
	case before == now:
	case now == "":
		d.log.Info("DRA works again", "with", what)
	default:
		d.log.Warn("DRA does not work, trying again", "with", what, "error", now)
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(pause):
	}
}
