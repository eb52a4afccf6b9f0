package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

const gpuResource = "nvidia.com/gpu"

// source of either kind: what it answers is set by the test.
type input[T any] struct {
	mu      sync.Mutex
	value   T
	err     error
	changed func()
	started chan struct{}
}

func newInput[T any](value T, err error) *input[T] {
	return &input[T]{value: value, err: err, started: make(chan struct{})}
}

func (i *input[T]) get() (T, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.value, i.err
}

func (i *input[T]) set(value T, err error) {
	<-i.started
	i.mu.Lock()
	i.value, i.err = value, err
	i.mu.Unlock()
	i.changed()
}

func (i *input[T]) Watch(ctx context.Context, changed func()) error {
	i.changed = changed
	close(i.started)
	changed()
	<-ctx.Done()
	return nil
}

type fakeNode struct{ *input[[]sharing.GPU] }

func (n fakeNode) Inventory() ([]sharing.GPU, error) { return n.get() }

type fakePolicy struct{ *input[sharing.Profile] }

func (p fakePolicy) Profile() (configs.Selected, error) {
	profile, err := p.get()
	if err != nil {
		return configs.Selected{Source: "fake"}, err
	}
	return configs.Config{Profile: profile}.Select("fake", "", nil), nil
}

func gpus(faults ...string) []sharing.GPU {
	list := make([]sharing.GPU, len(faults))
	for i, fault := range faults {
		list[i] = sharing.GPU{UUID: "GPU-" + string(rune('a'+i)), Index: i, Model: "Test", NUMANode: -1, Fault: fault}
	}
	return list
}

func profile(replicas int) sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGNone, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames: []sharing.Naming{{Pattern: "*", Name: gpuResource}},
		Shares:   []sharing.Share{{Path: "s", Resource: gpuResource, Replicas: replicas, Policy: sharing.Distributed}},
	}
}

// rig is an agent between inputs that the test sets and a simulated kubelet.
type rig struct {
	t       *testing.T
	ctx     context.Context
	node    fakeNode
	policy  fakePolicy
	kubelet *simkubelet.Kubelet
	// sight reads the kubelet's checkpoint.
	sight   plugin.Kubelet
	options Options
	agent   *agent
	http    http.Handler
	// wantErr is in the error with which run ends; empty for none.
	wantErr string
}

func newRig(t *testing.T, change func(*rig)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "va") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	r := &rig{
		t: t, ctx: ctx,
		node: fakeNode{newInput(gpus("", ""), nil)}, policy: fakePolicy{newInput(profile(4), nil)},
		kubelet: simkubelet.New(simkubelet.Options{Dir: dir}),
	}
	sight := podresources.New(podresources.Options{CheckpointDir: dir})
	t.Cleanup(func() { _ = sight.Close() })
	r.sight = sight
	r.options = Options{
		Node: r.node, Policy: r.policy, Logger: slog.New(slog.DiscardHandler), Version: "test",
		Plugin: plugin.NewManager(plugin.Options{
			Dir: dir, Kubelet: sight, Logger: slog.New(slog.DiscardHandler),
			Timing: plugin.Timing{Quiet: 50 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 50 * time.Millisecond},
		}),
	}
	if change != nil {
		change(r)
	}
	r.agent = newAgent(r.options)
	r.http = r.agent.handler()
	var running sync.WaitGroup
	running.Go(func() { _ = r.kubelet.Run(ctx) })
	running.Go(func() {
		err := r.agent.run(ctx)
		if (err == nil) != (r.wantErr == "") || (err != nil && !strings.Contains(err.Error(), r.wantErr)) {
			t.Errorf("run: %v, want %q", err, r.wantErr)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
		_ = os.RemoveAll(dir)
	})
	return r
}

// endable returns what ends the agent before the test ends. It is for newRig's
// change.
func (r *rig) endable() (end func()) {
	told := make(chan struct{})
	r.options.Background = append(r.options.Background, func(ctx context.Context) error {
		select {
		case <-told:
			return errors.New("told to stop")
		case <-ctx.Done():
			return nil
		}
	})
	r.wantErr = "told to stop"
	return func() { close(told) }
}

func (r *rig) shows(allocatable int) {
	r.t.Helper()
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Allocatable == allocatable }); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) get(path string) (int, string) {
	recorder := httptest.NewRecorder()
	r.http.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
	return recorder.Code, recorder.Body.String()
}

// awaitBody waits until the path answers with the code and a body with text.
func (r *rig) awaitBody(path string, code int, text string) {
	r.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		gotCode, body := r.get(path)
		if gotCode == code && strings.Contains(body, text) {
			return
		}
		select {
		case <-tick.C:
		case <-r.ctx.Done():
			r.t.Fatalf("%s: %d %q, want %d %q", path, gotCode, body, code, text)
		}
	}
}
