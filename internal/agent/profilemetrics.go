package agent

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

// profileCollector shows how far the wanted profile has come.
type profileCollector struct {
	agent                                   *agent
	info, state, wanted, applied, appliedAt *prometheus.Desc
}

func newProfileCollector(a *agent) profileCollector {
	return profileCollector{
		agent:     a,
		info:      desc("config_info", "The profile whose lists the kubelet has; always 1.", "profile", "source", "generation"),
		state:     desc("config_state", "Whether the profile that should be in force is in this state: applied, pending, rejected.", "state"),
		wanted:    desc("config_generation", "Generation of the profile that should be in force, as a number that has no order; absent while it is not known."),
		applied:   desc("config_applied_generation", "Generation of the profile whose lists the kubelet has, as a number that has no order; absent before the first."),
		appliedAt: desc("config_last_apply_timestamp_seconds", "Since when the kubelet has the lists of the profile in virgate_config_info, in Unix time; absent before the first."),
	}
}

// Describe implements prometheus.Collector.
func (c profileCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.info, c.state, c.wanted, c.applied, c.appliedAt} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c profileCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- metrics.Constant(desc, prometheus.GaugeValue, value, labels...)
	}
	s, p := c.agent.state.Load(), c.agent.progress.Load()
	for _, state := range sharing.ProfileStates() {
		gauge(c.state, truth(state == p.state), string(state))
	}
	if number, ok := generationNumber(s.wanted.Generation); ok {
		gauge(c.wanted, number)
	}
	if number, ok := generationNumber(p.applied.Generation); ok {
		gauge(c.applied, number)
		gauge(c.appliedAt, float64(p.appliedAt.UnixMilli())/1000)
		gauge(c.info, 1, p.applied.Name, p.applied.Source, p.applied.Generation)
	}
}

// generationNumber is a generation as a metric's value. Its 12 hexadecimal
// digits fit into the 53 bits that a float64 has.
func generationNumber(generation string) (number float64, ok bool) {
	value, err := strconv.ParseUint(generation, 16, 48)
	return float64(value), err == nil
}
