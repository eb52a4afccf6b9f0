package agent

import (
	"context"

	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/sharing"
)

// What the parts need of the loop is filled in here: they know nothing of it.

func newSettings(a *agent) *gpusettings.Settings {
	return gpusettings.New(gpusettings.Options{
		Driver: a.DriverSettings,
		Inputs: func() (gpus []sharing.GPU, plan sharing.Plan, known bool) {
			s := a.state.Load()
			return s.gpus, s.plan, s.planned && s.unread == nil
		},
		Closed: func(gpu string) bool {
			return a.released()[gpu] || a.mig.Changing(gpu) || a.mps.view.Load().Busy[gpu]
		},
		Users:       func(ctx context.Context, gpu string) []string { return a.usersOf(ctx, gpu) },
		Changed:     a.requestPlan,
		Looked:      func() { notify(a.mps.wake) },
		UndoTimeout: a.DrainTimeout,
		Logger:      a.Logger,
	})
}
