package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
)

// ErrDown is returned by whatever needs a running kubelet while it is stopped,
// and by an admission that a stop cut short.
var ErrDown = errors.New("kubelet is down")

// errEnded says that Run has returned: a kubelet runs once.
var errEnded = errors.New("kubelet has ended")

// Kubelet is a simulated kubelet. Its methods may be called from any goroutine.
type Kubelet struct {
	options Options
	logger  *slog.Logger
	// lifecycle is held while the kubelet starts or stops.
	lifecycle semaphore
	// admission is the kubelet's allocation mutex: one pod at a time, whatever
	// its Allocate takes.
	admission semaphore

	mu sync.Mutex
	// changed is closed and replaced at every change.
	changed chan struct{}
	// process is nil while the kubelet is stopped.
	process  *process
	ended    bool
	pods     map[podKey]*pod
	podsMade int
	counters map[string]*counters
	node     map[string]Quantity
	// violations[delivered:] are still to be passed to Options.Violation.
	violations   []string
	delivered    int
	misbehaviour misbehaviour
}

// New returns a kubelet that Run starts.
func New(options Options) *Kubelet {
	options = options.withDefaults()
	return &Kubelet{
		options:   options,
		logger:    options.Logger.With("component", "simkubelet"),
		lifecycle: newSemaphore(),
		admission: newSemaphore(),
		changed:   make(chan struct{}),
		pods:      map[podKey]*pod{},
		counters:  map[string]*counters{},
		node:      map[string]Quantity{},
	}
}

// Run starts the kubelet and blocks until ctx ends. Then it stops it, and
// returns nil after every goroutine has ended. Its error says why the first
// start was impossible. A kubelet runs once; Stop and Start interrupt it.
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
// directly in the directory, and serves. Resources of the checkpoint come back
// without devices. It does nothing when the kubelet is up.
func (k *Kubelet) Start(ctx context.Context) error {
	if err := k.lifecycle.acquire(ctx); err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	defer k.lifecycle.release()

	k.mu.Lock()
	up, ended := k.process != nil, k.ended
	k.mu.Unlock()
	switch {
	case ended:
		return fmt.Errorf("start kubelet: %w", errEnded)
	case up:
		return nil
	}
	p, err := k.startProcess()
	if err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	if k.options.HoldPods && k.haveLivePods() {
		return nil
	}
	if err := k.restore(ctx, p); err != nil {
		k.takeDown()
		return fmt.Errorf("start kubelet: %w", err)
	}
	return nil
}

// Stop ends the kubelet's process as a kill does: streams and calls break,
// memory is lost, socket files and the checkpoint stay. It returns when all of
// the process's goroutines have ended, and does nothing when the kubelet is
// down.
func (k *Kubelet) Stop(ctx context.Context) error {
	if err := k.lifecycle.acquire(ctx); err != nil {
		return fmt.Errorf("stop kubelet: %w", err)
	}
	defer k.lifecycle.release()
	k.takeDown()
	return nil
}

// takeDown is Stop for who is at the lifecycle already.
func (k *Kubelet) takeDown() {
	k.lock()
	p := k.process
	k.process = nil
	if p != nil {
		k.tell(Event{Kind: Stopped})
	}
	k.unlock()
	if p != nil {
		k.end(p)
	}
}

// Restart is Stop and Start. Containers keep running meanwhile.
func (k *Kubelet) Restart(ctx context.Context) error {
	if err := k.Stop(ctx); err != nil {
		return err
	}
	return k.Start(ctx)
}

// Reboot is Restart with every container stopped in between, so that each pod
// has to be admitted again with the devices it had.
func (k *Kubelet) Reboot(ctx context.Context) error {
	if err := k.Stop(ctx); err != nil {
		return err
	}
	k.lock()
	for _, pod := range k.pods {
		pod.containersRunning = false
	}
	k.unlock()
	return k.Start(ctx)
}

// lock and unlock enclose every change. unlock wakes who awaits a change and
// passes new violations on.
func (k *Kubelet) lock() { k.mu.Lock() }

func (k *Kubelet) unlock() {
	close(k.changed)
	k.changed = make(chan struct{})
	fresh := k.violations[k.delivered:]
	k.delivered = len(k.violations)
	k.mu.Unlock()
	if k.options.Violation != nil {
		for _, message := range fresh {
			k.options.Violation(message)
		}
	}
}

// violate records a violation. The caller holds the lock.
func (k *Kubelet) violate(format string, arguments ...any) {
	message := fmt.Sprintf(format, arguments...)
	k.logger.Error("contract violated", "violation", message)
	k.violations = append(k.violations, message)
}
