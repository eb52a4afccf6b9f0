package migchange

import (
	"reflect"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// progress is how far the GPUs are. Any goroutine may call its methods; for one GPU, the goroutine
// that has its managedGPU.
type progress struct {
	*Options
	published atomic.Pointer[[]nodereport.GPULayout]
	// waiting is true if a GPU does not have its layout.
	waiting atomic.Bool

	mu   sync.Mutex
	gpus map[string]nodereport.GPULayout
}

func newProgress(o *Options) *progress {
	p := &progress{
		Options: o,
		gpus:    map[string]nodereport.GPULayout{},
	}
	p.published.Store(&[]nodereport.GPULayout{})
	return p
}

// Status returns how far the GPUs that Virgate partitions are, by index. The list must not be
// modified.
func (r *Reconciler) Status() []nodereport.GPULayout {
	return *r.progress.published.Load()
}

// set stores the GPU's status for the next publish.
func (p *progress) set(status nodereport.GPULayout) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gpus[status.GPU] = status
}

func (p *progress) forget(gpu string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.gpus, gpu)
}

func (p *progress) publish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := []nodereport.GPULayout{}
	waiting := false
	for _, status := range p.gpus {
		if status.State != "" {
			list = append(list, status)
			waiting = waiting || status.State != nodereport.LayoutApplied
		}
	}
	p.waiting.Store(waiting)
	slices.SortFunc(list, func(a, b nodereport.GPULayout) int { return a.Index - b.Index })
	if !reflect.DeepEqual(*p.published.Load(), list) {
		p.published.Store(&list)
		p.Changed()
	}
}

type stateReason struct {
	state  nodereport.LayoutState
	reason string
}

// report publishes how far the GPU is, and logs it if that is new.
func (p *progress) report(g *managedGPU, state nodereport.LayoutState, reason string) {
	if g.status.State == state && g.status.Reason == reason {
		return
	}
	g.status.State, g.status.Reason = state, reason
	p.set(g.status)
	p.publish()
	log := p.Logger.With("gpu", g.status.GPU, "layout", g.status.Wanted, "state", state)
	// Each try passes through pending; ending like the last try is not new.
	news := g.logged != (stateReason{state, reason})
	switch {
	case state == "":
		return
	case state == nodereport.LayoutPending:
		log.Info("MIG layout", "reason", reason)
		return
	case !news:
	case state == nodereport.LayoutBlocked:
		log.Warn("MIG layout waits", "reason", reason)
	case state == nodereport.LayoutApplied:
		log.Info("MIG layout reached")
	default:
		log.Error("MIG layout not reached", "reason", reason)
	}
	g.logged = stateReason{state, reason}
}

// see records how the GPU is partitioned.
func (p *progress) see(g *managedGPU, state sharing.MIGState) {
	g.status.MIG = state.Enabled
	g.status.Slots = state.Geometry.Slots
	g.status.Instances = state.Instances
	g.status.Resettable = !state.NeedsReboot
	g.status.Unreachable = state.Geometry.Unreachable(state.Instances)
	p.set(g.status)
}
