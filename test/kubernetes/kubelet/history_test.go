package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	limit "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
)

// listHistory is what one node's kubelets have received, across their restarts. It knows the rules that
// every list must obey, whatever plugin sends it.
type listHistory struct {
	// holds reports whether a running pod holds the device.
	holds func(resource, id string) bool
	clock func() time.Time

	mu         sync.Mutex
	resources  map[string]*resourceHistory
	violations []string
	// modes are each unit's last offered mode, switches how often that changed.
	modes    map[string]unitMode
	switches int
}

// unitMode is the name under which a unit is offered, and whether it is shared.
type unitMode struct {
	resource string
	shared   bool
}

// resourceHistory is the history of one resource.
type resourceHistory struct {
	// views are what the kubelet believed, in order: one for each list, and one with nothing healthy for
	// each loss of the plugin.
	views []kubeletView
	// since has the time of each.
	since []time.Time
	// inForce is the place of the newest one that the device manager has applied.
	inForce int
	// last is the newest list; seen has every ID ever listed.
	last kubeletView
	seen map[string]struct{}
	// unhealthy are the devices that are listed Unhealthy, removals those that have left the list, in
	// order; ended are those whose plugin ended.
	unhealthy       map[string]unhealthySince
	removals, ended []removal
	counters
}

// kubeletView maps each device in a list to whether it is Healthy.
type kubeletView map[string]bool

// counters count what happened to a resource.
type counters struct {
	lists, connections, losses int
	// removed and returned count IDs that left a list and that came back.
	removed, returned int
	// cycles counts the lists in which IDs came back after a removal.
	cycles int
	// shrunk is true if IDs have been removed since the last of these cycles.
	shrunk bool
}

func newListHistory(holds func(resource, id string) bool) *listHistory {
	return &listHistory{holds: holds, clock: time.Now, resources: map[string]*resourceHistory{}, modes: map[string]unitMode{}}
}

func (l *listHistory) account(resource string) *resourceHistory {
	if l.resources[resource] == nil {
		l.resources[resource] = &resourceHistory{views: []kubeletView{{}}, since: []time.Time{{}}, seen: map[string]struct{}{}, unhealthy: map[string]unhealthySince{}}
	}
	return l.resources[resource]
}

func (l *listHistory) connected(resource string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.account(resource).connections++
}

func (l *listHistory) disconnected(resource string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.account(resource).lose(l.clock())
}

// succeeded notes that the next list comes from a plugin that cannot know the last one, so invariant 6 does
// not bind it.
func (l *listHistory) succeeded(resource string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	unknown := kubeletView{}
	for id := range a.last {
		unknown[id] = false
	}
	a.last = unknown
}

// restarted notes that a new kubelet knows no plugin.
func (l *listHistory) restarted() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, account := range l.resources {
		account.lose(l.clock())
	}
}

func (a *resourceHistory) lose(now time.Time) {
	a.losses++
	a.views, a.since = append(a.views, kubeletView{}), append(a.since, now)
	a.inForce = len(a.views) - 1
	for id, told := range a.unhealthy {
		a.ended = append(a.ended, removal{id, told, now})
	}
}

// received checks a list that the kubelet is about to apply, and returns its place in the history.
func (l *listHistory) received(resource string, list *api.ListAndWatchResponse) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	next := kubeletView{}
	for _, device := range list.Devices {
		if _, twice := next[device.ID]; twice {
			l.violate("%s lists %s twice", resource, device.ID)
		}
		next[device.ID] = device.Health == api.Healthy
	}
	for id, healthy := range a.last {
		if _, stays := next[id]; stays {
			continue
		}
		a.removed++
		a.shrunk = true
		if healthy { // Even if the plugin was lost in between: Virgate tells every stream.
			l.violate("invariant 6: %s drops %s, Healthy in the list before", resource, id)
		}
		if l.holds(resource, id) {
			l.violate("invariant 5: %s drops %s, which a running pod holds", resource, id)
		}
	}
	back := 0
	for id := range next {
		_, listed := a.last[id]
		if _, seen := a.seen[id]; seen && !listed {
			back++
		}
		a.seen[id] = struct{}{}
	}
	a.returned += back
	if back > 0 && a.shrunk {
		a.cycles++
		a.shrunk = false
	}
	a.lists++
	a.last = next
	a.views, a.since = append(a.views, next), append(a.since, l.clock())
	a.followTellings(l.clock())
	l.checkOneName(resource, next)
	return len(a.views) - 1
}

