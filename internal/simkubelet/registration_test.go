package simkubelet

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/sets"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestRegisterRefusals(t *testing.T) {
	r := startRig(t, Options{DialTimeout: 50 * time.Millisecond})
	r.servePlugin(gpu, "a.sock")
	for _, row := range []struct {
		name    string
		request *api.RegisterRequest
		want    string
	}{
		{"version", &api.RegisterRequest{Version: "v1alpha", Endpoint: "a.sock", ResourceName: gpu}, "version"},
		{"name", &api.RegisterRequest{Version: api.Version, Endpoint: "a.sock", ResourceName: "gpu"}, "domain"},
		{"nobody listens", &api.RegisterRequest{Version: api.Version, Endpoint: "b.sock", ResourceName: gpu}, "failed to dial device plugin: context deadline exceeded"},
	} {
		t.Run(row.name, func(t *testing.T) {
			err := registerWith(r.ctx, r.options.Dir, row.request)
			if err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("got %v, want an error with %q", err, row.want)
			}
		})
	}
	if s := r.Snapshot().Resources[gpu]; s.Registrations != 2 || s.StreamsOpened != 0 || s.Connected {
		t.Errorf("got %+v, want 2 registrations and no stream", s)
	}
}

// The kubelet calls GetDevicePluginOptions inside Register, so a plugin that answers
// it only after Register has returned never registers.
func TestOptionsAreRequestedInsideRegister(t *testing.T) {
	r := startRig(t, Options{})
	p := r.servePlugin(gpu, "sub.sock")
	p.options = &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}
	p.prefer = func(_ context.Context, request *api.ContainerPreferredAllocationRequest) ([]string, error) {
		return request.AvailableDeviceIDs[1:], nil
	}
	err := registerWith(r.ctx, r.options.Dir, &api.RegisterRequest{
		Version: api.Version, Endpoint: p.socket, ResourceName: gpu,
		Options: &api.DevicePluginOptions{PreStartRequired: true}, // ignored
	})
	if err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a", "b")...)
	status := r.add(oneContainer("pod", 1))
	if got := status.Containers[0].Devices(gpu); len(got) != 1 || got[0] != "b" {
		t.Errorf("got %q, want the preferred b", got)
	}
	if socket := r.Snapshot().Resources[gpu].Socket; socket != "sub.sock" {
		t.Errorf("socket is %q", socket)
	}
}

func TestStartRemovesSocketsOnly(t *testing.T) {
	r := startRig(t, Options{})
	dir := r.options.Dir
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	file, sub := filepath.Join(dir, "state.json"), filepath.Join(dir, "sub", "b.sock")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Dir(sub), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(dir, "a.sock"), sub} {
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = listener.Close() }()
	}
	if _, err := os.Stat(filepath.Join(dir, socketName)); err != nil {
		t.Errorf("a stopped kubelet's socket file is gone: %v", err)
	}
	if err := r.Start(r.ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "a.sock")); !os.IsNotExist(err) {
		t.Errorf("a.sock: got %v, want it removed", err)
	}
	for _, path := range []string{file, sub, filepath.Join(dir, socketName)} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}

// TestHooks checks that Register returns the result of Options.OnRegister, and that Options.OnRead is called before
// each list and before a stream's end is noticed.
func TestHooks(t *testing.T) {
	var calls atomic.Int32
	reads := make(chan struct{})
	r := startRig(t, Options{
		OnRegister: func(context.Context) error {
			if calls.Add(1) == 1 {
				return status.Error(codes.Unavailable, "not now")
			}
			return nil
		},
		OnRead: func(stopping <-chan struct{}) {
			select {
			case reads <- struct{}{}:
			case <-stopping:
			}
		},
	})
	p := r.servePlugin(gpu, "a.sock")
	if err := p.register(r.ctx); status.Code(err) != codes.Unavailable {
		t.Errorf("refused Register: got %v", err)
	}
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.post(healthy("a")...)
	if lists := r.Snapshot().Resources[gpu].Lists; lists != 0 {
		t.Errorf("%d lists read before their time", lists)
	}
	<-reads
	r.awaitCounts(gpu, 1, 1)
	<-reads
	p.server.Stop()
	if !r.Snapshot().Resources[gpu].Connected {
		t.Error("the end of the stream was noticed before its time")
	}
	<-reads
	r.await(func(s Snapshot) bool { return !s.Resources[gpu].Connected })
}

