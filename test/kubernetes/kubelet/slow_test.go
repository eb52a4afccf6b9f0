package kubelet

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// delay is a kubelet that has no time to go on: for a while after it has chosen
// devices, or after their plugin has answered. The plugin sees nothing of that,
// no call is in progress.
type delay struct {
	deviceplugin.DevicePlugin
	api.DevicePluginClient
	chosen, answered func()
}

// API is what the device manager calls.
func (d delay) API() api.DevicePluginClient {
	d.DevicePluginClient = d.DevicePlugin.API()
	return d
}

// Allocate calls the plugin.
func (d delay) Allocate(ctx context.Context, request *api.AllocateRequest, options ...grpc.CallOption) (*api.AllocateResponse, error) {
	d.chosen()
	response, err := d.DevicePluginClient.Allocate(ctx, request, options...)
	d.answered()
	return response, err
}

// The list shrinks while the kubelet is in the middle of an admission and slow,
// slower than the protocol is without its quiet time. Without that time in
// step.removable the device has left the list by the time that the kubelet goes
// on: it is refused a device that was free, and with a plugin that would grant
// it all the same the kubelet dies.
func TestShrinkWhileTheKubeletIsSlow(t *testing.T) {
	const quiet, slow = 8 * time.Second, 4 * time.Second
	for _, test := range []struct {
		name          string
		chosen, after bool
	}{{"after it has chosen", true, false}, {"after the answer", false, true}} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel() // It waits for seconds.
			b := newBench(t, topologymanager.PolicyBestEffort)
			reached := make(chan struct{}, 1)
			stall := func(now bool) func() {
				return func() {
					if now {
						reached <- struct{}{}
						nap(t.Context(), slow)
					}
				}
			}
			b.witness.slow = func(plugin deviceplugin.DevicePlugin) deviceplugin.DevicePlugin {
				return delay{DevicePlugin: plugin, chosen: stall(test.chosen), answered: stall(test.after)}
			}
			timing := quick()
			timing.Quiet = quiet
			v := b.startVirgate(timing)
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			admitted := make(chan error, 1)
			go func() {
				_, err := b.admit(gpu, 3)
				admitted <- err
			}()
			<-reached
			v.Apply(plan(2, profile{replicas: 1, excluded: []int{1}}))
			if err := <-admitted; err != nil {
				t.Error(err)
			}
			for _, p := range b.pods.running() {
				b.starts(p)
				// Its devices may have been free and Unhealthy when they were granted.
				b.await(patience, func() bool { return b.resize(p) == nil }, "the pod's devices to be Healthy")
			}
		})
	}
}
