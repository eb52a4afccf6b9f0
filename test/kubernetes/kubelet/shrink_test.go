package kubelet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

func TestResizeOnTheOpenStream(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			v := b.startVirgate(quick())
			v.Apply(plan(4, profile{replicas: 4}))
			b.shows(gpu, 16, 16)
			p := b.run(gpu, 2)
			for _, replicas := range []int{8, 2, 4} {
				v.Apply(plan(4, profile{replicas: replicas}))
				b.shows(gpu, 4*replicas, 4*replicas)
			}
			v.Apply(plan(4, profile{replicas: 4, policy: sharing.Packed}))
			v.Apply(plan(4, profile{replicas: 4, policy: sharing.Packed, faulty: []int{2}}))
			b.shows(gpu, 16, 12)
			b.starts(p)
			if got := b.history.counts(gpu); got.connections != 1 || got.losses != 0 {
				t.Errorf("invariant 1: registered %d times, lost %d times", got.connections, got.losses)
			}
		})
	}
}

// Every way in which pods can hold more than is wanted. Their devices stay in the list, so the kubelet may
// admit its pods again after a restart or a resize. With NUMA nodes and a policy that asks for hints, it
// panics on a held device that is not listed (pkg/kubelet/cm/devicemanager/topology_hints.go). Without the
// case for held devices in inputs.appendSurplus, it panics here.
func TestShrinkBelowWhatIsHeld(t *testing.T) {
	lost := plan(2, profile{replicas: 8})
	lost.Resources[0].Units = lost.Resources[0].Units[:1]
	lost.Resources[0].Devices = lost.Resources[0].Devices[:8]
	delete(lost.Health, gpus("", 1, 1)[0].UUID)

	for _, test := range []struct {
		name string
		plan sharing.Plan
		// want returns the capacity and the allocatable number under the old name, while pods hold this
		// many devices of the two GPUs.
		want        func(first, second int) (capacity, allocatable int)
		retireAfter time.Duration
		// unhealthy is true if a pod holds devices that are Unhealthy now.
		unhealthy bool
	}{
		{name: "fewer replicas", plan: plan(2, profile{replicas: 2}),
			want: func(a, b int) (int, int) { return max(2, a) + max(2, b), max(2, a) + max(2, b) }},
		{name: "fewer replicas, retired", plan: plan(2, profile{replicas: 2}), retireAfter: time.Millisecond, unhealthy: true,
			want: func(a, b int) (int, int) { return max(2, a) + max(2, b), 4 }},
		{name: "GPU excluded", plan: plan(2, profile{replicas: 8, excluded: []int{1}}), unhealthy: true,
			want: func(_, b int) (int, int) { return 8 + b, 8 }},
		{name: "GPU faulty", plan: plan(2, profile{replicas: 8, faulty: []int{1}}), unhealthy: true,
			want: func(_, _ int) (int, int) { return 16, 8 }},
		{name: "GPU lost", plan: lost, unhealthy: true,
			want: func(_, b int) (int, int) { return 8 + b, 8 }},
		{name: "exclusive", plan: plan(2, profile{replicas: 1}), unhealthy: true,
			want: func(a, b int) (int, int) { return a + b, 0 }},
		{name: "nothing wanted", plan: sharing.Plan{Health: plan(2, profile{replicas: 1}).Health}, unhealthy: true,
			want: func(a, b int) (int, int) { return a + b, 0 }},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, topologymanager.PolicyBestEffort)
			timing := quick()
			timing.RetireAfter = test.retireAfter
			v := b.startVirgate(timing)
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			for range 5 {
				b.run(gpu, 2)
			}
			held := b.heldOf(b.pods.running()...)
			capacity, allocatable := test.want(held[0], held[1])
			v.Apply(test.plan)
			b.shows(gpu, capacity, allocatable)
			b.lookAgain(test.unhealthy)
			b.restart(0)
			b.shows(gpu, capacity, allocatable)
			if err := b.readmit(); err != nil {
				t.Error(err)
			}
			b.lookAgain(test.unhealthy)

			for _, p := range b.pods.running() {
				b.delete(p)
			}
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			b.run(gpu, 16)
		})
	}
}

