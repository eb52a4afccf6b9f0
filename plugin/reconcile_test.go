package plugin_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// memory is a store that may refuse to keep anything.
type memory struct {
	mu     sync.Mutex
	lists  plugin.Lists
	broken bool
	// saves counts the calls of Save.
	saves int
}

func (m *memory) Load() (plugin.Lists, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lists, nil
}

func (m *memory) Save(lists plugin.Lists) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.saves++
	if m.broken {
		return errors.New("disk full")
	}
	m.lists = lists
	return nil
}

// set has the store break, or work again, and returns how often Save was called since
// it was last set.
func (m *memory) set(broken bool) (saves int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	saves = m.saves
	m.broken, m.saves = broken, 0
	return saves
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
	b.shows(before, 1, 0)
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
	if diff := cmp.Diff(map[plugin.Phase]int{plugin.Offered: 2, plugin.HeldSurplus: 2}, phases); diff != "" {
		t.Error(diff)
	}
}

// slowStore sends the lists to save, and saves them when the test allows it.
type slowStore struct {
	saving chan plugin.Lists
	keep   chan struct{}
}

func (*slowStore) Load() (plugin.Lists, error) { return nil, nil }

func (s *slowStore) Save(lists plugin.Lists) error {
	s.saving <- lists
	<-s.keep
	return nil
}

// TestKeptBeforeItIsListed has plans change, and the program end, while the disk is slow.
func TestKeptBeforeItIsListed(t *testing.T) {
	store := &slowStore{saving: make(chan plugin.Lists), keep: make(chan struct{})}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Store = store })
	for devices := 2; devices <= 6; devices += 2 {
		b.manager.Apply(plan(gpu, 1, devices))
		if got := len((<-store.saving)[gpu].Entries); got != devices {
			t.Errorf("%d devices are to be kept, want %d", got, devices)
		}
		b.manager.Apply(plan(gpu, 1, devices+2))                         // Meanwhile.
		soon, cancel := context.WithTimeout(b.ctx, 100*time.Millisecond) // Nothing happens that could be awaited.
		if b.kubelet.Await(soon, func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Capacity >= devices }) == nil {
			t.Errorf("%d devices are listed before they are kept", devices)
		}
		cancel()
		store.keep <- struct{}{}
		b.shows(gpu, devices, devices)
	}
	<-store.saving
	stopped := make(chan struct{})
	go func() { defer close(stopped); b.stop() }()
	store.keep <- struct{}{}
	<-stopped
}

// TestSavesWhenItCanAgain has a full disk that gets room later, while nothing else happens. The time is
// simulated, and there is no directory for sockets.
func TestSavesWhenItCanAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &memory{}
		var log strings.Builder
		manager := plugin.NewManager(plugin.Options{
			Dir: filepath.Join(t.TempDir(), "missing"), Store: store, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- manager.Run(ctx) }()
		pass := func(d time.Duration) { <-time.After(d) } //nolint:forbidigo // in a synctest bubble: the time is simulated
		// apply has the plan served for a minute on a disk that takes it or not, and
		// returns how often it was to be kept.
		apply := func(devices int, broken bool) int {
			store.set(broken)
			manager.Apply(plan(gpu, 1, devices))
			pass(time.Minute)
			return store.set(false)
		}
		if n := apply(2, false); n != 1 {
			t.Errorf("kept %d times", n)
		}
		if n := apply(2, false); n != 0 {
			t.Errorf("the same is kept %d times more", n)
		}
		for n := range 2 {
			devices := 4 + 2*n
			if n := apply(devices, true); n < 4 || n > 10 {
				t.Errorf("tried %d times in a minute", n)
			}
			pass(15 * time.Second)
			if lists, _ := store.Load(); len(lists[gpu].Entries) != devices {
				t.Errorf("%d devices are kept, want %d", len(lists[gpu].Entries), devices)
			}
			pass(time.Minute)
			if n := store.set(false); n != 1 {
				t.Errorf("kept %d times", n)
			}
			if lines := strings.Count(log.String(), "lists not kept"); lines != n+1 {
				t.Errorf("the log says it %d times, want %d", lines, n+1)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestServingGoesOnWithoutStore(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Store = &memory{broken: true} })
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.manager.Apply(plan(gpu, 4, 1))
	b.shows(gpu, 4, 4)
}

func TestResizeKeepsTheStream(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 8, 10))
	b.shows(gpu, 80, 80)
	held := b.mustPod("p", gpu, 2)
	for _, replicas := range []int{20, 2, 4, 3, 10} {
		b.manager.Apply(plan(gpu, 8, replicas))
		b.shows(gpu, 8*replicas, 8*replicas)
	}
	r := b.kubelet.Snapshot().Resources[gpu]
	if r.StreamsOpened != 1 || r.Registrations != 1 {
		t.Errorf("%d streams and %d registrations, want 1 and 1", r.StreamsOpened, r.Registrations)
	}
	if len(held) != 2 {
		t.Errorf("held %v", held)
	}
}

func TestPolicyChangeSendsNoList(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	lists := b.kubelet.Snapshot().Resources[gpu].Lists
	packed := plan(gpu, 2, 4)
	packed.Resources[0].Policy = sharing.Packed
	b.manager.Apply(packed)
	awaitServed(t, b)
	var units []string
	for i := range 2 {
		id := b.mustPod(fmt.Sprint("p", i), gpu, 1)[0]
		unit, _, _ := sharing.ParseDeviceID(id)
		units = append(units, unit)
	}
	if units[0] != units[1] {
		t.Errorf("packed put pods on %v", units)
	}
	if n := b.kubelet.Snapshot().Resources[gpu].Lists; n != lists {
		t.Errorf("%d lists, want %d", n, lists)
	}
}

// TestListsAreCoalesced sends many plans: there is at most one list in each interval.
func TestListsAreCoalesced(t *testing.T) {
	const interval = 200 * time.Millisecond
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Timing.ListInterval = interval })
	began := time.Now()
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	for i := range 100 {
		fault := ""
		if i%2 == 0 {
			fault = "XID 79"
		}
		b.manager.Apply(withFault(plan(gpu, 2, 1), "GPU-0001", fault))
	}
	b.manager.Apply(plan(gpu, 3, 1))
	b.shows(gpu, 3, 3)
	lists := b.kubelet.Snapshot().Resources[gpu].Lists
	now := time.Now()
	if took := now.Sub(began); lists > 1+int(took/interval) {
		t.Errorf("%d lists in %s", lists, took)
	}
}

func TestListIntervalHolds(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Timing.ListInterval = time.Hour })
	b.manager.Apply(plan(gpu, 1, 1))
	b.shows(gpu, 1, 1)
	for replicas := range 20 {
		b.manager.Apply(plan(gpu, 1, replicas+2))
		awaitServed(t, b)
	}
	if lists := b.manager.Status().Resources[0].Lists; lists != 1 {
		t.Errorf("%d lists within the interval", lists)
	}
}
