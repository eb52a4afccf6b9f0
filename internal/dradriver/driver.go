// Package dradriver is a node's DRA driver: it connects the kubelet, the API server and the table
// of claims. It registers with the kubelet, answers its calls, and publishes what the node offers
// as ResourceSlices.
//
// It decides nothing: the table decides which claim gets which devices, and internal/dra decides
// what is offered. No error here ends the program; errors are logged and retried.
//
// It does not use k8s.io/dynamic-resource-allocation, because that includes the client of every
// Kubernetes API: 15 MB more program size and 10 MB more memory at rest on each node, even if the
// node serves no claims. Read this file first, then kubelet.go and publish.go.
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
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/wake"
)

// Claims are the claims of this node. Its methods are called from many goroutines.
type Claims interface {
	// Prepare gives the claim its devices. It returns soon after ctx ends. For a claim that is
	// already prepared it returns the same answer; after an error, the kubelet tries again. It
	// returns the CDI names for each of the claim's results. The runtime adds them to each
	// container that uses the result's request.
	Prepare(ctx context.Context, claim dra.Claim) (cdi [][]string, err error)
	// Unprepare takes the claim's devices back. The claim's results are not known, unlike in
	// Prepare. It is no error if there is no such claim.
	Unprepare(claim dra.Claim) error
	// Devices returns all devices that claims have, with their health. The channel is closed when
	// they change.
	Devices() ([]dra.DeviceHealth, <-chan struct{})
}

// Options are what a Driver needs.
type Options struct {
	// Driver is the name of the driver, Node the name of the Node object.
	Driver, Node string
	// PodUID is part of the socket names, so that two pods can have sockets at the same time; empty
	// without a pod.
	PodUID string
	// Dir is the driver's own directory, /var/lib/kubelet/plugins/<driver>; the driver creates it.
	// RegistryDir is the kubelet's, /var/lib/kubelet/plugins_registry. Both have the same path on
	// the host.
	Dir, RegistryDir string
	// Config is the configuration for connecting to the API server.
	Config *rest.Config
	Claims Claims
	// Changed is called when State has changed, from any goroutine; nil disables it.
	Changed func()
	// Observe is called with the duration and the error of each claim's call, from any goroutine;
	// nil disables it.
	Observe func(call Call, took time.Duration, err error)
	Logger  *slog.Logger
}

// Call is a call of the kubelet for a claim.
type Call string

// The kubelet's calls.
const (
	Prepare   Call = "prepare"
	Unprepare Call = "unprepare"
)

// driverStatus is the status of the driver.
type driverStatus struct {
	// registered is true once the kubelet has accepted the driver, since the driver last began to
	// serve.
	registered bool
	// unserved is why the kubelet cannot call; unpublished is why the API server does not have the
	// last published slices. Both are empty if nothing is wrong.
	unserved, unpublished string
	// slices is the number of ResourceSlices in the API server, 0 before the first successful
	// check. writes counts the requests that changed them, failures the checks that failed.
	slices, writes, failures int
	// written is the time since which the API server has the last published slices; zero while it
	// does not have them.
	written time.Time
	// without are the features that the API server has dropped since this driver started. They are
	// kept, because a caller that publishes without them would otherwise see no problem and publish
	// with them again.
	without dra.Features
}

// Driver is a DRA driver. At most one with a given name may run on a node; the program that runs it
// holds the node's lock.
type Driver struct {
	options Options
	// pool is the name of the node's only pool.
	pool   string
	api    *kube.Client
	timing timing
	log    *slog.Logger

	// wake wakes the publisher.
	wake wake.Signal

	// mutex guards the following fields.
	mutex  sync.Mutex
	status driverStatus
	// given are the last published slices, nil before the first time. urgent is true if they have a
	// fault that the API server does not know yet.
	given  []resourceapi.ResourceSlice
	urgent bool
}

type timing struct {
	// pace is the minimum time between two checks of the API server's slices, unless there is a new
	// fault. settle is how long to wait for further changes after another program, such as the
	// starting kubelet, changes them; it is random, up to this duration.
	pace, settle time.Duration
	// spread is the time over which the nodes of a cluster reconnect when their watches end at the
	// same moment.
	spread time.Duration
	// request is how long the API server may take for one claim or one check.
	request time.Duration
	retry   wait.Backoff
	// beat is the time between two messages about devices' health, and between two checks of the
	// sockets. The kubelet treats health older than 30 s as unknown (kubernetes 1.36.3,
	// pkg/kubelet/cm/dra/healthinfo.go).
	beat time.Duration
}

func defaultTiming() timing {
	return timing{
		pace:    time.Second,
		settle:  500 * time.Millisecond,
		spread:  5 * time.Second,
		request: 20 * time.Second,
		retry:   kube.Backoff(300*time.Millisecond, 30*time.Second),
		beat:    10 * time.Second,
	}
}

// New returns a driver, which does nothing before Run.
func New(options Options) (*Driver, error) {
	if options.Driver == "" || options.Node == "" || options.Config == nil {
		return nil, errors.New("a DRA driver needs its own and the Node's name, and a way to reach the API server")
	}
	api, err := kube.NewClient(options.Config)
	if err != nil {
		return nil, fmt.Errorf("DRA driver: %w", err)
	}
	api.Timeout = defaultTiming().request
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
		wake:    wake.NewSignal(),
		api:     api,
		log:     options.Logger.With("component", "dra", "driver", options.Driver),
	}, nil
}

// Run serves the kubelet and publishes until ctx ends. It returns when everything it started has
// ended; no call of the kubelet is then running any more. The slices stay for a successor.
func (d *Driver) Run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(func() error { d.serve(ctx); return nil })
	group.Go(func() error { d.publish(ctx); return nil })
	return group.Wait()
}

// State returns the state of the driver. It may be called from any goroutine.
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

// change changes the status and reports the change.
func (d *Driver) change(change func(*driverStatus)) {
	d.mutex.Lock()
	before := d.status
	change(&d.status)
	after := d.status
	d.mutex.Unlock()
	d.say("kubelet", before.unserved, after.unserved)
	d.say("ResourceSlices", before.unpublished, after.unpublished)
	before.writes, before.failures = after.writes, after.failures
	// A change of a mere counter is not reported.
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
