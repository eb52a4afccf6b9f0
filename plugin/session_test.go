package plugin

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/sharing"
)

// TestSocketName holds that names are used once, are found by RemoveSockets, and
// fit into a socket's address below the kubelet's own directory.
func TestSocketName(t *testing.T) {
	const dir = "/var/lib/kubelet/device-plugins/"
	const longest = 107 // bytes, of Linux' sockaddr_un without its end
	seen := map[string]bool{}
	for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/gpu", "nvidia.com/" + strings.Repeat("x", 63), "a/" + strings.Repeat("x", 300)} {
		name := socketName(resource)
		if seen[name] || strings.Contains(name, "/") || !strings.HasPrefix(name, socketPrefix) || !strings.HasSuffix(name, ".sock") {
			t.Errorf("%s: %s", resource, name)
		}
		if len(dir)+len(name) > longest {
			t.Errorf("%s: %d bytes", resource, len(dir)+len(name))
		}
		seen[name] = true
	}
}

// TestCloseWaitsForCalls holds that nothing serves when a successor may.
func TestCloseWaitsForCalls(t *testing.T) {
	dir, err := os.MkdirTemp("", "vs") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	called, answer := make(chan struct{}), make(chan struct{})
	s := &server{name: "nvidia.com/gpu", dir: dir, log: slog.New(slog.DiscardHandler), closing: newClosing(), now: func() time.Time {
		close(called)
		<-answer
		return time.Time{}
	}}
	s.publish(newGeneration(sharing.Resource{Name: s.name}, List{}, terms{}, nil, nil, nil))
	session, err := s.open()
	if err != nil {
		t.Fatal(err)
	}
	connection, err := grpc.NewClient("unix:"+session.path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	ended := make(chan error)
	go func() {
		_, err := api.NewDevicePluginClient(connection).GetPreferredAllocation(context.Background(), &api.PreferredAllocationRequest{})
		ended <- err
	}()
	<-called
	closed := make(chan struct{})
	go func() { defer close(closed); session.close() }()
	if err := <-ended; status.Code(err) != codes.Unavailable {
		t.Errorf("the call ends with %v", err)
	}
	select {
	case <-closed:
		t.Error("closed while a call is under way")
	case <-time.After(100 * time.Millisecond): // Nothing happens that could be awaited.
	}
	s.now = time.Now
	close(answer)
	<-closed
}
