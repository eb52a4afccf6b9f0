package kubelet

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	cadvisor "github.com/google/cadvisor/info/v1"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/shortdir"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	m.Run()
}

// bench is a node: a kubelet, and the plugin that serves it.
type bench struct {
	*kubelet
	log *slog.Logger
	// reader, when set, wraps what the next Virgate reads of the kubelet.
	reader func(plugin.Kubelet) plugin.Kubelet
}

// newBench starts a kubelet. When the test ends, it fails if the kubelet
// crashed or a list broke a rule.
func newBench(t *testing.T, policy string) *bench {
	t.Helper()
	b := newNaiveBench(t, policy)
	t.Cleanup(func() {
		for _, stack := range b.crashes() {
			t.Errorf("this would have killed the kubelet: %s", stack)
		}
		for _, rule := range b.history.broken() {
			t.Error(rule)
		}
	})
	return b
}

// newNaiveBench starts a kubelet that the test may crash.
func newNaiveBench(t *testing.T, policy string) *bench {
	t.Helper()
	root := shortdir.New(t)
	k := &kubelet{
		t: t, policy: policy, pods: &pods{},
		dir: filepath.Join(root, "plugins"), podResources: filepath.Join(root, "podresources.sock"),
	}
	k.history = newListHistory(k.pods.holds)
	if err := os.Mkdir(k.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	k.start()
	t.Cleanup(func() {
		k.end()
	})
	b := &bench{kubelet: k, log: slog.New(slog.DiscardHandler)}
	if testing.Verbose() && os.Getenv("VIRGATE_LOG") != "" {
		b.log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return b
}

// policies are the topology policies that every test of admission runs under.
func policies() []string {
	return []string{topologymanager.PolicyNone, topologymanager.PolicyBestEffort}
}

// quick returns timing that makes removals happen within a test.
func quick() plugin.Timing {
	// A grant counts as held for the removal delay, so that must exceed the time that a starved kubelet
	// takes from an Allocate to its pod.
	return plugin.Timing{RemovalDelay: 300 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 2 * time.Second}
}

// since is how long it has been.
func since(began time.Time) time.Duration {
	return time.Since(began).Round(time.Millisecond) //nolint:forbidigo // for the report: no test is judged by it
}

// pause waits between two pods of a storm, and between two looks at a lock.
func pause() { nap(context.Background(), time.Millisecond) }

// await waits until the condition holds.
func (b *bench) await(condition func() bool, format string, args ...any) {
	b.t.Helper()
	await.True(b.t, fmt.Sprintf(format, args...), condition)
}

// shows waits until the kubelet publishes these numbers of the resource.
func (b *bench) shows(resource string, capacity, allocatable int) {
	b.t.Helper()
	var all, able int
	b.await(func() bool {
		all, able, _ = b.node(resource)
		return all == capacity && able == allocatable
	}, "%s with capacity %d and allocatable %d", resource, capacity, allocatable)
}

// run admits a pod, which must succeed.
func (b *bench) run(resource string, count int) *pod {
	b.t.Helper()
	p, err := b.admit(resource, count)
	if err != nil {
		b.t.Fatalf("admit a pod for %d of %s: %v", count, resource, err)
	}
	return p
}

// recovers waits until the kubelet admits a pod again after two plugins have had the resource. If the kubelet
// is slow to notice the end of one, it takes the next for it and drops it, too.
func (b *bench) recovers(resource string) {
	b.t.Helper()
	b.await(func() bool {
		p, err := b.admit(resource, 1)
		if err == nil {
			b.delete(p)
		}
		return err == nil
	}, "a pod with %s admitted", resource)
}

// starts starts the pod's container again, which must get the same units.
func (b *bench) starts(p *pod) {
	b.t.Helper()
	visible, err := b.startContainer(p)
	if err != nil {
		b.t.Fatal(err)
	}
	if !slices.Equal(visible, unitsOf(p)) {
		b.t.Errorf("%s with %v starts with %v", p.Name, p.devices, visible)
	}
}

// kubelet is a node's kubelet across all of its restarts.
type kubelet struct {
	t *testing.T
	// dir is the device-plugins directory; PodResources' socket is beside it.
	dir, podResources string
	policy            string
	pods              *pods
	history           *listHistory

	// loop is held by what the kubelet does in its single loop.
	loop sync.Mutex
	// life is held by code that needs process to stay.
	life sync.RWMutex
	*process
	// panics are the stacks of panics that would have killed the kubelet.
	mu     sync.Mutex
	panics []string
}

// process is one life of the kubelet.
type process struct {
	manager  *devicemanager.ManagerImpl
	topology topologymanager.Manager
	observer *observer
	// ready is true once every source of pods has been seen.
	ready   atomic.Bool
	crashed atomic.Bool
	unserve func()
}

// numaNodes are the machine's NUMA nodes.
func numaNodes() []cadvisor.Node { return []cadvisor.Node{{Id: 0}, {Id: 1}} }

// start begins a life, with the pods that already run.
func (k *kubelet) start() {
	k.t.Helper()
	if err := k.begin(); err != nil {
		k.t.Fatalf("start kubelet: %v", err)
	}
}

func (k *kubelet) begin() error {
	topology, err := topologymanager.NewManager(numaNodes(), k.policy, topologymanager.ContainerTopologyScope, nil)
	if err != nil {
		return err
	}
	socket := filepath.Join(k.dir, "kubelet.sock")
	manager, err := newManagerImpl(klog.Background(), socket, numaNodes(), topology)
	if err != nil {
		return err
	}
	p := &process{manager: manager, topology: topology, observer: &observer{manager: manager, history: k.history}}
	if err := attach(manager, socket, p.observer); err != nil {
		return err
	}
	topology.AddHintProvider(klog.Background(), manager)

	containers, running := containermap.NewContainerMap(), sets.New[string]()
	for _, pod := range k.pods.running() {
		id := "container-of-" + pod.Name
		containers.Add(string(pod.UID), pod.container().Name, id)
		running.Insert(id)
	}
	p.ready.Store(len(running) == 0)
	sources := config.NewSourcesReady(func(sets.Set[string]) bool { return p.ready.Load() })
	// The kubelet, too, serves PodResources this late.
	if err := manager.Start(klog.Background(), k.pods.GetActivePods, sources, containers, running); err != nil {
		return err
	}
	if p.unserve, err = servePodResources(k.podResources, k.pods, manager); err != nil {
		return err
	}
	k.process = p
	return nil
}

// end ends this life as a kill does: connections break, and nothing more is written.
func (k *kubelet) end() {
	k.loop.Lock()
	defer k.loop.Unlock()
	if k.crashed.Load() {
		free(k.manager)
	}
	k.life.Lock()
	defer k.life.Unlock()
	k.kill()
}

func (k *kubelet) kill() {
	k.unserve()
	k.observer.end()
	if err := k.manager.Stop(klog.Background()); err != nil {
		k.t.Errorf("stop kubelet: %v", err)
	}
}

// free unlocks the device manager's lock if a panic has left it locked, so that goroutines which wait for
// it can end.
func free(manager *devicemanager.ManagerImpl) {
	mutex := locked(manager)
	for range 1000 {
		if mutex.TryLock() {
			mutex.Unlock()
			return
		}
		pause()
	}
	mutex.Unlock()
}

// restart ends this life and, after a while, begins the next. The running pods must then be admitted again,
// see readmit.
func (k *kubelet) restart(away time.Duration) {
	k.t.Helper()
	k.loop.Lock()
	defer k.loop.Unlock()
	k.life.Lock()
	defer k.life.Unlock()
	k.kill()
	k.history.restarted()
	nap(k.t.Context(), away)
	k.start()
}

// errCrashed is a panic of the kubelet's code.
type errCrashed struct{ stack string }

func (e errCrashed) Error() string { return "the kubelet crashed: " + e.stack }

// survive runs a part of the kubelet and returns its panic as an error.
func (k *kubelet) survive(part func() error) (err error) {
	k.life.RLock()
	defer k.life.RUnlock()
	if k.crashed.Load() {
		return errCrashed{"earlier"}
	}
	defer func() {
		if cause := recover(); cause != nil {
			k.crashed.Store(true)
			stack := fmt.Sprintf("%v\n%s", cause, debug.Stack())
			k.mu.Lock()
			defer k.mu.Unlock()
			k.panics = append(k.panics, stack)
			err = errCrashed{stack}
		}
	}()
	return part()
}

// crashes returns the stacks of all panics so far.
func (k *kubelet) crashes() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]string(nil), k.panics...)
}

