package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
)

// ContainerCollector is a prometheus.Collector of all series that name a pod.
// They are gauges of what is now, so that a pod that ends leaves none behind.
type ContainerCollector struct {
	state                            Source
	use                              UseSource
	allocations                      *prometheus.Desc
	memory, sm, processes, overShare *prometheus.Desc
}

// NewContainerCollector returns a collector that asks both.
func NewContainerCollector(state Source, use UseSource) ContainerCollector {
	perContainer := func(name, help string) *prometheus.Desc {
		return desc(name, help, "namespace", "pod", "container", "gpu_uuid", "unit_uuid")
	}
	return ContainerCollector{
		state:       state,
		use:         use,
		allocations: desc("allocation_info", "A device that a container holds; always 1.", "namespace", "pod", "container", "resource", "gpu_uuid", "unit_uuid", "device"),
		memory:      perContainer("container_memory_used_bytes", "Memory that the container's processes use on the unit."),
		sm:          perContainer("container_sm_utilization_ratio", "Use of the GPU's multiprocessors by the container's processes; absent with MIG enabled, and where the driver does not tell."),
		processes:   perContainer("container_processes", "Processes that the container has on the unit."),
		overShare:   perContainer("container_memory_over_share_bytes", "Memory that the container uses beyond its fair share: the unit's memory by its replicas, times the devices held."),
	}
}

// Describe implements prometheus.Collector.
func (c ContainerCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.allocations, c.memory, c.sm, c.processes, c.overShare} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c ContainerCollector) Collect(ch chan<- prometheus.Metric) {
	send := gauges(ch)
	state := c.state.Sharing()
	if state.AllocationsKnown {
		c.collectAllocations(send, state)
	}
	for _, use := range c.use.Use().Report.Containers {
		labels := []string{use.Namespace, use.Pod, use.Name, use.GPU, use.Unit}
		figure(send, c.memory, use.Memory, labels...)
		figure(send, c.sm, use.SM, labels...)
		send(c.processes, float64(use.Processes), labels...)
		figure(send, c.overShare, use.OverShare, labels...)
	}
}

func (c ContainerCollector) collectAllocations(send gauge, state State) {
	board := sharing.BoardOf(state.GPUs)
	for _, resource := range state.Resources {
		for _, unit := range resource.Units {
			board[unit.ID] = unit.GPU
		}
	}
	seen := map[[5]string]bool{} // A series that came twice would fail the scrape.
	for _, a := range state.Allocations {
		for _, device := range a.Devices {
			unit, _, _ := sharing.ParseDeviceID(device)
			gpu, known := board[unit]
			key := [5]string{a.Namespace, a.Pod, a.Container, a.Resource, device}
			if !known || seen[key] { // Of another plugin, or of a unit that is not in the node.
				continue
			}
			seen[key] = true
			send(c.allocations, 1, a.Namespace, a.Pod, a.Container, a.Resource, gpu, unit, device)
		}
	}
}
