package podresources

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/shortdir"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const gpu = "nvidia.com/gpu"

// node is a running kubelet with a plugin.
type node struct {
	*kubelettest.Kubelet
	t           *testing.T
	ctx         context.Context
	dir, socket string
}

func startNode(t *testing.T, options simkubelet.Options) *node {
	t.Helper()
	dir := shortdir.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	n := &node{t: t, ctx: ctx, dir: filepath.Join(dir, "d"), socket: filepath.Join(dir, "p.sock")}
	options.Dir, options.PodResourcesSocket = n.dir, n.socket
	options.OnViolation = func(message string) { t.Errorf("violation: %s", message) }
	n.Kubelet = kubelettest.New(options)
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	n.await(func(s simkubelet.Snapshot) bool { return s.Up })
	return n
}

func (n *node) await(condition func(simkubelet.Snapshot) bool) {
	n.t.Helper()
	if err := n.Await(n.ctx, condition); err != nil {
		n.t.Fatal(err)
	}
}

// source reads the node; its clock is two minutes ahead, so that kubelet.sock is old.
func (n *node) source(change func(*Options)) *Source {
	n.t.Helper()
	options := Options{
		Socket:        n.socket,
		CheckpointDir: n.dir,
		Timeout:       patient,
		Now:           func() time.Time { return time.Now().Add(2 * time.Minute) },
	}
	if change != nil {
		change(&options)
	}
	source := New(options)
	n.t.Cleanup(func() { _ = source.Close() })
	return source
}

func (n *node) add(pod simkubelet.Pod) simkubelet.PodStatus {
	n.t.Helper()
	status, err := n.AddPod(n.ctx, pod)
	if err != nil {
		n.t.Fatal(err)
	}
	return status
}

func wants(count int) map[string]int { return map[string]int{gpu: count} }

// plugin offers one list and grants everything.
type plugin struct {
	api.UnimplementedDevicePluginServer
	list []*api.Device
}

// offer serves, registers and returns when the kubelet has the list. The plugin
// ends with the returned stop, or with the test.
func (n *node) offer(socket string, list ...*api.Device) (stop func()) {
	n.t.Helper()
	listener, err := net.Listen("unix", filepath.Join(n.dir, socket))
	if err != nil {
		n.t.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &plugin{list: list})
	go func() { _ = server.Serve(listener) }()
	n.t.Cleanup(server.Stop)

	connection, err := grpc.NewClient("unix:"+filepath.Join(n.dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	lists := n.Snapshot().Resources[gpu].Lists
	request := &api.RegisterRequest{Version: api.Version, Endpoint: socket, ResourceName: gpu}
	if _, err := api.NewRegistrationClient(connection).Register(n.ctx, request); err != nil {
		n.t.Fatal(err)
	}
	n.await(func(s simkubelet.Snapshot) bool { return s.Resources[gpu].Lists > lists })
	return server.Stop
}

func (*plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: p.list}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (*plugin) Allocate(context.Context, *api.AllocateRequest) (*api.AllocateResponse, error) {
	return &api.AllocateResponse{ContainerResponses: []*api.ContainerAllocateResponse{{}}}, nil
}

// devices makes healthy ones, and unhealthy ones of IDs that start with "!".
// The first is on two NUMA nodes.
func devices(ids ...string) []*api.Device {
	var list []*api.Device
	for _, id := range ids {
		id, sick := strings.CutPrefix(id, "!")
		device := &api.Device{ID: id, Health: api.Healthy}
		if sick {
			device.Health = api.Unhealthy
		}
		list = append(list, device)
	}
	list[0].Topology = &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: 0}, {ID: 1}}}
	return list
}
