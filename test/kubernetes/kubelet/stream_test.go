package kubelet

import (
	"context"
	"errors"
	"maps"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	"github.com/virgate/virgate/plugin"
)

// Invariant 4. Without the retry in registrar.streamChanged the resource stays lost.
func TestDroppedByTheKubelet(t *testing.T) {
	b := newBench(t, topologymanager.PolicyNone)
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 2)
	for range 4 {
		losses := b.history.counts(gpu).losses
		b.await(func() bool {
			b.drop(gpu) // It does nothing while Virgate is not registered.
			return b.history.counts(gpu).losses > losses
		}, "the kubelet to let go")
		b.shows(gpu, 16, 16)
		b.starts(p)
	}
}

// A plugin that registered earlier ends, and the kubelet takes the newer one for it: it finds plugins by
// resource name alone (runClient in pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go). Virgate has no
// PodResources here, so it does not wait until the other one has gone.
func TestTakenForAnOlderPlugin(t *testing.T) {
	b := newBench(t, topologymanager.PolicyNone)
	stopOlder := b.startNaive(&naive{}, "older", 16)
	b.shows(gpu, 16, 16)
	manager := plugin.NewManager(plugin.Options{Dir: b.dir, Timing: quick(), Logger: b.log})
	manager.Apply(plan(2, profile{replicas: 8}))
	b.background(manager.Run)
	b.await(func() bool { return b.history.counts(gpu).lists == 2 }, "Virgate listed its devices")
	b.shows(gpu, 16, 16)
	stopOlder()
	b.await(func() bool { return b.history.counts(gpu).connections >= 3 }, "Virgate registered again")
	b.recovers(gpu)
	b.shows(gpu, 16, 16)
}

// If PodResources shows an older plugin, Virgate lets it end first: it registers once and is never taken
// for the other. Without the barrier in registrar.register it registers beside it and is dropped.
func TestWaitsForAnOlderPlugin(t *testing.T) {
	b := newBench(t, topologymanager.PolicyNone)
	stopOlder := b.startNaive(&naive{}, "older", 16)
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 2)
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.await(func() bool { return len(v.Status().Resources) == 1 }, "Virgate serves")
	nap(t.Context(), 500*time.Millisecond) // Virgate would have registered by now.
	stopOlder()
	b.await(func() bool { return b.history.counts(gpu).connections == 2 }, "Virgate registered")
	b.shows(gpu, 16, 16)
	if err := b.resize(p); err != nil {
		t.Error(err)
	}
	if got := b.history.counts(gpu); got.connections != 2 || got.losses != 1 {
		t.Errorf("%d registrations and %d losses, want the older one's, Virgate's, and the older one's end", got.connections, got.losses)
	}
}

// NVIDIA's plugin served this node before, with more replicas than are wanted now. If Next did not adopt
// what pods hold, Virgate's first list would lack those devices.
func TestSucceedsNVIDIAsPlugin(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	stopOlder := b.startNaive(&naive{}, "nvidia-gpu", 16)
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 6)
	stopOlder()
	b.shows(gpu, 16, 0)
	b.history.succeeded(gpu) // Virgate cannot know what else was listed.
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 2}))
	held := b.heldOf(p)
	kept := max(2, held[0]) + max(2, held[1])
	b.shows(gpu, kept, kept)
	if err := b.resize(p); err != nil {
		t.Error(err)
	}
	b.delete(p)
	b.shows(gpu, 4, 4)
	b.run(gpu, 1)
}

// The way back: NVIDIA's plugin has the same IDs, so pods do not notice.
func TestIsSucceededByNVIDIAsPlugin(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 6)
	listed := b.history.list(gpu)
	b.halt(v, gpu)

	b.startNaive(&naive{}, "nvidia-gpu", 16)
	b.shows(gpu, 16, 16)
	if got := b.history.list(gpu); !maps.Equal(got, listed) {
		t.Errorf("other devices: %v, before %v", got, listed)
	}
	if _, err := b.startContainer(p); err != nil { // This plugin names no devices to a container.
		t.Error(err)
	}
	if err := b.resize(p); err != nil {
		t.Error(err)
	}
	b.delete(p)
	b.run(gpu, 16)
}

// A foreign plugin registers the resource beside Virgate and ends again. The kubelet stops the endpoint,
// but leaves Virgate's stream open. Without server.isIgnored Virgate would never notice.
func TestForeignPluginComesAndGoes(t *testing.T) {
	t.Parallel() // It waits for seconds.
	b := newBench(t, topologymanager.PolicyNone)
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	stopForeign := b.startNaive(&naive{}, "foreign", 16)
	stopForeign()
	b.await(func() bool { return b.history.counts(gpu).connections >= 3 }, "Virgate registered again")
	b.recovers(gpu)
	b.shows(gpu, 16, 16)
}

// unfit fails when the kubelet connects to it.
type unfit struct{ naive }

func (*unfit) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return nil, status.Error(codes.Internal, "unfit")
}

// After a failed registration by a foreign plugin, the kubelet no longer notices the end of Virgate's
// stream: it has removed the name from its table of clients (connectClient in
// pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go). A restarted Virgate still serves, but later: it
// waits for the plugin that the kubelet still believes in.
func TestForeignRegistrationFails(t *testing.T) {
	t.Parallel() // It waits for seconds.
	b := newBench(t, topologymanager.PolicyNone)
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	endpoint, stopForeign := b.serve(&unfit{}, "foreign.sock")
	if err := b.register(gpu, endpoint); err == nil {
		t.Fatal("an unfit plugin was registered")
	}
	stopForeign()
	p := b.run(gpu, 1)
	v.stop(t)
	v = b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.recovers(gpu)
	b.starts(p)
}

// background runs the function until the test ends.
func (b *bench) background(run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	b.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			b.t.Error(err)
		}
	})
}
