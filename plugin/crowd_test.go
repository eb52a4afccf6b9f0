package plugin_test

import (
	"errors"
	"fmt"
	"io"
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

// socketOf is the only plugin's socket in the folder of the client's manager.
func socketOf(t *testing.T, dir string) string {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(dir, "virgate-*.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets %q, %v", sockets, err)
	}
	return sockets[0]
}

// isOpen says that the server has not closed the connection. It waits a little for
// what has nothing to say.
func isOpen(t *testing.T, connection net.Conn, patience time.Duration) bool {
	t.Helper()
	if err := connection.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 512)
	for {
		_, err := connection.Read(buffer)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return true
		case err != nil:
			if !errors.Is(err, io.EOF) && !errors.As(err, new(*net.OpError)) {
				t.Errorf("read: %v", err)
			}
			return false
		}
	}
}

// TestHoarderKeepsNobodyOut holds that many connections that do nothing are
// closed in the order in which they came, that the one with the stream stays, and
// that who comes now is answered.
func TestHoarderKeepsNobodyOut(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	registered := b.kubelet.Snapshot().Resources[gpu].Registrations
	var idle []net.Conn
	for range 100 {
		connection, err := net.Dial("unix", socketOf(t, b.dir))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = connection.Close() })
		idle = append(idle, connection)
	}
	if isOpen(t, idle[0], 20*time.Second) {
		t.Error("the oldest idle connection is still open")
	}
	response, err := dialSocket(t, b.dir).Allocate(t.Context(), allocate("GPU-0000::0"))
	if err != nil || len(response.ContainerResponses) != 1 {
		t.Errorf("who comes now is answered %v, %v", response, err)
	}
	left := 0
	for _, connection := range idle {
		if isOpen(t, connection, 20*time.Millisecond) {
			left++
		}
	}
	if left == 0 || left > 8 {
		t.Errorf("%d idle connections are open, want the last few", left)
	}
	if r := b.kubelet.Snapshot().Resources[gpu]; r.Registrations != registered || r.Streams != 1 || !r.Connected {
		t.Errorf("the kubelet lost its stream: %+v", r)
	}
	b.mustPod("pod", gpu, 1)
}

// TestDenseRequest holds that a request with more in it than any list has devices
// is refused before anything is made of it, and a long honest one is not.
func TestDenseRequest(t *testing.T) {
	client := dialPlugin(t, plan(gpu, 2, 4))
	many := &api.AllocateRequest{}
	for range 1 << 18 {
		many.ContainerRequests = append(many.ContainerRequests, &api.ContainerAllocateRequest{})
	}
	one := &api.ContainerAllocateRequest{DevicesIds: make([]string, 1<<18)}
	for name, request := range map[string]*api.AllocateRequest{
		"containers": many, "devices": {ContainerRequests: []*api.ContainerAllocateRequest{one}},
	} {
		if _, err := client.Allocate(t.Context(), request); status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "more fields than any list has devices") {
			t.Errorf("many %s are answered %v", name, err)
		}
	}
	available := make([]string, 50_000)
	for i := range available {
		available[i] = fmt.Sprintf("GPU-00000000-0000-0000-0000-000000000000::%d", i)
	}
	response, err := client.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: available, MustIncludeDeviceIDs: available[:100], AllocationSize: 100},
	}})
	if err != nil || len(response.ContainerResponses[0].DeviceIDs) != 100 {
		t.Errorf("a long list is answered %v", err)
	}
}
