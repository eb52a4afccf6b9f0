package migchange

import (
	"maps"
	"sync"
)

// mostChanges is how many GPUs are changed at a time: one has the driver, and the next
// one is ready for it. The driver makes one change of MIG mode or instances at a time on
// all GPUs (the kernel module holds its API lock and all GPUs' locks meanwhile), so that
// two that took turns would both end late.
const mostChanges = 2

// changes are those under way, each in a goroutine of its own. The goroutine that looks at the
// GPUs begins them; has may be called from any.
type changes struct {
	wake func()
	// begun counts them all.
	begun   int
	running sync.WaitGroup

	mu       sync.Mutex
	underWay map[string]bool // by GPU
}

// Changing says that a change of the GPU is being made.
func (r *Reconciler) Changing(gpu string) bool { return r.changes.has(gpu) }

func (c *changes) has(gpu string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.underWay[gpu]
}

// gpus are those that are being changed.
func (c *changes) gpus() map[string]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.underWay)
}

// room is how many more changes may begin now.
func (c *changes) room() int { return max(0, mostChanges-len(c.gpus())) }

// start begins a change, which has g to itself until it ends. The end wakes.
func (c *changes) start(g *managedGPU, change func()) {
	gpu := g.status.GPU
	c.mu.Lock()
	c.underWay[gpu] = true
	c.mu.Unlock()
	g.last = nil
	c.begun++
	c.running.Go(func() {
		change()
		c.mu.Lock()
		delete(c.underWay, gpu)
		c.mu.Unlock()
		c.wake()
	})
}
