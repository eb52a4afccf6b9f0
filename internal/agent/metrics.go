package agent

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/sharing/metrics"
)

// registry has the collectors of a scrape. When there are too many series, those of
// the last collectors are left out.
func (a *agent) registry() *prometheus.Registry {
	show := []prometheus.Collector{
		nodemetrics.NewProgramCollector(a.programMetrics), a.calls, metrics.NewHealthCollector(a.Health.Health),
		metrics.NewUtilizationCollector(a.samples.utilization), metrics.NewCollector(a.samples.sharing),
	}
	if !a.HTTP.NoContainers {
		show = append(show, metrics.NewContainerCollector(a.samples.sharing, a.samples.utilization))
	}
	if a.ClaimCalls != nil {
		show = append([]prometheus.Collector{a.ClaimCalls, nodemetrics.NewDRACollector(a.draMetrics)}, show...)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		metrics.NewLimitedCollector(cmp.Or(a.HTTP.MaxSeries, 10000), show...),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry
}

// programMetrics are what this program says of itself.
func (a *agent) programMetrics() nodemetrics.Program {
	s, p := a.state.Load(), a.progress.Load()
	program := nodemetrics.Program{
		Version:       a.Version,
		Accepted:      s.profile != nil && s.rejected == nil,
		Read:          s.planned && s.unread == nil,
		Unmatched:     len(s.plan.Unmatched),
		OtherWarnings: len(s.plan.Warnings) - len(s.plan.Unmatched),
		Saved:         a.StateWriteError() == nil,
		Plugin:        a.Plugin.Status(),
		Waits:         p.waits,
		State:         p.state,
		Applied:       p.applied,
		AppliedAt:     p.appliedAt,
		Settings:      a.gpuSettings.All(),
		Evictions:     a.guard.Evictions(),
		Layouts:       a.mig.Status(),
	}
	podResources, checkpoint := a.UnreadKubelet()
	program.PodResources, program.Checkpoint = podResources == nil, checkpoint == nil
	if a.MPS != nil {
		daemons, connected := a.MPS.States()
		program.MPS = &nodemetrics.MPS{Connected: connected, Daemons: daemons, GPUs: s.gpus}
	}
	r := &program.Repartitions
	r.Applied, r.Undone, r.Failed = a.mig.Results()
	return program
}

// draMetrics are what the node has by Dynamic Resource Allocation.
func (a *agent) draMetrics() nodemetrics.DRA {
	return nodemetrics.DRA{
		State: a.DRA.Driver.State(),
		View:  a.DRA.Claims.View(),
		Units: a.dra.Units(),
	}
}