func TestDropStream(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	if r.DropStream("nvidia.com/other") || !r.DropStream(gpu) {
		t.Error("DropStream does not know which plugin is there")
	}
	p.awaitEnd()
	r.awaitCounts(gpu, 0, 1)
}

// The end of a dropped stream does not disconnect a newer client, however late the
// kubelet notices it.
func TestDropStreamLeavesTheNextClient(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	r.lock()
	process, dropped := r.process, r.process.clients[gpu]
	r.unlock()
	r.DropStream(gpu)
	p.awaitEnd()
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a")...)
	r.runClient(process, dropped) // notices, once more and at the latest
	if got := r.Snapshot().Resources[gpu]; !got.Connected || got.Allocatable != 1 || got.Streams != 1 {
		t.Errorf("got %+v, want the new client connected", got)
	}
}

// A stop waits neither until the plugin gives up nor until the kubelet does.
func TestStopDuringRegister(t *testing.T) {
	var silent atomic.Bool
	r := startRig(t, Options{DialTimeout: time.Hour, OnRegister: func(ctx context.Context) error {
		if silent.Load() {
			<-ctx.Done()
		}
		return ctx.Err()
	}})
	p := r.servePlugin(gpu, "a.sock")
	failed := make(chan error, 2)
	go func() {
		failed <- registerWith(r.ctx, r.options.Dir, &api.RegisterRequest{Version: api.Version, Endpoint: "none.sock", ResourceName: gpu})
	}()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Registrations == 1 })
	silent.Store(true)
	go func() { failed <- p.register(r.ctx) }()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Registrations == 2 })
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-failed; err == nil {
			t.Error("Register succeeded on a stopped kubelet")
		}
	}
}

// The results are from the real kubelet, 1.36.3.
func TestResourceNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"nvidia.com/gpu":                true,
		"nvidia.com/gpu.shared":         true,
		"nvidia.com/mig-1g.10gb.me":     true,
		"nvidia.com/" + repeat("a", 63): true,
		repeat("a", 240) + ".com/gpu":   true,
		"gpu":                           false,
		"":                              false,
		"/gpu":                          false,
		"nvidia.com/":                   false,
		"kubernetes.io/gpu":             false,
		"x.kubernetes.io/gpu":           false,
		"requests.nvidia.com/gpu":       false,
		"NVIDIA.com/gpu":                false,
		"nvidia..com/gpu":               false,
		"nvidia.com/" + repeat("a", 64): false,
		repeat("a", 241) + ".com/gpu":   false,
		"nvidia.com/mig-1g.10gb+me":     false,
		"nvidia.com/a/b":                false,
		"nvidia.com/gpu-":               false,
		"nvidia.com/gpu\n":              false,
	} {
		if err := checkResourceName(name); (err == nil) != ok {
			t.Errorf("%q: got %v, want accepted %t", name, err, ok)
		}
	}
}

func repeat(s string, n int) string { return strings.Repeat(s, n) }

