package plugin_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestEmptyPlan(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(sharing.Plan{})
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.manager.Apply(sharing.Plan{Health: plan(gpu, 2, 1).Health})
	b.await(func(k simkubelet.Snapshot) bool { return !k.Resources[gpu].Connected && k.Resources[gpu].Capacity == 0 })
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
}

func TestUnitFaultTakesAllReplicas(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	b.manager.Apply(withFault(plan(gpu, 2, 4), "GPU-0001", "XID 79"))
	b.shows(gpu, 8, 4)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
}

func TestRename(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	held := b.mustPod("p", gpu, 1)
	b.manager.Apply(plan(gpu+".shared", 2, 3))
	b.shows(gpu+".shared", 3, 3)
	b.shows(gpu, 1, 0)
	if _, err := b.kubelet.RestartContainer(b.ctx, "test", "p", "main"); err != nil {
		t.Errorf("container of %v: %v", held, err)
	}
	if err := b.kubelet.DeletePod("test", "p"); err != nil {
		t.Fatal(err)
	}
	b.shows(gpu+".shared", 6, 6)
	b.await(func(k simkubelet.Snapshot) bool { return !k.Resources[gpu].Connected })
}

// TestStopIsQuick stops the program, also while the kubelet is silent: the end does not wait for the
// registration's timeout of an hour.
func TestStopIsQuick(t *testing.T) {
	for _, test := range []struct {
		name   string
		silent bool
	}{{"with a stream", false}, {"silent kubelet", true}} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.kubelet.HangRegister(test.silent)
			b.manager.Apply(plan(gpu, 8, 10))
			b.await(func(k simkubelet.Snapshot) bool {
				r := k.Resources[gpu]
				return r.Registrations > 0 && (test.silent || r.Allocatable == 80)
			})
			b.stop()
			left, err := filepath.Glob(filepath.Join(b.dir, "virgate-*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	shared := plan(gpu, 2, 4)
	shared.Resources[0].FailRequestsGreaterThanOne = true
	spread := plan(gpu, 1, 4)
	spread.Resources[0].Policy, spread.Resources[0].SpreadStrict = sharing.Spread, true
	exclusive := plan(gpu, 2, 1)
	exclusive.Resources[0].FailRequestsGreaterThanOne = true
	for _, test := range []struct {
		name  string
		plan  sharing.Plan
		count int
		want  string
	}{
		{"one share only", shared, 2, "failRequestsGreaterThanOne"},
		{"one share", shared, 1, ""},
		{"several exclusive", exclusive, 2, ""},
		{"strict spread", spread, 2, "distinct GPUs"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.manager.Apply(test.plan)
			b.await(func(k simkubelet.Snapshot) bool {
				return k.Resources[gpu].Allocatable == len(test.plan.Resources[0].Devices)
			})
			_, err := b.pod("p", gpu, test.count)
			switch {
			case test.want == "" && err != nil:
				t.Error(err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestAwaitStopped(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	brief, cancel := context.WithTimeout(b.ctx, 50*time.Millisecond)
	defer cancel()
	if err := b.manager.AwaitStopped(brief); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stopped while it serves: %v", err)
	}
	b.manager.Apply(sharing.Plan{})
	if err := b.manager.AwaitStopped(b.ctx); err != nil {
		t.Error(err)
	}
	if r := b.kubelet.Snapshot().Resources[gpu]; r.Capacity != 0 {
		t.Errorf("capacity %d", r.Capacity)
	}
}

// gpusAs plans some GPUs, from the first on, with IDs as long as real ones
// and a NUMA node.
func gpusAs(first, count, replicas int) sharing.Plan {
	var gpus []sharing.GPU
	for i := range count {
		uuid := "GPU-" + string(rune('a'+first+i)) + strings.Repeat("0", 35)
		gpus = append(gpus, sharing.GPU{UUID: uuid, Index: first + i, Model: "Test", NUMANode: 1})
	}
	return sharing.NewPlan(gpus, sharing.Profile{
		MIGStrategy: sharing.MIGNone, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames:    []sharing.NamingRule{{Pattern: "*", Name: gpu}},
		TimeSlicing: []sharing.ReplicatedResource{{Path: "s", Resource: gpu, Replicas: replicas, Policy: sharing.Distributed}},
	})
}

// TestLongestList checks that the kubelet accepts the longest list that a plan can have, healthy and unhealthy.
func TestLongestList(t *testing.T) {
	b := newBench(t, nil)
	const gpus, replicas = 16, sharing.MaxDevices / 16
	longest := gpusAs(0, gpus, replicas)
	b.manager.Apply(longest)
	b.shows(gpu, gpus*replicas, gpus*replicas)
	broken := gpusAs(0, gpus, replicas)
	for _, unit := range longest.Resources[0].Units {
		withFault(broken, unit.ID, "broken")
	}
	b.manager.Apply(broken)
	b.shows(gpu, gpus*replicas, 0)
}

// TestLongestListsChange checks that when the maximum number of devices moves from one GPU to another, the list
// never exceeds the kubelet's limit, which would end the stream. Old devices are removed before any new one is
// added, on the same stream.
func TestLongestListsChange(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(gpusAs(0, 1, sharing.MaxDevices))
	b.shows(gpu, sharing.MaxDevices, sharing.MaxDevices)
	b.manager.Apply(gpusAs(1, 1, sharing.MaxDevices))
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[gpu]
		return r.Connected && r.Allocatable == sharing.MaxDevices && strings.HasPrefix(r.Devices[0].ID, "GPU-b")
	})
	if r := b.kubelet.Snapshot().Resources[gpu]; r.StreamsOpened != 1 || r.Registrations != 1 {
		t.Errorf("%d streams and %d registrations, want one of each", r.StreamsOpened, r.Registrations)
	}
}

// TestRoom checks that listed devices stay, and that new ones are added in the plan's order while there is room.
func TestRoom(t *testing.T) {
	old, next := gpusAs(0, 2, 3000), gpusAs(1, 3, sharing.MaxDevices/3)
	lists := plugin.Next(nil, old, plugin.KubeletSnapshot{}, plugin.RPCState{}, time.Unix(1000, 0), plugin.Timing{})
	lists = plugin.Next(lists, next, plugin.KubeletSnapshot{}, plugin.RPCState{}, time.Unix(1001, 0), plugin.Timing{})
	devices := map[byte]int{} // by the GPU's letter
	for _, e := range lists[gpu].Entries {
		devices[e.ID[4]]++
	}
	// Of GPU a all stay for now; b, c and d are wanted, and d is the last.
	const each = sharing.MaxDevices / 3
	want := map[byte]int{'a': 3000, 'b': each, 'c': each, 'd': sharing.MaxDevices - 3000 - 2*each}
	if diff := cmp.Diff(want, devices); diff != "" {
		t.Error(diff)
	}
}

// TestAllocateDuringRefresh allocates while the host and the grants keep changing. Each response comes from one
// state, never from two, and none is an error.
func TestAllocateDuringRefresh(t *testing.T) {
	hosts := make([]grant.Host, 8)
	for i := range hosts {
		hosts[i] = grant.Host{
			DevRoot: fmt.Sprintf("/driver-%d", i),
			Nodes:   map[string][]string{"GPU-0000": {fmt.Sprintf("/dev/nvidia%d", i)}, "GPU-0001": {fmt.Sprintf("/dev/nvidia%d", i)}},
			Extras:  []string{grant.CDIName("gds", fmt.Sprint(i))},
		}
	}
	plans := []sharing.Plan{by(plan(gpu, 2, 2), sharing.CDICRI, sharing.DriverMounts), by(plan(gpu, 2, 2), sharing.DriverMounts)}
	client, manager := dialManager(t, plans[0])
	manager.SetHost(hosts[0])
	awaitGrant(t, client, "GPU-0000::0", func(r *api.ContainerAllocateResponse) bool { return len(r.Devices) == 1 })

	// seen are the states that responses came from.
	var seen sync.Map
	var ended atomic.Bool
	var refresher, callers sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	refresher.Go(func() {
		for i := 0; !ended.Load(); i++ {
			manager.SetHost(hosts[i%len(hosts)])
			manager.Apply(plans[i%len(plans)])
		}
	})
	for n := range 4 {
		callers.Go(func() {
			for states := 0; states < len(hosts); {
				response, err := client.Allocate(ctx, allocate(fmt.Sprintf("GPU-%04d::%d", n%2, n/2)))
				if err != nil {
					t.Error(err)
					return
				}
				got := response.ContainerResponses[0]
				if !ofOneState(got) {
					t.Errorf("of several states: %v", got)
					return
				}
				seen.Store(got.Devices[0].HostPath, true)
				states = 0
				seen.Range(func(any, any) bool { states++; return true })
			}
		})
	}
	callers.Wait()
	ended.Store(true)
	refresher.Wait()
}

// ofOneState reports whether the node, its folder and the CDI entry have the same number.
func ofOneState(r *api.ContainerAllocateResponse) bool {
	if len(r.Devices) != 1 {
		return false
	}
	var folder, node int
	if _, err := fmt.Sscanf(r.Devices[0].HostPath, "/driver-%d/dev/nvidia%d", &folder, &node); err != nil || folder != node {
		return false
	}
	for _, entry := range r.CdiDevices[min(1, len(r.CdiDevices)):] {
		if entry.Name != grant.CDIName("gds", fmt.Sprint(node)) {
			return false
		}
	}
	return len(r.CdiDevices) != 1
}

// TestSwitchIsQuick switches with a removal delay of an hour. A name that stays always has allocatable devices.
func TestSwitchIsQuick(t *testing.T) {
	store := &memory{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Store = store
		options.Timing = plugin.Timing{RemovalDelay: time.Hour, StreamTimeout: time.Hour, VerifyAfter: time.Hour}
	})
	b.manager.Apply(plan(gpu, 8, 1))
	b.shows(gpu, 8, 8)
	name := gpu
	for _, to := range []struct {
		name     string
		replicas int
	}{{gpu, 4}, {gpu, 1}, {gpu + ".shared", 10}, {gpu, 1}, {gpu, 10}, {gpu + ".shared", 10}, {gpu + ".shared", 1}} {
		least := 1000
		b.manager.Apply(plan(to.name, 8, to.replicas))
		b.await(func(k simkubelet.Snapshot) bool {
			if to.name == name {
				least = min(least, k.Resources[name].Allocatable)
			}
			return k.Resources[to.name].Allocatable == 8*to.replicas
		})
		if least == 0 {
			t.Errorf("%s ×%d: nothing was allocatable", to.name, to.replicas)
		}
		name = to.name
	}
}

// TestSwitchAfterAPodThatHasEnded switches a GPU whose pod has just ended. The pod was seen, so nothing waits for
// the removal delay of an hour.
func TestSwitchAfterAPodThatHasEnded(t *testing.T) {
	kubelet := &looking{seen: make(chan struct{}, 1)}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing = plugin.Timing{RemovalDelay: time.Hour, StreamTimeout: time.Hour, VerifyAfter: time.Hour}
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 1))
	b.shows(gpu, 1, 1)
	b.mustPod("p", gpu, 1)
	select { // Nothing but the grant makes the manager look.
	case <-kubelet.seen:
	case <-b.ctx.Done():
		t.Fatal("the kubelet is not read after a grant")
	}
	awaitServed(t, b)
	if err := b.kubelet.DeletePod("test", "p"); err != nil {
		t.Fatal(err)
	}
	b.manager.Apply(byMPS(gpu, 1, 4))
	b.shows(gpu, 5, 4)
}

// looking reports each reading during which a pod holds a device.
type looking struct {
	direct
	seen chan struct{}
}

func (l *looking) Held(ctx context.Context) ([]sharing.Allocation, error) {
	held, err := l.direct.Held(ctx)
	if len(held) > 0 {
		select {
		case l.seen <- struct{}{}:
		default:
		}
	}
	return held, err
}

// TestHeldUnitSwitchesWhenItsHolderEnds has pods wait for exclusively held GPUs: none of them gets one in the old
// mode, and each GPU is shared once its own pod ends.
func TestHeldUnitSwitchesWhenItsHolderEnds(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Timing = plugin.Timing{RemovalDelay: time.Hour, StreamTimeout: time.Hour, VerifyAfter: time.Hour}
	})
	b.manager.Apply(plan(gpu, 4, 1))
	b.shows(gpu, 4, 4)
	for i := range 4 {
		b.mustPod(fmt.Sprint("old-", i), gpu, 1)
	}
	b.manager.Apply(byMPS(gpu, 4, 3))
	b.shows(gpu, 4, 0)
	for i := range 4 {
		if _, err := b.pod("waiting", gpu, 1); err == nil {
			t.Error("a pod was given a GPU that is to change")
		}
		if err := b.kubelet.DeletePod("test", fmt.Sprint("old-", i)); err != nil {
			t.Fatal(err)
		}
		b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 3*(i+1) })
		if i == 0 {
			b.mustPod("new", gpu, 1)
		}
	}
}