// node returns what the kubelet would publish about a resource; known is false when it would publish
// nothing.
func (k *kubelet) node(resource string) (capacity, allocatable int, known bool) {
	k.life.RLock()
	defer k.life.RUnlock()
	all, free, _ := k.manager.GetCapacity()
	for name, quantity := range all {
		if string(name) == resource {
			able := free[name]
			return int(quantity.Value()), int(able.Value()), true
		}
	}
	return 0, 0, false
}

// drop makes the kubelet drop the resource's plugin, as it does when the plugin watcher deregisters one.
func (k *kubelet) drop(resource string) {
	k.life.RLock()
	defer k.life.RUnlock()
	k.manager.GetWatcherHandler().DeRegisterPlugin(resource, "")
}

// startContainer starts the pod's container and returns the units that it gets, sorted.
func (k *kubelet) startContainer(p *pod) (visible []string, err error) {
	err = k.survive(func() error {
		options, err := k.manager.GetDeviceRunContainerOptions(context.Background(), p.Pod, p.container())
		if err != nil {
			return fmt.Errorf("start %s: %w", p.Name, err)
		}
		if options == nil {
			return fmt.Errorf("start %s: the kubelet knows of no devices", p.Name)
		}
		for _, env := range options.Envs {
			visible = append(visible, strings.Split(env.Value, ",")...)
		}
		return nil
	})
	// The kubelet asks for devices in no fixed order, so the plugin names units in none.
	slices.Sort(visible)
	return visible, err
}