func TestListReplacesList(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", append(healthy("b@1", "c"), unhealthy("a@0+1")...)...)
	got := r.Snapshot().Resources[gpu]
	want := Resource{
		Devices:  []Device{{"a", false}, {"b", true}, {"c", true}},
		Capacity: 3, Allocatable: 2, Streams: 1, StreamsOpened: 1, Registrations: 1, Lists: 1, Socket: "a.sock", Connected: true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	p.send(unhealthy("b", "c")...)
	r.awaitCounts(gpu, 0, 2)
	p.send()
	r.awaitCounts(gpu, 0, 0)
	p.send(healthy("x", "y")...)
	r.awaitCounts(gpu, 2, 2)
	if got := r.Snapshot().Resources[gpu]; got.Lists != 4 || got.StreamsOpened != 1 || got.StreamsClosed != 0 {
		t.Errorf("got %+v, want 4 lists on one stream", got)
	}
}

func TestHealthIsComparedExactly(t *testing.T) {
	for health, ok := range map[string]bool{"Healthy": true, "Unhealthy": false, "healthy": false, "": false} {
		if d := newDeviceList([]*api.Device{{ID: "a", Health: health}}); d.healthy.Has("a") != ok || d.unhealthy.Has("a") == ok {
			t.Errorf("%q: got %+v", health, d)
		}
	}
	// As in the real kubelet, an ID that is both counts twice.
	if d := newDeviceList(append(healthy("a"), unhealthy("a")...)); d.capacity() != 2 || len(d.healthy) != 1 {
		t.Errorf("got %+v", d)
	}
}

func TestStreamEnd(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	close(p.quit)
	r.awaitCounts(gpu, 0, 2)
	got := r.Snapshot().Resources[gpu]
	if got.Connected || got.Streams != 0 || got.StreamsClosed != 1 {
		t.Errorf("got %+v, want a stopped endpoint", got)
	}
	_, err := r.AddPod(r.ctx, oneContainer("late", 1))
	if err == nil || !strings.Contains(err.Error(), "no healthy devices present; cannot allocate unhealthy devices "+gpu) {
		t.Errorf("got %v", err)
	}
}

// The end of the first plugin's stream disconnects the second plugin.
func TestOverlappingRegistration(t *testing.T) {
	r := startRig(t, Options{AllowOverlap: true})
	first := r.startPlugin(gpu, "1.sock", healthy("a", "b")...)
	second := r.servePlugin(gpu, "2.sock")
	second.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) {
		return answer([]string{"second"}), nil
	}
	if err := second.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.awaitCounts(gpu, 2, 2)
	second.send(healthy("a", "b", "c")...)
	first.send(healthy("a", "b", "c", "d")...)
	r.awaitCounts(gpu, 4, 4)
	if env := r.add(oneContainer("pod", 1)).Containers[0].Env(); env["DEVICES"] != "second" {
		t.Errorf("Allocate went to the old endpoint: %v", env)
	}
	first.server.Stop()
	second.awaitEnd()
	r.awaitCounts(gpu, 0, 4)
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Streams == 0 })
}

// Lists from a remaining third stream make the devices of a stopped endpoint healthy
// again.
func TestThirdStreamOnStoppedEndpoint(t *testing.T) {
	r := startRig(t, Options{AllowOverlap: true})
	var plugins []*devicePlugin
	for _, socket := range []string{"1.sock", "2.sock", "3.sock"} {
		plugins = append(plugins, r.startPlugin(gpu, socket, healthy("a")...))
	}
	plugins[0].server.Stop()
	plugins[2].awaitEnd()
	r.awaitCounts(gpu, 0, 1)
	plugins[1].send(healthy("a")...)
	r.awaitCounts(gpu, 1, 1)
	if _, err := r.AddPod(r.ctx, oneContainer("pod", 1)); err == nil || !strings.Contains(err.Error(), "has been stopped") {
		t.Errorf("got %v, want a stopped endpoint", err)
	}
}

// After a failed Register the kubelet does not notice the end of the old plugin.
func TestFailedRegisterLeavesTheOldPluginServing(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	r.options.DialTimeout = 30 * time.Millisecond // Only now, for a slow machine.
	if err := registerWith(r.ctx, r.options.Dir, &api.RegisterRequest{Version: api.Version, Endpoint: "none.sock", ResourceName: gpu}); err == nil {
		t.Fatal("Register without a plugin succeeded")
	}
	p.server.Stop()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Streams == 0 })
	if got := r.Snapshot().Resources[gpu]; got.Allocatable != 1 || !got.Connected {
		t.Errorf("got %+v, want the dead plugin's device", got)
	}
	_, err := r.AddPod(r.ctx, oneContainer("pod", 1))
	if err == nil || !strings.Contains(err.Error(), "code = Unavailable") {
		t.Errorf("got %v, want Unavailable", err)
	}
}

func TestResourceIsRemovedAfterTheGrace(t *testing.T) {
	now := time.Now()
	r := startRig(t, Options{StatusPeriod: time.Hour, Now: func() time.Time { return now }})
	p := r.startPlugin(gpu, "a.sock", append(healthy("a"), unhealthy("b")...)...)
	p.server.Stop()
	r.awaitCounts(gpu, 0, 2)
	for _, row := range []struct {
		after time.Duration
		want  int
	}{{5 * time.Minute, 2}, {time.Second, 0}} {
		r.lock()
		now = now.Add(row.after)
		r.unlock()
		r.ReportStatus()
		if got := r.Snapshot().Resources[gpu].Capacity; got != row.want {
			t.Errorf("%v later: capacity %d, want %d", row.after, got, row.want)
		}
	}
	if registered := r.checkpoint().RegisteredDevices; len(registered) != 0 {
		t.Errorf("the checkpoint still has %v", registered)
	}
}

