package metrics

import (
	_ "embed"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/virgate/virgate/sharing"
)

// UtilizationState is what the last sample of the GPUs' utilization found.
type UtilizationState struct {
	Report sharing.UtilizationReport
	// Age is how old the sample is; Sampled is false when there is none yet.
	Age     time.Duration
	Sampled bool
	// Contended is how long each GPU has been contended so far, by UUID.
	Contended map[string]time.Duration
	// AttributionErrors and SampleErrors count what went wrong, by stage and by source.
	AttributionErrors map[sharing.AttributionStage]uint64
	SampleErrors      map[string]uint64
}

//go:embed utilization.txt
var utilizationFamilies string

// NewUtilizationCollector returns a collector of what use returns, whose series name no pods.
func NewUtilizationCollector(use func() UtilizationState) prometheus.Collector {
	return collector{ParseFamilies(utilizationFamilies), func(send Send) { collectUtilization(send, use()) }}
}

func collectUtilization(send Send, use UtilizationState) {
	for stage, errors := range use.AttributionErrors {
		send("attribution_errors_total", float64(errors), string(stage))
	}
	for source, errors := range use.SampleErrors {
		send("sample_errors_total", float64(errors), source)
	}
	for gpu, contended := range use.Contended {
		send("gpu_contended_seconds_total", contended.Seconds(), gpu)
	}
	send("attribution_up", BoolToFloat(use.Report.Attributed))
	if use.Sampled {
		send("sample_age_seconds", use.Age.Seconds())
	}
	collectGPUs(send, use.Report)
	collectAttributed(send, use.Report)
}

func collectGPUs(send Send, report sharing.UtilizationReport) {
	for _, gpu := range report.GPUs {
		figure(send, "gpu_sm_utilization_ratio", gpu.SM, gpu.GPU)
		figure(send, "gpu_memory_used_bytes", gpu.Memory, gpu.GPU)
		figure(send, "gpu_temperature_celsius", gpu.Celsius, gpu.GPU)
		if !gpu.ThrottleKnown {
			continue
		}
		for _, reason := range sharing.ThrottleReasons() {
			send("gpu_throttled", BoolToFloat(slices.Contains(gpu.Throttled, reason)), gpu.GPU, string(reason))
		}
	}
}

func collectAttributed(send Send, report sharing.UtilizationReport) {
	if !report.Attributed {
		return
	}
	active := map[string]int{}
	for _, container := range report.Containers {
		if container.Processes > 0 {
			active[container.Unit]++
		}
	}
	for _, gpu := range report.GPUs {
		for _, unit := range gpu.Units {
			send("unit_active_sharers", float64(active[unit.Unit]), gpu.GPU, unit.Unit)
		}
	}
	for _, contention := range report.Contention {
		send("gpu_sm_max_share_ratio", contention.MaxShare, contention.GPU)
	}
	for _, rest := range report.Unattributed {
		figure(send, "unattributed_memory_bytes", rest.Memory, rest.GPU, string(rest.Cause))
		figure(send, "unattributed_sm_utilization_ratio", rest.SM, rest.GPU, string(rest.Cause))
		send("unattributed_processes", float64(rest.Processes), rest.GPU, string(rest.Cause))
	}
}

// figure sends a value if it is known.
func figure(send Send, name string, figure *float64, labels ...string) {
	if figure != nil {
		send(name, *figure, labels...)
	}
}

//go:embed containers.txt
var containerFamilies string

// NewContainerCollector returns a collector of all series that name a pod. They are
// gauges of the present state, so that none is left when a pod has ended.
func NewContainerCollector(state func() State, use func() UtilizationState) prometheus.Collector {
	return collector{ParseFamilies(containerFamilies), func(send Send) {
		if now := state(); now.AllocationsKnown {
			collectAllocations(send, now)
		}
		collectContainers(send, use().Report.Containers)
	}}
}

func collectContainers(send Send, containers []sharing.ContainerUtilization) {
	for _, use := range containers {
		labels := []string{use.Namespace, use.Pod, use.Name, use.GPU, use.Unit}
		figure(send, "container_memory_used_bytes", use.Memory, labels...)
		figure(send, "container_sm_utilization_ratio", use.SM, labels...)
		send("container_processes", float64(use.Processes), labels...)
		figure(send, "container_memory_over_share_bytes", use.OverShare, labels...)
	}
}

func collectAllocations(send Send, state State) {
	gpu := sharing.GPUByUnit(state.GPUs)
	for _, resource := range state.Listed {
		for _, unit := range resource.Units {
			gpu[unit.ID] = unit.GPU
		}
	}
	seen := map[[5]string]bool{} // A repeated series would fail the scrape.
	for _, a := range state.Allocations {
		for _, device := range a.Devices {
			unit, _, _ := sharing.ParseDeviceID(device)
			gpu, known := gpu[unit]
			key := [5]string{a.Namespace, a.Pod, a.Container, a.Resource, device}
			if !known || seen[key] { // Another plugin's, or of a unit that the node does not have.
				continue
			}
			seen[key] = true
			send("allocation_info", 1, a.Namespace, a.Pod, a.Container, a.Resource, gpu, unit, device)
		}
	}
}
