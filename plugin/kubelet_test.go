package plugin_test

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// blind is a kubelet that cannot be read.
type blind struct{}

var errBlind = errors.New("not to be read")

func (blind) Held(context.Context) ([]sharing.Allocation, error) { return nil, errBlind }

func (blind) Applied(context.Context) (map[string][]string, error) { return nil, errBlind }

func (blind) Serving(context.Context, string) (bool, error) { return false, errBlind }

func TestBlindManagerKeepsWhatItGranted(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Kubelet = blind{} })
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	held := b.mustPod("p", gpu, 3)
	b.manager.Apply(withFault(plan(gpu, 1, 4), "GPU-0000", "XID 79")) // Another generation.
	b.shows(gpu, 4, 0)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 4, 3)
	for _, d := range b.kubelet.Snapshot().Resources[gpu].Devices {
		if slices.Contains(held, d.ID) != d.Healthy {
			t.Errorf("%s: Healthy %t, held are %v", d.ID, d.Healthy, held)
		}
	}
}

// forgetful returns holders like a kubelet whose checkpoint is older than a pod's end: without the pod's name,
// until it gets a list.
type forgetful struct {
	direct
	mu    sync.Mutex
	ghost sharing.Allocation
	lists int
}

func (f *forgetful) Held(ctx context.Context) ([]sharing.Allocation, error) {
	held, err := f.direct.Held(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ghost.Resource != "" && f.Snapshot().Resources[f.ghost.Resource].Lists <= f.lists {
		held = append(held, f.ghost)
	}
	return held, err
}

// haunt has the device held by a pod that is gone, until the next list.
func (f *forgetful) haunt(resource, id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	// One list announces the shrink, one may take the device back when the ghost is seen, and one lacks the free
	// devices; the ghost outlives them.
	f.lists = f.Snapshot().Resources[resource].Lists + 3
	f.ghost = sharing.Allocation{Pod: "uid:1", Resource: resource, Devices: []string{id}}
}

func TestStaleCheckpointIsRenewed(t *testing.T) {
	kubelet := &forgetful{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Kubelet = kubelet })
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	kubelet.haunt(gpu, "GPU-0000::3")
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
}

// slow returns holders only once the test allows it.
type slow struct {
	direct
	asked, answer chan struct{}
}

func (s slow) Held(ctx context.Context) ([]sharing.Allocation, error) {
	select {
	case s.asked <- struct{}{}:
	default:
	}
	select {
	case <-s.answer:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.direct.Held(ctx)
}

// TestFirstListHasWhatPodsHold takes over from a plugin without state. A first list without the held device would
// break the kubelet's contract.
func TestFirstListHasWhatPodsHold(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	b.mustPod("p", gpu, 4)
	b.stop()
	b.await(func(k simkubelet.Snapshot) bool { return !k.Resources[gpu].Connected })
	kubelet := slow{direct{b.kubelet}, make(chan struct{}, 1), make(chan struct{})}
	successor := b.succeed(plugin.Options{Kubelet: kubelet})
	successor.Apply(plan(gpu, 1, 2))
	<-kubelet.asked
	if served := successor.Status().Resources; len(served) > 0 {
		t.Errorf("it serves %+v before it knows who holds what", served)
	}
	close(kubelet.answer)
	b.shows(gpu, 4, 4)
}

// holding is a kubelet whose pods, in the namespace, hold all four devices.
type holding struct {
	namespace string
	looks     atomic.Int64
}

func (h *holding) Held(context.Context) ([]sharing.Allocation, error) {
	h.looks.Add(1)
	return []sharing.Allocation{{
		Namespace: h.namespace, Pod: "p", Container: "c", Resource: gpu,
		Devices: []string{"GPU-0000::0", "GPU-0000::1", "GPU-0000::2", "GPU-0000::3"},
	}}, nil
}
func (*holding) Applied(context.Context) (map[string][]string, error) { return nil, nil }
func (*holding) Serving(context.Context, string) (bool, error)        { return false, nil }

// TestListIsSentAgainWhileHoldersAreUncertain checks that a list is sent again once per removal delay while a
// change waits for a holder that the kubelet does not name, as its pod may be gone.
func TestListIsSentAgainWhileHoldersAreUncertain(t *testing.T) {
	t.Parallel()
	const quiet = 200 * time.Millisecond
	for _, row := range []struct {
		name, namespace string
		devices         int // that the plan wants
		awaited         []string
		reminds         bool
	}{
		{"devices are surplus", "", 2, nil, true},
		{"devices are surplus, and their pod is named", "test", 2, nil, false},
		{"the unit is awaited", "", 4, []string{"GPU-0001", "GPU-0000"}, true},
		{"another unit is awaited", "", 4, []string{"GPU-0001"}, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			kubelet := &holding{namespace: row.namespace}
			client, manager := dialOptions(t, plugin.Options{
				Logger: slog.New(slog.DiscardHandler), Kubelet: kubelet,
				Timing: plugin.Timing{RemovalDelay: quiet, ListInterval: time.Millisecond},
			}, plan(gpu, 1, 4))
			next, _ := listen(t, client)
			next()
			began := time.Now()
			manager.Apply(plan(gpu, 1, row.devices))
			var waiting sync.WaitGroup
			defer waiting.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			waiting.Go(func() {
				tick := time.NewTicker(5 * time.Millisecond)
				defer tick.Stop()
				for ctx.Err() == nil {
					manager.RefreshHolders(row.awaited...)
					<-tick.C
				}
			})
			if !row.reminds {
				for seen := kubelet.looks.Load(); kubelet.looks.Load() < seen+10; {
					runtime.Gosched()
				}
				if lists := manager.Status().Resources[0].Lists; lists != 1 {
					t.Errorf("sent %d times", lists)
				}
				return
			}
			for range 3 {
				if got, want := next(), "0 1 2 3"; got != want {
					t.Errorf("list %q, want %q", got, want)
				}
			}
			if now := time.Now(); now.Before(began.Add(2 * quiet)) {
				t.Errorf("sent three times in %s", now.Sub(began))
			}
		})
	}
}

// behind is a kubelet that shows no device of a list: it has dropped the stream, or has not read that far.
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
	ctx, cancel := context.WithTimeout(t.Context(), patience)
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
		Timing: plugin.Timing{RemovalDelay: 50 * time.Millisecond, ListInterval: interval},
	}, plan(gpu, 1, 4))
	return client, manager, kubelet
}

// TestToldBeforeItIsRemoved shrinks while the stream may not send. Lists are coalesced, but the list with the
// Unhealthy device is always sent before the list without it.
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

// TestToldOnTheNewStream shrinks without a stream, for long enough to remove the devices if the kubelet had
// received the list.
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
	for late := time.Now().Add(patience); time.Now().Before(late); <-again.C {
		if r := manager.Status().Resources; len(r) == 1 && r[0].Streams == wanted {
			return
		}
	}
	t.Fatalf("not %d streams", wanted)
}