// newManagerImpl makes a device manager in any directory; the exported one
// knows only the kubelet's own.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(klog.Logger, string, []cadvisor.Node, topologymanager.Store) (*devicemanager.ManagerImpl, error)

// inside returns a private field of the struct that v is or points to.
func inside[T any](v reflect.Value, name string) *T {
	for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	return (*T)(unsafe.Pointer(v.FieldByName(name).UnsafeAddr()))
}

func locked(manager *devicemanager.ManagerImpl) *sync.Mutex {
	return inside[sync.Mutex](reflect.ValueOf(manager), "mutex")
}

// attach makes a plugin server that reports to observer the one of the manager.
func attach(manager *devicemanager.ManagerImpl, socket string, observer deviceplugin.ClientHandler) error {
	server, err := deviceplugin.NewServer(klog.Background(), socket, manager, observer)
	if err != nil {
		return err
	}
	*inside[deviceplugin.Server](reflect.ValueOf(manager), "server") = server
	return nil
}

// setBack moves the time at which the resource's plugin stopped into the past. It returns false when the
// manager does not know the resource or its plugin has not stopped.
func setBack(manager *devicemanager.ManagerImpl, resource string, by time.Duration) bool {
	mutex := locked(manager)
	mutex.Lock()
	defer mutex.Unlock()
	endpoint := reflect.ValueOf(manager).Elem().FieldByName("endpoints").MapIndex(reflect.ValueOf(resource))
	if !endpoint.IsValid() {
		return false
	}
	mutex = inside[sync.Mutex](endpoint.FieldByName("e"), "mutex")
	mutex.Lock()
	defer mutex.Unlock()
	stopped := inside[time.Time](endpoint.FieldByName("e"), "stopTime")
	if stopped.IsZero() {
		return false
	}
	*stopped = stopped.Add(-by)
	return true
}

