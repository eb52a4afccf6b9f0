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
	// Keep is called with the profile in force, each time that the loop decides,
	// but with none that Kept has returned. It returns soon, and reports what goes wrong by itself.
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
		next.profile, next.restored = &wanted, false
	case next.profile == nil && serving:
		if kept, ok := a.Keeper.Kept(); ok {
			next.profile, next.restored = &kept, true
			a.Logger.Info("profile of the last run serves", "profile", kept.String(), "generation", kept.Generation)
		}
	}
	// Also when the wanted one is rejected: the good one may be from the time when
	// this program stood by.
	if serving && next.profile != nil && !next.restored {
		a.Keeper.Keep(*next.profile)
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