// heldOf counts the pods' devices by the index of their GPU.
func (b *bench) heldOf(pods ...*pod) [2]int {
	var held [2]int
	for i, gpu := range gpus("", 0, len(held)) {
		for _, p := range pods {
			for _, id := range p.devices {
				if unit, _, _ := sharing.ParseDeviceID(id); unit == gpu.UUID {
					held[i]++
				}
			}
		}
	}
	return held
}

// lookAgain resizes every pod and starts its container. Only a resize of a pod with unhealthy devices may
// be refused.
func (b *bench) lookAgain(unhealthy bool) {
	b.t.Helper()
	refused := 0
	for _, p := range b.pods.running() {
		b.starts(p)
		if err := b.resize(p); errors.As(err, new(rejection)) {
			refused++
		} else if err != nil {
			b.t.Error(err)
		}
	}
	if (refused > 0) != unhealthy {
		b.t.Errorf("%d resizes refused", refused)
	}
}

// unhealthySince is when the kubelet was told that a device is Unhealthy; it has not been told otherwise
// since.
type unhealthySince struct {
	// at is the time, and place the place of that view in the resource's history.
	at    time.Time
	place int
}

// removal notes that an Unhealthy device left the list, or that its plugin ended.
type removal struct {
	id   string
	told unhealthySince
	at   time.Time
}

// followTellings notes which devices became Unhealthy in the newest list, and which have left it.
func (a *resourceHistory) followTellings(now time.Time) {
	for id, healthy := range a.last {
		if _, already := a.unhealthy[id]; healthy {
			delete(a.unhealthy, id)
		} else if !already {
			a.unhealthy[id] = unhealthySince{now, len(a.views) - 1}
		}
	}
	for id, told := range a.unhealthy {
		if _, stays := a.last[id]; !stays {
			a.removals = append(a.removals, removal{id, told, now})
			delete(a.unhealthy, id)
		}
	}
}

// removed returns the resource's removals, in order.
func (l *listHistory) removed(resource string) []removal {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.account(resource).removals)
}

