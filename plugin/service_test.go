package plugin_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// dialPlugin starts a manager with a plan and no kubelet, and returns a client on its
// only socket.
func dialPlugin(t testing.TB, p sharing.Plan) api.DevicePluginClient {
	t.Helper()
	client, _ := dialManager(t, p)
	return client
}

// dialManager is dialPlugin that also returns the manager.
func dialManager(t testing.TB, p sharing.Plan) (api.DevicePluginClient, *plugin.Manager) {
	t.Helper()
	return dialOptions(t, plugin.Options{Logger: slog.New(slog.DiscardHandler)}, p)
}

// dialOptions is dialManager for a manager with other options.
func dialOptions(t testing.TB, options plugin.Options, p sharing.Plan) (api.DevicePluginClient, *plugin.Manager) {
	t.Helper()
	dir, err := os.MkdirTemp("", "vg") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	options.Dir = dir
	manager := plugin.NewManager(options)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = manager.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		_ = os.RemoveAll(dir)
	})
	manager.Apply(p)
	return dialSocket(t, dir), manager
}

// dialSocket returns a client on the only plugin's socket in the folder, which
// may come in a moment.
func dialSocket(t testing.TB, dir string) api.DevicePluginClient {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	var sockets []string
	for len(sockets) == 0 && time.Now().Before(deadline) {
		sockets, _ = filepath.Glob(filepath.Join(dir, "virgate-*.sock"))
	}
	if len(sockets) != 1 {
		t.Fatalf("sockets %v, want one", sockets)
	}
	connection, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)), // The file is there a moment before the listener.
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", sockets[0])
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return api.NewDevicePluginClient(connection)
}

func allocate(ids ...string) *api.AllocateRequest {
	return &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}}
}

