package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
)

// Source is asked at each scrape, from any goroutine, and answers at once.
type Source interface {
	// GPUs returns the node's boards as last seen.
	GPUs() []sharing.GPU
	// Resources returns what is planned now.
	Resources() []sharing.Resource
	// Allocations returns who holds what; ok is false when that is not known,
	// and then no series depends on it.
	Allocations() (allocations []sharing.Allocation, ok bool)
}

// Collector is a prometheus.Collector over a Source.
type Collector struct{ source Source }

// NewCollector returns a collector that asks source.
func NewCollector(source Source) Collector { return Collector{source} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("virgate_"+name, help, labels, nil)
}

// descriptions are what a Collector may emit.
type descriptions struct {
	gpuInfo, gpuMemory, unitHealthy    *prometheus.Desc
	resourceDevices, resourceHealthy   *prometheus.Desc
	replicas, unitSharers, allocations *prometheus.Desc
}

func describe() descriptions {
	return descriptions{
		gpuInfo:         desc("gpu_info", "A GPU of this node; always 1.", "gpu_uuid", "index", "model", "architecture", "mig", "pci_bus_id", "numa_node"),
		gpuMemory:       desc("gpu_memory_bytes", "Total memory of the GPU.", "gpu_uuid"),
		unitHealthy:     desc("unit_healthy", "Whether the GPU or partition may be used.", "gpu_uuid", "unit_uuid"),
		resourceDevices: desc("resource_planned_devices", "Devices that the profile offers under the resource name.", "resource"),
		resourceHealthy: desc("resource_healthy_devices", "Devices of the resource whose unit is healthy.", "resource"),
		replicas:        desc("unit_replicas", "Devices that stand for the GPU or partition; 1 is exclusive.", "resource", "gpu_uuid", "unit_uuid"),
		unitSharers:     desc("unit_sharers", "Containers that hold a device of the GPU or partition.", "resource", "gpu_uuid", "unit_uuid"),
		allocations:     desc("allocation_info", "A device that a container holds; always 1.", "namespace", "pod", "container", "resource", "gpu_uuid", "unit_uuid", "device"),
	}
}

// Describe implements prometheus.Collector.
func (c Collector) Describe(ch chan<- *prometheus.Desc) {
	d := describe()
	for _, desc := range []*prometheus.Desc{
		d.gpuInfo, d.gpuMemory, d.unitHealthy, d.resourceDevices, d.resourceHealthy, d.replicas, d.unitSharers, d.allocations,
	} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	d := describe()
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	for _, g := range c.source.GPUs() {
		gauge(d.gpuInfo, 1, g.UUID, strconv.Itoa(g.Index), g.Model, g.Architecture, strconv.FormatBool(g.MIG), g.PCIBusID, strconv.Itoa(g.NUMANode))
		gauge(d.gpuMemory, float64(g.Memory), g.UUID)
		gauge(d.unitHealthy, truth(g.Fault == ""), g.UUID, g.UUID)
		for _, p := range g.Partitions {
			gauge(d.unitHealthy, truth(g.Fault == "" && p.Fault == ""), g.UUID, p.UUID)
		}
	}

	resources := c.source.Resources()
	gpuOf := map[string]string{}
	for _, r := range resources {
		gauge(d.resourceDevices, float64(len(r.Devices)), r.Name)
		gauge(d.resourceHealthy, float64(r.Healthy()), r.Name)
		for _, u := range r.Units {
			gpuOf[u.ID] = u.GPU
			gauge(d.replicas, float64(u.Replicas), r.Name, u.GPU, u.ID)
		}
	}

	allocations, ok := c.source.Allocations()
	if !ok {
		return
	}
	for _, usage := range sharing.Usage(resources, allocations) {
		gauge(d.unitSharers, float64(len(usage.Holders)), usage.Resource, usage.Unit.GPU, usage.Unit.ID)
	}
	seen := map[[5]string]bool{} // A series that came twice would fail the scrape.
	for _, a := range allocations {
		for _, device := range a.Devices {
			unit, _, _ := sharing.ParseDeviceID(device)
			gpu, known := gpuOf[unit]
			if !known {
				continue // Of another plugin, or of a unit that is offered no more.
			}
			key := [5]string{a.Namespace, a.Pod, a.Container, a.Resource, device}
			if seen[key] {
				continue
			}
			seen[key] = true
			gauge(d.allocations, 1, a.Namespace, a.Pod, a.Container, a.Resource, gpu, unit, device)
		}
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
