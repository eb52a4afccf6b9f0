package agent

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// towards are the steps from how a board is cut to how it should be, place for
// place; none when it is. It is pure and decides nothing: which partitions stay
// follows from the target. Each step that is made leaves one less.
//
// A partition in use that would have to go is an error, sharing.ErrInUse, and
// then there are no steps.
func towards(cut sharing.Cut, target sharing.Arrangement) ([]mig.Step, error) {
	wanted := map[mig.Placement][]mig.Profile{}
	if target.MIG {
		for _, p := range target.Partitions {
			wanted[p.Placement] = append(wanted[p.Placement], p.Profile)
		}
	}
	var leave, destroy, create []mig.Step
	for _, instance := range cut.Instances {
		want := wanted[instance.Placement]
		stays := len(want) > 0 && want[0].Instance() == instance.Profile
		if stays {
			delete(wanted, instance.Placement)
		} else {
			want = nil
			destroy = append(destroy, mig.Step{
				Action: mig.DestroyInstance, Placement: instance.Placement, Profile: instance.Profile, GI: instance.GI, CI: -1,
			})
		}
		gone, missing, err := compare(instance, want)
		if err != nil {
			return nil, err
		}
		leave, create = append(leave, gone...), append(create, missing...)
	}
	var mode []mig.Step
	switch {
	case cut.MIG && !target.MIG:
		mode = []mig.Step{{Action: mig.DisableMIG, GI: -1, CI: -1}}
	case !cut.MIG && target.MIG:
		mode = []mig.Step{{Action: mig.EnableMIG, GI: -1, CI: -1}}
	}
	for at, profiles := range wanted {
		create = append(create, mig.Step{Action: mig.CreateInstance, Placement: at, Profile: profiles[0].Instance(), GI: -1, CI: -1})
		for _, profile := range profiles {
			create = append(create, mig.Step{Action: mig.CreateCompute, Placement: at, Profile: profile, GI: -1, CI: -1})
		}
	}
	slices.SortStableFunc(create, func(a, b mig.Step) int {
		// By place, and an instance before what lies in it.
		return cmp.Or(cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(b.Action, a.Action), mig.Compare(b.Profile, a.Profile))
	})
	return slices.Concat(leave, destroy, mode, create), nil
}

// compare says which compute instances of the GPU instance must go, free ones
// first, and which are missing.
func compare(instance mig.Instance, want []mig.Profile) (gone, missing []mig.Step, err error) {
	computes := slices.Clone(instance.Computes)
	slices.SortFunc(computes, func(a, b mig.Compute) int {
		switch {
		case a.Busy == b.Busy:
			return cmp.Compare(a.CI, b.CI)
		case a.Busy:
			return -1
		}
		return 1
	})
	want = slices.Clone(want)
	for _, c := range computes {
		profile := instance.Partition(c)
		if i := slices.Index(want, profile); i >= 0 {
			want = slices.Delete(want, i, i+1)
			continue
		}
		if c.Busy {
			return nil, nil, fmt.Errorf("%s at %s (%s): %w", profile, instance.Placement, c.UUID, sharing.ErrInUse)
		}
		gone = append(gone, mig.Step{
			Action: mig.DestroyCompute, Placement: instance.Placement, Profile: profile, GI: instance.GI, CI: c.CI, UUID: c.UUID,
		})
	}
	for _, profile := range want {
		missing = append(missing, mig.Step{Action: mig.CreateCompute, Placement: instance.Placement, Profile: profile, GI: instance.GI, CI: -1})
	}
	return gone, missing, nil
}

// uuids are the partitions of the board.
func uuids(cut sharing.Cut) map[string]bool {
	set := map[string]bool{}
	for _, instance := range cut.Instances {
		for _, c := range instance.Computes {
			set[c.UUID] = true
		}
	}
	return set
}

// lasting are the partitions of the board that neither finishing nor undoing the
// change touches.
func lasting(cut sharing.Cut, recut sharing.Recut) map[string]bool {
	set := map[string]bool{}
	for _, instance := range cut.Instances {
		for _, c := range instance.Computes {
			placed := mig.Placed{Profile: instance.Partition(c), Placement: instance.Placement}
			if slices.Contains(recut.Before.Partitions, placed) && slices.Contains(recut.After.Partitions, placed) {
				set[c.UUID] = true
			}
		}
	}
	return set
}
