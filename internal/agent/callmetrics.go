package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing/metrics"
)

// callCollector shows how the kubelet's calls fare.
type callCollector struct {
	agent                                       *agent
	granted, refused, sameUnit, took, preferred *prometheus.Desc
}

func newCallCollector(a *agent) callCollector {
	return callCollector{
		agent:     a,
		granted:   desc("allocations_total", "Allocate calls that were granted.", "resource"),
		refused:   desc("allocate_failures_total", "Allocate calls that were refused: unknown_device, unhealthy, too_many, same_unit, not_ready, recut, internal.", "resource", "reason"),
		sameUnit:  desc("same_unit_grants_total", "Containers that were granted several devices of one unit, which is no more than one.", "resource"),
		took:      desc("allocate_duration_seconds", "How long Allocate took, by result: ok, error.", "resource", "result"),
		preferred: desc("preferred_allocation_duration_seconds", "How long GetPreferredAllocation took.", "resource"),
	}
}

// Describe implements prometheus.Collector.
func (c callCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.granted, c.refused, c.sameUnit, c.took, c.preferred} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c callCollector) Collect(ch chan<- prometheus.Metric) {
	count := func(desc *prometheus.Desc, value uint64, labels ...string) {
		ch <- metrics.Constant(desc, prometheus.CounterValue, float64(value), labels...)
	}
	distribution := func(desc *prometheus.Desc, latency plugin.Latency, labels ...string) {
		buckets := make(map[float64]uint64, len(latency.Buckets))
		for bound, calls := range latency.Buckets {
			buckets[bound.Seconds()] = calls
		}
		ch <- prometheus.MustNewConstHistogram(desc, latency.Count, latency.Sum.Seconds(), buckets, labels...)
	}
	for _, r := range c.agent.Plugin.Status().Resources {
		count(c.granted, r.Granted, r.Name)
		for _, reason := range plugin.Reasons() {
			count(c.refused, r.Refused[reason], r.Name, string(reason))
		}
		count(c.sameUnit, r.SameUnit, r.Name)
		distribution(c.took, r.Allocated, r.Name, "ok")
		distribution(c.took, r.Failed, r.Name, "error")
		distribution(c.preferred, r.Preferred, r.Name)
	}
}
