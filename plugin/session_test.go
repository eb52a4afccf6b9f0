package plugin

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// TestSocketName checks that names are used once, are found by RemoveSockets, and
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

// TestCloseWaitsForCalls checks that no call is served any more when a successor may serve.
func TestCloseWaitsForCalls(t *testing.T) { synctest.Test(t, testCloseWaitsForCalls) }

func testCloseWaitsForCalls(t *testing.T) {
	called, answer := make(chan struct{}), make(chan struct{})
	s := &server{Options: Options{Logger: slog.New(slog.DiscardHandler)}, name: "nvidia.com/gpu", refusedUnits: newRefusedUnits()}
	s.Now = func() time.Time {
		close(called)
		<-answer
		return time.Time{}
	}
	s.publish(newGeneration(sharing.Resource{Name: s.name}, List{}, grantTerms{}, nil, nil, nil))
	listener := bufconn.Listen(1 << 10)
	session := s.serve("in memory", listener)
	connection, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
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
	synctest.Wait()
	select {
	case <-closed:
		t.Error("closed while a call is under way")
	default:
	}
	s.Now = time.Now
	close(answer)
	<-closed
}

// namedStream differs from others by its name.
type namedStream struct {
	grpc.ServerStream
	name string
}

// TestStreamState checks, step by step, the list that the open stream was sent.
func TestStreamState(t *testing.T) {
	first, second := &namedStream{name: "first"}, &namedStream{name: "second"}
	older := &generation{version: 1}
	newest := &generation{version: 2}
	r := &running{server: &server{name: "gpu"}}
	r.current.Store(newest)
	for _, step := range []struct {
		name       string
		last       *sentList
		sent, lost bool
	}{
		{"no stream yet", nil, false, true},
		{"one has opened", &sentList{&generation{}, first}, false, true},
		{"it was given a list", &sentList{older, first}, false, false},
		{"it was given the newest", &sentList{newest, first}, true, false},
		{"the same, repeated", &sentList{newest.repeated(), first}, true, false},
		{"replaced since", &sentList{newest, second}, true, true},
		{"asked again", &sentList{newest, second}, true, false},
		{"lost", nil, false, true},
		{"still lost", nil, false, true},
		{"back again", &sentList{older, second}, false, true},
		{"and given the newest", &sentList{newest, second}, true, false},
	} {
		r.sent.Store(step.last)
		into := RPCState{Sent: map[string]bool{}, Lost: map[string]bool{}}
		r.streamState(into)
		if sent, lost := into.Sent["gpu"], into.Lost["gpu"]; sent != step.sent || lost != step.lost {
			t.Errorf("%s: sent %t, lost %t", step.name, sent, lost)
		}
	}
}
