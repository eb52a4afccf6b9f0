package plugin_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
)

// memory is a store that may refuse to keep anything.
type memory struct {
	mu     sync.Mutex
	lists  plugin.Lists
	broken bool
}

func (m *memory) Load() (plugin.Lists, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lists, nil
}

func (m *memory) Save(lists plugin.Lists) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken {
		return errors.New("disk full")
	}
	m.lists = lists
	return nil
}

// TestRestartKeepsADroppedName uses names that no other plugin could have left.
func TestRestartKeepsADroppedName(t *testing.T) {
	const before, after = "example.com/gpu", "example.com/gpu.shared"
	store := &memory{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Store = store })
	b.manager.Apply(plan(before, 2, 1))
	b.shows(before, 2, 2)
	b.mustPod("p", before, 1)
	b.stop()
	b.await(func(k simkubelet.Snapshot) bool { return !k.Resources[before].Connected })

	b.succeed(plugin.Options{Kubelet: direct{b.kubelet}, Store: store}).Apply(plan(after, 2, 3))
	b.shows(before, 1, 1)
	b.shows(after, 3, 3)
	if _, err := b.kubelet.RestartContainer(b.ctx, "test", "p", "main"); err != nil {
		t.Error(err)
	}
}

func TestSavesEveryPhase(t *testing.T) {
	store := &memory{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Store = store })
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	b.mustPod("p", gpu, 4)
	b.manager.Apply(plan(gpu, 1, 2)) // It changes nothing but phases.
	awaitServed(t, b)
	phases := map[plugin.Phase]int{}
	lists, _ := store.Load()
	for _, e := range lists[gpu].Entries {
		phases[e.Phase]++
	}
	if diff := cmp.Diff(map[plugin.Phase]int{plugin.Offered: 2, plugin.Closing: 2}, phases); diff != "" {
		t.Error(diff)
	}
}

func TestServingGoesOnWithoutStore(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Store = &memory{broken: true} })
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.manager.Apply(plan(gpu, 4, 1))
	b.shows(gpu, 4, 4)
}
