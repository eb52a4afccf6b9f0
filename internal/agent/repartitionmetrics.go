package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

// layoutCollector shows how far the boards are that Virgate cuts.
type layoutCollector struct {
	agent                           *agent
	state, slots, instances, recuts *prometheus.Desc
}

func newLayoutCollector(a *agent) layoutCollector {
	return layoutCollector{
		agent:     a,
		state:     desc("mig_layout_state", "Whether a board that Virgate cuts is in that state: applied, pending, blocked, failed, reset-required.", "gpu_uuid", "layout", "state"),
		slots:     desc("mig_slots", "Memory slots of a board that Virgate cuts: used, free, or unreachable, which is free and nothing can be placed in it now.", "gpu_uuid", "state"),
		instances: desc("mig_instances", "GPU instances of a board that Virgate cuts, by profile and whether a process uses one.", "gpu_uuid", "profile", "state"),
		recuts:    desc("mig_repartitions_total", "Changes of boards that had begun, by result: applied, undone, failed.", "result"),
	}
}

// Describe implements prometheus.Collector.
func (c layoutCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.state, c.slots, c.instances, c.recuts} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c layoutCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- metrics.Constant(desc, prometheus.GaugeValue, value, labels...)
	}
	for _, board := range c.agent.layouts() {
		for _, state := range sharing.LayoutStates() {
			gauge(c.state, truth(state == board.State), board.GPU, board.Wanted, string(state))
		}
		used := 0
		type kind struct{ profile, state string }
		counts := map[kind]int{}
		for _, instance := range board.Instances {
			used += instance.Placement.Size
			state := "free"
			for _, compute := range instance.Computes {
				if compute.Busy {
					state = "in_use"
				}
			}
			counts[kind{instance.Profile.String(), state}]++
		}
		gauge(c.slots, float64(used), board.GPU, "used")
		gauge(c.slots, float64(board.Slots-used-board.Unreachable), board.GPU, "free")
		gauge(c.slots, float64(board.Unreachable), board.GPU, "unreachable")
		for k, count := range counts {
			gauge(c.instances, float64(count), board.GPU, k.profile, k.state)
		}
	}
	if c.agent.boards == nil {
		return
	}
	results := &c.agent.boards.results
	for result, count := range map[string]uint64{
		"applied": results.applied.Load(), "undone": results.undone.Load(), "failed": results.failed.Load(),
	} {
		ch <- metrics.Constant(c.recuts, prometheus.CounterValue, float64(count), result)
	}
}