// excuse returns nil when Virgate had a right to remove the device during an admission that began
// with the belief at this place, and otherwise an error with what the kubelet was told since then.
func (l *listHistory) excuse(resource, id string, at int, ended time.Time, quiet time.Duration) error {
	if l.overtook(resource, id, at, ended, quiet) || l.flapped(resource, id, at) {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	var told []string
	for i := at; i < len(a.views); i++ {
		state := "not listed"
		if healthy, listed := a.views[i][id]; listed && healthy {
			state = "Healthy"
		} else if listed {
			state = "Unhealthy"
		}
		told = append(told, fmt.Sprintf("%s after %v", state, a.since[i].Sub(a.since[at])))
	}
	return fmt.Errorf("the admission ended after %v; the kubelet was told: %s", ended.Sub(a.since[at]), strings.Join(told, ", "))
}

// overtook reports whether an admission of the resource took longer than the removal delay. It began with
// the belief at this place in force and ended by the given time. During it, the kubelet was told that the
// device is Unhealthy, so it may have chosen the device before. By its end, the device had been Unhealthy
// for the removal delay and was then removed. A device that was removed earlier is no excuse.
func (l *listHistory) overtook(resource, id string, at int, ended time.Time, quiet time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	for _, r := range slices.Concat(a.removals, a.ended) {
		// The list without the device reaches the kubelet after the plugin has dropped the device, maybe
		// long after, so the admission's end counts if it is earlier.
		left := r.at
		if ended.Before(left) {
			left = ended
		}
		if r.id == id && r.told.place > at && left.Sub(r.told.at) >= quiet {
			return true
		}
	}
	return false
}

// The excuse for a refused device covers no removal that came too early.
func TestOvertook(t *testing.T) {
	const quiet = 50 * time.Millisecond
	const device, other = "GPU-1::1", "GPU-1::0"
	type list struct {
		after time.Duration // since the one before
		// devices are Healthy where true; nil ends the plugin.
		devices kubeletView
	}
	healthy, unhealthy, gone := kubeletView{other: true, device: true}, kubeletView{other: true, device: false}, kubeletView{other: true}
	for _, test := range []struct {
		name string
		// before came before the admission began, during after that.
		before, during []list
		// ended is when the admission ended, since the last list.
		ended time.Duration
		want  bool
	}{
		{name: "slow admission", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet, gone}}, want: true},
		{name: "list without it arrives late", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet + 9, gone}}, ended: -9, want: true},
		{name: "removed too early", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet - 1, gone}}, ended: time.Hour},
		{name: "refused too early, list late", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {2 * quiet, gone}}, ended: -quiet - 1},
		{name: "removed while Healthy", before: []list{{0, healthy}}, during: []list{{time.Hour, gone}}, ended: time.Hour},
		{name: "not removed", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {time.Hour, unhealthy}}, ended: time.Hour},
		{name: "Healthy again in between", before: []list{{0, healthy}},
			during: []list{{1, unhealthy}, {quiet, healthy}, {1, unhealthy}, {quiet - 1, gone}}, ended: time.Hour},
		{name: "told before the admission", before: []list{{0, healthy}, {1, unhealthy}}, during: []list{{quiet, gone}}},
		{name: "removed before the admission", before: []list{{0, healthy}, {1, unhealthy}, {quiet, gone}}, ended: time.Hour},
		{name: "plugin lost in between, told since", before: []list{{0, healthy}},
			during: []list{{1, nil}, {time.Hour, unhealthy}, {quiet - 1, gone}}, ended: time.Hour},
		{name: "plugin ended", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet, nil}, {1, healthy}}, want: true},
		{name: "plugin ended too early", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet - 1, nil}}, ended: time.Hour},
		{name: "unhealthy again in a longer list", before: []list{{0, healthy}},
			during: []list{{1, unhealthy}, {quiet / 2, unhealthy}, {quiet / 2, gone}}, want: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			now := time.Now()
			l := newListHistory(func(string, string) bool { return false })
			l.clock = func() time.Time { return now }
			take := func(lists []list) {
				for _, next := range lists {
					now = now.Add(next.after)
					if next.devices == nil {
						l.disconnected(gpu)
						continue
					}
					l.applied(gpu, l.received(gpu, response(next.devices)))
				}
			}
			take(test.before)
			at := l.now(gpu)
			take(test.during)
			ended := now.Add(test.ended)
			if got := l.overtook(gpu, device, at, ended, quiet); got != test.want {
				t.Errorf("%t, want %t", got, test.want)
			}
			if l.overtook(gpu, other, at, ended, quiet) || l.overtook(shared, device, at, ended, quiet) {
				t.Error("another device, or one of another resource, is excused")
			}
		})
	}
}

// A resource that ends was first reported without healthy devices.
func TestStopped(t *testing.T) {
	const quiet = 50 * time.Millisecond
	healthy, unhealthy, none := kubeletView{"GPU-1": true, "GPU-2": false}, kubeletView{"GPU-1": false, "GPU-2": false}, kubeletView{}
	for _, test := range []struct {
		name  string
		views []kubeletView
		ended time.Duration // since the first view; they come a millisecond apart
		want  bool
	}{
		{"told in time", []kubeletView{unhealthy, none}, quiet, true},
		{"told too late", []kubeletView{unhealthy, none}, quiet - 1, false},
		{"not ended", []kubeletView{unhealthy, unhealthy}, time.Hour, false},
		{"ended at once", []kubeletView{none}, 0, false},
		{"Healthy again", []kubeletView{unhealthy, healthy, unhealthy, none}, quiet, false},
		{"nothing new", nil, time.Hour, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			now := time.Now()
			l := newListHistory(func(string, string) bool { return false })
			l.clock = func() time.Time { return now }
			l.received(gpu, response(healthy))
			began, at := now, len(l.account(gpu).views)-1
			for i, view := range test.views {
				now = began.Add(time.Duration(i) * time.Millisecond)
				l.received(gpu, response(view))
			}
			if got := l.stopped(gpu, at, began.Add(test.ended), quiet); got != test.want {
				t.Errorf("%t, want %t", got, test.want)
			}
		})
	}
}

