package agent

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

// newWeb returns what serves HTTP, and shows what this agent knows.
func (a *agent) newWeb() *web.Server {
	options := web.Options{
		HTTP:    a.HTTP,
		Listen:  a.Listen,
		Changed: a.wakeReport,
		Logger:  a.Logger,
		Node: web.Node{
			Status:  a.status,
			Unready: a.unready,
			Waiting: func() []string {
				p := a.progress.Load()
				return nodereport.Waiting(p.layouts, p.waits)
			},
			Plan: func() (sharing.Plan, bool) {
				s := a.state.Load()
				return s.plan, s.planned
			},
			Forecast: a.forecast,
			Metrics:  a.registry,
		},
	}
	if a.ListenWhenServing {
		options.May = a.locked
	}
	return web.New(options)
}

// registry has the collectors of a scrape. When there are too many series, those of
// the last collectors are left out.
func (a *agent) registry() *prometheus.Registry {
	show := []prometheus.Collector{
		collector{metrics.ParseFamilies(programFamilies), a}, a.calls, metrics.NewHealthCollector(a.Health.Health),
		metrics.NewUtilizationCollector(a.utilization), metrics.NewCollector(a.sharing),
	}
	if !a.HTTP.NoContainers {
		show = append(show, metrics.NewContainerCollector(a.sharing, a.utilization))
	}
	if a.DRA.Calls != nil {
		show = append([]prometheus.Collector{a.DRA.Calls, draCollector{metrics.ParseFamilies(draFamilies), a}}, show...)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		metrics.NewLimitedCollector(cmp.Or(a.HTTP.MaxSeries, 10000), show...),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry
}