// checkOneName is invariant 7: a unit with free Healthy devices in this resource has none in another. (A
// whole unit's device counts as a share, too, if the unit has grown.)
func (l *listHistory) checkOneName(resource string, next kubeletView) {
	ways := map[string]bool{}
	for id, healthy := range next {
		if !healthy || l.holds(resource, id) {
			continue
		}
		unit, _, shared := sharing.ParseDeviceID(id)
		ways[unit] = shared || ways[unit]
	}
	for unit, shared := range ways {
		if now := (unitMode{resource, shared}); l.modes[unit] != now {
			l.modes[unit] = now
			l.switches++
		}
	}
	for other, account := range l.resources {
		if other == resource {
			continue
		}
		for id, healthy := range account.views[len(account.views)-1] {
			unit, _, _ := sharing.ParseDeviceID(id)
			if _, offered := ways[unit]; healthy && offered && !l.holds(other, id) {
				l.violate("invariant 7: %s and %s both offer %s", resource, other, unit)
			}
		}
	}
}

// complain calls violate with the lock.
func (l *listHistory) complain(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.violate(format, args...)
}

func (l *listHistory) violate(format string, args ...any) {
	l.violations = append(l.violations, fmt.Sprintf(format, args...))
}

// applied notes that the device manager has applied the belief at this place.
func (l *listHistory) applied(resource string, at int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	a.inForce = max(a.inForce, at)
}

// now returns the place of the belief that is in force.
func (l *listHistory) now(resource string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.account(resource).inForce
}

// since returns the belief at this place and all later ones: those that may have been in force since.
func (l *listHistory) since(resource string, at int) []kubeletView {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.account(resource).views[at:])
}

// counts returns the counters of a resource.
func (l *listHistory) counts(resource string) counters {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.account(resource).counters
}

// list returns the newest list.
func (l *listHistory) list(resource string) kubeletView {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.account(resource).last
}

// broken returns the violations of the rules by lists, each as often as it happened.
func (l *listHistory) broken() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.violations)
}

// observer stands between the plugin clients and the device manager and records what passes.
type observer struct {
	manager *devicemanager.ManagerImpl
	history *listHistory
	// slow, when set, stands between the device manager and every plugin.
	slow func(deviceplugin.DevicePlugin) deviceplugin.DevicePlugin
	// reading, when set, is called before each list is recorded and passed on.
	reading func()

	// mu is held while the manager works. dead is true once its process has ended; what arrives later is
	// dropped.
	mu   sync.RWMutex
	dead bool
}

var errDead = errors.New("this kubelet has ended")

// PluginConnected passes on the registration of a plugin.
func (w *observer) PluginConnected(ctx context.Context, resource string, plugin deviceplugin.DevicePlugin) error {
	if w.slow != nil {
		plugin = w.slow(plugin)
	}
	// Without the lock: this call goes to the plugin and back.
	if err := w.manager.PluginConnected(ctx, resource, plugin); err != nil {
		return err
	}
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.dead {
		return errDead
	}
	w.history.connected(resource)
	return nil
}

// PluginDisconnected passes on that the kubelet has dropped a plugin.
func (w *observer) PluginDisconnected(logger klog.Logger, resource string) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if !w.dead {
		w.history.disconnected(resource)
		w.manager.PluginDisconnected(logger, resource)
	}
}

