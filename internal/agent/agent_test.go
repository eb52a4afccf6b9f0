package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

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

func TestFollowsBothInputs(t *testing.T) {
	r := newRig(t, nil)
	r.shows(8)
	r.policy.set(profile(10), nil)
	r.shows(20)
	r.node.set(gpus("", "XID 79"), nil)
	r.shows(10)
	r.node.set(gpus("", "", ""), nil)
	r.shows(30)
}

func TestRejectedProfileLeavesTheLastGoodOne(t *testing.T) {
	r := newRig(t, nil)
	r.shows(8)
	r.policy.set(sharing.Profile{}, errors.New("p.yaml:3: replicas: must be at least 1"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	r.node.set(gpus("", "", ""), nil)
	r.shows(12) // The GPUs' changes are planned with the last good profile.
	r.policy.set(profile(5), nil)
	r.shows(15)
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 1")
}

func TestUnreadableGPUsLeaveThePlan(t *testing.T) {
	r := newRig(t, nil)
	r.shows(8)
	r.node.set(nil, errors.New("driver gone"))
	r.awaitBody("/metrics", 200, "virgate_inventory_last_read_successful 0")
	r.policy.set(profile(3), nil)
	r.shows(6)
}

func TestNotReadyReasons(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*rig)
		want   string
	}{
		{"no profile", func(r *rig) {
			r.policy = fakePolicy{newInput(sharing.Profile{}, errors.New("line 3"))}
			r.options.Policy = r.policy
		}, "no profile: line 3"},
		{"no driver", func(r *rig) {
			r.node = fakeNode{newInput[[]sharing.GPU](nil, errors.New("no driver"))}
			r.options.Node = r.node
		}, "GPUs not read: no driver"},
		{"silent kubelet", func(r *rig) { r.kubelet.SetSilent(true) }, "nvidia.com/gpu: not registered"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, test.change)
			r.awaitBody("/readyz", 503, test.want)
		})
	}
}

func TestReadyWhenServed(t *testing.T) {
	r := newRig(t, nil)
	r.awaitBody("/readyz", 200, "ok")
	r.shows(8)
	if code, body := r.get("/healthz"); code != 200 {
		t.Errorf("healthz %d %s", code, body)
	}
	code, body := r.get("/plan")
	var got sharing.Summary
	if err := json.Unmarshal([]byte(body), &got); code != 200 || err != nil {
		t.Fatalf("plan %d %s", code, body)
	}
	if len(got.Resources) != 1 || got.Resources[0].Devices != 8 || got.Warnings == nil {
		t.Errorf("plan %+v", got)
	}
}

func TestReadyWithoutGPUs(t *testing.T) {
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput([]sharing.GPU{}, nil)}; r.options.Node = r.node })
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, `"resources": []`)
}

func TestHTTPOnlyReads(t *testing.T) {
	r := newRig(t, nil)
	for _, path := range []string{"/plan", "/readyz", "/metrics", "/healthz", "/sim/xid?gpu=0&code=79"} {
		recorder := httptest.NewRecorder()
		r.http.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, path, strings.NewReader("x")))
		if recorder.Code != http.StatusMethodNotAllowed && recorder.Code != http.StatusNotFound {
			t.Errorf("POST %s: %d", path, recorder.Code)
		}
	}
}

func TestStandsByUntilClaimed(t *testing.T) {
	claimed := make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.Claim = func(ctx context.Context, standBy func()) error {
			standBy()
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	r.awaitBody("/plan", 200, `"devices": 8`)
	r.awaitBody("/readyz", 200, "ok")
	if n := r.kubelet.Snapshot().Resources[gpuResource].Registrations; n != 0 {
		t.Errorf("%d registrations while standing by", n)
	}
	close(claimed)
	r.shows(8)
}

func TestNotReadyBeforeTheClaim(t *testing.T) {
	r := newRig(t, func(r *rig) {
		r.options.Claim = func(ctx context.Context, _ func()) error {
			<-ctx.Done()
			return ctx.Err()
		}
	})
	r.awaitBody("/readyz", 503, "not serving yet")
}

func TestDrainsBeforeItEnds(t *testing.T) {
	stopped := make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.DrainTimeout = 30 * time.Second
		r.options.Background = append(r.options.Background, func(context.Context) error {
			<-stopped
			return errors.New("told to stop")
		})
		r.wantErr = "told to stop"
	})
	r.shows(8)
	close(stopped)
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpuResource].Capacity == 0 && !k.Resources[gpuResource].Connected
	}); err != nil {
		t.Error(err)
	}
}

func TestLookAgain(t *testing.T) {
	look := make(chan struct{})
	r := newRig(t, func(r *rig) { r.options.Look = look })
	r.shows(8)
	r.policy.mu.Lock()
	r.policy.value = profile(2) // Without saying so.
	r.policy.mu.Unlock()
	look <- struct{}{}
	r.shows(4)
}

func TestBackgroundFailureEndsRun(t *testing.T) {
	failure := errors.New("socket gone")
	err := Run(t.Context(), Options{
		Node: fakeNode{newInput(gpus(""), nil)}, Policy: fakePolicy{newInput(profile(1), nil)},
		Plugin:     plugin.NewManager(plugin.Options{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)}),
		Logger:     slog.New(slog.DiscardHandler),
		Background: []func(context.Context) error{func(context.Context) error { return failure }},
	})
	if !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
}

func TestListenAddressInUse(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	err := Run(t.Context(), Options{Listen: strings.TrimPrefix(server.URL, "http://"), Logger: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "listen for HTTP") {
		t.Errorf("got %v", err)
	}
}

func TestServesHTTP(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	a := newAgent(Options{Listen: "localhost:0", Logger: slog.New(slog.DiscardHandler), Plugin: plugin.NewManager(plugin.Options{})})
	listener, err := listen(ctx, a.Listen)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- a.serve(ctx, listener, a.handler(), "") }()
	response, err := http.Get("http://" + listener.Addr().String() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if string(body) != "ok\n" {
		t.Errorf("body %q", body)
	}
	cancel()
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("ended with %v", err)
	}
}

func TestMetricsAreLinted(t *testing.T) {
	r := newRig(t, nil)
	r.shows(8)
	problems, err := testutil.GatherAndLint(r.agent.registry())
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		if strings.HasPrefix(problem.Metric, "virgate_") {
			t.Errorf("%s: %s", problem.Metric, problem.Text)
		}
	}
}

// TestReadyWhileANewNameWaits renames a resource whose only unit a pod holds:
// the new name has nothing to serve, and nothing is wrong.
func TestReadyWhileANewNameWaits(t *testing.T) {
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput(gpus(""), nil)}; r.options.Node = r.node })
	r.shows(4)
	_, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "c", Requests: map[string]int{gpuResource: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	renamed := profile(4)
	renamed.Shares[0].Rename = gpuResource + ".shared"
	r.policy.set(renamed, nil)
	r.shows(1)
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, "nvidia.com/gpu.shared")
	r.awaitBody("/metrics", 200, "virgate_kubelet_state_known 1")
}
