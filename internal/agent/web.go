package agent

import (
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/sharing"
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
			Forecast: newForecaster(a).forecast,
			Metrics:  a.registry,
		},
	}
	if a.ListenWhenServing {
		options.May = a.locked
	}
	return web.New(options)
}
