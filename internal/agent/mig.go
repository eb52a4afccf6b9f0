package agent

import (
	"errors"
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
	released := a.released()
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