// virgate is a running Virgate without its planning; the test makes the plans.
type virgate struct {
	*plugin.Manager
	source *podresources.Source
	cancel context.CancelFunc
	ended  chan struct{}
	// waits receives the reasons why it waits for its turn, and is closed when its turn comes.
	waits chan error
}

// startVirgate starts a Virgate. Like the program, it stands by while another one serves, and then takes
// over its state.
func (b *bench) startVirgate(timing plugin.Timing) *virgate {
	b.t.Helper()
	return b.startVirgateThatReads(b.podResources, timing)
}

// startVirgateThatReads starts a Virgate that reads this socket, if not empty, and the kubelet's
// checkpoint.
func (b *bench) startVirgateThatReads(socket string, timing plugin.Timing) *virgate {
	b.t.Helper()
	file := state.NewFile(b.dir, b.log)
	source := podresources.New(podresources.Options{Socket: socket, CheckpointDir: b.dir, Logger: b.log})
	ctx, cancel := context.WithCancel(context.Background())
	var reads plugin.Kubelet = source
	if b.reader != nil {
		reads = b.reader(source)
	}
	v := &virgate{source: source, cancel: cancel, ended: make(chan struct{}), waits: make(chan error, 100)}
	v.Manager = plugin.NewManager(plugin.Options{
		Dir: b.dir, Kubelet: reads, Store: state.Lists{File: file}, Timing: timing, Logger: b.log,
	})
	go func() {
		defer close(v.ended)
		lock, err := state.Acquire(ctx, b.dir, func(err error) { v.waits <- err })
		close(v.waits)
		if err != nil {
			return
		}
		file.Load()
		_ = v.Run(ctx)
		_ = lock.Release()
	}()
	b.t.Cleanup(func() { v.stop(b.t) })
	return v
}

// stop ends it. A second call does nothing.
func (v *virgate) stop(t *testing.T) {
	t.Helper()
	v.cancel()
	<-v.ended
	if err := v.source.Close(); err != nil {
		t.Error(err)
	}
}

// halt stops Virgate and waits until the kubelet has noticed for each of the resources.
func (b *bench) halt(v *virgate, resources ...string) {
	b.t.Helper()
	losses := map[string]int{}
	for _, resource := range resources {
		losses[resource] = b.history.counts(resource).losses
	}
	v.stop(b.t)
	for _, resource := range resources {
		b.await(func() bool {
			_, allocatable, _ := b.node(resource)
			return b.history.counts(resource).losses > losses[resource] && allocatable == 0
		}, "the kubelet to let go of %s", resource)
	}
}

// pod is a pod with one container, which requests devices of one resource. It is immutable.
type pod struct {
	*v1.Pod
	resource string
	count    int
	// devices are what the container got, sorted; nil before it is admitted.
	devices []string
}

// container returns the only one.
func (p *pod) container() *v1.Container { return &p.Spec.Containers[0] }

// pods are the node's active pods: those that wait for admission and those that run.
type pods struct {
	mu     sync.Mutex
	made   int
	active []*pod
	// cleaning is held while the device manager forgets the pods that were not
	// active when it began.
	cleaning sync.Mutex
}

// add makes a pod and returns it, active and without devices.
func (p *pods) add(resourceName string, count int) *pod {
	p.cleaning.Lock()
	defer p.cleaning.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made++
	name := fmt.Sprintf("pod-%05d", p.made)
	wanted := v1.ResourceList{v1.ResourceName(resourceName): *resource.NewQuantity(int64(count), resource.DecimalSI)}
	made := &pod{
		Pod: &v1.Pod{
			ObjectMeta: meta.ObjectMeta{Namespace: "test", Name: name, UID: types.UID("uid-" + name)},
			Spec: v1.PodSpec{Containers: []v1.Container{{
				Name: "main", Resources: v1.ResourceRequirements{Limits: wanted, Requests: wanted},
			}}},
		},
		resource: resourceName, count: count,
	}
	p.active = append(p.active, made)
	return made
}

