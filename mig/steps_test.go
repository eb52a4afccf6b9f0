package mig_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// TestSteps checks which steps lead from a GPU's state to a target, in which order, and which are never needed.
func TestSteps(t *testing.T) {
	profile := func(text string) mig.Profile {
		p, err := mig.ParseProfile(text)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	one, two, part := profile("1g.5gb"), profile("2g.10gb"), profile("1c.2g.10gb")
	at := func(p mig.Profile, start, size int) mig.Partition {
		return mig.Partition{Profile: p, Placement: mig.Placement{Start: start, Size: size}}
	}
	instance := func(gi int, p mig.Partition, computes ...mig.Compute) mig.Instance {
		return mig.Instance{GI: gi, Profile: p.Profile.Instance(), Placement: p.Placement, Computes: computes}
	}
	compute := func(ci, slices int, uuid string, busy bool) mig.Compute {
		return mig.Compute{CI: ci, Slices: slices, UUID: uuid, Busy: busy}
	}
	for _, test := range []struct {
		name   string
		mode   bool
		have   []mig.Instance
		target mig.PlacedLayout
		want   []string
		inUse  bool
	}{
		{"nothing to nothing", false, nil, mig.PlacedLayout{}, nil, false},
		{"mode on, then instance, then computes", false, nil,
			mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{at(part, 2, 2), at(part, 2, 2), at(one, 0, 1)}},
			[]string{"enable MIG mode", "create GPU instance 1g.5gb at 0:1", "create partition 1g.5gb at 0:1",
				"create GPU instance 2g.10gb at 2:2", "create partition 1c.2g.10gb at 2:2", "create partition 1c.2g.10gb at 2:2"}, false},
		{"all gone, then mode off", true, []mig.Instance{instance(1, at(one, 0, 1), compute(0, 1, "MIG-a", false))}, mig.PlacedLayout{},
			[]string{"destroy partition 1g.5gb at 0:1 (MIG-a)", "destroy GPU instance 1g.5gb at 0:1", "disable MIG mode"}, false},
		{"what is right stays, in use or not", true,
			[]mig.Instance{instance(1, at(one, 0, 1), compute(0, 1, "MIG-a", true)), instance(2, at(one, 1, 1), compute(0, 1, "MIG-b", false))},
			mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{at(one, 0, 1), at(one, 1, 1)}}, nil, false},
		{"another place is another partition", true, []mig.Instance{instance(1, at(one, 0, 1), compute(0, 1, "MIG-a", false))},
			mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{at(one, 1, 1)}},
			[]string{"destroy partition 1g.5gb at 0:1 (MIG-a)", "destroy GPU instance 1g.5gb at 0:1",
				"create GPU instance 1g.5gb at 1:1", "create partition 1g.5gb at 1:1"}, false},
		{"an instance without its partition gets it", true, []mig.Instance{instance(1, at(one, 0, 1))},
			mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{at(one, 0, 1)}}, []string{"create partition 1g.5gb at 0:1"}, false},
		{"of equal partitions the free one goes", true,
			[]mig.Instance{instance(1, at(two, 0, 2), compute(0, 1, "MIG-a", false), compute(1, 1, "MIG-b", true))},
			mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{at(part, 0, 2)}}, []string{"destroy partition 1c.2g.10gb at 0:2 (MIG-a)"}, false},
		{"one in use never goes", true, []mig.Instance{instance(1, at(one, 0, 1), compute(0, 1, "MIG-a", true))},
			mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{at(two, 0, 2)}}, nil, true},
		{"nor for the mode", true, []mig.Instance{instance(1, at(one, 0, 1), compute(0, 1, "MIG-a", true))}, mig.PlacedLayout{}, nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			steps, err := mig.Steps(test.mode, test.have, test.target)
			var got []string
			for _, step := range steps {
				got = append(got, step.String())
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			if errors.Is(err, mig.ErrInUse) != test.inUse || (err != nil) != test.inUse {
				t.Errorf("error %v", err)
			}
		})
	}
}
