package plugin_test

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin"
)

// registry takes down who registers.
type registry struct {
	api.UnimplementedRegistrationServer
	endpoints chan string
}

func (r registry) Register(_ context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	r.endpoints <- request.Endpoint
	return &api.Empty{}, nil
}

// TestKubeletSocketComesLast: a kubelet removes all sockets before it makes its
// own. A plugin that looks in between has a new socket, finds nobody to register
// with, and its new socket is never wiped.
func TestKubeletSocketComesLast(t *testing.T) {
	dir := t.TempDir()
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = manager.Run(ctx) })
	manager.Apply(plan(gpu, 1, 2))

	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	var sockets []string
	// It has tried for sure, and found nobody, some looks after it has a socket.
	for looks := 0; looks < 50; <-again.C {
		var err error
		if sockets, err = filepath.Glob(filepath.Join(dir, "virgate-*.sock")); err != nil || ctx.Err() != nil {
			t.Fatal(err, ctx.Err())
		}
		looks += len(sockets)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	kubelet, registered := grpc.NewServer(), registry{endpoints: make(chan string, 1)}
	api.RegisterRegistrationServer(kubelet, registered)
	running.Go(func() { _ = kubelet.Serve(listener) })
	defer kubelet.Stop()
	select {
	case endpoint := <-registered.endpoints:
		if want := filepath.Base(sockets[0]); endpoint != want {
			t.Errorf("registered %s, want the socket that was there, %s", endpoint, want)
		}
	case <-ctx.Done():
		t.Error("not registered")
	}
}
