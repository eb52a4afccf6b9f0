package mig

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Instance is a GPU instance and its compute instances, as the driver lists them.
type Instance struct {
	GI int `json:"gi"` // the driver's GPU instance ID
	// Profile is the GPU instance's profile; its Compute equals its Slices.
	Profile   Profile   `json:"profile"`
	Placement Placement `json:"placement"`
	// Computes are the compute instances, in any order. A GPU instance without compute instances
	// still occupies its slots, but is not in use.
	Computes []Compute `json:"computes,omitempty"`
}

// Compute is a compute instance, which Kubernetes calls a MIG device.
type Compute struct {
	// CI is the driver's compute instance ID, unique in its GPU instance.
	CI int `json:"ci"`
	// Slices is the number of compute slices, the C of "Cc.Gg.Mgb".
	Slices int    `json:"slices"`
	UUID   string `json:"uuid"`
	// Busy is true if a pod or a process uses it, or if that is unknown.
	Busy bool `json:"busy,omitempty"`
}

// Partition returns the profile of one of the GPU instance's compute instances.
func (i Instance) Partition(c Compute) Profile {
	p := i.Profile
	p.Compute = c.Slices
	return p
}

// Change brings a GPU to its wanted layout, or as close to it as the partitions in use allow.
type Change struct {
	// Steps are in the order in which they must be made; none if nothing can be done now.
	// Everything is destroyed before anything is created.
	Steps []Step `json:"steps,omitempty"`
	// Doomed are the sorted UUIDs of the partitions that the steps destroy; Kept are the UUIDs of
	// the others, including blocked ones.
	Doomed []string `json:"doomed,omitempty"`
	Kept   []string `json:"kept,omitempty"`
	// Blocked are the partitions in use that prevent the completion of the layout, sorted by
	// placement.
	Blocked []Blocked `json:"blocked,omitempty"`
	// Result are the GPU's partitions after the steps, sorted by placement.
	Result []Partition `json:"result,omitempty"`
	// MIG is the MIG mode after the steps.
	MIG bool `json:"-"`
}

// Target returns how the GPU is partitioned after the steps.
func (c Change) Target() PlacedLayout { return PlacedLayout{MIG: c.MIG, Partitions: c.Result} }

// Complete reports whether the GPU has the wanted layout after the steps.
func (c Change) Complete() bool { return len(c.Blocked) == 0 }

// Empty reports whether there is nothing to do now: the GPU has its layout, or waits for partitions
// in use.
func (c Change) Empty() bool { return len(c.Steps) == 0 }

// Blocked is a partition in use that the wanted layout does not have.
type Blocked struct {
	Partition
	UUID string `json:"uuid"`
	// Waiting are the wanted partitions that cannot be created while this one exists, with their
	// future placements. There are none if this partition is merely surplus, or if it only prevents
	// switching off MIG mode.
	Waiting []Partition `json:"waiting,omitempty"`
}

// String returns a text about the partition and the wanted partitions that wait for it.
func (b Blocked) String() string {
	text := fmt.Sprintf("%s at %s is in use", b.Profile, b.Placement)
	if len(b.Waiting) == 0 {
		return text + " and not part of the layout"
	}
	waiting := make([]string, len(b.Waiting))
	for i, w := range b.Waiting {
		waiting[i] = fmt.Sprintf("%s at %s", w.Profile, w.Placement)
	}
	return text + ", in the way of " + strings.Join(waiting, ", ")
}

// Step is one driver call that changes a GPU.
type Step struct {
	Action Action `json:"action"`
	// Placement identifies the GPU instance, which exists or is created by an earlier step. It is
	// zero for a change of the MIG mode.
	Placement Placement `json:"placement"`
	// Profile is the profile of the GPU instance or, for a compute instance, of the partition. It
	// is zero for a change of the MIG mode.
	Profile Profile `json:"profile"`
	// GI is the driver's ID of the GPU instance; -1 if it does not exist yet. CI and UUID identify
	// the compute instance to destroy; for any other action CI is -1.
	GI   int    `json:"gi"`
	CI   int    `json:"ci"`
	UUID string `json:"uuid,omitempty"`
}

// Action is what a Step does.
type Action string

// The actions, in the order of a Change's steps.
const (
	DestroyCompute  Action = "destroy-compute"
	DestroyInstance Action = "destroy-instance"
	DisableMIG      Action = "disable-mig"
	EnableMIG       Action = "enable-mig"
	CreateInstance  Action = "create-instance"
	CreateCompute   Action = "create-compute"
)

// String describes the step for people.
func (s Step) String() string {
	switch s.Action {
	case DestroyCompute:
		return fmt.Sprintf("destroy partition %s at %s (%s)", s.Profile, s.Placement, s.UUID)
	case DestroyInstance:
		return fmt.Sprintf("destroy GPU instance %s at %s", s.Profile, s.Placement)
	case CreateInstance:
		return fmt.Sprintf("create GPU instance %s at %s", s.Profile, s.Placement)
	case CreateCompute:
		return fmt.Sprintf("create partition %s at %s", s.Profile, s.Placement)
	case EnableMIG:
		return "enable MIG mode"
	case DisableMIG:
		return "disable MIG mode"
	}
	return string(s.Action)
}

