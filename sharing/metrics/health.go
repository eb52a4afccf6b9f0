package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
)

// HealthSource is asked at each scrape, from any goroutine, and answers at once.
type HealthSource interface {
	Health() sharing.HealthReport
}

// HealthCollector is a prometheus.Collector over a HealthSource.
type HealthCollector struct {
	source                            HealthSource
	state, transitions, xids, monitor *prometheus.Desc
}

// NewHealthCollector returns a collector that asks source.
func NewHealthCollector(source HealthSource) HealthCollector {
	return HealthCollector{
		source:      source,
		state:       desc("unit_health_state", "Whether the GPU or partition is in the state: healthy, suspect, unhealthy, recovering.", "gpu_uuid", "unit_uuid", "state"),
		transitions: desc("health_transitions_total", "Changes of state of the GPU and its partitions.", "gpu_uuid", "from", "to", "cause"),
		xids:        desc("xid_events_total", "XID errors that the GPU reported, with what they meant when they came: ignore, suspect, fatal.", "gpu_uuid", "xid", "action"),
		monitor:     desc("health_monitor_up", "Whether errors of the GPU are heard of as they happen; if not, probes alone watch it.", "gpu_uuid"),
	}
}

// Describe implements prometheus.Collector.
func (c HealthCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.state, c.transitions, c.xids, c.monitor} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c HealthCollector) Collect(ch chan<- prometheus.Metric) {
	report := c.source.Health()
	send := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		ch <- Constant(desc, kind, value, labels...)
	}
	for _, u := range report.Units {
		for _, state := range sharing.HealthStates() {
			send(c.state, prometheus.GaugeValue, truth(u.State == state), u.GPU, u.Unit, string(state))
		}
	}
	for _, t := range report.Transitions {
		send(c.transitions, prometheus.CounterValue, float64(t.Count), t.GPU, string(t.From), string(t.To), string(t.Cause))
	}
	for _, x := range report.XIDs {
		send(c.xids, prometheus.CounterValue, float64(x.Count), x.GPU, x.XID, string(x.Action))
	}
	for _, m := range report.Monitors {
		send(c.monitor, prometheus.GaugeValue, truth(m.Degraded == ""), m.GPU)
	}
}
