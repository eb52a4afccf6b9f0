package migchange

import (
	"maps"
	"sync"
)

// mostChanges is how many GPUs are changed at a time: one has the driver, and the next one is ready
// for it. The driver makes one change of MIG mode or instances at a time on all GPUs, because the
// kernel module holds its API lock and all GPUs' locks meanwhile. Two changes that took turns would
// both end late.
const mostChanges = 2

// changes are the changes under way, each in its own goroutine. The goroutine that checks the GPUs
// starts them; has may be called from any.
type changes struct {
	*Options
	wake func()
	// begun counts all changes started so far.
	begun   int
	running sync.WaitGroup

	mu       sync.Mutex
	underWay map[string]bool // by GPU
}

// Changing reports whether a change of the GPU is being made.
func (r *Reconciler) Changing(gpu string) bool { return r.changes.has(gpu) }

func (c *changes) has(gpu string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.underWay[gpu]
}

// gpus returns the GPUs that are being changed.
func (c *changes) gpus() map[string]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.underWay)
}

// room returns how many more changes may begin now.
func (c *changes) room() int { return max(0, mostChanges-len(c.gpus())) }

// start begins a change, which has g to itself until it ends. Then it calls wake. It returns false,
// and begins nothing, if the GPU is blocked: a release of another GPU first blocks this one, and then
// checks that no change of it is under way.
func (c *changes) start(g *managedGPU, change func()) bool {
	gpu := g.status.GPU
	c.set(gpu, true)
	if c.Blocked(gpu) != "" {
		c.set(gpu, false)
		return false
	}
	g.last = nil
	c.begun++
	c.running.Go(func() {
		change()
		c.set(gpu, false)
		c.wake()
	})
	return true
}

func (c *changes) set(gpu string, underWay bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if underWay {
		c.underWay[gpu] = true
	} else {
		delete(c.underWay, gpu)
	}
}
