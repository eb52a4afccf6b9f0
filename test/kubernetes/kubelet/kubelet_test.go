package kubelet

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	cadvisor "github.com/google/cadvisor/info/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

// kubelet is a node's kubelet over all of its restarts.
type kubelet struct {
	t *testing.T
	// dir is the device-plugins directory; PodResources' socket is beside it.
	dir, podResources string
	policy            string
	pods              *pods
	ledger            *ledger

	// loop is held by what the kubelet does in its one loop.
	loop sync.Mutex
	// life is held by whatever needs process to stay.
	life sync.RWMutex
	*process
	// panics are the stacks of what would have killed the kubelet.
	mu     sync.Mutex
	panics []string
}

// process is one life of the kubelet.
type process struct {
	manager  *devicemanager.ManagerImpl
	topology topologymanager.Manager
	witness  *witness
	// ready says that every source of pods has been seen.
	ready   atomic.Bool
	crashed atomic.Bool
	unserve func()
}

// numaNodes are those of the machine.
func numaNodes() []cadvisor.Node { return []cadvisor.Node{{Id: 0}, {Id: 1}} }

// start begins a life, with the pods that run already.
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
	p := &process{manager: manager, topology: topology, witness: &witness{manager: manager, ledger: k.ledger}}
	if err := attach(manager, socket, p.witness); err != nil {
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
	// PodResources is served as late as this in the kubelet too.
	if err := manager.Start(klog.Background(), k.pods.GetActivePods, sources, containers, running); err != nil {
		return err
	}
	if p.unserve, err = servePodResources(k.podResources, k.pods, manager); err != nil {
		return err
	}
	k.process = p
	return nil
}

// end ends this life as a kill does: connections break, and nothing is written
// any more.
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
	k.witness.end()
	if err := k.manager.Stop(klog.Background()); err != nil {
		k.t.Errorf("stop kubelet: %v", err)
	}
}

// free lets go of the device manager's lock if a panic has left it locked, so
// that whoever waits for it can end.
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

// restart ends this life and, after a while, begins the next. The running pods
// still have to be admitted again, see readmit.
func (k *kubelet) restart(away time.Duration) {
	k.t.Helper()
	k.loop.Lock()
	defer k.loop.Unlock()
	k.life.Lock()
	defer k.life.Unlock()
	k.kill()
	k.ledger.restarted()
	nap(k.t.Context(), away)
	k.start()
}

// errCrashed says that the kubelet's code panicked.
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

// node is what the kubelet would publish of a resource; known is false when it
// would publish nothing.
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

// drop makes the kubelet let go of the resource's plugin, as it does when the
// plugin watcher deregisters one.
func (k *kubelet) drop(resource string) {
	k.life.RLock()
	defer k.life.RUnlock()
	k.manager.GetWatcherHandler().DeRegisterPlugin(resource, "")
}

// startContainer returns the units that a start of the pod's container is given,
// sorted.
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
	// The kubelet asks for devices in no order, so the plugin names units in none.
	slices.Sort(visible)
	return visible, err
}
