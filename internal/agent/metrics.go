package agent

import (
	_ "embed"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

//go:embed metrics.txt
var programFamilies string

// collector is a prometheus.Collector that shows how the program itself fares, how far the
// wanted profile has come, and how far the GPUs are that Virgate partitions.
type collector struct {
	metrics.Families
	agent *agent
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	send := c.To(ch)
	s, p := c.agent.state.Load(), c.agent.progress.Load()
	send("build_info", 1, c.agent.Version)
	send("config_last_apply_successful", metrics.BoolToFloat(s.profile != nil && s.rejected == nil))
	send("inventory_last_read_successful", metrics.BoolToFloat(s.planned && s.unread == nil))
	send("plan_warnings", float64(len(s.plan.Unmatched)), "unmatched")
	send("plan_warnings", float64(len(s.plan.Warnings)-len(s.plan.Unmatched)), "other")
	send("state_last_write_successful", metrics.BoolToFloat(c.agent.StateWriteError() == nil))
	serving := c.agent.Plugin.Status()
	send("kubelet_state_known", metrics.BoolToFloat(serving.KubeletSeen))
	podResources, checkpoint := c.agent.UnreadKubelet()
	send("kubelet_source_up", metrics.BoolToFloat(podResources == nil), "pod_resources")
	send("kubelet_source_up", metrics.BoolToFloat(checkpoint == nil), "checkpoint")
	for _, r := range serving.Resources {
		send("listandwatch_streams", float64(r.Streams), r.Name)
		send("listed_devices", float64(r.Healthy), r.Name, "healthy")
		send("listed_devices", float64(r.Devices-r.Healthy), r.Name, "unhealthy")
		waiting := 0
		for _, w := range p.waits {
			if w.Resource == r.Name {
				waiting++
			}
		}
		send("switch_waiting_units", float64(waiting), r.Name)
		send("kubelet_registrations_total", float64(r.Registrations), r.Name)
		send("listandwatch_updates_total", float64(r.Lists), r.Name)
		send("allocations_total", float64(r.Granted), r.Name)
		for _, reason := range plugin.RefusalReasons() {
			send("allocate_failures_total", float64(r.Refused[reason]), r.Name, string(reason))
		}
		send("same_unit_grants_total", float64(r.SameUnit), r.Name)
	}
	for _, state := range nodereport.ProfileStates() {
		send("config_state", metrics.BoolToFloat(state == p.state), string(state))
	}
	if p.applied.Generation != "" {
		send("config_last_apply_timestamp_seconds", float64(p.appliedAt.UnixMilli())/1000)
		send("config_info", 1, p.applied.Name, p.applied.Source, p.applied.Generation)
	}
	for gpu, list := range *c.agent.gpuSettings.list.Load() {
		for _, s := range list {
			send("gpu_setting_applied", metrics.BoolToFloat(s.State == status.SettingApplied), gpu, s.Setting, s.Value)
		}
	}
	c.agent.guard.collect(send)
	collectMPS(send, c.agent.MPS, s.gpus)
	collectLayouts(send, c.agent.mig.Status())
	applied, undone, failed := c.agent.mig.Results()
	send("mig_repartitions_total", float64(applied), "applied")
	send("mig_repartitions_total", float64(undone), "undone")
	send("mig_repartitions_total", float64(failed), "failed")
}

// collectMPS shows the MPS daemons; nothing where there can be none.
func collectMPS(send metrics.Send, daemons MPS, gpus []sharing.GPU) {
	if daemons == nil {
		return
	}
	states, connected := daemons.States()
	send("mps_up", metrics.BoolToFloat(connected))
	if !connected {
		return // What was known is not known any more.
	}
	gpu := sharing.GPUByUnit(gpus)
	for _, state := range states {
		for _, phase := range nodereport.MPSPhases() {
			send("mps_daemon_state", metrics.BoolToFloat(state.Phase == phase), gpu[state.ID], state.ID, string(phase))
		}
		send("mps_daemon_restarts_total", float64(state.Restarts), gpu[state.ID], state.ID)
	}
}

// callCollector measures the kubelet's calls: it is a plugin.CallMetrics and a prometheus.Collector.
type callCollector struct{ took, preferred *prometheus.HistogramVec }

func newCallCollector() callCollector {
	return callCollector{
		took:      callHistogram("allocate_duration_seconds", "How long Allocate took, by result: ok, error.", "resource", "result"),
		preferred: callHistogram("preferred_allocation_duration_seconds", "How long GetPreferredAllocation took.", "resource"),
	}
}

// callHistogram has buckets for calls that take some microseconds. The kubelet's
// pod handling waits for each of them, so those above a second are told apart too.
func callHistogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "virgate_" + name, Help: help,
		Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .1, .5, 2.5},
	}, labels)
}

func (c callCollector) Start(resource string) plugin.CallObservers {
	return plugin.CallObservers{
		Granted:   c.took.WithLabelValues(resource, "ok"),
		Refused:   c.took.WithLabelValues(resource, "error"),
		Preferred: c.preferred.WithLabelValues(resource),
	}
}

func (c callCollector) Stop(resource string) {
	c.took.DeletePartialMatch(prometheus.Labels{"resource": resource})
	c.preferred.DeleteLabelValues(resource)
}

func (c callCollector) Describe(ch chan<- *prometheus.Desc) {
	c.took.Describe(ch)
	c.preferred.Describe(ch)
}

func (c callCollector) Collect(ch chan<- prometheus.Metric) {
	c.took.Collect(ch)
	c.preferred.Collect(ch)
}
