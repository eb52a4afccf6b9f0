package simkubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
)

// ErrDown is returned by every method that needs a running kubelet while it is stopped, and by an
// admission that a stop interrupted.
var ErrDown = errors.New("kubelet is down")

// errEnded is returned by Start after Run has returned.
var errEnded = errors.New("kubelet has ended")

// Kubelet is a simulated kubelet. Its methods may be called from any goroutine.
type Kubelet struct {
	options Options
	logger  *slog.Logger
	// lifecycle is held while the kubelet starts or stops. It is a semaphore instead of a mutex, so
	// that a caller can stop waiting for it.
	lifecycle *semaphore.Weighted
	// admission is the kubelet's allocation mutex, and a semaphore for the same reason. It admits
	// one pod at a time, however long the plugin's Allocate takes.
	admission *semaphore.Weighted

	mu sync.Mutex
	// waits are the calls of Await under way.
	waits map[*wait]bool
	// process is nil while the kubelet is stopped.
	process   *process
	ended     bool
	pods      map[podKey]*pod
	podsAdded int
	counters  map[string]*Resource
	// violations[delivered:] are still to be passed to Options.OnViolation.
	violations []string
	delivered  int
}

// New returns a kubelet. Run starts it.
func New(options Options) *Kubelet {
	options = options.withDefaults()
	return &Kubelet{
		options:   options,
		logger:    options.Logger.With("component", "simkubelet"),
		waits:     map[*wait]bool{},
		lifecycle: semaphore.NewWeighted(1),
		admission: semaphore.NewWeighted(1),
		pods:      map[podKey]*pod{},
		counters:  map[string]*Resource{},
	}
}

// Run starts the kubelet, blocks until ctx ends, stops the kubelet, and returns nil when all of its
// goroutines have ended. It returns an error if the kubelet could not be started. A kubelet runs
// only once; Stop and Start interrupt it.
//
// Like a killed kubelet it leaves its socket files behind.
func (k *Kubelet) Run(ctx context.Context) error {
	err := k.Start(ctx)
	if err == nil {
		<-ctx.Done()
	}
	k.lock()
	k.ended = true
	k.unlock()
	if ctx.Err() != nil {
		err = nil
	}
	return errors.Join(err, k.Stop(context.WithoutCancel(ctx)))
}

// Start starts a stopped kubelet: it reads the checkpoint, removes every socket
// directly in the directory, and serves. Resources in the checkpoint have no
// devices at first. Start does nothing when the kubelet is up.
func (k *Kubelet) Start(ctx context.Context) error {
	if err := k.lifecycle.Acquire(ctx, 1); err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	defer k.lifecycle.Release(1)

	k.mu.Lock()
	up := k.process != nil
	ended := k.ended
	pods := len(k.livePods())
	k.mu.Unlock()
	switch {
	case ended:
		return fmt.Errorf("start kubelet: %w", errEnded)
	case up:
		return nil
	}
	if err := k.startProcess(); err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	if k.options.DelayPods && pods > 0 {
		return nil
	}
	if err := k.RestorePods(ctx); err != nil {
		k.stopProcess()
		return fmt.Errorf("start kubelet: %w", err)
	}
	return nil
}

// Stop ends the kubelet's process as a kill does: streams and calls break off,
// memory is lost, socket files and the checkpoint remain. It returns when all of
// the process's goroutines have ended, and does nothing when the kubelet is down.
func (k *Kubelet) Stop(ctx context.Context) error {
	if err := k.lifecycle.Acquire(ctx, 1); err != nil {
		return fmt.Errorf("stop kubelet: %w", err)
	}
	defer k.lifecycle.Release(1)
	k.stopProcess()
	return nil
}

// stopProcess is Stop for a caller that holds lifecycle already.
func (k *Kubelet) stopProcess() {
	k.lock()
	p := k.process
	if p == nil {
		k.unlock()
		return
	}
	k.process = nil
	k.notify(Event{Kind: Stopped})
	k.unlock()
	close(p.stopping)
	k.closeConnections(p)
	for _, server := range p.servers {
		server.Stop()
	}
	// A Register call may have added a connection meanwhile.
	k.closeConnections(p)
	p.goroutines.Wait()
}