// The excuse is for one message only, about the resource.
func TestUnknownDevice(t *testing.T) {
	for _, test := range []struct {
		message, want string
		is            bool
	}{
		{`Allocate failed due to rpc error: code = NotFound desc = nvidia.com/gpu has no device "GPU-1::1", which is unexpected`, "GPU-1::1", true},
		{`Allocate failed due to rpc error: code = NotFound desc = nvidia.com/h100 has no device "GPU-1::1", which is unexpected`, "", false},
		{`nvidia.com/gpu has no device "GPU-1::1`, "", false},
		{`nvidia.com/gpu: device GPU-1::1 must not be used: XID 79`, "", false},
		{`requested number of devices unavailable for nvidia.com/gpu`, "", false},
	} {
		if got, is := unknownDevice(test.message, gpu); is != test.is || is && got != test.want {
			t.Errorf("%s: %q, %t", test.message, got, is)
		}
	}
}

func response(devices kubeletView) *api.ListAndWatchResponse {
	list := &api.ListAndWatchResponse{}
	for id, healthy := range devices {
		health := api.Unhealthy
		if healthy {
			health = api.Healthy
		}
		list.Devices = append(list.Devices, &api.Device{ID: id, Health: health})
	}
	return list
}

// A kubelet with unread lists shows the state before them. Without the wait in inputs.appendSurplus until the
// stream has been given the list with the device Unhealthy, Virgate takes the old state for that list's
// effect. Its next list then lacks a device that was Healthy in the one before.
func TestToldBeforeItIsRemoved(t *testing.T) {
	t.Parallel() // It waits for seconds.
	b := newBench(t, topologymanager.PolicyBestEffort)
	stall, goOn := b.stallLists()
	timing := quick()
	timing.ListInterval = 3 * time.Second // Much may change between two lists.
	v := b.startVirgate(timing)
	v.Apply(plan(2, profile{replicas: 2}))
	b.shows(gpu, 4, 4)
	sent := func(lists uint64) func() bool { return func() bool { return v.Status().Resources[0].Lists >= lists } }
	stall()
	v.Apply(plan(2, profile{replicas: 8}))
	b.await(sent(2), "the longer list sent")
	v.Apply(plan(2, profile{replicas: 2}))
	b.await(sent(3), "another one")
	goOn()
	b.await(func() bool { return b.history.counts(gpu).lists >= 3 }, "the kubelet to read on")
	b.shows(gpu, 4, 4)
}

// A kubelet that has not read the list yet still grants what it believes to be Healthy. Without the wait in
// inputs.appendSurplus until the kubelet has applied the list, Virgate no longer knows those devices and
// refuses them.
func TestServesAKubeletThatIsBehind(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	stall, goOn := b.stallLists()
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	stall()
	v.Apply(plan(2, profile{replicas: 2}))
	b.await(func() bool { return v.Status().Resources[0].Lists == 2 }, "the list sent")
	nap(t.Context(), time.Second) // Twenty times the removal delay.
	p := b.run(gpu, 16)
	goOn()
	b.starts(p)
	b.delete(p)
	b.shows(gpu, 4, 4)
}

