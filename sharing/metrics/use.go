package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
)

// UseState is what the last sample of the boards' use found.
type UseState struct {
	Report sharing.UseReport
	// Age is how old the sample is; Sampled is false when there is none yet.
	Age     time.Duration
	Sampled bool
	// Contended is for how long each board was contended, by UUID.
	Contended map[string]time.Duration
	// AttributionErrors and SampleErrors count what went wrong so far, by stage
	// and by source.
	AttributionErrors map[sharing.UseStage]uint64
	SampleErrors      map[string]uint64
}

// UseSource is asked at each scrape, from any goroutine, and answers at once.
type UseSource interface{ Use() UseState }

// UseCollector is a prometheus.Collector over a UseSource. None of its series
// has a pod's name.
type UseCollector struct {
	source                                           UseSource
	sm, memory, temperature, throttled               *prometheus.Desc
	activeSharers, maxShare, contended               *prometheus.Desc
	restMemory, restSM, restProcesses                *prometheus.Desc
	attributed, attributionErrors, age, sampleErrors *prometheus.Desc
}

// NewUseCollector returns a collector that asks source.
func NewUseCollector(source UseSource) UseCollector {
	return UseCollector{
		source:            source,
		sm:                desc("gpu_sm_utilization_ratio", "Time in which the GPU computed, of the driver's last sample period of up to a second; absent with MIG enabled.", "gpu_uuid"),
		memory:            desc("gpu_memory_used_bytes", "Memory of the GPU that is in use, by processes and by the driver itself.", "gpu_uuid"),
		temperature:       desc("gpu_temperature_celsius", "Temperature of the GPU's core.", "gpu_uuid"),
		throttled:         desc("gpu_throttled", "Whether the GPU is slower than it could be for the reason: thermal, power, hw_slowdown.", "gpu_uuid", "reason"),
		activeSharers:     desc("unit_active_sharers", "Containers that hold a device of the unit and have a process on it.", "gpu_uuid", "unit_uuid"),
		maxShare:          desc("gpu_sm_max_share_ratio", "The largest part that one container has of what all containers compute on the GPU; absent while none does.", "gpu_uuid"),
		contended:         desc("gpu_contended_seconds_total", "Time in which at least two containers computed on the GPU and it was busy for 90 % of its time.", "gpu_uuid"),
		restMemory:        desc("unattributed_memory_bytes", "Memory of processes that are no holder's: of no container, of one that holds no device of the unit, or not readable.", "gpu_uuid", "cause"),
		restSM:            desc("unattributed_sm_utilization_ratio", "Use of the GPU's multiprocessors by such processes; absent with MIG enabled.", "gpu_uuid", "cause"),
		restProcesses:     desc("unattributed_processes", "Number of such processes.", "gpu_uuid", "cause"),
		attributed:        desc("attribution_up", "Whether processes can be told apart by container. While not, every series that depends on it is absent."),
		attributionErrors: desc("attribution_errors_total", "What went wrong on the way from processes to containers: nvml, cgroup, pods.", "stage"),
		age:               desc("sample_age_seconds", "Age of the figures on use and on who holds what; absent before the first."),
		sampleErrors:      desc("sample_errors_total", "Samples that lack something because the source could not be read: driver, kubelet.", "source"),
	}
}

// Describe implements prometheus.Collector.
func (c UseCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		c.sm, c.memory, c.temperature, c.throttled, c.activeSharers, c.maxShare, c.contended,
		c.restMemory, c.restSM, c.restProcesses, c.attributed, c.attributionErrors, c.age, c.sampleErrors,
	} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c UseCollector) Collect(ch chan<- prometheus.Metric) {
	use := c.source.Use()
	send := gauges(ch)
	count := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- Constant(desc, prometheus.CounterValue, value, labels...)
	}
	for stage, errors := range use.AttributionErrors {
		count(c.attributionErrors, float64(errors), string(stage))
	}
	for source, errors := range use.SampleErrors {
		count(c.sampleErrors, float64(errors), source)
	}
	for gpu, contended := range use.Contended {
		count(c.contended, contended.Seconds(), gpu)
	}
	send(c.attributed, truth(use.Report.Attributed))
	if use.Sampled {
		send(c.age, use.Age.Seconds())
	}
	c.collectBoards(send, use.Report)
	c.collectAttributed(send, use.Report)
}

func (c UseCollector) collectBoards(send gauge, report sharing.UseReport) {
	for _, board := range report.Boards {
		figure(send, c.sm, board.SM, board.GPU)
		figure(send, c.memory, board.Memory, board.GPU)
		figure(send, c.temperature, board.Celsius, board.GPU)
		if !board.ThrottleKnown {
			continue
		}
		throttled := map[sharing.ThrottleReason]bool{}
		for _, reason := range board.Throttled {
			throttled[reason] = true
		}
		for _, reason := range sharing.ThrottleReasons() {
			send(c.throttled, truth(throttled[reason]), board.GPU, string(reason))
		}
	}
}

func (c UseCollector) collectAttributed(send gauge, report sharing.UseReport) {
	if !report.Attributed {
		return
	}
	active := map[string]int{}
	for _, container := range report.Containers {
		if container.Processes > 0 {
			active[container.Unit]++
		}
	}
	for _, board := range report.Boards {
		for _, unit := range board.Units {
			send(c.activeSharers, float64(active[unit.Unit]), board.GPU, unit.Unit)
		}
	}
	for _, contention := range report.Contention {
		send(c.maxShare, contention.MaxShare, contention.GPU)
	}
	for _, rest := range report.Unattributed {
		figure(send, c.restMemory, rest.Memory, rest.GPU, string(rest.Cause))
		figure(send, c.restSM, rest.SM, rest.GPU, string(rest.Cause))
		send(c.restProcesses, float64(rest.Processes), rest.GPU, string(rest.Cause))
	}
}

// figure sends what is known.
func figure(send gauge, desc *prometheus.Desc, figure sharing.Figure, labels ...string) {
	if figure.Known {
		send(desc, figure.Value, labels...)
	}
}
