package simkubelet

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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

// The kubelet asks for the options inside Register, so a plugin that answers
// neither until the other is done never registers.
func TestOptionsAreAskedInsideRegister(t *testing.T) {
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

func TestMisbehaviour(t *testing.T) {
	r := startRig(t, Options{})
	p := r.servePlugin(gpu, "a.sock")

	r.RefuseRegister(1)
	if err := p.register(r.ctx); status.Code(err) != codes.Unavailable {
		t.Errorf("refused Register: got %v", err)
	}

	r.SetSilent(true)
	silent := make(chan error, 1)
	ctx, cancel := context.WithCancel(r.ctx)
	go func() { silent <- p.register(ctx) }()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Registrations == 2 })
	cancel()
	if err := <-silent; status.Code(err) != codes.Canceled {
		t.Errorf("unanswered Register: got %v", err)
	}

	r.SetSilent(false)
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a")...)
	if r.DropStream("nvidia.com/other") || !r.DropStream(gpu) {
		t.Error("DropStream does not know which plugin is there")
	}
	p.awaitEnd()
	r.awaitCounts(gpu, 0, 1)

	const delay = 60 * time.Millisecond
	r.SlowStream(delay)
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	p.send(healthy("a")...)
	if took := time.Since(begin); took < delay/2 {
		t.Errorf("slow list took %v", took)
	}

	r.SlowStream(0)
	p.send(healthy("a", "b")...)
	r.awaitCounts(gpu, 2, 2)
	r.SlowStream(delay)
	begin = time.Now()
	p.server.Stop()
	r.await(func(s Snapshot) bool { return !s.Resources[gpu].Connected })
	if took := time.Since(begin); took < delay/2 {
		t.Errorf("the end of a slow stream took %v", took)
	}
}

// The end of a dropped stream does not take a newer client along, however late
// the kubelet notices it.
func TestDropStreamSparesNextClient(t *testing.T) {
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

// A stop must not wait for what only the plugin's patience ends.
func TestStopDuringRegister(t *testing.T) {
	r := startRig(t, Options{})
	p := r.servePlugin(gpu, "a.sock")
	failed := make(chan error, 2)
	go func() {
		failed <- registerWith(r.ctx, r.options.Dir, &api.RegisterRequest{Version: api.Version, Endpoint: "none.sock", ResourceName: gpu})
	}()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Registrations == 1 })
	r.SetSilent(true)
	go func() { failed <- p.register(r.ctx) }()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Registrations == 2 })
	begin := time.Now()
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("Stop took %v", took)
	}
	for range 2 {
		if err := <-failed; err == nil {
			t.Error("Register succeeded on a stopped kubelet")
		}
	}
}