// TestGrowth shares each GPU of a full node once its own pod ends, and not before. A pod that takes the GPU at
// once gets one of the shares. The allocatable number never falls.
func TestGrowth(t *testing.T) {
	t.Parallel()
	store := &memory{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Store = store
		options.Timing = plugin.Timing{RemovalDelay: time.Hour, StreamTimeout: time.Hour, VerifyAfter: time.Hour}
	})
	b.manager.Apply(plan(gpu, 4, 1))
	b.shows(gpu, 4, 4)
	for i := range 3 {
		b.mustPod(fmt.Sprint("old-", i), gpu, 1)
	}
	allocatable := 4
	grows := func(to int) {
		t.Helper()
		b.await(func(k simkubelet.Snapshot) bool {
			now := k.Resources[gpu].Allocatable
			if now < allocatable {
				t.Errorf("%d devices are allocatable after %d", now, allocatable)
			}
			allocatable = now
			return now == to
		})
	}
	b.manager.Apply(plan(gpu, 4, 3))
	grows(3 + 3)
	b.mustPod("new", gpu, 3) // Of the GPU that is free, one of them with its first ID.
	for i := range 2 {
		if err := b.kubelet.DeletePod("test", fmt.Sprint("old-", i)); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			b.mustPod("quick", gpu, 1)
		}
		grows(6 + 2*(i+1))
	}
	kept, err := store.Load() // Lists are kept before the kubelet gets them.
	if err != nil {
		t.Fatal(err)
	}
	whole := 0
	for _, e := range kept[gpu].Entries {
		if e.Mode != sharing.TimeSliced {
			t.Errorf("%s is kept as %v", e.ID, e.Mode)
		}
		if e.Whole {
			whole++
		}
	}
	if whole != 1 {
		t.Errorf("%d of the GPUs are said to be promised to a pod alone", whole)
	}

	b.manager.Apply(plan(gpu, 4, 1)) // Back: the last of the old pods has had its GPU all the time.
	b.await(func(k simkubelet.Snapshot) bool {
		return k.Resources[gpu].Allocatable == 2 // The one of that pod, and the one that is free.
	})
}

// TestSwitchAfterPodsOfLongAgo switches GPUs whose pods were seen once and have ended, while the kubelet was not
// read. The GPUs are free, so not all of them switch at once.
func TestSwitchAfterPodsOfLongAgo(t *testing.T) {
	kubelet := &looking{seen: make(chan struct{}, 1)}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing = plugin.Timing{RemovalDelay: time.Hour, StreamTimeout: time.Hour, VerifyAfter: time.Hour}
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.mustPod("p", gpu, 2)
	select {
	case <-kubelet.seen:
	case <-b.ctx.Done():
		t.Fatal("the kubelet is not read after a grant")
	}
	awaitStatus(t, b, "the reading is taken up", func() bool { return b.manager.Status().KubeletSeen })
	if err := b.kubelet.DeletePod("test", "p"); err != nil {
		t.Fatal(err)
	}
	b.manager.Apply(byMPS(gpu, 2, 4))
	least := 2
	b.await(func(k simkubelet.Snapshot) bool {
		least = min(least, k.Resources[gpu].Allocatable)
		return k.Resources[gpu].Allocatable == 8
	})
	if least == 0 {
		t.Error("nothing was allocatable")
	}
}
