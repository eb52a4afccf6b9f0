package plugin

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Options are what a Manager needs.
type Options struct {
	// Dir is the kubelet's device-plugins directory. It need not exist yet.
	Dir string
	// Kubelet tells what is held and applied; nil when nothing can.
	Kubelet Kubelet
	// Store keeps the lists over restarts; nil for none.
	Store  Store
	Timing Timing
	Logger *slog.Logger
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Store keeps the lists, so that a restarted Virgate offers every device that
// a pod may hold before it changes anything. Manager calls it from one
// goroutine; no allocation waits for it.
type Store interface {
	// Load returns the lists that were saved last; none when there are none.
	Load() (Lists, error)
	// Save returns when the lists are kept for good. After an error it is called
	// again, at the latest in 10 s.
	Save(lists Lists) error
}

// Manager brings what the kubelet lists to what the last plan wants, and keeps
// it there.
type Manager struct {
	options Options
	// planned makes Run look at what it was given.
	planned signal
	plan    atomic.Pointer[sharing.Plan]
	host    atomic.Pointer[Host]
	status  atomic.Pointer[serving]
	changed signal
	closing *closing
	// awaited are the units of Remind.
	awaited atomic.Pointer[[]string]
}

// serving is what Run serves now. It is immutable but for superseded, which is
// closed when another takes its place.
type serving struct {
	servers []*server // by name
	plan    *sharing.Plan
	// seen says that the kubelet could be read when it was last looked at.
	seen       bool
	superseded chan struct{}
}

// NewManager returns a manager without a plan.
func NewManager(options Options) *Manager {
	options.Timing = options.Timing.withDefaults()
	if options.Now == nil {
		options.Now = time.Now
	}
	m := &Manager{options: options, planned: make(signal, 1), changed: make(signal, 1), closing: newClosing()}
	m.status.Store(&serving{superseded: make(chan struct{})})
	m.host.Store(&Host{})
	return m
}

// SetHost says what the node has ready for containers; without it, nothing but
// the names of devices can be granted. Call it before the Apply of a plan that
// needs it: each list is served with the last one. It does not wait.
func (m *Manager) SetHost(host Host) {
	m.host.Store(&host)
	m.planned.give()
}

// Apply makes plan the wanted one. It does not wait; of several plans the last
// wins. The plan must not be changed afterwards.
func (m *Manager) Apply(plan sharing.Plan) {
	m.plan.Store(&plan)
	m.planned.give()
}

// AwaitStopped returns nil when no resource is served any more, as after an
// empty plan, and an error when ctx ends first.
func (m *Manager) AwaitStopped(ctx context.Context) error {
	for {
		stopped := m.status.Load()
		if len(stopped.servers) == 0 && m.plan.Load() == stopped.plan {
			return nil
		}
		select {
		case <-stopped.superseded:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Run serves until ctx ends and returns when every server has stopped. What
// the kubelet was told stays as it is, for a successor.
func (m *Manager) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var children sync.WaitGroup
	defer children.Wait()
	defer cancel()

	looks := make(signal, 1)
	sights := make(chan Sight)
	if m.options.Kubelet != nil {
		children.Go(func() { m.watchKubelet(ctx, looks, sights) })
	}

	r := reconciler{Manager: m, lists: Lists{}, servers: map[string]*running{}, start: func(s *server) *running {
		ctx, stop := context.WithCancel(ctx)
		run := &running{server: s, stop: stop, done: make(chan struct{})}
		children.Go(func() {
			defer close(run.done)
			s.run(ctx)
		})
		return run
	}}
	r.restore()
	again := time.NewTimer(0)
	again.Stop()
	// The first lists wait for a look at what pods hold already.
	looked := m.options.Kubelet == nil
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.planned:
			looks.give()
		case r.seen = <-sights:
			looked = true
		case <-again.C:
			looks.give()
		}
		plan := m.plan.Load()
		if plan == nil || !looked {
			continue
		}
		r.step(plan)
		switch {
		case !r.lists.settled():
			again.Reset(m.options.Timing.pollInterval())
		case r.saveFailed:
			again.Reset(saveInterval)
		}
	}
}
