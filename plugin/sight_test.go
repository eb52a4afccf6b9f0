package plugin_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// blind is a kubelet that cannot be read.
type blind struct{}

var errBlind = errors.New("not to be read")

func (blind) Held(context.Context) ([]sharing.Allocation, error) { return nil, errBlind }

func (blind) Applied(context.Context) (map[string][]string, error) { return nil, errBlind }

func (blind) Serving(context.Context, string) (bool, error) { return false, errBlind }

func TestBlindManagerKeepsWhatItGranted(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Kubelet = blind{} })
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	held := b.mustPod("p", gpu, 3)
	b.manager.Apply(withFault(plan(gpu, 1, 4), "GPU-0000", "XID 79")) // Another generation.
	b.shows(gpu, 4, 0)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 4, 3)
	for _, d := range b.kubelet.Snapshot().Resources[gpu].Devices {
		if slices.Contains(held, d.ID) != d.Healthy {
			t.Errorf("%s: Healthy %t, held are %v", d.ID, d.Healthy, held)
		}
	}
}

// forgetful says who holds devices as a kubelet does whose checkpoint is older
// than a pod's end: without naming the pod, until it gets a list.
type forgetful struct {
	direct
	mu    sync.Mutex
	ghost sharing.Allocation
	lists int
}

func (f *forgetful) Held(ctx context.Context) ([]sharing.Allocation, error) {
	held, err := f.direct.Held(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ghost.Resource != "" && f.Snapshot().Resources[f.ghost.Resource].Lists <= f.lists {
		held = append(held, f.ghost)
	}
	return held, err
}

// haunt makes the device held by a pod that is gone, until the next list.
func (f *forgetful) haunt(resource, id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	// One list announces the shrink, one may take the device back when the ghost
	// is seen, one lacks what was free; the ghost outlives them.
	f.lists = f.Snapshot().Resources[resource].Lists + 3
	f.ghost = sharing.Allocation{Pod: "uid:1", Resource: resource, Devices: []string{id}}
}

func TestStaleCheckpointIsRenewed(t *testing.T) {
	kubelet := &forgetful{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Kubelet = kubelet })
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	kubelet.haunt(gpu, "GPU-0000::3")
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
}

// slow takes its time to say who holds what.
type slow struct{ direct }

func (s slow) Held(ctx context.Context) ([]sharing.Allocation, error) {
	select {
	case <-time.After(200 * time.Millisecond):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.direct.Held(ctx)
}

// TestFirstListHasWhatPodsHold takes over from a plugin that left no state. The
// kubelet's contract is broken by a first list without the held device.
func TestFirstListHasWhatPodsHold(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	b.mustPod("p", gpu, 4)
	b.stop()
	b.await(func(k simkubelet.Snapshot) bool { return !k.Resources[gpu].Connected })
	b.succeed(plugin.Options{Kubelet: slow{direct{b.kubelet}}}).Apply(plan(gpu, 1, 2))
	b.shows(gpu, 4, 4)
}
