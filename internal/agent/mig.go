package agent

import (
	"errors"
	"log/slog"
	"slices"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// migInputs are the GPUs and the wanted layout that the loop has last decided by.
func (a *agent) migInputs() (gpus []sharing.GPU, wanted sharing.MIGConfig, err error) {
	s := a.state.Load()
	if s.profile != nil {
		wanted = s.profile.Profile.MIG
	}
	if !s.planned {
		err = errors.New("nothing is planned yet")
	}
	if s.pause.paused {
		return nil, wanted, err
	}
	released := a.releases.Released()
	gpus = slices.DeleteFunc(slices.Clone(s.gpus), func(g sharing.GPU) bool { return g.DriverIndex == sharing.NotListed || released[g.UUID] })
	return gpus, wanted, err
}

// resourcesOf are the resources that the profile in force makes of these GPUs.
func (a *agent) resourcesOf(gpus []sharing.GPU) []sharing.Resource {
	profile := a.state.Load().profile
	if profile == nil {
		return nil
	}
	return sharing.NewPlan(gpus, profile.Profile).Resources
}

// migDevices are the device plugin's units as a MIG change sees them.
type migDevices struct{ *plugin.Manager }

func (d migDevices) SetRefusals(units map[string]string) {
	d.Manager.SetRefusals(plugin.MIGChange, units)
}

// pause is what is known of Options.Paused.
type pause struct{ paused, known bool }

func (a *agent) pauseNow() (p pause) {
	if a.Paused == nil {
		return pause{known: true}
	}
	p.paused, p.known = a.Paused()
	return p
}

// logPause says when a pause begins and ends.
func logPause(log *slog.Logger, last, next pause) {
	switch {
	case next.paused && !last.paused:
		log.Warn("mig-manager pauses this program by a label of the Node")
	case last.paused && !next.paused && next.known:
		log.Info("mig-manager no longer pauses this program")
	}
}