func TestAllocate(t *testing.T) {
	oneShare := plan(gpu, 2, 4)
	oneShare.Resources[0].OneShareOnly = true
	strict := plan(gpu, 2, 4)
	strict.Resources[0].SpreadStrict = true
	gone := plan(gpu, 2, 1)
	delete(gone.Faults, "GPU-0001")
	byIndex := plan(gpu, 3, 2)
	byIndex.Resources[0].DeviceIDs = sharing.ByIndex
	for _, test := range []struct {
		name    string
		plan    sharing.Plan
		request *api.AllocateRequest
		visible string
		code    codes.Code
		message string
	}{
		{"one exclusive", plan(gpu, 2, 1), allocate("GPU-0001"), "GPU-0001", codes.OK, ""},
		{"two units in the plan's order", plan(gpu, 3, 4), allocate("GPU-0002::1", "GPU-0000::3"), "GPU-0000,GPU-0002", codes.OK, ""},
		{"one unit once", plan(gpu, 2, 4), allocate("GPU-0001::0", "GPU-0001::2"), "GPU-0001", codes.OK, ""},
		{"by index", byIndex, allocate("GPU-0002::1", "GPU-0001::0"), "1,2", codes.OK, ""},
		{"unknown device", plan(gpu, 2, 4), allocate("GPU-0001::9"), "", codes.NotFound, `nvidia.com/gpu has no device "GPU-0001::9"`},
		{"one known, one not", plan(gpu, 2, 4), allocate("GPU-0001::1", "GPU-0001"), "", codes.NotFound, `no device "GPU-0001"`},
		{"no device", plan(gpu, 2, 4), allocate(), "", codes.InvalidArgument, "no device requested"},
		{"no container", plan(gpu, 2, 4), &api.AllocateRequest{}, "", codes.InvalidArgument, "no container"},
		{"faulty unit", withFault(plan(gpu, 2, 4), "GPU-0001", "XID 79"), allocate("GPU-0001::0"), "", codes.Unavailable, "XID 79"},
		{"unit that is gone", gone, allocate("GPU-0001"), "", codes.Unavailable, "no longer on this node"},
		{"two shares where one is allowed", oneShare, allocate("GPU-0001::0", "GPU-0000::0"), "", codes.InvalidArgument, "a container may request 1, not 2"},
		{"two shares of one unit where one is allowed", oneShare, allocate("GPU-0001::0", "GPU-0001::1"), "", codes.InvalidArgument, "a container may request 1, not 2"},
		{"one share where one is allowed", oneShare, allocate("GPU-0001::0"), "GPU-0001", codes.OK, ""},
		{"strict spread on one unit", strict, allocate("GPU-0001::0", "GPU-0001::1"), "", codes.ResourceExhausted, "spread is strict"},
		{"strict spread on two units", strict, allocate("GPU-0001::0", "GPU-0000::1"), "GPU-0000,GPU-0001", codes.OK, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			client := dialPlugin(t, test.plan)
			response, err := client.Allocate(t.Context(), test.request)
			if status.Code(err) != test.code || (err != nil && !strings.Contains(err.Error(), test.message)) {
				t.Fatalf("got %v, want %s with %q", err, test.code, test.message)
			}
			if err != nil {
				return
			}
			want := []map[string]string{{"NVIDIA_VISIBLE_DEVICES": test.visible}}
			var got []map[string]string
			for _, container := range response.ContainerResponses {
				got = append(got, container.Envs)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestOneAnswerAContainer(t *testing.T) {
	client := dialPlugin(t, plan(gpu, 2, 4))
	response, err := client.Allocate(t.Context(), &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{
		{DevicesIds: []string{"GPU-0000::0"}}, {DevicesIds: []string{"GPU-0001::0"}},
	}})
	if err != nil || len(response.ContainerResponses) != 2 {
		t.Errorf("got %v, %v, want two answers", response, err)
	}
}

func TestPreferredAllocationNeverFails(t *testing.T) {
	client := dialPlugin(t, withFault(plan(gpu, 2, 2), "GPU-0001", "XID 79"))
	for _, test := range []struct {
		name      string
		available []string
		size      int32
		want      int
	}{
		{"enough", []string{"GPU-0000::0", "GPU-0000::1"}, 2, 2},
		{"unknown IDs only", []string{"x", "y", "z"}, 2, 2},
		{"faulty IDs only", []string{"GPU-0001::0"}, 1, 1},
		{"too few", []string{"GPU-0000::0"}, 3, 1},
		{"none", nil, 1, 0},
		{"negative size", []string{"GPU-0000::0"}, -1, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			response, err := client.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{
				ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: test.available, AllocationSize: test.size}},
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := len(response.ContainerResponses[0].DeviceIDs); got != test.want {
				t.Errorf("%d IDs, want %d", got, test.want)
			}
		})
	}
}

// TestListsAreCoalesced sends many plans while the stream is not read.
func TestListsAreCoalesced(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.kubelet.SlowStream(200 * time.Millisecond)
	before := b.kubelet.Snapshot().Resources[gpu].Lists
	for i := range 100 {
		fault := ""
		if i%2 == 0 {
			fault = "XID 79"
		}
		b.manager.Apply(withFault(plan(gpu, 2, 1), "GPU-0001", fault))
	}
	b.manager.Apply(plan(gpu, 3, 1))
	b.shows(gpu, 3, 3)
	if lists := b.kubelet.Snapshot().Resources[gpu].Lists - before; lists > 10 {
		t.Errorf("%d lists for a burst", lists)
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
	b := newBench(t, func(_ *simkubeletOptions, options *plugin.Options) { options.Kubelet = kubelet })
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	kubelet.haunt(gpu, "GPU-0000::3")
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
}

// doubter does not see what the kubelet serves the first few times.
type doubter struct {
	direct
	asked atomic.Int64
}

func (d *doubter) Serving(ctx context.Context, resource string) (bool, error) {
	serving, err := d.direct.Serving(ctx, resource)
	return serving && d.asked.Add(1) > 1, err
}

func TestIgnoredStreamIsReplaced(t *testing.T) {
	kubelet := &doubter{}
	b := newBench(t, func(_ *simkubeletOptions, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing.VerifyAfter = 20 * time.Millisecond
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 2))
	b.await(func(k simkubeletSnapshot) bool {
		return k.Resources[gpu].StreamsOpened == 2 && k.Resources[gpu].Allocatable == 2
	})
	b.mustPod("p", gpu, 1)
}

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
	b := newBench(t, func(_ *simkubeletOptions, options *plugin.Options) { options.Store = store })
	b.manager.Apply(plan(before, 2, 1))
	b.shows(before, 2, 2)
	b.mustPod("p", before, 1)
	b.stop()
	b.await(func(k simkubeletSnapshot) bool { return !k.Resources[before].Connected })

	b.succeed(plugin.Options{Kubelet: direct{b.kubelet}, Store: store}).Apply(plan(after, 2, 3))
	b.shows(before, 1, 1)
	b.shows(after, 3, 3)
	if _, err := b.kubelet.RestartContainer(b.ctx, "test", "p", "main"); err != nil {
		t.Error(err)
	}
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
	b.await(func(k simkubeletSnapshot) bool { return !k.Resources[gpu].Connected })
	b.succeed(plugin.Options{Kubelet: slow{direct{b.kubelet}}}).Apply(plan(gpu, 1, 2))
	b.shows(gpu, 4, 4)
}

// occupied shows another plugin's devices until it is freed.
type occupied struct {
	direct
	asked atomic.Int64
	freed atomic.Bool
}

func (o *occupied) Serving(context.Context, string) (bool, error) {
	o.asked.Add(1)
	return !o.freed.Load(), nil
}

func TestRegistrationWaitsForTheBarrier(t *testing.T) {
	kubelet := &occupied{}
	b := newBench(t, func(_ *simkubeletOptions, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing.VerifyAfter = time.Hour
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 2))
	for kubelet.asked.Load() < 3 {
		if b.ctx.Err() != nil {
			t.Fatal("the kubelet was not asked")
		}
		runtime.Gosched()
	}
	if n := b.kubelet.Snapshot().Resources[gpu].Registrations; n != 0 {
		t.Errorf("%d registrations before the barrier", n)
	}
	kubelet.freed.Store(true)
	b.shows(gpu, 2, 2)
}

func TestListIntervalHolds(t *testing.T) {
	b := newBench(t, func(_ *simkubeletOptions, options *plugin.Options) { options.Timing.ListInterval = time.Hour })
	b.manager.Apply(plan(gpu, 1, 1))
	b.shows(gpu, 1, 1)
	for replicas := range 20 {
		b.manager.Apply(plan(gpu, 1, replicas+2))
		for !b.manager.Status().Served {
			runtime.Gosched()
		}
	}
	if lists := b.manager.Status().Resources[0].Lists; lists != 1 {
		t.Errorf("%d lists within the interval", lists)
	}
}

func TestSavesEveryPhase(t *testing.T) {
	store := &memory{}
	b := newBench(t, func(_ *simkubeletOptions, options *plugin.Options) { options.Store = store })
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	b.mustPod("p", gpu, 4)
	b.manager.Apply(plan(gpu, 1, 2)) // It changes nothing but phases.
	for !b.manager.Status().Served {
		runtime.Gosched()
	}
	phases := map[plugin.Phase]int{}
	lists, _ := store.Load()
	for _, e := range lists[gpu].Entries {
		phases[e.Phase]++
	}
	if diff := cmp.Diff(map[plugin.Phase]int{plugin.Offered: 2, plugin.Closing: 2}, phases); diff != "" {
		t.Error(diff)
	}
}

func TestAwaitStopped(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	brief, cancel := context.WithTimeout(b.ctx, 50*time.Millisecond)
	defer cancel()
	if err := b.manager.AwaitStopped(brief); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stopped while it serves: %v", err)
	}
	b.manager.Apply(sharing.Plan{})
	if err := b.manager.AwaitStopped(b.ctx); err != nil {
		t.Error(err)
	}
	if r := b.kubelet.Snapshot().Resources[gpu]; r.Capacity != 0 {
		t.Errorf("capacity %d", r.Capacity)
	}
}

