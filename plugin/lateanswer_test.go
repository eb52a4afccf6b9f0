package plugin_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin"
)

// listener is a kubelet that opens its stream, and whose answer to Register is
// lost, as on a machine so slow that the deadline has passed by then.
type listener struct {
	api.UnimplementedRegistrationServer
	dir string
	// life ends the streams.
	life          context.Context
	registrations atomic.Int32
	lists         chan int
}

func (l *listener) Register(_ context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	l.registrations.Add(1)
	connection, err := grpc.NewClient("unix:"+filepath.Join(l.dir, request.Endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	context.AfterFunc(l.life, func() { _ = connection.Close() })
	stream, err := api.NewDevicePluginClient(connection).ListAndWatch(l.life, &api.Empty{})
	if err != nil {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	l.lists <- len(first.Devices)
	go func() {
		for {
			list, err := stream.Recv()
			if err != nil {
				return
			}
			l.lists <- len(list.Devices)
		}
	}()
	return nil, errors.New("the answer is lost")
}

// Found by test/soak: the stream was there, and it was registered again beside
// it, which makes the kubelet drop one of the two.
func TestLostAnswerIsNotRegisteredAgain(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	heard := &listener{dir: dir, life: ctx, lists: make(chan int, 100)}
	socket, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	kubelet := grpc.NewServer()
	api.RegisterRegistrationServer(kubelet, heard)
	running.Go(func() { _ = kubelet.Serve(socket) })
	defer kubelet.Stop()
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	running.Go(func() { _ = manager.Run(ctx) })

	// Lists are 100 ms apart, and a first retry is sooner than three of them.
	for devices := 2; devices < 14; devices++ {
		manager.Apply(plan(gpu, 1, devices))
		for got := 0; got != devices; {
			select {
			case got = <-heard.lists:
			case <-ctx.Done():
				t.Fatalf("list of %d devices not received", devices)
			}
		}
	}
	if n := heard.registrations.Load(); n != 1 {
		t.Errorf("registered %d times beside an open stream, want once", n)
	}
}
