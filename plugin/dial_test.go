package plugin_test

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
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
	client := dialSocket(t, dir)
	for late := time.After(10 * time.Second); !manager.Status().Served; {
		select {
		case <-manager.Changed():
		case <-late:
			t.Fatal("the plan is not served")
		}
	}
	return client, manager
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