// A kubelet that has lost the stream shows no device as Healthy, whatever it was told. Without the reset in
// inputs.appendSurplus after a lost stream, the removal delay that began on the old stream would continue.
func TestRemovalDelayBeginsAnewOnANewStream(t *testing.T) {
	t.Parallel() // It waits for seconds.
	const quiet = 6 * time.Second
	b := newBench(t, topologymanager.PolicyBestEffort)
	timing := quick()
	timing.RemovalDelay = quiet
	v := b.startVirgate(timing)
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	v.Apply(plan(2, profile{replicas: 2}))
	b.shows(gpu, 16, 4)
	nap(t.Context(), quiet/2)
	lost := time.Now()
	b.drop(gpu)
	b.shows(gpu, 16, 4)
	b.shows(gpu, 4, 4)
	for _, r := range b.history.removed(gpu) {
		if waited := r.at.Sub(lost); waited < quiet {
			t.Errorf("%s left the list %s after the stream was lost", r.id, waited)
		}
	}
}

// stallLists returns two functions: between their calls the kubelet reads no list.
func (b *bench) stallLists() (stall, goOn func()) {
	var stalled atomic.Bool
	released := make(chan struct{})
	b.observer.reading = func() {
		if stalled.Load() {
			<-released
		}
	}
	goOn = sync.OnceFunc(func() {
		stalled.Store(false)
		close(released)
	})
	b.t.Cleanup(goOn)
	return func() { stalled.Store(true) }, goOn
}

// delay is a kubelet that pauses after it has chosen devices, or after their plugin has answered. The
// plugin sees nothing of that, because no call is in progress.
type delay struct {
	deviceplugin.DevicePlugin
	api.DevicePluginClient
	chosen, answered func()
}

// API is called by the device manager.
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

// The list shrinks while the kubelet is in the middle of an admission that takes longer than the protocol
// does without the removal delay. Without that delay in inputs.removable, the device has left the list when
// the kubelet continues: the kubelet is refused a device that was free, and with a plugin that granted it
// all the same, it would panic.
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
			b.observer.slow = func(plugin deviceplugin.DevicePlugin) deviceplugin.DevicePlugin {
				return delay{DevicePlugin: plugin, chosen: stall(test.chosen), answered: stall(test.after)}
			}
			timing := quick()
			timing.RemovalDelay = quiet
			v := b.startVirgate(timing)
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			admitted := make(chan error, 1)
			go func() {
				_, err := b.admit(gpu, 3)
				admitted <- err
			}()
			<-reached
			v.Apply(plan(2, profile{replicas: 2}))
			if err := <-admitted; err != nil {
				t.Error(err)
			}
			for _, p := range b.pods.running() {
				b.starts(p)
				// Its devices may have been free and Unhealthy when they were granted.
				b.await(func() bool { return b.resize(p) == nil }, "the pod's devices to be Healthy")
			}
		})
	}
}

// PodResources is not mounted: what is held and applied is known only from the kubelet's checkpoint, also
// over a restart of the kubelet. Without podresources.ParseCheckpoint nothing is known, and no list ever
// shrinks.
func TestCheckpointAlone(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			v := b.startVirgateThatReads("", quick())
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			p := b.run(gpu, 6)
			v.Apply(plan(2, profile{replicas: 2}))
			held := b.heldOf(p)
			kept := max(2, held[0]) + max(2, held[1])
			b.shows(gpu, kept, kept)
			b.restart(0)
			b.shows(gpu, kept, kept)
			if err := b.readmit(); err != nil {
				t.Error(err)
			}
			b.starts(p)
			if err := b.resize(p); err != nil {
				t.Error(err)
			}

			b.delete(p)
			b.await(func() bool {
				b.delete(b.run(gpu, 1)) // The kubelet forgets deleted pods when it admits one.
				nap(t.Context(), 2*quick().RemovalDelay)
				capacity, allocatable, _ := b.node(gpu)
				return capacity == 4 && allocatable == 4
			}, "a list of 4")
		})
	}
}
