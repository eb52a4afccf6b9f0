package simkubelet

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/test/shortdir"
)

const gpu = "nvidia.com/gpu"

// rig is a running kubelet. At the end of the test it must have no violation that
// the test has not expected.
type rig struct {
	*Kubelet
	t        *testing.T
	ctx      context.Context
	expected int
}

func startRig(t *testing.T, options Options) *rig {
	t.Helper()
	dir := shortdir.New(t)
	options.Dir = filepath.Join(dir, "d")
	options.PodResourcesSocket = filepath.Join(dir, "p", "kubelet.sock")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	r := &rig{Kubelet: New(options), t: t, ctx: ctx}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(running) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		cancel()
		if violations := r.Violations(); len(violations) != r.expected {
			t.Errorf("%d violations, want %d:\n%s", len(violations), r.expected, strings.Join(violations, "\n"))
		}
	})
	r.await(func(s Snapshot) bool { return s.Up })
	return r
}

func (r *rig) await(condition func(Snapshot) bool) {
	r.t.Helper()
	if err := r.Await(r.ctx, condition); err != nil {
		r.t.Fatalf("%v\nviolations: %q", err, r.Violations())
	}
}

// awaitCounts waits for a resource's allocatable and capacity.
func (r *rig) awaitCounts(resource string, allocatable, capacity int) {
	r.t.Helper()
	r.await(func(s Snapshot) bool {
		return s.Resources[resource].Allocatable == allocatable && s.Resources[resource].Capacity == capacity
	})
}

// expectViolation waits for a violation that has all the parts.
func (r *rig) expectViolation(parts ...string) {
	r.t.Helper()
	r.expected++
	r.await(func(s Snapshot) bool {
		if len(s.Violations) < r.expected {
			return false
		}
		latest := s.Violations[r.expected-1]
		for _, part := range parts {
			if !strings.Contains(latest, part) {
				r.t.Errorf("violation %q has no %q", latest, part)
			}
		}
		return true
	})
}

func (r *rig) add(pod Pod) PodStatus {
	r.t.Helper()
	status, err := r.AddPod(r.ctx, pod)
	if err != nil {
		r.t.Fatal(err)
	}
	return status
}

// oneContainer is a pod with one container, c, that requests devices.
func oneContainer(name string, count int) Pod {
	return Pod{Namespace: "default", Name: name, Containers: []Container{{Name: "c", Requests: map[string]int{gpu: count}}}}
}

// devicePlugin serves one socket with one stream, and sends the lists of send.
type devicePlugin struct {
	api.UnimplementedDevicePluginServer
	rig      *rig
	resource string
	socket   string
	server   *grpc.Server
	lists    chan []*api.Device
	// ended receives a value for each stream that the kubelet ended.
	ended chan struct{}
	// quit ends the streams from the plugin's side.
	quit chan struct{}

	options  *api.DevicePluginOptions
	allocate func(context.Context, []string) (*api.AllocateResponse, error)
	prefer   func(context.Context, *api.ContainerPreferredAllocationRequest) ([]string, error)
}

// servePlugin serves a plugin without registering it.
func (r *rig) servePlugin(resource, socket string) *devicePlugin {
	r.t.Helper()
	p := &devicePlugin{
		rig: r, resource: resource, socket: socket,
		lists:   make(chan []*api.Device),
		ended:   make(chan struct{}, 10),
		quit:    make(chan struct{}),
		options: &api.DevicePluginOptions{},
	}
	p.listen()
	return p
}

func (p *devicePlugin) listen() {
	p.rig.t.Helper()
	listener, err := net.Listen("unix", filepath.Join(p.rig.options.Dir, p.socket))
	if err != nil {
		p.rig.t.Fatal(err)
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	api.RegisterDevicePluginServer(server, p)
	p.server = server
	go func() { _ = server.Serve(listener) }()
	p.rig.t.Cleanup(server.Stop)
}

// startPlugin serves and registers a plugin, and sends its first list.
func (r *rig) startPlugin(resource, socket string, list ...*api.Device) *devicePlugin {
	r.t.Helper()
	p := r.servePlugin(resource, socket)
	if err := p.register(r.ctx); err != nil {
		r.t.Fatal(err)
	}
	p.send(list...)
	return p
}

func (p *devicePlugin) register(ctx context.Context) error {
	return registerWith(ctx, p.rig.options.Dir, &api.RegisterRequest{
		Version: api.Version, Endpoint: p.socket, ResourceName: p.resource,
	})
}

func registerWith(ctx context.Context, dir string, request *api.RegisterRequest) error {
	connection, err := grpc.NewClient("unix:"+filepath.Join(dir, socketName), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	_, err = api.NewRegistrationClient(connection).Register(ctx, request)
	return err
}

// send returns when the kubelet has processed the list.
func (p *devicePlugin) send(list ...*api.Device) {
	p.rig.t.Helper()
	before := p.rig.Snapshot().Resources[p.resource].Lists
	p.post(list...)
	p.rig.await(func(s Snapshot) bool { return s.Resources[p.resource].Lists == before+1 })
}

// post returns when the stream has taken the list.
func (p *devicePlugin) post(list ...*api.Device) {
	p.rig.t.Helper()
	select {
	case p.lists <- list:
	case <-p.rig.ctx.Done():
		p.rig.t.Fatal("no stream takes the list")
	}
}

// awaitEnd returns when the kubelet has ended a stream.
func (p *devicePlugin) awaitEnd() {
	p.rig.t.Helper()
	select {
	case <-p.ended:
	case <-p.rig.ctx.Done():
		p.rig.t.Fatal("stream lives on")
	}
}

func (p *devicePlugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return p.options, nil
}

func (p *devicePlugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		select {
		case list := <-p.lists:
			if err := stream.Send(&api.ListAndWatchResponse{Devices: list}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			p.ended <- struct{}{}
			return nil
		case <-p.quit:
			return nil
		}
	}
}

func (p *devicePlugin) GetPreferredAllocation(ctx context.Context, request *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	ids, err := p.prefer(ctx, request.ContainerRequests[0])
	return &api.PreferredAllocationResponse{
		ContainerResponses: []*api.ContainerPreferredAllocationResponse{{DeviceIDs: ids}},
	}, err
}

func (p *devicePlugin) Allocate(ctx context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	ids := request.ContainerRequests[0].DevicesIds
	if p.allocate != nil {
		return p.allocate(ctx, ids)
	}
	return answer(ids), nil
}

func answer(ids []string) *api.AllocateResponse {
	return &api.AllocateResponse{ContainerResponses: []*api.ContainerAllocateResponse{
		{Envs: map[string]string{"DEVICES": strings.Join(ids, ",")}},
	}}
}

// healthy makes devices; nodes are given as "id@node".
func healthy(ids ...string) []*api.Device {
	var list []*api.Device
	for _, id := range ids {
		id, node, bound := strings.Cut(id, "@")
		device := &api.Device{ID: id, Health: api.Healthy}
		if bound {
			device.Topology = &api.TopologyInfo{}
			for text := range strings.SplitSeq(node, "+") {
				var n int64
				if _, err := fmt.Sscan(text, &n); err != nil {
					panic(err)
				}
				device.Topology.Nodes = append(device.Topology.Nodes, &api.NUMANode{ID: n})
			}
		}
		list = append(list, device)
	}
	return list
}

func unhealthy(ids ...string) []*api.Device {
	list := healthy(ids...)
	for _, device := range list {
		device.Health = api.Unhealthy
	}
	return list
}
