package plugin_test

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// bench is a manager and a simulated kubelet on one directory.
type bench struct {
	t       *testing.T
	ctx     context.Context
	dir     string
	kubelet *simkubelet.Kubelet
	manager *plugin.Manager
	// stop ends the manager and waits for it.
	stop func()
}

// newBench starts both; the test fails at its end if the contract was broken.
func newBench(t *testing.T, change func(*simkubelet.Options, *plugin.Options)) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "vg") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	kubeletOptions := simkubelet.Options{Dir: dir}
	pluginOptions := plugin.Options{
		Dir: dir, Logger: slog.New(slog.DiscardHandler),
		Timing: plugin.Timing{Quiet: 50 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 50 * time.Millisecond},
	}
	b := &bench{t: t, dir: dir}
	if change != nil {
		change(&kubeletOptions, &pluginOptions)
	}
	b.kubelet = simkubelet.New(kubeletOptions)
	if pluginOptions.Kubelet == nil {
		pluginOptions.Kubelet = direct{b.kubelet}
	}
	b.manager = plugin.NewManager(pluginOptions)

	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	b.ctx = ctx
	var running sync.WaitGroup
	running.Go(func() { _ = b.kubelet.Run(ctx) })
	managed, stopManager := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = b.manager.Run(managed)
	}()
	b.stop = func() { stopManager(); <-ended }
	t.Cleanup(func() {
		b.stop()
		cancel()
		running.Wait()
		for _, violation := range b.kubelet.Violations() {
			t.Errorf("kubelet's contract broken: %s", violation)
		}
	})
	return b
}

// succeed runs another manager on the same directory until the test ends.
func (b *bench) succeed(options plugin.Options) *plugin.Manager {
	options.Dir, options.Logger = b.dir, slog.New(slog.DiscardHandler)
	options.Timing = plugin.Timing{Quiet: 50 * time.Millisecond, StopAfter: 50 * time.Millisecond}
	manager := plugin.NewManager(options)
	ctx, cancel := context.WithCancel(b.ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = manager.Run(ctx) })
	b.t.Cleanup(func() { cancel(); running.Wait() })
	return manager
}

// direct asks the simulated kubelet without a socket.
type direct struct{ *simkubelet.Kubelet }

func (d direct) Held(context.Context) ([]sharing.Allocation, error) {
	var held []sharing.Allocation
	for _, pod := range d.Snapshot().Pods {
		for _, container := range pod.Containers {
			for _, grant := range container.Grants {
				held = append(held, sharing.Allocation{
					Namespace: pod.Namespace, Pod: pod.Name, Container: container.Name, Resource: grant.Resource, Devices: grant.Devices,
				})
			}
		}
	}
	return held, nil
}

func (d direct) Applied(context.Context) (map[string][]string, error) {
	applied := map[string][]string{}
	for name, r := range d.Snapshot().Resources {
		for _, device := range r.Devices {
			if device.Healthy {
				applied[name] = append(applied[name], device.ID)
			}
		}
	}
	return applied, nil
}

func (d direct) Serving(_ context.Context, resource string) (bool, error) {
	return d.Snapshot().Resources[resource].Allocatable > 0, nil
}

// await waits for a state of the kubelet.
func (b *bench) await(wanted func(simkubelet.Snapshot) bool) {
	b.t.Helper()
	if err := b.kubelet.Await(b.ctx, wanted); err != nil {
		b.t.Fatal(err)
	}
}

// shows waits until the kubelet has so many devices, and so many of them
// allocatable.
func (b *bench) shows(resource string, capacity, allocatable int) {
	b.t.Helper()
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[resource]
		return r.Connected && r.Capacity == capacity && r.Allocatable == allocatable
	})
}

func (b *bench) pod(name, resource string, count int) (simkubelet.PodStatus, error) {
	return b.kubelet.AddPod(b.ctx, simkubelet.Pod{
		Namespace: "test", Name: name,
		Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{resource: count}}},
	})
}

func (b *bench) mustPod(name, resource string, count int) []string {
	b.t.Helper()
	status, err := b.pod(name, resource, count)
	if err != nil {
		b.t.Fatal(err)
	}
	return status.Containers[0].Devices(resource)
}

// awaitStatus waits until it is so, looking when the status changes.
func awaitStatus(t *testing.T, b *bench, what string, so func() bool) {
	t.Helper()
	for !so() {
		select {
		case <-b.manager.Changed():
		case <-b.ctx.Done():
			t.Fatalf("it never comes that %s", what)
		}
	}
}

// awaitServed waits until the last plan has been taken up.
func awaitServed(t *testing.T, b *bench) {
	t.Helper()
	awaitStatus(t, b, "the plan is served", func() bool { return b.manager.Status().Served })
}