// The reasons why a step can fail, for errors.Is.
var (
	// ErrInUse means that a partition or GPU is in use, by a pod or by any other program.
	ErrInUse = errors.New("in use")
	// ErrUnlistedClient means that the driver lists no process that uses the busy partition or GPU.
	ErrUnlistedClient = errors.New("by a program that is in no list of the driver")
	// ErrNoPermission means that this process may not partition GPUs.
	ErrNoPermission = errors.New("not permitted")
	// ErrResetRequired means that the GPU must be reset first.
	ErrResetRequired = errors.New("the GPU must be reset")
)

// UnlistedClientError is ErrUnlistedClient with the programs that have the GPU open, as far as they
// are known.
type UnlistedClientError struct{ Programs []string }

func (*UnlistedClientError) Error() string { return ErrUnlistedClient.Error() }

// Is reports whether the target is ErrUnlistedClient.
func (*UnlistedClientError) Is(target error) bool { return target == ErrUnlistedClient }

// PlacedLayout is a layout whose partitions have their placements.
type PlacedLayout struct {
	MIG bool `json:"mig"`
	// Partitions are sorted by placement.
	Partitions []Partition `json:"partitions"`
}

// Steps returns the steps that lead from the GPU's current mode and GPU instances to exactly the
// target. The target alone decides which partitions stay. A change can be interrupted and resumed
// after any step: Steps then returns the remaining steps.
//
// Everything is destroyed before anything is created. All compute instances are destroyed before
// the first GPU instance, because the driver reports a GPU instance as in use for a moment after
// its last compute instance is destroyed. Of interchangeable partitions, the ones in use stay. If a
// partition in use would still have to be destroyed, the error wraps ErrInUse and there are no
// steps.
func Steps(mode bool, have []Instance, target PlacedLayout) ([]Step, error) {
	wanted := map[Placement][]Profile{}
	if target.MIG {
		for _, p := range target.Partitions {
			wanted[p.Placement] = append(wanted[p.Placement], p.Profile)
		}
	}
	var computes, instances, create []Step
	for _, instance := range have {
		want := wanted[instance.Placement]
		if len(want) > 0 && want[0].Instance() == instance.Profile {
			delete(wanted, instance.Placement)
		} else {
			want = nil
			instances = append(instances, Step{
				Action:    DestroyInstance,
				Profile:   instance.Profile,
				Placement: instance.Placement,
				GI:        instance.GI,
				CI:        -1,
			})
		}
		destroyed, created, err := instance.steps(want)
		if err != nil {
			return nil, err
		}
		computes, create = append(computes, destroyed...), append(create, created...)
	}
	for at, profiles := range wanted {
		create = append(create, Step{
			Action:    CreateInstance,
			Profile:   profiles[0].Instance(),
			Placement: at,
			GI:        -1,
			CI:        -1,
		})
		for _, profile := range profiles {
			create = append(create, Step{
				Action:    CreateCompute,
				Profile:   profile,
				Placement: at,
				GI:        -1,
				CI:        -1,
			})
		}
	}
	slices.SortStableFunc(create, func(a, b Step) int {
		// By position, and a GPU instance before its compute instances.
		return cmp.Or(cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(b.Action, a.Action),
			b.Profile.Compare(a.Profile))
	})
	if mode != target.MIG {
		instances = append(instances, ModeStep(target.MIG))
	}
	return slices.Concat(computes, instances, create), nil
}

// ModeStep returns the step that switches MIG mode on or off.
func ModeStep(on bool) Step {
	if on {
		return Step{
			Action: EnableMIG,
			GI:     -1,
			CI:     -1,
		}
	}
	return Step{
		Action: DisableMIG,
		GI:     -1,
		CI:     -1,
	}
}

// steps returns the steps that leave the GPU instance with exactly the wanted partitions.
func (i Instance) steps(want []Profile) (destroy, create []Step, err error) {
	want = slices.Clone(want)
	rank := map[bool]int{false: 1} // Partitions in use come first.
	computes := slices.SortedFunc(slices.Values(i.Computes), func(a, b Compute) int {
		return cmp.Or(cmp.Compare(rank[a.Busy], rank[b.Busy]), cmp.Compare(a.CI, b.CI))
	})
	for _, c := range computes {
		profile := i.Partition(c)
		if n := slices.Index(want, profile); n >= 0 {
			want = slices.Delete(want, n, n+1)
			continue
		}
		if c.Busy {
			return nil, nil, fmt.Errorf("%s at %s (%s): %w", profile, i.Placement, c.UUID, ErrInUse)
		}
		destroy = append(destroy, Step{
			Action:    DestroyCompute,
			Profile:   profile,
			Placement: i.Placement,
			GI:        i.GI,
			CI:        c.CI,
			UUID:      c.UUID,
		})
	}
	for _, profile := range want {
		create = append(create, Step{
			Action:    CreateCompute,
			Profile:   profile,
			Placement: i.Placement,
			GI:        i.GI,
			CI:        -1,
		})
	}
	return destroy, create, nil
}
