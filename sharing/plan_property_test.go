package sharing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// randomNode makes up to eight boards: some with MIG, some sick.
func randomNode(r *rand.Rand) []GPU {
	fault := func() string {
		if r.IntN(5) == 0 {
			return "xid 79"
		}
		return ""
	}
	kinds := []mig.Profile{oneG(), oneGME(), twoG(), halfG(), threeG(), {}}
	var boards []GPU
	for index := range r.IntN(9) {
		board := whole(index, []string{a100, t4}[r.IntN(2)])
		if r.IntN(2) == 0 {
			var profiles []mig.Profile
			for range r.IntN(5) {
				profiles = append(profiles, kinds[r.IntN(len(kinds))])
			}
			board = cut(index, profiles...)
			for i := range board.Partitions {
				board.Partitions[i].Fault = fault()
			}
		}
		board.Fault = fault()
		boards = append(boards, board)
	}
	return boards
}

// randomProfile makes a profile that fits such nodes now and then.
func randomProfile(r *rand.Rand, t *testing.T) Profile {
	names := []string{"nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb", "nvidia.com/t4"}
	texts := []string{"0", "1", "2:0", "3:1", "7", whole(4, t4).UUID, "0000:05:00.0"}
	var shares []Share
	for range r.IntN(4) {
		share := Share{
			Resource: names[r.IntN(len(names))],
			Replicas: r.IntN(4),
			Policy:   []Policy{Distributed, Packed, Spread}[r.IntN(3)],
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
		profile.GPUNames = []Naming{{"T4", "nvidia.com/t4"}, {"*", "nvidia.com/gpu"}}
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
			t.Errorf("node %d: the order of the boards matters:\n%s", i, diff)
		}
		if diff := cmp.Diff(shape(plan), shape(NewPlan(healed(gpus), profile))); diff != "" {
			t.Errorf("node %d: health changes what is offered (-sick +healthy):\n%s", i, diff)
		}
		if t.Failed() {
			t.Fatalf("boards %+v\nprofile %+v", gpus, profile)
		}
	}
}

// problems says which invariants the plan breaks.
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
			fault, known := plan.Faults[unit.ID]
			if !known || fault != unit.Fault {
				report("unit %s has fault %q, the inventory %q, %v", unit.ID, unit.Fault, fault, known)
			}
			for replica := range unit.Replicas {
				if len(devices) == 0 {
					report("%s has too few devices", resource.Name)
					return found
				}
				want := Device{ID: NewDeviceID(unit.ID, replica), Unit: unit.ID, Healthy: fault == "", NUMANode: unit.NUMANode}
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

// misplaced says which units are offered and must not be, or the reverse.
func misplaced(gpus []GPU, profile Profile, plan Plan, offered map[string]string) (found []string) {
	excluded := func(matches func(Selector) bool) bool { return slices.ContainsFunc(profile.Exclude, matches) }
	for _, board := range gpus {
		_, asWhole := offered[board.UUID]
		out := excluded(func(s Selector) bool { return s.MatchGPU(board) })
		switch {
		case asWhole && (board.MIG || out):
			found = append(found, fmt.Sprintf("board %d is offered", board.Index))
		case !asWhole && !board.MIG && !out && profile.MIGStrategy != MIGSingle:
			found = append(found, fmt.Sprintf("board %d is not offered", board.Index))
		}
		for _, partition := range board.Partitions {
			_, here := offered[partition.UUID]
			out := excluded(func(s Selector) bool { return s.MatchPartition(board, partition) })
			allowed := profile.MIGStrategy != MIGNone && !out && !partition.Profile.IsZero()
			if here && !allowed || !here && allowed && profile.MIGStrategy == MIGMixed {
				found = append(found, fmt.Sprintf("partition %d:%d is offered: %v", board.Index, partition.Index, here))
			}
		}
	}
	if !slices.IsSorted(plan.Warnings) {
		found = append(found, "the warnings are not sorted")
	}
	return found
}

func shuffledNode(r *rand.Rand, gpus []GPU) []GPU {
	boards := slices.Clone(gpus)
	r.Shuffle(len(boards), func(i, j int) { boards[i], boards[j] = boards[j], boards[i] })
	for _, board := range boards {
		parts := slices.Clone(board.Partitions)
		r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		boards[slices.IndexFunc(boards, func(g GPU) bool { return g.UUID == board.UUID })].Partitions = parts
	}
	return boards
}

func healed(gpus []GPU) []GPU {
	boards := slices.Clone(gpus)
	for i := range boards {
		boards[i].Fault = ""
		boards[i].Partitions = slices.Clone(boards[i].Partitions)
		for j := range boards[i].Partitions {
			boards[i].Partitions[j].Fault = ""
		}
	}
	return boards
}

// shape is what a plan offers, whatever its health.
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
