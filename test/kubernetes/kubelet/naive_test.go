package kubelet

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// naive is a device plugin whose author does not know the kubelet: a device that is no longer wanted leaves
// the list at once.
type naive struct {
	api.UnimplementedDevicePluginServer
	// careful adds what seems to help: a lock between lists and allocations, and a refusal of devices that
	// are not listed.
	careful bool

	mu      sync.Mutex
	ids     []string
	changed chan struct{}
	listed  map[string]bool
}

func (n *naive) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// list lists the first of eight devices for each of two GPUs. They have the IDs that Virgate gives them.
func (n *naive) list(count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ids = nil
	for _, device := range plan(2, profile{replicas: 8}).Resources[0].Devices[:count] {
		n.ids = append(n.ids, device.ID)
	}
	if n.changed != nil {
		close(n.changed)
	}
	n.changed = make(chan struct{})
}

func (n *naive) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		changed, err := n.send(stream)
		if err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (n *naive) send(stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) (<-chan struct{}, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	response := &api.ListAndWatchResponse{}
	n.listed = map[string]bool{}
	for i, id := range n.ids {
		n.listed[id] = true
		response.Devices = append(response.Devices, &api.Device{
			ID: id, Health: api.Healthy, Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: int64(i % 2)}}},
		})
	}
	return n.changed, stream.Send(response)
}

func (n *naive) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	if n.careful {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, id := range request.ContainerRequests[0].DevicesIds {
			if !n.listed[id] {
				return nil, status.Errorf(codes.NotFound, "no device %q", id)
			}
		}
	}
	return &api.AllocateResponse{ContainerResponses: []*api.ContainerAllocateResponse{{}}}, nil
}

// serve serves a plugin other than Virgate. It returns the socket's name and a function that ends the
// plugin.
func (b *bench) serve(plugin api.DevicePluginServer, name string) (endpoint string, stop func()) {
	b.t.Helper()
	listener, err := net.Listen("unix", filepath.Join(b.dir, name))
	if err != nil {
		b.t.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, plugin)
	stop = serveOn(listener, server)
	b.t.Cleanup(stop)
	return name, stop
}

// register registers a socket in the directory for the resource.
func (b *bench) register(resource, endpoint string) error {
	connection, err := grpc.NewClient("unix://"+filepath.Join(b.dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	_, err = api.NewRegistrationClient(connection).Register(b.t.Context(), &api.RegisterRequest{Version: api.Version, Endpoint: endpoint, ResourceName: resource})
	return err
}

// startNaive serves and registers a plugin with this many devices, and returns a function that ends it.
// name is the socket's name, which must be unique in the bench.
func (b *bench) startNaive(n *naive, name string, count int) (stop func()) {
	b.t.Helper()
	n.list(count)
	endpoint, stop := b.serve(n, name+".sock")
	if err := b.register(gpu, endpoint); err != nil {
		b.t.Fatal(err)
	}
	return stop
}

// The test of the tests: careless lists really kill the code they run against, and the history sees why.
func TestNaivePluginsKillTheKubelet(t *testing.T) {
	const few, many, bound = 2, 16, 2000
	for _, test := range []struct {
		name    string
		careful bool
	}{{"removes at once", false}, {"locks and refuses", true}} {
		for _, policy := range policies() {
			t.Run(test.name+"/"+policy, func(t *testing.T) {
				b := newNaiveBench(t, policy)
				n := &naive{careful: test.careful}
				stop := b.startNaive(n, "naive", many)
				b.shows(gpu, many, many)
				ctx, cancel := context.WithCancel(t.Context())
				var flipping sync.WaitGroup
				defer flipping.Wait()
				defer stop() // A dead kubelet reads no more lists, so a list may wait to be sent.
				defer cancel()
				flipping.Go(func() {
					for ctx.Err() == nil {
						n.list(few)
						nap(ctx, 2*time.Millisecond)
						n.list(many)
						nap(ctx, 2*time.Millisecond)
					}
				})
				for i := range bound {
					p, err := b.admit(gpu, 1)
					if errors.As(err, new(errCrashed)) {
						t.Logf("dead after %d admissions", i+1)
						break
					}
					if err == nil {
						b.delete(p)
					}
				}
				if len(b.crashes()) == 0 {
					t.Errorf("the kubelet outlived %d admissions: this storm proves nothing", bound)
				}
				if len(b.history.broken()) == 0 {
					t.Error("the list history saw no rule broken")
				}
			})
		}
	}
}

// A device that a pod holds is removed: the kubelet panics when it looks at the pod again.
func TestRemovingAHeldDeviceKillsTheKubelet(t *testing.T) {
	for _, test := range []struct {
		name  string
		again func(*bench, *pod) error
	}{
		{"resized in place", func(b *bench, p *pod) error { return b.resize(p) }},
		{"kubelet restarted", func(b *bench, _ *pod) error {
			b.restart(0)
			b.startNaive(&naive{}, "again", 1)
			b.shows(gpu, 1, 1)
			return b.readmit()
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newNaiveBench(t, topologymanager.PolicyBestEffort)
			n := &naive{}
			b.startNaive(n, "naive", 4)
			b.shows(gpu, 4, 4)
			p := b.run(gpu, 3)
			n.list(1)
			b.shows(gpu, 1, 1)
			if err := test.again(b, p); !errors.As(err, new(errCrashed)) {
				t.Errorf("the kubelet outlived it: %v", err)
			}
		})
	}
}