// run records what an admitted pod got, and returns the pod that runs.
func (p *pods) run(admitted *pod, devices []string) *pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	running := *admitted
	running.devices = devices
	for i, other := range p.active {
		if other == admitted {
			p.active[i] = &running
		}
	}
	return &running
}

func (p *pods) remove(gone *pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active = slices.DeleteFunc(p.active, func(other *pod) bool { return other == gone })
}

// running returns the pods that have their devices, oldest first.
func (p *pods) running() []*pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.active), func(pod *pod) bool { return pod.devices == nil })
}

func (p *pods) isRunning(pod *pod) bool { return slices.Contains(p.running(), pod) }

// holds reports whether a running pod holds the device.
func (p *pods) holds(resource, id string) bool {
	return slices.ContainsFunc(p.running(), func(pod *pod) bool {
		return pod.resource == resource && slices.Contains(pod.devices, id)
	})
}

// GetActivePods is for the device manager and PodResources.
func (p *pods) GetActivePods() []*v1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	active := make([]*v1.Pod, len(p.active))
	for i, pod := range p.active {
		active[i] = pod.Pod
	}
	return active
}

// GetPods is for PodResources.
func (p *pods) GetPods() []*v1.Pod { return p.GetActivePods() }

// GetPodByName is for PodResources.
func (p *pods) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, pod := range p.GetActivePods() {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, true
		}
	}
	return nil, false
}

// The resource of most tests, and the name that it may be given.
const (
	gpu    = "nvidia.com/gpu"
	shared = "nvidia.com/gpu.shared"
)

// profile has only those fields of a profile that these tests change.
type profile struct {
	// resource is the name of the GPUs, gpu when empty.
	resource string
	replicas int
	policy   sharing.AllocationPolicy
	// faulty and excluded are indexes of GPUs.
	faulty, excluded []int
}

// gpus are GPUs of one model, alternately at one NUMA node and the other. first is the index of the first
// one.
func gpus(model string, first, count int) []sharing.GPU {
	gpus := make([]sharing.GPU, count)
	for i := range gpus {
		gpus[i] = sharing.GPU{
			UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", first+i), Index: first + i, Minor: first + i,
			Model: model, NUMANode: i % 2,
		}
	}
	return gpus
}

// plan plans this many GPUs under one profile.
func plan(count int, p profile) sharing.Plan {
	return planAll([]string{"GPU"}, count, map[string]profile{"GPU": p})
}

// planAll plans this many GPUs of each model under the model's profile.
func planAll(models []string, count int, profiles map[string]profile) sharing.Plan {
	whole := sharing.Profile{MIGStrategy: sharing.MIGNone, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID}
	var all []sharing.GPU
	for m, model := range models {
		p := profiles[model]
		if p.resource == "" {
			p.resource = gpu
		}
		if p.policy == "" {
			p.policy = sharing.Distributed
		}
		whole.GPUNames = append(whole.GPUNames, sharing.NamingRule{Pattern: sharing.Pattern(model), Name: p.resource})
		whole.TimeSlicing = append(whole.TimeSlicing, sharing.ReplicatedResource{Resource: p.resource, Replicas: p.replicas, Policy: p.policy})
		for i, gpu := range gpus(model, m*count, count) {
			if slices.Contains(p.faulty, i) {
				gpu.Health = sharing.Faulty("XID 79")
			}
			if slices.Contains(p.excluded, i) {
				whole.Exclude = append(whole.Exclude, mustSelect(gpu.UUID))
			}
			all = append(all, gpu)
		}
	}
	return sharing.NewPlan(all, whole)
}

func mustSelect(uuid string) sharing.Selector {
	selector, err := sharing.ParseSelector(uuid)
	if err != nil {
		panic(err) // GPUs makes no such UUID
	}
	return selector
}

// unitsOf returns the units of the pod's devices, sorted, each once.
func unitsOf(p *pod) []string {
	var units []string
	for _, id := range p.devices {
		unit, _, _ := sharing.ParseDeviceID(id)
		units = append(units, unit)
	}
	slices.Sort(units)
	return slices.Compact(units)
}
