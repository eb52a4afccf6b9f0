package mig_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// TestSupplyIsWhatPlaceAllows checks for every set of GPU instances on each known GPU that the counters allow it
// if and only if Place does.
func TestSupplyIsWhatPlaceAllows(t *testing.T) {
	layouts := map[int]int{}
	seen := map[string]bool{}
	for _, g := range mig.KnownGeometries() {
		shape := fmt.Sprint(len(g.Profiles), g.Slices)
		if seen[shape] {
			continue // Other models differ only in the memory of the profiles.
		}
		seen[shape] = true
		all, supply := g.Placements(), g.Supply()
		count := 0
		var grow func(from int, have []mig.Partition)
		grow = func(from int, have []mig.Partition) {
			count++
			for i := from; i < len(all); i++ {
				next := append(have[:len(have):len(have)], all[i])
				// The kept ones stay, and the new one has only one place.
				alone := g
				alone.Profiles = nil
				for _, info := range g.Profiles {
					if info.Profile == all[i].Profile {
						info.Starts = []int{all[i].Placement.Start}
					}
					alone.Profiles = append(alone.Profiles, info)
				}
				_, err := alone.Place(mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: all[i].Profile, Count: 1}}}, have)
				if fits := within(supply, g, next); fits != (err == nil) {
					t.Fatalf("%v beside %v: the counters say %t, Place says %v", all[i], have, fits, err)
				}
				if err == nil {
					grow(i+1, next)
				}
			}
		}
		grow(0, nil)
		layouts[len(all)] = count - 1
	}
	if want := map[int]int{10: 21, 12: 29, 13: 75, 25: 2318, 30: 716}; fmt.Sprint(want) != fmt.Sprint(layouts) {
		t.Errorf("layouts by number of placements: %v, want %v", layouts, want)
	}
}

// TestMemoryLimitsNothing checks that the memory of instances is counted but never excludes one, even if a
// driver's figures do not add up.
func TestMemoryLimitsNothing(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, g := range mig.KnownGeometries() {
		for _, known := range []bool{false, true} {
			if g.Memory = nil; known {
				g.Memory = map[mig.Profile]uint64{}
				for _, info := range g.Profiles {
					g.Memory[info.Profile] = uint64(info.Size*4864) + random.Uint64N(1000)
				}
			}
			supply := g.Supply()["memory"]
			for _, p := range g.Placements() {
				takes := g.Needs(p)["memory"]
				if takes == 0 || takes*g.Slots > supply*p.Placement.Size {
					t.Errorf("%v takes %d of %d in %d of %d slots", p, takes, supply, p.Placement.Size, g.Slots)
				}
				if known && takes != int(g.Memory[p.Profile])<<20 {
					t.Errorf("%v takes %d, and the driver says %d MiB", p, takes, g.Memory[p.Profile])
				}
			}
		}
	}
}

func within(supply mig.Counters, g mig.Geometry, partitions []mig.Partition) bool {
	sum := mig.Counters{}
	for _, p := range partitions {
		for name, n := range g.Needs(p) {
			if sum[name] += n; sum[name] > supply[name] {
				return false
			}
		}
	}
	return true
}

// TestSupplyOfAMaximum has a profile whose maximum is lower than its number of places.
func TestSupplyOfAMaximum(t *testing.T) {
	p := profile(t, "1g.5gb")
	g := mig.Geometry{Slices: 4, Slots: 4, Profiles: []mig.ProfileInfo{{Profile: p, Size: 1, Starts: []int{0, 1, 2, 3}, Max: 2}}}
	all := g.Placements()
	if len(all) != 4 || !within(g.Supply(), g, all[:2]) || within(g.Supply(), g, all[1:]) {
		t.Errorf("%v of %v", all, g.Supply())
	}
}

func TestLabel(t *testing.T) {
	for _, test := range []struct{ profile, want string }{
		{"1g.10gb", "1g10gb"}, {"1c.2g.20gb", "1c2g20gb"}, {"1g.10gb+me", "1g10gb-me"},
		{"1g.24gb+me.all", "1g24gb-me-all"}, {"1g.24gb-me", "1g24gb-no-me"}, {"1g.24gb+gfx,me", "1g24gb-gfx-me"},
	} {
		if got := profile(t, test.profile).Label(); got != test.want {
			t.Errorf("%s: %q, want %q", test.profile, got, test.want)
		}
	}
}

// TestPlacementsInOrder checks the order in which the places of a 7-slice GPU are tried.
func TestPlacementsInOrder(t *testing.T) {
	g, _ := mig.GeometryOf(0x2330)
	starts := map[string][]int{}
	for _, p := range g.Placements() {
		starts[p.Profile.String()] = append(starts[p.Profile.String()], p.Placement.Start)
	}
	single := []int{4, 5, 6, 0, 1, 2, 3}
	if diff := cmp.Diff(map[string][]int{
		"1g.10gb": single, "1g.10gb+me": single, "1g.20gb": {6, 4, 2, 0}, "2g.20gb": {4, 2, 0}, "3g.40gb": {4, 0}, "4g.40gb": {0}, "7g.80gb": {0},
	}, starts); diff != "" {
		t.Errorf("starts (-want +got):\n%s", diff)
	}
}

// TestArrival adds the instances of every possible mixture in every order, or a sample of orders, and checks how
// often one finds no place.
func TestArrival(t *testing.T) {
	g, _ := mig.GeometryOf(0x2330)
	all, supply := g.Placements(), g.Supply()
	mixtures := map[string][]mig.Profile{}
	var grow func(from int, have []mig.Partition)
	grow = func(from int, have []mig.Partition) {
		var profiles []mig.Profile
		for _, p := range have {
			profiles = append(profiles, p.Profile)
		}
		mixtures[fmt.Sprint(profiles)] = profiles
		for i := from; i < len(all); i++ {
			if next := append(have[:len(have):len(have)], all[i]); within(supply, g, next) {
				grow(i+1, next)
			}
		}
	}
	grow(0, nil)
	delete(mixtures, "[]")
	r, share := rand.New(rand.NewPCG(1, 1)), 0.0
	for _, name := range slices.Sorted(maps.Keys(mixtures)) {
		const rounds = 40
		failed, profiles := 0, mixtures[name]
		for range rounds {
			r.Shuffle(len(profiles), func(i, j int) { profiles[i], profiles[j] = profiles[j], profiles[i] })
			var have []mig.Partition
			for _, p := range profiles {
				i := slices.IndexFunc(all, func(next mig.Partition) bool {
					return next.Profile == p && within(supply, g, append(have[:len(have):len(have)], next))
				})
				if i < 0 {
					failed++
					break
				}
				have = append(have, all[i])
			}
		}
		share += float64(failed) / rounds / float64(len(mixtures))
	}
	if len(mixtures) != 127 || share < 0.06 || share > 0.08 {
		t.Errorf("of %d mixtures, %.3f of the orders end without a place", len(mixtures), share)
	}
}
