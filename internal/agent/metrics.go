package agent

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/sharing/metrics"
)

// registry returns the collectors of a scrape. If there are too many series, those of the last
// collectors are omitted.
func (v *view) registry() *prometheus.Registry {
	show := []prometheus.Collector{
		nodemetrics.NewProgramCollector(v.programMetrics), v.calls, metrics.NewHealthCollector(v.Health.Health),
		metrics.NewUtilizationCollector(v.samples.utilization), metrics.NewCollector(v.samples.sharing),
	}
	if !v.HTTP.NoContainers {
		show = append(show, metrics.NewContainerCollector(v.samples.sharing, v.samples.utilization))
	}
	if v.ClaimCalls != nil {
		show = append([]prometheus.Collector{v.ClaimCalls, nodemetrics.NewDRACollector(v.draMetrics)}, show...)
	}
	if v.Announcements != nil {
		show = append([]prometheus.Collector{v.switches}, show...)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		metrics.NewLimitedCollector(cmp.Or(v.HTTP.MaxSeries, 10000), show...),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry
}

// programMetrics returns the metrics about the program itself.
func (v *view) programMetrics() nodemetrics.Program {
	s, p := v.state.Load(), v.progress.Load()
	program := nodemetrics.Program{
		Version:       v.Version,
		Accepted:      s.profile != nil && s.rejected == nil,
		Read:          s.planned && s.unread == nil,
		Unmatched:     len(s.plan.Unmatched),
		OtherWarnings: len(s.plan.Warnings) - len(s.plan.Unmatched),
		Saved:         v.StateWriteError() == nil,
		Plugin:        v.Plugin.Status(),
		Waits:         p.waits,
		State:         p.state,
		Applied:       p.applied,
		AppliedAt:     p.appliedAt,
		Settings:      v.gpuSettings.All(),
		Evictions:     v.guard.Evictions(),
		Layouts:       v.mig.Status(),
	}
	if v.Announcements != nil {
		program.Announcements = v.Announcements()
	}
	podResources, checkpoint := v.UnreadKubelet()
	program.PodResources, program.Checkpoint = podResources == nil, checkpoint == nil
	if v.MPS != nil {
		daemons, connected := v.MPS.States()
		program.MPS = &nodemetrics.MPS{
			Connected: connected,
			Daemons:   daemons,
			GPUs:      s.gpus,
		}
	}
	r := &program.Repartitions
	r.Applied, r.Undone, r.Failed = v.mig.Results()
	return program
}

// draMetrics returns the metrics about Dynamic Resource Allocation.
func (v *view) draMetrics() nodemetrics.DRA {
	return nodemetrics.DRA{
		State: v.DRA.Driver.State(),
		View:  v.DRA.Claims.View(),
		Units: v.dra.Units(),
	}
}
