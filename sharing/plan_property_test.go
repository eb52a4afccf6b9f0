package sharing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// randomNode makes up to eight GPUs: some with MIG, some sick.
func randomNode(r *rand.Rand) []GPU {
	health := func() Health {
		if r.IntN(5) == 0 {
			return Faulty("xid 79")
		}
		return Health{}
	}
	kinds := []mig.Profile{oneG(), oneGME(), twoG(), halfG(), threeG(), {}}
	var gpus []GPU
	for index := range r.IntN(9) {
		gpu := whole(index, []string{a100, t4}[r.IntN(2)])
		if r.IntN(2) == 0 {
			var profiles []mig.Profile
			for range r.IntN(5) {
				profiles = append(profiles, kinds[r.IntN(len(kinds))])
			}
			gpu = cut(index, profiles...)
			for i := range gpu.Partitions {
				gpu.Partitions[i].Health = health()
			}
		}
		gpu.Health = health()
		gpus = append(gpus, gpu)
	}
	return gpus
}

// randomProfile makes a profile that fits such nodes now and then.
func randomProfile(r *rand.Rand, t *testing.T) Profile {
	names := []string{"nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb", "nvidia.com/t4"}
	texts := []string{"0", "1", "2:0", "3:1", "7", whole(4, t4).UUID, "0000:05:00.0"}
	var shares []ReplicatedResource
	for range r.IntN(4) {
		share := ReplicatedResource{
			Resource: names[r.IntN(len(names))],
			Replicas: r.IntN(4),
			Policy:   []AllocationPolicy{Distributed, Packed, Spread}[r.IntN(3)],
		}
		if r.IntN(2) == 0 {
			share.Rename = names[r.IntN(len(names))]
		}
		switch r.IntN(3) {
		case 0:
			share.Select.Count = 1 + r.IntN(3)
		case 1:
			share.Select = list(t, texts[r.IntN(len(texts))], texts[r.IntN(len(texts))])
		}
		shares = append(shares, share)
	}
	profile := defaults(shares...)
	profile.MIGStrategy = []MIGStrategy{MIGNone, MIGSingle, MIGMixed}[r.IntN(3)]
	if r.IntN(2) == 0 {
		profile.GPUNames = []NamingRule{{"T4", "nvidia.com/t4"}, {"*", "nvidia.com/gpu"}}
	}
	if r.IntN(3) == 0 {
		profile.Exclude = selectors(t, texts[r.IntN(len(texts))])
	}
	return profile
}

func TestPlanProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for i := range 1500 {
		gpus, profile := randomNode(r), randomProfile(r, t)
		plan := NewPlan(gpus, profile)
		for _, problem := range problems(gpus, profile, plan) {
			t.Errorf("node %d: %s", i, problem)
		}
		if diff := cmp.Diff(plan, NewPlan(shuffledNode(r, gpus), profile)); diff != "" {
			t.Errorf("node %d: the order of the GPUs matters:\n%s", i, diff)
		}
		if diff := cmp.Diff(shape(plan), shape(NewPlan(healed(gpus), profile))); diff != "" {
			t.Errorf("node %d: health changes what is offered (-sick +healthy):\n%s", i, diff)
		}
		if t.Failed() {
			t.Fatalf("GPUs %+v\nprofile %+v", gpus, profile)
		}
	}
}

// problems lists the invariants that the plan breaks.
func problems(gpus []GPU, profile Profile, plan Plan) (found []string) {
	report := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	seen := make(map[string]string)
	if !slices.IsSortedFunc(plan.Resources, func(a, b Resource) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	}) {
		report("resources are not sorted by name, or one comes twice")
	}
	for _, resource := range plan.Resources {
		if len(resource.Devices) == 0 {
			report("%s has no devices", resource.Name)
		}
		devices := resource.Devices
		for _, unit := range resource.Units {
			if other, twice := seen[unit.ID]; twice {
				report("unit %s is in %s and %s", unit.ID, other, resource.Name)
			}
			seen[unit.ID] = resource.Name
			health, known := plan.Health[unit.ID]
			if !known || health != unit.Health {
				report("unit %s has fault %q, the inventory %q, %v", unit.ID, unit.Health, health, known)
			}
			for replica := range unit.Replicas {
				if len(devices) == 0 {
					report("%s has too few devices", resource.Name)
					return found
				}
				want := Device{ID: NewDeviceID(unit.ID, replica), Unit: unit.ID, Healthy: health.Healthy(), NUMANode: unit.NUMANode}
				if unit.Replicas == 1 {
					want.ID = unit.ID
				}
				if devices[0] != want {
					report("%s has device %+v, want %+v", resource.Name, devices[0], want)
				}
				devices = devices[1:]
			}
		}
		if len(devices) > 0 {
			report("%s has devices without unit: %v", resource.Name, devices)
		}
	}
	return append(found, misplaced(gpus, profile, plan, seen)...)
}

