package plugin_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/shortdir"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// patience is how long anything may take on a busy machine.
const patience = await.Patience

// bench is a manager and a simulated kubelet on one directory.
type bench struct {
	t       *testing.T
	ctx     context.Context
	dir     string
	kubelet *kubelettest.Kubelet
	manager *plugin.Manager
	// stop ends the manager and waits for it.
	stop func()
}

// newBench starts both; the test fails at its end if the contract was broken.
func newBench(t *testing.T, change func(*simkubelet.Options, *plugin.Options)) *bench {
	t.Helper()
	dir := shortdir.New(t)
	kubeletOptions := simkubelet.Options{Dir: dir}
	pluginOptions := plugin.Options{
		Dir: dir, Logger: slog.New(slog.DiscardHandler),
		Timing: plugin.Timing{
			RemovalDelay: 50 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 2 * time.Second,
			// On a slow machine, a kubelet must not count as silent or as having lost its stream; tests of that set
			// these. A registration never times out, so no test can wait for that.
			RegisterTimeout: time.Hour, StreamTimeout: time.Hour, VerifyAfter: time.Hour,
		},
	}
	b := &bench{t: t, dir: dir}
	if change != nil {
		change(&kubeletOptions, &pluginOptions)
	}
	b.kubelet = kubelettest.New(kubeletOptions)
	if pluginOptions.Kubelet == nil {
		pluginOptions.Kubelet = direct{b.kubelet}
	}
	b.manager = plugin.NewManager(pluginOptions)

	ctx, cancel := context.WithTimeout(t.Context(), patience)
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
	options.Timing = plugin.Timing{RemovalDelay: 50 * time.Millisecond, StopAfter: 50 * time.Millisecond, StreamTimeout: time.Hour, VerifyAfter: time.Hour}
	manager := plugin.NewManager(options)
	ctx, cancel := context.WithCancel(b.ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = manager.Run(ctx) })
	b.t.Cleanup(func() { cancel(); running.Wait() })
	return manager
}

// direct asks the simulated kubelet without a socket.
type direct struct{ *kubelettest.Kubelet }

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

// awaitStatus waits for a condition, checking it when the status changes.
func awaitStatus(t *testing.T, b *bench, what string, so func() bool) {
	t.Helper()
	changed := b.manager.Subscribe()
	for !so() {
		select {
		case <-changed:
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

// plan has one resource with this many units and replicas.
func plan(name string, units, replicas int) sharing.Plan {
	p := sharing.Plan{Health: map[string]sharing.Health{}}
	r := sharing.Resource{Name: name, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID}
	for u := range units {
		id := fmt.Sprintf("GPU-%04d", u)
		p.Health[id] = sharing.Health{}
		r.Units = append(r.Units, sharing.Unit{ID: id, GPU: id, Index: fmt.Sprint(u), Replicas: replicas, NUMANode: -1})
		for n := range replicas {
			d := sharing.Device{ID: id, Unit: id, Healthy: true, NUMANode: -1}
			if replicas > 1 {
				d.ID = sharing.NewDeviceID(id, n)
			}
			r.Devices = append(r.Devices, d)
		}
	}
	p.Resources = []sharing.Resource{r}
	return p
}

// byMPS is plan, but shared by MPS.
func byMPS(name string, units, shares int) sharing.Plan {
	p := plan(name, units, shares)
	r := &p.Resources[0]
	for i := range r.Units {
		r.Units[i].MPS.Shares = shares
	}
	for i := range r.Devices {
		r.Devices[i].ID = sharing.NewMPSDeviceID(r.Devices[i].Unit, i%shares, shares)
	}
	return p
}

// withFault marks a unit of the plan.
func withFault(p sharing.Plan, unit, fault string) sharing.Plan {
	p.Health[unit] = sharing.Faulty(fault)
	for r := range p.Resources {
		for i, d := range p.Resources[r].Devices {
			if d.Unit == unit {
				p.Resources[r].Devices[i].Healthy = false
			}
		}
	}
	return p
}

const gpu = "nvidia.com/gpu"

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
func dialOptions(t testing.TB, options plugin.Options, p sharing.Plan, setUp ...func(*plugin.Manager)) (api.DevicePluginClient, *plugin.Manager) {
	t.Helper()
	dir := shortdir.New(t)
	options.Dir = dir
	options.Timing.StreamTimeout, options.Timing.VerifyAfter = time.Hour, time.Hour
	manager := plugin.NewManager(options)
	for _, do := range setUp {
		do(manager)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = manager.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	changed := manager.Subscribe()
	manager.Apply(p)
	client := dialSocket(t, dir)
	for !manager.Status().Served {
		<-changed
	}
	return client, manager
}

// dialSocket returns a client on the only plugin's socket in the folder, which
// may come in a moment.
func dialSocket(t testing.TB, dir string) api.DevicePluginClient {
	t.Helper()
	var sockets []string
	for late := time.Now().Add(patience); len(sockets) == 0 && time.Now().Before(late); runtime.Gosched() {
		sockets, _ = filepath.Glob(filepath.Join(dir, "virgate-*.sock"))
	}
	if len(sockets) != 1 {
		t.Fatalf("sockets %v, want one", sockets)
	}
	connection, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)), // The file exists a moment before the listener.
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
