package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
)

// State is what a node offers and who holds it, at one moment.
type State struct {
	// GPUs are the node's boards as last seen.
	GPUs []sharing.GPU
	// Resources are planned now.
	Resources []sharing.Resource
	// Listings are what the kubelet is told now.
	Listings []sharing.Listing
	// Allocations are who holds what; AllocationsKnown is false when that is not
	// known, and then no series depends on it.
	Allocations      []sharing.Allocation
	AllocationsKnown bool
}

// Source is asked at each scrape, from any goroutine, and answers at once.
type Source interface{ Sharing() State }

// Collector is a prometheus.Collector over a Source. None of its series has a
// pod's name.
type Collector struct {
	source                           Source
	gpuInfo, gpuMemory, unitHealthy  *prometheus.Desc
	unitInfo, unitDevices            *prometheus.Desc
	resourceDevices, resourceHealthy *prometheus.Desc
	replicas, unitSharers, tenants   *prometheus.Desc
	oversubscription                 *prometheus.Desc
}

// NewCollector returns a collector that asks source.
func NewCollector(source Source) Collector {
	return Collector{
		source:           source,
		gpuInfo:          desc("gpu_info", "A GPU of this node; always 1.", "gpu_uuid", "index", "model", "architecture", "mig", "pci_bus_id", "numa_node"),
		gpuMemory:        desc("gpu_memory_bytes", "Total memory of the GPU.", "gpu_uuid"),
		unitHealthy:      desc("unit_healthy", "Whether the GPU or partition may be used.", "gpu_uuid", "unit_uuid"),
		unitInfo:         desc("unit_info", "A GPU or partition that is offered; always 1. Profile and instances are empty for a whole GPU.", "gpu_uuid", "unit_uuid", "mig_profile", "gi", "ci", "resource"),
		unitDevices:      desc("unit_devices", "Devices of the unit that the kubelet is told of, each in one state: allocated, or else free or unhealthy.", "resource", "gpu_uuid", "unit_uuid", "state"),
		resourceDevices:  desc("resource_planned_devices", "Devices that the profile offers under the resource name.", "resource"),
		resourceHealthy:  desc("resource_healthy_devices", "Devices of the resource whose unit is healthy.", "resource"),
		replicas:         desc("unit_replicas", "Devices that stand for the GPU or partition; 1 is exclusive.", "resource", "gpu_uuid", "unit_uuid"),
		unitSharers:      desc("unit_sharers", "Containers that hold a device of the GPU or partition.", "resource", "gpu_uuid", "unit_uuid"),
		tenants:          desc("unit_tenants", "Namespaces whose pods hold a device of the GPU or partition.", "gpu_uuid", "unit_uuid"),
		oversubscription: desc("gpu_oversubscription_ratio", "Devices of the GPU that containers hold, by the units that it is offered as; above 1, containers share.", "gpu_uuid"),
	}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("virgate_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (c Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		c.gpuInfo, c.gpuMemory, c.unitHealthy, c.unitInfo, c.unitDevices, c.resourceDevices, c.resourceHealthy,
		c.replicas, c.unitSharers, c.tenants, c.oversubscription,
	} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	state := c.source.Sharing()
	c.collectUnits(gauges(ch), state)
	if state.AllocationsKnown {
		c.collectHeld(gauges(ch), state)
	}
}

// gauges sends gauges.
func gauges(ch chan<- prometheus.Metric) gauge {
	return func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- Constant(desc, prometheus.GaugeValue, value, labels...)
	}
}

type gauge func(desc *prometheus.Desc, value float64, labels ...string)

// collectUnits shows what there is and how it is offered.
func (c Collector) collectUnits(send gauge, state State) {
	for _, g := range state.GPUs {
		send(c.gpuInfo, 1, g.UUID, strconv.Itoa(g.Index), g.Model, g.Architecture, strconv.FormatBool(g.MIG), g.PCIBusID, strconv.Itoa(g.NUMANode))
		send(c.gpuMemory, float64(g.Memory), g.UUID)
		send(c.unitHealthy, truth(g.Fault == ""), g.UUID, g.UUID)
		for _, p := range g.Partitions {
			send(c.unitHealthy, truth(g.Fault == "" && p.Fault == ""), g.UUID, p.UUID)
		}
	}
	for _, r := range state.Resources {
		send(c.resourceDevices, float64(len(r.Devices)), r.Name)
		send(c.resourceHealthy, float64(r.Healthy()), r.Name)
		for _, u := range r.Units {
			send(c.replicas, float64(u.Replicas), r.Name, u.GPU, u.ID)
			profile, gi, ci := "", "", ""
			if u.Partition() {
				profile, gi, ci = u.Profile.String(), strconv.Itoa(u.GI), strconv.Itoa(u.CI)
			}
			send(c.unitInfo, 1, u.GPU, u.ID, profile, gi, ci, r.Name)
		}
	}
}

// collectHeld shows how much of it is held.
func (c Collector) collectHeld(send gauge, state State) {
	board := sharing.BoardOf(state.GPUs)
	for _, o := range sharing.Occupancies(state.GPUs, state.Listings, state.Allocations) {
		send(c.unitDevices, float64(o.Free), o.Resource, o.GPU, o.Unit, "free")
		send(c.unitDevices, float64(o.Allocated), o.Resource, o.GPU, o.Unit, "allocated")
		send(c.unitDevices, float64(o.Unhealthy), o.Resource, o.GPU, o.Unit, "unhealthy")
	}
	usages := sharing.Usage(state.Resources, state.Allocations)
	for _, usage := range usages {
		send(c.unitSharers, float64(usage.Sharers()), usage.Resource, board[usage.Unit.ID], usage.Unit.ID)
		send(c.tenants, float64(usage.Tenants()), board[usage.Unit.ID], usage.Unit.ID)
	}
	for _, o := range sharing.Oversubscriptions(usages) {
		send(c.oversubscription, o.Ratio, o.GPU)
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
