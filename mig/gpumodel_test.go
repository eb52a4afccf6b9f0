package mig_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/virgate/virgate/mig"
)

// gpuModel is a GPU as a driver would keep it, on which steps can be made. It takes its rules from legal, not
// from the package.
type gpuModel struct {
	geometry  mig.Geometry
	mode      bool
	instances []mig.Instance
	// made counts partitions, for their UUIDs.
	made int
}

// newGPUModel cuts a GPU as given; partitions at one placement share a GPU
// instance.
func newGPUModel(t testing.TB, g mig.Geometry, partitions []mig.Partition) *gpuModel {
	t.Helper()
	b := &gpuModel{geometry: g, mode: true}
	for _, p := range partitions {
		if b.at(p.Placement) < 0 {
			b.must(t, mig.Step{Action: mig.CreateInstance, Profile: p.Profile.Instance(), Placement: p.Placement})
		}
		b.must(t, mig.Step{Action: mig.CreateCompute, Profile: p.Profile, Placement: p.Placement, GI: -1})
	}
	return b
}

func (b *gpuModel) must(t testing.TB, s mig.Step) {
	t.Helper()
	if err := b.make(s); err != nil {
		t.Fatalf("%s: %v", s, err)
	}
}

// make makes one step, or returns why a driver would refuse it.
func (b *gpuModel) make(s mig.Step) error {
	if s.Action == mig.EnableMIG || s.Action == mig.DisableMIG {
		if on := s.Action == mig.EnableMIG; on == b.mode || len(b.instances) > 0 {
			return errors.New("the mode is so already, or something is on the GPU")
		}
		b.mode = s.Action == mig.EnableMIG
		return nil
	}
	if !b.mode {
		return errors.New("MIG is off")
	}
	i := b.at(s.Placement)
	if s.Action == mig.CreateInstance {
		return b.createInstance(s)
	}
	if i < 0 {
		return errors.New("no GPU instance there")
	}
	there := &b.instances[i]
	if s.GI >= 0 && s.GI != there.GI || s.Profile.Instance() != there.Profile {
		return fmt.Errorf("another GPU instance is there: %+v", *there)
	}
	switch s.Action {
	case mig.CreateCompute:
		return b.createCompute(there, s.Profile.Compute)
	case mig.DestroyInstance:
		if len(there.Computes) > 0 || s.GI != there.GI {
			return errors.New("it has compute instances")
		}
		b.instances = slices.Delete(b.instances, i, i+1)
		return nil
	case mig.DestroyCompute:
		n := slices.IndexFunc(there.Computes, func(c mig.Compute) bool { return c.CI == s.CI })
		if n < 0 || there.Computes[n].UUID != s.UUID || there.Computes[n].Slices != s.Profile.Compute || there.Computes[n].Busy {
			return errors.New("no such free compute instance")
		}
		there.Computes = slices.Delete(slices.Clone(there.Computes), n, n+1)
		return nil
	}
	return fmt.Errorf("no action %q", s.Action)
}

func (b *gpuModel) createInstance(s mig.Step) error {
	shape, ok := b.geometry.ProfileInfo(s.Profile)
	if !ok || shape.Profile != s.Profile || shape.Size != s.Placement.Size || !slices.Contains(shape.Starts, s.Placement.Start) {
		return errors.New("no such shape and placement")
	}
	next := append(b.outlines(), mig.Partition{Profile: s.Profile, Placement: s.Placement})
	if !legal(b.geometry, next) {
		return fmt.Errorf("not legal: %v", next)
	}
	gi := 1
	for slices.ContainsFunc(b.instances, func(i mig.Instance) bool { return i.GI == gi }) {
		gi++
	}
	b.instances = append(b.instances, mig.Instance{GI: gi, Profile: s.Profile, Placement: s.Placement})
	return nil
}

func (b *gpuModel) createCompute(in *mig.Instance, size int) error {
	used, ci := 0, 0
	for _, c := range in.Computes {
		used += c.Slices
		ci = max(ci, c.CI+1)
	}
	if used+size > in.Profile.Slices {
		return errors.New("no slices left in the GPU instance")
	}
	b.made++
	in.Computes = append(slices.Clone(in.Computes), mig.Compute{CI: ci, Slices: size, UUID: fmt.Sprintf("MIG-%d", b.made)})
	return nil
}

func (b *gpuModel) at(p mig.Placement) int {
	return slices.IndexFunc(b.instances, func(i mig.Instance) bool { return i.Placement == p })
}

func (b *gpuModel) outlines() []mig.Partition {
	var list []mig.Partition
	for _, i := range b.instances {
		list = append(list, mig.Partition{Profile: i.Profile, Placement: i.Placement})
	}
	return list
}

// state is the state of one partition of the model.
type state struct {
	mig.Partition
	uuid string
	busy bool
}

// partitions are the model's, by UUID's number.
func (b *gpuModel) partitions() []state {
	var list []state
	for _, i := range b.instances {
		for _, c := range i.Computes {
			list = append(list, state{mig.Partition{Profile: i.Partition(c), Placement: i.Placement}, c.UUID, c.Busy})
		}
	}
	slices.SortFunc(list, func(a, b state) int {
		return cmp.Or(cmp.Compare(len(a.uuid), len(b.uuid)), cmp.Compare(a.uuid, b.uuid))
	})
	return list
}

// setBusy marks the partitions whose place in partitions() the set has.
func (b *gpuModel) setBusy(set uint) {
	for n, p := range b.partitions() {
		for i := range b.instances {
			for c := range b.instances[i].Computes {
				if b.instances[i].Computes[c].UUID == p.uuid {
					b.instances[i].Computes[c].Busy = set>>n&1 == 1
				}
			}
		}
	}
}

// has is the multiset of partitions as text.
func (b *gpuModel) has() string {
	var list []mig.Partition
	for _, p := range b.partitions() {
		list = append(list, p.Partition)
	}
	return multiset(list)
}

func (b *gpuModel) clone() *gpuModel {
	c := *b
	c.instances = slices.Clone(b.instances)
	for i := range c.instances {
		c.instances[i].Computes = slices.Clone(c.instances[i].Computes)
	}
	return &c
}
