package hostile

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/test/repeat"
)

// intruder is a client on the plugin's own socket that is not the kubelet. That requires root.
func intruder(t *testing.T, p *program) api.DevicePluginClient {
	t.Helper()
	path := filepath.Join(p.dir, p.kubelet.Snapshot().Resources[gpu].Socket)
	connection, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return api.NewDevicePluginClient(connection)
}

// peak samples the heap until stop is called, which returns the maximum.
func peak() (stop func() uint64) {
	var most atomic.Uint64
	done := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			most.Store(max(most.Load(), heap()))
			select {
			case <-done:
				return
			case <-tick.C:
			}
		}
	})
	return func() uint64 {
		close(done)
		looking.Wait()
		return most.Load()
	}
}

// TestFloodOfCalls checks that ten thousand Allocates at a time, from ten connections, are each answered or
// given up by the client and take bounded memory, and that the kubelet meanwhile gets its answers and keeps
// its stream.
func TestFloodOfCalls(t *testing.T) {
	long(t)
	p := start(t, options{profile: replicas(20)})
	p.shows(gpu, 40)
	registered := p.kubelet.Snapshot().Resources[gpu].Registrations
	before, stop := heap(), peak()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	request := &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{"GPU-of-nobody"}}}}
	var answered atomic.Int64
	var calls sync.WaitGroup
	perClient := repeat.Times(250, 1000)
	for range 10 {
		client := intruder(t, p)
		for range perClient {
			calls.Go(func() {
				if _, err := client.Allocate(ctx, request); err != nil {
					answered.Add(1)
				}
			})
		}
	}
	for n := range 20 {
		p.admit("pod-" + string(rune('a'+n)))
	}
	calls.Wait()
	if n := answered.Load(); n != int64(10*perClient) {
		t.Errorf("%d calls were refused, want all", n)
	}
	if r := p.kubelet.Snapshot().Resources[gpu]; r.Registrations != registered || r.Streams != 1 {
		t.Errorf("the kubelet lost its stream: %d registrations, %d streams", r.Registrations, r.Streams)
	}
	// This includes the clients' goroutines, up to ten thousand.
	if most := stop(); most > before+256<<20 {
		t.Errorf("%d MiB more than before", (most-before)>>20)
	}
	// Connections beyond the limit have waited until others had been idle for a while.
	p.says("/metrics", `virgate_allocate_failures_total{reason="unknown_device",resource="nvidia.com/gpu"} `)
	if lines := strings.Count(p.log.String(), "allocation refused"); lines == 0 || lines > 200 {
		t.Errorf("the log has %d lines of it", lines)
	}
}

// admit runs a pod with one device.
func (p *program) admit(name string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	_, err := p.kubelet.AddPod(ctx, simkubelet.Pod{Namespace: "n", Name: name, Containers: []simkubelet.Container{
		{Name: "main", Requests: map[string]int{gpu: 1}},
	}})
	if err != nil {
		p.t.Fatalf("%s: %v\n%s", name, err, p.log)
	}
}

// TestFloodOfBytes checks that the longest requests that gRPC accepts, as dense as possible, from as many
// connections as allowed, take bounded memory.
func TestFloodOfBytes(t *testing.T) {
	long(t)
	p := start(t, options{profile: replicas(20)})
	p.shows(gpu, 40)
	dense := &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: make([]string, 2_000_000)}}}
	long := &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: []string{strings.Repeat("x", 4_000_000)}, AllocationSize: 1},
	}}
	before, stop := heap(), peak()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	var calls sync.WaitGroup
	perClient := repeat.Times(1, 4)
	for range 10 {
		client := intruder(t, p)
		for range perClient {
			calls.Go(func() {
				if _, err := client.Allocate(ctx, dense); err == nil {
					t.Error("two million devices were granted")
				}
				_, _ = client.GetPreferredAllocation(ctx, long)
			})
		}
	}
	for n := range 10 {
		p.admit("pod-" + string(rune('a'+n)))
	}
	calls.Wait()
	most := stop()
	t.Logf("%d MiB at the most, %d MiB before", most>>20, before>>20)
	// Each call has 4 MB, up to three times: in the client, on the way, and in the server. Go's collector
	// lets as much garbage accumulate as is live.
	if most > before+uint64(perClient)*512<<20 {
		t.Errorf("%d MiB more than before", (most-before)>>20)
	}
	p.shows(gpu, 40)
}

// TestSecondStream checks that a client which opens streams beside the kubelet's is disconnected, and that
// the kubelet has its devices again.
func TestSecondStream(t *testing.T) {
	t.Parallel()
	p := start(t, options{profile: replicas(2)})
	p.shows(gpu, 4)
	first := p.kubelet.Snapshot().Resources[gpu].Socket
	client := intruder(t, p)
	ended := make(chan struct{})
	for range 50 {
		stream, err := client.ListAndWatch(p.ctx, &api.Empty{}) // An error means that it has ended.
		go func() {
			for err == nil {
				_, err = stream.Recv()
			}
			ended <- struct{}{}
		}()
	}
	for range 50 {
		select {
		case <-ended:
		case <-p.ctx.Done():
			t.Fatal("an intruder's stream is served without end")
		}
	}
	p.await(func(s simkubelet.Snapshot) bool {
		r := s.Resources[gpu]
		return r.Socket != first && r.Connected && r.Streams == 1 && r.Allocatable == 4
	})
}

// TestLingeringConnections checks that a kubelet which comes back is let in although the socket still has
// all the connections that it allows.
func TestLingeringConnections(t *testing.T) {
	t.Parallel()
	for name, linger := range map[string]func(*grpc.ClientConn) error{
		"idle": func(c *grpc.ClientConn) error {
			_, err := api.NewDevicePluginClient(c).GetDevicePluginOptions(t.Context(), &api.Empty{})
			return err
		},
		"in the middle of a call": func(c *grpc.ClientConn) error { // Its request never arrives.
			_, err := c.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, api.DevicePlugin_Allocate_FullMethodName)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, options{profile: replicas(2)})
			p.shows(gpu, 4)
			before := p.kubelet.Snapshot().Resources[gpu]
			lingering := make(chan error, 4)
			for range 4 {
				connection, err := grpc.NewClient("unix:"+filepath.Join(p.dir, before.Socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = connection.Close() })
				go func() { lingering <- linger(connection) }()
			}
			for range 3 { // The fourth waits until the kubelet's own connection is closed.
				if err := <-lingering; err != nil {
					t.Fatal(err)
				}
			}
			p.kubelet.DropStream(gpu)
			p.await(func(s simkubelet.Snapshot) bool {
				r := s.Resources[gpu]
				return r.Registrations > before.Registrations && r.Connected && r.Streams == 1 && r.Allocatable == 4
			})
		})
	}
}