func TestServingGoesOnWithoutStore(t *testing.T) {
	b := newBench(t, func(_ *simkubeletOptions, options *plugin.Options) { options.Store = &memory{broken: true} })
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.manager.Apply(plan(gpu, 4, 1))
	b.shows(gpu, 4, 4)
}

// The benchmarks measure over a real socket; compare them with the empty call.

func BenchmarkEmptyCall(b *testing.B) {
	client := dialPlugin(b, plan(gpu, 8, 10))
	for b.Loop() {
		if _, err := client.GetDevicePluginOptions(b.Context(), &api.Empty{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAllocate(b *testing.B) {
	for _, replicas := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("devices=%d", 8*replicas), func(b *testing.B) {
			client := dialPlugin(b, plan(gpu, 8, replicas))
			request := allocate("GPU-0003::1")
			var empty, full time.Duration
			for b.Loop() {
				start := time.Now()
				if _, err := client.GetDevicePluginOptions(b.Context(), &api.Empty{}); err != nil {
					b.Fatal(err)
				}
				middle := time.Now()
				if _, err := client.Allocate(b.Context(), request); err != nil {
					b.Fatal(err)
				}
				empty += middle.Sub(start)
				full += time.Since(middle)
			}
			b.ReportMetric(float64(full)/float64(empty), "×empty")
		})
	}
}

func BenchmarkPreferredAllocation(b *testing.B) {
	p := plan(gpu, 8, 1000)
	var available []string
	for _, d := range p.Resources[0].Devices {
		available = append(available, d.ID)
	}
	client := dialPlugin(b, p)
	for _, size := range []int32{1, 8, 64} {
		b.Run(fmt.Sprintf("devices=8000/size=%d", size), func(b *testing.B) {
			request := &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: available, AllocationSize: size},
			}}
			for b.Loop() {
				if _, err := client.GetPreferredAllocation(b.Context(), request); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