func TestStatusIsPublishedByItself(t *testing.T) {
	r := startRig(t, Options{StatusPeriod: 5 * time.Millisecond, StopGrace: time.Millisecond})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	p.server.Stop()
	r.awaitCounts(gpu, 0, 0)
}

// TestAwaitMissesNoState checks that a state is seen even if it is over before the caller of Await runs again.
func TestAwaitMissesNoState(t *testing.T) {
	r := startRig(t, Options{})
	r.startPlugin(gpu, "a.sock", healthy("a")...)
	looked, gone, seen := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		once := sync.OnceFunc(func() { close(looked) })
		seen <- r.Await(r.ctx, func(s Snapshot) bool {
			once()
			<-gone
			return len(s.Pods) == 1
		})
	}()
	<-looked
	r.add(oneContainer("pod", 1))
	r.remove("default", "pod")
	close(gone)
	if err := <-seen; err != nil {
		t.Error(err)
	}
}

func TestAwaitEndsWithContext(t *testing.T) {
	r := startRig(t, Options{})
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	err := r.Await(ctx, func(Snapshot) bool { return false })
	if err == nil || !strings.Contains(err.Error(), "up=true") {
		t.Errorf("got %v, want the last state", err)
	}
}

// A plugin whose connection was closed has lost its stream, and may register again.
func TestCutConnections(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	r.CloseConnections()
	p.awaitEnd()
	r.awaitCounts(gpu, 0, 1)
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a")...)
	r.awaitCounts(gpu, 1, 1)
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.CloseConnections()
}

// FuzzRegister checks that only a domain with a name is accepted as a resource name.
// It does not call Register, which would connect to the plugin.
func FuzzRegister(f *testing.F) {
	for _, request := range []*api.RegisterRequest{
		{Version: api.Version, Endpoint: "a.sock", ResourceName: "nvidia.com/gpu"},
		{Version: "v1", Endpoint: "a.sock", ResourceName: "nvidia.com/gpu"},
		{Version: api.Version, Endpoint: "../../x", ResourceName: "kubernetes.io/x", Options: &api.DevicePluginOptions{PreStartRequired: true}},
		{Version: api.Version, Endpoint: strings.Repeat("a", 200), ResourceName: "requests.x/\x1b"},
	} {
		data, err := proto.Marshal(request)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var request api.RegisterRequest
		if proto.Unmarshal(data, &request) != nil {
			return
		}
		err := checkResourceName(request.ResourceName)
		if domain, name, found := strings.Cut(request.ResourceName, "/"); err == nil && (!found || domain == "" || name == "" || strings.ContainsAny(name, "/\n\x1b ")) {
			t.Errorf("the name %q is accepted", request.ResourceName)
		}
	})
}

// FuzzList checks that for any list devices are counted once and violations are
// sorted.
func FuzzList(f *testing.F) {
	for _, list := range [][]*api.Device{healthy("a@0", "b"), append(healthy("a"), unhealthy("a", "")...), {{ID: "a", Health: "\x1b", Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: -1}}}}}, {{}}, nil} {
		data, err := proto.Marshal(&api.ListAndWatchResponse{Devices: list})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var response api.ListAndWatchResponse
		if proto.Unmarshal(data, &response) != nil {
			return
		}
		next := newDeviceList(response.Devices)
		if len(next.all) > len(response.Devices) || next.capacity() < len(next.all) {
			t.Errorf("%d devices of %d", len(next.all), len(response.Devices))
		}
		wrong := checkList("r", newDeviceList(healthy("a", "b")), response.Devices, sets.New("c"))
		if !slices.IsSorted(wrong) {
			t.Errorf("not sorted: %q", wrong)
		}
		if _, there := next.all["c"]; !there && !slices.ContainsFunc(wrong, func(w string) bool { return strings.Contains(w, "that pods hold: c") }) {
			t.Errorf("a held device is dropped, and nobody says so: %q", wrong)
		}
	})
}
