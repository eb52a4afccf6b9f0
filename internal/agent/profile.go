package agent

import (
	"errors"
	"reflect"

	"github.com/virgate/virgate/configs"
)

// Keeper keeps the profile in force for the next start. It is called from the
// loop, and only by the program that serves the node.
type Keeper interface {
	// Kept returns the profile that was in force when the last program ended;
	// false when none was, or it cannot be used any more.
	Kept() (configs.Selected, bool)
	// Keep is called with the profile in force, each time it has been found
	// right. It returns soon, and reports what goes wrong by itself.
	Keep(configs.Selected)
}

// choose finds the profile in force: the wanted one, else the last good one of
// this program, else that of the program before it. OnProfile hears of it.
func (a *agent) choose(last, next *state) {
	wanted, err := a.Policy.Profile()
	next.wanted, next.rejected = wanted, err
	serving := a.Keeper != nil && a.serving.Load()
	switch {
	case err == nil:
		next.profile = &wanted
		if serving {
			a.Keeper.Keep(wanted)
		}
	case next.profile == nil && serving:
		if kept, ok := a.Keeper.Kept(); ok {
			next.profile = &kept
			a.Logger.Info("profile of the last run serves", "profile", kept.String(), "generation", kept.Generation)
		}
	}
	if err != nil && !sameError(last.rejected, err) {
		if errors.Is(err, configs.ErrPending) {
			a.Logger.Info("profile awaited", "because", err)
		} else {
			a.Logger.Error("profile rejected, the last good one stays in force", "error", err)
		}
	}
	if next.profile == nil || last.profile != nil && reflect.DeepEqual(last.profile.Profile, next.profile.Profile) {
		return
	}
	if err == nil {
		a.Logger.Info("profile in force", "profile", wanted.String(), "generation", wanted.Generation)
	}
	if a.OnProfile != nil {
		a.OnProfile(next.profile.Profile)
	}
}