// StopContainers stops every container. When the kubelet starts the next time, each pod has to be
// admitted again with the devices that it had.
func (k *Kubelet) StopContainers() {
	k.lock()
	defer k.unlock()
	for _, pod := range k.pods {
		pod.containersRunning = false
	}
}

// lock and unlock enclose every change. unlock reports it, and new violations.
func (k *Kubelet) lock() { k.mu.Lock() }

func (k *Kubelet) unlock() {
	k.tell()
	fresh := k.violations[k.delivered:]
	k.delivered = len(k.violations)
	k.mu.Unlock()
	if k.options.OnViolation != nil {
		for _, message := range fresh {
			k.options.OnViolation(message)
		}
	}
}

// violation records a violation. The caller holds the lock.
func (k *Kubelet) violation(format string, arguments ...any) {
	message := fmt.Sprintf(format, arguments...)
	k.logger.Error("contract violated", "violation", message)
	k.violations = append(k.violations, message)
}

// Options are a kubelet's settings.
type Options struct {
	// Dir is the device-plugins directory, with kubelet.sock and the checkpoint file. It is created
	// if missing, and each start removes all sockets directly in it. It must be short: a Unix
	// socket's path has at most 107 bytes.
	Dir string
	// PodResourcesSocket is the path of the PodResources socket; empty for none.
	PodResourcesSocket string
	// Logger gets what a kubelet would log; nil disables it.
	Logger *slog.Logger
	// OnViolation is called for each violation, with no lock held. The method Violations returns
	// them too.
	OnViolation func(message string)
	// OnChange is called for every change, with the kubelet's lock held: it must neither block nor
	// call the kubelet.
	OnChange func(Snapshot)
	// OnEvent is called for every Event, in order, with the kubelet's lock held: it must neither
	// block nor call the kubelet.
	OnEvent func(event Event)
	// OnRegister is called for every Register call, with no lock held; the call fails with
	// its error.
	OnRegister func(ctx context.Context) error
	// OnRead simulates a slow kubelet. It is called with no lock held before each list is read, and
	// before the end of a stream is noticed. It must return when stopping is closed.
	OnRead func(stopping <-chan struct{})
	// AllowOverlap allows several live streams for one resource, which are otherwise a violation.
	// The kubelet still behaves like a real one: the first stream to end disconnects the newest
	// client.
	AllowOverlap bool
	// DelayPods keeps the pods of an earlier process unknown until RestorePods is
	// called, like the time between a kubelet's start and the API server's first
	// response: PodResources does not list them, and no devices are freed.
	DelayPods bool
	// DialTimeout limits the connection to a plugin that registers; 0 means the
	// kubelet's 10 s.
	DialTimeout time.Duration
	// StatusPeriod is the time between two updates of the node's status; 0 means the
	// kubelet's 10 s.
	StatusPeriod time.Duration
	// StopGrace is how long a stopped endpoint is kept; 0 means the kubelet's 5 min.
	// The next update of the node's status removes the resource.
	StopGrace time.Duration
	// Now is the clock for StopGrace; nil means time.Now.
	Now func() time.Time
}

func (o Options) withDefaults() Options {
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	o.DialTimeout = cmp.Or(o.DialTimeout, 10*time.Second)
	o.StatusPeriod = cmp.Or(o.StatusPeriod, 10*time.Second)
	o.StopGrace = cmp.Or(o.StopGrace, 5*time.Minute)
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.OnRegister == nil {
		o.OnRegister = func(context.Context) error { return nil }
	}
	if o.OnRead == nil {
		o.OnRead = func(<-chan struct{}) {}
	}
	return o
}

// DropStream disconnects the plugin that serves a resource, as a kubelet does when it cannot read a
// list, and cancels the context of the plugin's stream. It reports whether there was such a plugin.
func (k *Kubelet) DropStream(resource string) bool {
	k.lock()
	defer k.unlock()
	if k.process == nil || k.process.clients[resource] == nil {
		return false
	}
	c := k.process.clients[resource]
	c.dropped = true
	k.disconnect(k.process, c)
	return true
}

// CloseConnections closes the connections to all plugins, as if their processes
// were killed: calls in flight fail, and the kubelet notices the ends of streams.
func (k *Kubelet) CloseConnections() {
	k.mu.Lock()
	p := k.process
	k.mu.Unlock()
	if p != nil {
		k.closeConnections(p)
	}
}
