package plugin_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// behind is a kubelet that shows no device of a list: it has let go of the
// stream, or has lists before it that it has not read.
type behind struct{ looks atomic.Int64 }

func (b *behind) Held(context.Context) ([]sharing.Allocation, error) {
	b.looks.Add(1)
	return nil, nil
}
func (*behind) Applied(context.Context) (map[string][]string, error) { return nil, nil }
func (*behind) Serving(context.Context, string) (bool, error)        { return true, nil }

// listen opens a stream; the returned function reads one list, as "0 1 (2)" with
// the numbers of the devices, in brackets when Unhealthy.
func listen(t *testing.T, client api.DevicePluginClient) (next func() string, end func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	var stream grpc.ServerStreamingClient[api.ListAndWatchResponse]
	stream, err := client.ListAndWatch(ctx, &api.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	return func() string {
		t.Helper()
		list, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var words []string
		for _, d := range list.Devices {
			_, word, _ := strings.Cut(d.ID, "::")
			if d.Health == api.Unhealthy {
				word = "(" + word + ")"
			}
			words = append(words, word)
		}
		slices.Sort(words)
		return strings.Join(words, " ")
	}, cancel
}

func dialBehind(t *testing.T, interval time.Duration) (api.DevicePluginClient, *plugin.Manager, *behind) {
	t.Helper()
	kubelet := &behind{}
	client, manager := dialOptions(t, plugin.Options{
		Logger: slog.New(slog.DiscardHandler), Kubelet: kubelet,
		Timing: plugin.Timing{Quiet: 50 * time.Millisecond, ListInterval: interval},
	}, plan(gpu, 1, 4))
	return client, manager, kubelet
}

// TestToldBeforeItIsRemoved shrinks while the stream may not send: lists are
// coalesced, but never the one that says that a device is Unhealthy with the
// one that lacks it.
func TestToldBeforeItIsRemoved(t *testing.T) {
	client, manager, _ := dialBehind(t, 400*time.Millisecond)
	next, _ := listen(t, client)
	if got, want := next(), "0 1 2 3"; got != want {
		t.Fatalf("list %q, want %q", got, want)
	}
	manager.Apply(plan(gpu, 1, 2))
	for _, want := range []string{"(2) (3) 0 1", "0 1"} {
		if got := next(); got != want {
			t.Errorf("list %q, want %q", got, want)
		}
	}
}

// TestToldOnTheNewStream shrinks while there is no stream, long enough for
// devices to leave if the kubelet had been told.
func TestToldOnTheNewStream(t *testing.T) {
	client, manager, kubelet := dialBehind(t, time.Millisecond)
	next, end := listen(t, client)
	if got, want := next(), "0 1 2 3"; got != want {
		t.Fatalf("list %q, want %q", got, want)
	}
	end()
	awaitStreams(t, manager, 0)
	manager.Apply(plan(gpu, 1, 2))
	start, until := kubelet.looks.Load(), time.Now().Add(300*time.Millisecond)
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for (kubelet.looks.Load() < start+10 || time.Now().Before(until)) && manager.Status().Resources[0].Devices == 4 {
		<-again.C
	}
	next, _ = listen(t, client)
	for _, want := range []string{"(2) (3) 0 1", "0 1"} {
		if got := next(); got != want {
			t.Errorf("list %q, want %q", got, want)
		}
	}
}

func awaitStreams(t *testing.T, manager *plugin.Manager, wanted int) {
	t.Helper()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); <-again.C {
		if r := manager.Status().Resources; len(r) == 1 && r[0].Streams == wanted {
			return
		}
	}
	t.Fatalf("not %d streams", wanted)
}