// PluginListAndWatchReceiver passes on a list.
func (w *observer) PluginListAndWatchReceiver(logger klog.Logger, resource string, list *api.ListAndWatchResponse) {
	if w.reading != nil {
		w.reading()
	}
	w.mu.RLock()
	defer w.mu.RUnlock()
	if !w.dead {
		at := w.history.received(resource, list)
		w.manager.PluginListAndWatchReceiver(logger, resource, list)
		w.history.applied(resource, at)
	}
}

// end returns when nothing reaches the manager any more.
func (w *observer) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead = true
}

// devicesProvider converts the device manager's devices to PodResources: an entry for each ID and NUMA node
// (container manager, cm/container_manager.go).
type devicesProvider struct {
	*devicemanager.ManagerImpl
	pods *pods
}

// UpdateAllocatedDevices forgets the pods that are gone. The kubelet reads which pods are active before it
// takes its lock, so it also forgets one that is admitted in between. That pod's container then gets
// devices again at its start, which can crash a kubelet that admits another pod just then
// (kubernetes#136021). These races are the kubelet's own, so here the two take turns.
func (p devicesProvider) UpdateAllocatedDevices() {
	p.pods.cleaning.Lock()
	defer p.pods.cleaning.Unlock()
	p.ManagerImpl.UpdateAllocatedDevices()
}

// GetDevices returns what a container holds.
func (p devicesProvider) GetDevices(podUID, container string) []*podresourcesapi.ContainerDevices {
	return entries(p.ManagerImpl.GetDevices(podUID, container))
}

// GetAllocatableDevices returns every healthy device.
func (p devicesProvider) GetAllocatableDevices() []*podresourcesapi.ContainerDevices {
	return entries(p.ManagerImpl.GetAllocatableDevices())
}

func entries(resources devicemanager.ResourceDeviceInstances) []*podresourcesapi.ContainerDevices {
	var all []*podresourcesapi.ContainerDevices
	for resource, devices := range resources {
		for id, device := range devices {
			entry := func(topology *podresourcesapi.TopologyInfo) {
				all = append(all, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}, Topology: topology})
			}
			if device.GetTopology() == nil {
				entry(nil)
			}
			for _, node := range device.GetTopology().GetNodes() {
				entry(&podresourcesapi.TopologyInfo{Nodes: []*podresourcesapi.NUMANode{{ID: node.GetID()}}})
			}
		}
	}
	return all
}

// nothingElse answers the questions that Virgate does not ask.
type nothingElse struct{}

func (nothingElse) GetCPUs(string, string) []int64                              { return nil }
func (nothingElse) GetAllocatableCPUs() []int64                                 { return nil }
func (nothingElse) GetMemory(string, string) []*podresourcesapi.ContainerMemory { return nil }
func (nothingElse) GetAllocatableMemory() []*podresourcesapi.ContainerMemory    { return nil }
func (nothingElse) GetDynamicResources(*v1.Pod, *v1.Container) []*podresourcesapi.DynamicResource {
	return nil
}

// servePodResources serves as the kubelet does, with its rate limit. The returned function ends it.
func servePodResources(socket string, pods *pods, manager *devicemanager.ManagerImpl) (func(), error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	server := grpc.NewServer(limit.WithRateLimiter(ctx, "podresources", podresources.DefaultQPS, podresources.DefaultBurstTokens))
	podresourcesapi.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(ctx, podresources.PodResourcesProviders{
		Pods: pods, Devices: devicesProvider{manager, pods},
		Cpus: nothingElse{}, Memory: nothingElse{}, DynamicResources: nothingElse{},
	}))
	return serveOn(listener, server), nil
}

// serveOn serves until the returned function is called, which may happen twice.
func serveOn(listener net.Listener, server *grpc.Server) (stop func()) {
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	return sync.OnceFunc(func() {
		server.Stop()
		<-served
	})
}