// misplaced lists units that are offered and must not be, or the reverse.
func misplaced(gpus []GPU, profile Profile, plan Plan, offered map[string]string) (found []string) {
	excluded := func(matches func(Selector) bool) bool { return slices.ContainsFunc(profile.Exclude, matches) }
	for _, gpu := range gpus {
		_, asWhole := offered[gpu.UUID]
		out := excluded(func(s Selector) bool { return s.MatchGPU(gpu) })
		switch {
		case asWhole && (gpu.MIG || out):
			found = append(found, fmt.Sprintf("GPU %d is offered", gpu.Index))
		case !asWhole && !gpu.MIG && !out && profile.MIGStrategy != MIGSingle:
			found = append(found, fmt.Sprintf("GPU %d is not offered", gpu.Index))
		}
		for _, partition := range gpu.Partitions {
			_, here := offered[partition.UUID]
			out := excluded(func(s Selector) bool { return s.MatchPartition(gpu, partition) })
			allowed := profile.MIGStrategy != MIGNone && !out && !partition.Profile.IsZero()
			if here && !allowed || !here && allowed && profile.MIGStrategy == MIGMixed {
				found = append(found, fmt.Sprintf("partition %d:%d is offered: %v", gpu.Index, partition.Index, here))
			}
		}
	}
	if !slices.IsSorted(plan.Warnings) {
		found = append(found, "the warnings are not sorted")
	}
	return found
}

func shuffledNode(r *rand.Rand, gpus []GPU) []GPU {
	gpus = slices.Clone(gpus)
	r.Shuffle(len(gpus), func(i, j int) { gpus[i], gpus[j] = gpus[j], gpus[i] })
	for _, gpu := range gpus {
		parts := slices.Clone(gpu.Partitions)
		r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		gpus[slices.IndexFunc(gpus, func(g GPU) bool { return g.UUID == gpu.UUID })].Partitions = parts
	}
	return gpus
}

func healed(gpus []GPU) []GPU {
	gpus = slices.Clone(gpus)
	for i := range gpus {
		gpus[i].Health = Health{}
		gpus[i].Partitions = slices.Clone(gpus[i].Partitions)
		for j := range gpus[i].Partitions {
			gpus[i].Partitions[j].Health = Health{}
		}
	}
	return gpus
}

// shape is a plan's offer without health.
func shape(plan Plan) [][]string {
	shapes := [][]string{plan.Warnings}
	for _, resource := range plan.Resources {
		names := []string{resource.Name, string(resource.Policy)}
		for _, device := range resource.Devices {
			names = append(names, device.ID)
		}
		shapes = append(shapes, names)
	}
	return shapes
}

// TestMissingGPUChangesNoOther checks that a plan offers the other GPUs as if the missing one
// were there.
func TestMissingGPUChangesNoOther(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for i := range 1500 {
		gpus, profile := randomNode(r), randomProfile(r, t)
		if len(gpus) == 0 {
			continue
		}
		missing := gpus[r.IntN(len(gpus))].UUID
		before := NewPlan(gpus, profile)
		for n := range gpus {
			if gpus[n].UUID == missing {
				gpus[n].DriverIndex = NotListed
			}
		}
		var want []Resource
		for _, resource := range before.Resources {
			units := map[string]bool{}
			resource.Units = slices.DeleteFunc(slices.Clone(resource.Units), func(u Unit) bool {
				units[u.ID] = u.GPU == missing
				return u.GPU == missing
			})
			resource.Devices = slices.DeleteFunc(slices.Clone(resource.Devices), func(d Device) bool { return units[d.Unit] })
			if len(resource.Units) > 0 {
				want = append(want, resource)
			}
		}
		if diff := cmp.Diff(want, NewPlan(gpus, profile).Resources); diff != "" {
			t.Fatalf("case %d, without %s (-want +got):\n%s", i, missing, diff)
		}
	}
}
