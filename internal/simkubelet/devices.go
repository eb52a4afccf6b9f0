package simkubelet

import (
	"slices"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// devices are what the kubelet knows of a resource. The zero value is a
// resource known from the checkpoint alone.
type devices struct {
	// listed says that this process has received a list.
	listed bool
	// all is the last list by ID; the last of equal IDs wins.
	all map[string]*api.Device
	// healthy and unhealthy overlap when a list has an ID twice.
	healthy, unhealthy set
}

func newDevices(list []*api.Device) *devices {
	d := &devices{listed: true, all: make(map[string]*api.Device, len(list)), healthy: set{}, unhealthy: set{}}
	for _, device := range list {
		d.all[device.ID] = device
		if device.Health == api.Healthy {
			d.healthy[device.ID] = struct{}{}
		} else {
			d.unhealthy[device.ID] = struct{}{}
		}
	}
	return d
}

func (d *devices) capacity() int { return len(d.healthy) + len(d.unhealthy) }

func (d *devices) makeUnhealthy() {
	d.unhealthy = d.unhealthy.union(d.healthy)
	d.healthy = set{}
}

// aligned says that some device is bound to a NUMA node, so that the topology
// manager has hints for the resource.
func (d *devices) aligned() bool {
	for _, device := range d.all {
		if len(nodesOf(device)) > 0 {
			return true
		}
	}
	return false
}

// described are the devices of a list, in its order.
func described(list []*api.Device) []Device {
	devices := make([]Device, len(list))
	for i, device := range list {
		devices[i] = Device{ID: device.ID, Healthy: device.Health == api.Healthy, NUMA: nodesOf(device)}
	}
	return devices
}

// nodesOf are the NUMA nodes of a device, sorted; nil for a nil device too.
func nodesOf(device *api.Device) []int64 {
	var nodes []int64
	for _, node := range device.GetTopology().GetNodes() {
		nodes = append(nodes, node.GetID())
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// receiveList replaces the resource's devices, whichever stream the list came
// on, and writes the checkpoint.
func (k *Kubelet) receiveList(p *process, resource string, list []*api.Device) {
	k.lock()
	defer k.unlock()
	before := p.devices[resource]
	p.devices[resource] = newDevices(list)
	k.counter(resource).lists++
	k.tell(Event{Kind: Listed, Resource: resource, Devices: described(list)})
	for _, message := range checkList(resource, before, list, k.heldByPods(p)[resource]) {
		k.violate("%s", message)
	}
	k.checkUnits(p)
	k.writeCheckpoint(p)
}
