package release_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

type free struct{}

func (free) Withdrawn(...string) bool       { return true }
func (free) RefreshHolders(...string)       {}
func (free) Status() []nodereport.GPULayout { return nil }
func (free) Changing(string) bool           { return false }

type kept struct {
	mu   sync.Mutex
	list []release.Release
}

func (k *kept) Load() ([]release.Release, error) { return k.list, nil }
func (k *kept) Save(list []release.Release) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.list = slices.Clone(list)
	return nil
}

// TestSecondPauseWithoutDriver checks that a pause closes the driver even if the GPUs of the previous pause are
// not restored yet, because no driver is loaded.
func TestSecondPauseWithoutDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, err := simnode.New("a30x4")
		if err != nil {
			t.Fatal(err)
		}
		node := nvml.NewNode(sim, nvml.Options{})
		var pause atomic.Pointer[release.Pause]
		pause.Store(&release.Pause{})
		m := release.New(release.Options{
			Driver: release.Driver{Releaser: node, Store: &kept{}}, Devices: free{}, Layouts: free{},
			GPUs: func() []sharing.GPU { gpus, _ := node.Inventory(); return gpus }, Serving: func() bool { return true },
			Users: func(context.Context, string) []string { return nil }, Used: func(context.Context) bool { return false },
			MPS: func(string) bool { return false }, MIGReset: func() bool { return false },
			Paused:  func() (release.Pause, bool) { return *pause.Load(), true },
			Changed: func() {}, Plan: func(context.Context) {}, Logger: slog.New(slog.DiscardHandler),
		})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		defer func() { cancel(); running.Wait() }()
		running.Go(func() { _ = node.Watch(ctx, m.Wake) })
		pass := func(passed time.Duration) {
			time.Sleep(passed) //nolint:forbidigo // In a bubble.
			synctest.Wait()
		}
		pass(time.Second)
		running.Go(func() { _ = m.Run(ctx) })
		set := func(p release.Pause, wait time.Duration) {
			pause.Store(&p)
			m.Wake()
			pass(wait)
		}
		upgrade := release.Pause{Label: "nvidia.com/gpu.deploy.client", Value: "paused-for-driver-upgrade"}
		set(upgrade, 10*time.Second)
		if !node.Closed() {
			t.Fatal("not closed in the first pause")
		}
		loaded := sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
		set(release.Pause{}, time.Minute) // No driver yet.
		set(upgrade, 10*time.Second)
		before := sim.Calls("Init")
		pass(10 * time.Minute)
		if n := sim.Calls("Init") - before; n > 0 || !node.Closed() {
			var states []release.State
			for _, r := range m.List() {
				states = append(states, r.State)
			}
			t.Errorf("10 min into the second pause: closed %v, the driver was tried to be opened %d times in it, releases %v", node.Closed(), n, states)
		}
		loaded()
	})
}
