package agent

import (
	"context"
	"fmt"
	"slices"

	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/mpsshare"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/sharing"
)

// The parts that run beside the loop know nothing of it. They are given here what they need.

func newReleases(a *agent) *release.Manager {
	return release.New(release.Options{
		Driver:  a.Releases,
		Devices: a.Plugin,
		Layouts: a.mig,
		GPUs:    func() []sharing.GPU { return a.state.Load().gpus },
		Serving: a.serving.Load,
		Users:   a.usersOf,
		MIGReset: func() bool {
			profile := a.state.Load().profile
			return profile != nil && profile.Profile.MIG.Reset
		},
		Paused: func() (paused, known bool) {
			now := a.pauseNow()
			return now.paused, now.known
		},
		Plan:   a.planNow,
		Logger: a.Logger,
	})
}

func newSettings(a *agent) *gpusettings.Settings {
	return gpusettings.New(gpusettings.Options{
		Driver: a.DriverSettings,
		Inputs: func() (gpus []sharing.GPU, plan sharing.Plan, known bool) {
			s := a.state.Load()
			return s.gpus, s.plan, s.planned && s.unread == nil
		},
		Closed: func(gpu string) bool {
			return a.releases.Released()[gpu] || a.mig.Changing(gpu) || a.mps.View().Busy[gpu]
		},
		Users:       a.usersOf,
		Changed:     a.requestPlan,
		Looked:      func() { a.mps.Wake() }, // It is made later.
		UndoTimeout: a.DrainTimeout,
		Logger:      a.Logger,
	})
}

func newMPS(a *agent) *mpsshare.Manager {
	options := mpsshare.Options{
		Daemons: a.MPS,
		Inputs: func() (gpus []sharing.GPU, plan sharing.Plan, planned bool) {
			s := a.state.Load()
			return s.gpus, s.plan, s.planned
		},
		Lists:              a.Plugin.Status,
		ByDRA:              a.dra.Planned,
		Users:              a.usersOf,
		ComputeModePending: a.gpuSettings.ComputeModePending,
		Changed:            a.requestPlan,
	}
	if a.DRA.Claims != nil {
		options.Claims = a.DRA.Claims
	}
	return mpsshare.New(options)
}

// usersOf are the pods, claims and processes that use the GPU, or why that is not known.
func (a *agent) usersOf(ctx context.Context, gpu string) (users []string) {
	s := a.state.Load()
	units := sharing.UnitsOf(s.gpus, gpu)
	held, err := a.Kubelet.Held(ctx)
	if err != nil {
		return []string{"what pods hold cannot be read: " + err.Error()}
	}
	users = podsByUnit(s.gpus, held)[gpu]
	holders := sharing.HoldersByUnit(held)
	if slices.ContainsFunc(units, func(unit string) bool {
		return slices.ContainsFunc(holders[unit], func(a sharing.Allocation) bool { return !a.Certain() })
	}) {
		a.Plugin.RefreshHolders(units...) // It may be gone.
		users = append(users, sharing.UnnamedHolder)
	}
	users = append(users, a.dra.Users(s.gpus, gpu, held)...)
	for _, pid := range a.Processes(ctx, gpu) {
		users = append(users, fmt.Sprintf("process %d", pid))
	}
	return users
}

// notify tells whoever waits, without waiting.
func notify(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
