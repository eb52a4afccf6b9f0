package simkubelet

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// idSet is a set of device IDs or pod UIDs.
type idSet = sets.Set[string]

// deviceList is what the kubelet knows about a resource's devices. The zero value is for a resource
// known only from the checkpoint.
type deviceList struct {
	// all maps the IDs of the last list to its devices; the last of equal IDs wins. It is nil
	// before the first list.
	all map[string]*api.Device
	// healthy and unhealthy overlap when a list has an ID twice.
	healthy, unhealthy idSet
}

func newDeviceList(list []*api.Device) *deviceList {
	d := &deviceList{
		all:       make(map[string]*api.Device, len(list)),
		healthy:   idSet{},
		unhealthy: idSet{},
	}
	for _, device := range list {
		d.all[device.ID] = device
		if device.Health == api.Healthy {
			d.healthy.Insert(device.ID)
		} else {
			d.unhealthy.Insert(device.ID)
		}
	}
	return d
}

func (d *deviceList) capacity() int { return len(d.healthy) + len(d.unhealthy) }

func toDevices(list []*api.Device) []Device {
	devices := make([]Device, len(list))
	for i, device := range list {
		devices[i] = Device{ID: device.ID, Healthy: device.Health == api.Healthy}
	}
	return devices
}

// nodesOf returns the NUMA nodes of a device, sorted; nil for a nil device.
func nodesOf(device *api.Device) []int64 {
	var nodes []int64
	for _, node := range device.GetTopology().GetNodes() {
		nodes = append(nodes, node.GetID())
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// receiveList replaces the resource's devices, whichever stream sent the list, and writes the
// checkpoint.
func (k *Kubelet) receiveList(p *process, resource string, list []*api.Device) {
	k.lock()
	defer k.unlock()
	before := p.devices[resource]
	p.devices[resource] = newDeviceList(list)
	k.counter(resource).Lists++
	k.notify(Event{
		Kind:     ListReceived,
		Resource: resource,
		Devices:  toDevices(list),
	})
	for _, message := range checkList(resource, before, list, k.heldByPods(p)[resource]) {
		k.violation("%s", message)
	}
	k.checkUnits(p)
	k.writeCheckpoint(p)
}

// podDevices maps containers to the devices that they hold (cm/devicemanager/pod_devices.go). It
// keeps pods that have ended until the next updateAllocatedDevices.
type podDevices map[allocationKey]deviceAllocateInfo

// allocationKey is one resource of one container.
type allocationKey struct{ podUID, container, resource string }

type deviceAllocateInfo struct {
	// byNode maps NUMA nodes to device IDs. An ID on two nodes appears twice; an ID on no node is
	// under noNode.
	byNode map[int64][]string
	// response is the plugin's response. The container gets it each time it starts.
	response *api.ContainerAllocateResponse
}

// noNode stands for no NUMA node, also in the checkpoint (nodeWithoutTopology in
// the kubelet).
const noNode = -1

func newDeviceAllocateInfo(
	ids idSet,
	known map[string]*api.Device,
	response *api.ContainerAllocateResponse,
) deviceAllocateInfo {
	info := deviceAllocateInfo{byNode: map[int64][]string{}, response: response}
	for _, id := range sets.List(ids) {
		nodes := nodesOf(known[id])
		if len(nodes) == 0 {
			nodes = []int64{noNode}
		}
		for _, node := range nodes {
			info.byNode[node] = append(info.byNode[node], id)
		}
	}
	return info
}

func (i deviceAllocateInfo) ids() idSet {
	ids := idSet{}
	for _, onNode := range i.byNode {
		ids.Insert(onNode...)
	}
	return ids
}

// keys returns the keys sorted by pod, container and resource.
func (d podDevices) keys() []allocationKey {
	return slices.SortedFunc(maps.Keys(d), func(a, b allocationKey) int {
		return slices.Compare([]string{a.podUID, a.container, a.resource}, []string{b.podUID, b.container, b.resource})
	})
}

// resourcesOf returns the resources that the container holds devices of, sorted.
func (d podDevices) resourcesOf(podUID, container string) []string {
	var names []string
	for _, key := range d.keys() {
		if key.podUID == podUID && key.container == container {
			names = append(names, key.resource)
		}
	}
	return names
}

// updateAllocatedDevices forgets pods that have ended. Like the kubelet's
// UpdateAllocatedDevices it is called before devices are allocated to a pod and
// before List is answered, and does nothing until the kubelet has heard of all
// pods. The caller holds the lock.
func (k *Kubelet) updateAllocatedDevices(p *process) {
	if p.sourcesReady {
		live := k.livePods()
		maps.DeleteFunc(p.podDevices, func(key allocationKey, _ deviceAllocateInfo) bool {
			return !live.Has(key.podUID)
		})
	}
}

// allocated returns the devices of the resource that cannot be allocated: those in podDevices and
// those of the admission in progress.
func (p *process) allocated(resource string) idSet {
	ids := p.admitting[resource]
	for key, info := range p.podDevices {
		if key.resource == resource {
			ids = ids.Union(info.ids())
		}
	}
	return ids
}

// heldByPods returns the devices that live pods hold, by resource, including pods that this process
// has not heard of. The caller holds the lock.
func (k *Kubelet) heldByPods(p *process) map[string]idSet {
	live, held := k.livePods(), map[string]idSet{}
	for key, info := range p.podDevices {
		if live.Has(key.podUID) {
			held[key.resource] = held[key.resource].Union(info.ids())
		}
	}
	return held
}

// checkList returns the violations in a resource's next list, sorted. previous is the list before
// it, nil for none, and held are the devices that pods hold. A real kubelet reports none of the
// violations; some make it panic later.
func checkList(resource string, previous *deviceList, list []*api.Device, held idSet) []string {
	var violations []string
	complain := func(format string, arguments ...any) {
		violations = append(violations, resource+": "+fmt.Sprintf(format, arguments...))
	}
	seen := idSet{}
	for _, device := range list {
		switch {
		case device.ID == "":
			complain("list has a device without ID")
		case seen.Has(device.ID):
			complain("list has %s twice", device.ID)
		}
		seen.Insert(device.ID)
		if device.Health != api.Healthy && device.Health != api.Unhealthy {
			complain("health %q of %s counts as unhealthy", device.Health, device.ID)
		}
		if slices.ContainsFunc(nodesOf(device), func(node int64) bool { return node < 0 }) {
			complain("%s is on a negative NUMA node: no node is no topology", device.ID)
		}
		if device.Topology != nil && len(device.Topology.Nodes) == 0 {
			complain("%s has a topology without nodes: GetAllocatableResources does not show it", device.ID)
		}
	}
	if previous != nil {
		if dropped := previous.healthy.Difference(seen); len(dropped) > 0 {
			complain("list drops devices that were Healthy in the list before: %s", joinSome(dropped))
		}
	}
	if dropped := held.Difference(seen); len(dropped) > 0 {
		complain("list drops devices that pods hold: %s", joinSome(dropped))
	}
	slices.Sort(violations)
	return violations
}

// checkUnits reports units that can be allocated in two modes: in two resources, or as shares of
// two kinds ("3of10" is one of Virgate's shares by MPS). A unit is the part of an ID before "::".
// It is reported if it has free healthy devices in both modes, or if a pod holds it in one of them.
//
// The device with the unit's own ID may be a time-slice: it stays listed when the unit is no longer
// exclusive. The caller holds the lock.
func (k *Kubelet) checkUnits(p *process) {
	held := k.heldByPods(p)
	type mode struct {
		resource, of string
	}
	modeOf := map[string]mode{}
	conflicts := map[[2]string]idSet{}
	see := func(resource, id string) {
		unit, replica, _ := strings.Cut(id, "::")
		_, of, _ := strings.Cut(replica, "of")
		switch other, ok := modeOf[unit]; {
		case !ok:
			modeOf[unit] = mode{resource, of}
		case other != mode{resource, of}:
			pair := [2]string{other.resource, resource}
			if other.resource == resource {
				pair[1] += " as shares"
			}
			conflicts[pair] = conflicts[pair].Union(sets.New(unit))
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(p.devices)) {
		for _, id := range sets.List(held[resource]) {
			see(resource, id)
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(p.devices)) {
		for id := range p.devices[resource].healthy {
			if !held[resource].Has(id) && !p.admitting[resource].Has(id) {
				see(resource, id)
			}
		}
	}
	for _, pair := range slices.SortedFunc(maps.Keys(conflicts),
		func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		k.violation("units to be allocated both in %s and %s: %s", pair[0], pair[1], joinSome(conflicts[pair]))
	}
}

// joinSome lists IDs for a message, the first four of many.
func joinSome(ids idSet) string {
	const shown = 4
	sorted := sets.List(ids)
	if more := len(sorted) - shown; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(sorted[:shown], ", "), more)
	}
	return strings.Join(sorted, ", ")
}
