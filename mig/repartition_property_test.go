package mig_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/virgate/virgate/mig"
)

// checkLeast holds the change against every other choice of what to keep.
func checkLeast(t *testing.T, b *boardModel, wanted mig.Layout) mig.Change {
	t.Helper()
	before := b.clone()
	change := checkRepartition(t, b, wanted)
	busy, free := leastDestroyed(before, wanted)
	inUse := 0
	for _, p := range before.partitions() {
		if p.busy {
			inUse++
		}
	}
	if len(change.Blocked) != inUse-busy {
		t.Fatalf("%v → %v: %d block, at least %d must: %+v", before.partitions(), wanted, len(change.Blocked), inUse-busy, change)
	}
	// Where nothing blocks, whatever is not destroyed is kept for good.
	if least := len(before.partitions()) - busy - free; change.Complete() && len(change.Doomed) != least {
		t.Fatalf("%v → %v: destroys %d, %d would do: %+v", before.partitions(), wanted, len(change.Doomed), least, change)
	}
	if !change.Complete() {
		finish(t, b, wanted, change)
	}
	return change
}

func creations(change mig.Change) int {
	made := 0
	for _, s := range change.Steps {
		if s.Action == mig.CreateCompute {
			made++
		}
	}
	return made
}

// mostAtOnce looks at every layout among those that are as wanted, of those that
// keep most of the board, and returns how many partitions of one can be made at
// most while everything in use is still there.
func mostAtOnce(b *boardModel, layouts [][]mig.Placed, wanted []int) int {
	bestBusy, bestFree, most := -1, -1, 0
	for _, n := range wanted {
		var standing, fresh []mig.Placed
		keptBusy, keptFree := 0, 0
		for _, p := range b.partitions() {
			kept := slices.Contains(layouts[n], p.Placed)
			switch {
			case p.busy && kept:
				keptBusy++
			case kept:
				keptFree++
			}
			if kept || p.busy {
				standing = append(standing, p.Placed)
			}
		}
		if keptBusy < bestBusy || keptBusy == bestBusy && keptFree < bestFree {
			continue
		}
		if keptBusy > bestBusy || keptFree > bestFree {
			bestBusy, bestFree, most = keptBusy, keptFree, 0
		}
		for _, p := range layouts[n] {
			if !slices.Contains(standing, p) {
				fresh = append(fresh, p)
			}
		}
		for subset := range 1 << len(fresh) {
			together := slices.Clone(standing)
			for i, p := range fresh {
				if subset>>i&1 == 1 {
					together = append(together, p)
				}
			}
			if legal(b.geometry, together) {
				most = max(most, len(together)-len(standing))
			}
		}
	}
	return most
}

// From every layout to every multiset of a board with 4 slices, with every
// subset of the partitions in use.
func TestRepartitionEverythingOnFourSlices(t *testing.T) {
	for _, id := range []uint16{a30, rtxPro6000} {
		t.Run(fmt.Sprintf("%X", id), func(t *testing.T) {
			t.Parallel()
			g := geometry(t, id)
			layouts := legalLayouts(g)
			wishes := reachable(layouts)
			multisetOf := make(map[string][]int)
			for n, l := range layouts {
				multisetOf[multiset(l)] = append(multisetOf[multiset(l)], n)
			}
			random := rand.New(rand.NewPCG(1, uint64(id)))
			every := 1
			if id != a30 {
				every = 2000 // The board with 4 slices and 11 shapes has 7 million cases.
			}
			if raceDetector {
				every *= 5
			}
			for _, have := range layouts {
				for _, want := range wishes {
					if random.IntN(every) > 0 {
						continue
					}
					for busy := range uint(1) << len(have) {
						b := newBoardModel(t, g, have)
						b.setBusy(busy)
						most := mostAtOnce(b, layouts, multisetOf[text(want)])
						change := checkLeast(t, b, mig.Layout{MIG: true, Partitions: want})
						if made := creations(change); made != most {
							t.Fatalf("%v, %b in use, → %s: makes %d at once, %d are possible: %+v", have, busy, text(want), made, most, change)
						}
					}
				}
			}
		})
	}
}

// reachable are the distinct multisets of the layouts.
func reachable(layouts [][]mig.Placed) [][]mig.Count {
	seen := make(map[string]bool)
	var all [][]mig.Count
	for _, l := range layouts {
		if key := multiset(l); !seen[key] {
			seen[key] = true
			all = append(all, tally(l))
		}
	}
	return all
}

// From random layouts to random multisets of every board with 7 slices, with
// random partitions in use. The boards are cut alike, so that every layout comes
// up on some of them, and every multiset on each.
func TestRepartitionRandomOnSevenSlices(t *testing.T) {
	for _, id := range []uint16{a100, 0x20B2, 0x2321, 0x2342, 0x2335, 0x2348, 0x2901, 0x2941, 0x3182, 0x31C2} {
		t.Run(fmt.Sprintf("%X", id), func(t *testing.T) {
			t.Parallel()
			g := geometry(t, id)
			layouts := legalLayouts(g)
			wishes := reachable(layouts)
			random := rand.New(rand.NewPCG(2, uint64(id)))
			every := 2
			if raceDetector {
				every = 20
			}
			for n := random.IntN(every); n < len(layouts); n += every {
				b := newBoardModel(t, g, layouts[n])
				b.setBusy(uint(random.IntN(1<<7) & random.IntN(1<<7)))
				checkLeast(t, b, mig.Layout{MIG: true, Partitions: wishes[(n+random.IntN(2))%len(wishes)]})
			}
		})
	}
}

// The same with compute instances that share GPU instances, and GPU instances
// without any.
func TestRepartitionComputeInstances(t *testing.T) {
	for _, id := range []uint16{a100, a30} {
		t.Run(fmt.Sprintf("%X", id), func(t *testing.T) {
			t.Parallel()
			g := geometry(t, id)
			layouts := legalLayouts(g)
			random := rand.New(rand.NewPCG(3, uint64(id)))
			cases := 3000
			if raceDetector {
				cases = 300
			}
			for range cases {
				b := newBoardModel(t, g, split(random, layouts[random.IntN(len(layouts))]))
				for i := range b.instances {
					if random.IntN(8) == 0 {
						b.instances[i].Computes = nil
					}
				}
				b.setBusy(uint(random.IntN(1<<7) & random.IntN(1<<7)))
				wanted := mig.Layout{MIG: true, Partitions: tally(split(random, layouts[random.IntN(len(layouts))]))}
				checkLeast(t, b, wanted)
			}
		})
	}
}

// split cuts some GPU instances into several partitions, some of which are left
// out.
func split(random *rand.Rand, layout []mig.Placed) []mig.Placed {
	var list []mig.Placed
	for _, p := range layout {
		if random.IntN(2) == 0 {
			list = append(list, p)
			continue
		}
		for left := p.Profile.Slices; left > 0; {
			part := p
			part.Profile.Compute = 1 + random.IntN(left)
			left -= part.Profile.Compute
			list = append(list, part)
		}
		if random.IntN(3) == 0 {
			list = slices.Delete(list, len(list)-1, len(list))
		}
	}
	return list
}
