package mig_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/test/repeat"
)

// checkLeast compares the change with every other choice of what to keep.
func checkLeast(t *testing.T, b *gpuModel, wanted mig.Layout) mig.Change {
	t.Helper()
	before := b.clone()
	change := checkNewChange(t, b, wanted)
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
	// If nothing blocks, all that is not destroyed is kept for good.
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

// mostAtOnce looks at every wanted layout that keeps most of the GPU, and returns the most partitions of one that
// can be made while everything in use still exists.
func mostAtOnce(b *gpuModel, layouts [][]mig.Partition, wanted []int) int {
	bestBusy, bestFree, most := -1, -1, 0
	for _, n := range wanted {
		var standing, fresh []mig.Partition
		keptBusy, keptFree := 0, 0
		for _, p := range b.partitions() {
			kept := slices.Contains(layouts[n], p.Partition)
			switch {
			case p.busy && kept:
				keptBusy++
			case kept:
				keptFree++
			}
			if kept || p.busy {
				standing = append(standing, p.Partition)
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

// From every layout to every multiset of a GPU with 4 slices, with every
// subset of the partitions in use.
func TestNewChangeEverythingOnFourSlices(t *testing.T) {
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
				every = 2000 // The GPU with 4 slices and 11 shapes has 7 million cases.
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
						b := newGPUModel(t, g, have)
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
func reachable(layouts [][]mig.Partition) [][]mig.PartitionCount {
	seen := make(map[string]bool)
	var all [][]mig.PartitionCount
	for _, l := range layouts {
		if key := multiset(l); !seen[key] {
			seen[key] = true
			all = append(all, tally(l))
		}
	}
	return all
}

// From random layouts to random multisets of every GPU with 7 slices, with
// random partitions in use. The GPUs are cut alike, so that every layout comes
// up on some of them, and every multiset on each.
func TestNewChangeRandomOnSevenSlices(t *testing.T) {
	for _, id := range []uint16{a100, 0x20B2, 0x2321, 0x2342, 0x2335, 0x2348, 0x2901, 0x2941, 0x3182, 0x31C2} {
		t.Run(fmt.Sprintf("%X", id), func(t *testing.T) {
			t.Parallel()
			g := geometry(t, id)
			layouts := legalLayouts(g)
			wishes := reachable(layouts)
			random := rand.New(rand.NewPCG(2, uint64(id)))
			every := repeat.Times(8, 2)
			if raceDetector {
				every = 20
			}
			for n := random.IntN(every); n < len(layouts); n += every {
				b := newGPUModel(t, g, layouts[n])
				b.setBusy(uint(random.IntN(1<<7) & random.IntN(1<<7)))
				checkLeast(t, b, mig.Layout{MIG: true, Partitions: wishes[(n+random.IntN(2))%len(wishes)]})
			}
		})
	}
}

// The same with compute instances that share GPU instances, and GPU instances
// without any.
func TestNewChangeComputeInstances(t *testing.T) {
	for _, id := range []uint16{a100, a30} {
		t.Run(fmt.Sprintf("%X", id), func(t *testing.T) {
			t.Parallel()
			g := geometry(t, id)
			layouts := legalLayouts(g)
			random := rand.New(rand.NewPCG(3, uint64(id)))
			cases := repeat.Times(750, 3000)
			if raceDetector {
				cases = 300
			}
			for range cases {
				b := newGPUModel(t, g, split(random, layouts[random.IntN(len(layouts))]))
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

// split divides some GPU instances into several partitions, and leaves some out.
func split(random *rand.Rand, layout []mig.Partition) []mig.Partition {
	var list []mig.Partition
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

// checkNewChange asks for wanted, makes the steps one by one on the model and checks all promises of NewChange
// except that it destroys as little as possible. It returns the first change; the model is as after it.
func checkNewChange(t *testing.T, b *gpuModel, wanted mig.Layout) mig.Change {
	t.Helper()
	before, instances := b.partitions(), len(b.instances)
	change, err := mig.NewChange(b.geometry, b.mode, b.instances, wanted)
	if err != nil {
		t.Fatalf("%v → %v: %v", before, wanted, err)
	}
	fail := func(format string, args ...any) {
		t.Helper()
		t.Errorf("%v → %v: %+v", before, wanted, change)
		t.Fatalf(format, args...)
	}
	for _, s := range change.Steps {
		if err := b.make(s); err != nil {
			fail("%s: %v", s, err)
		}
	}
	after := b.partitions()
	var doomed, kept []string
	for _, p := range before {
		if slices.Contains(after, p) {
			kept = append(kept, p.uuid)
		} else {
			doomed = append(doomed, p.uuid)
			if p.busy {
				fail("%s was in use", p.uuid)
			}
		}
	}
	slices.Sort(kept)
	slices.Sort(doomed)
	if diff := cmp.Diff(doomed, change.Doomed) + cmp.Diff(kept, change.Kept); diff != "" {
		fail("doomed or kept (-want +got):\n%s", diff)
	}
	var result []mig.Partition
	for _, p := range after {
		result = append(result, p.Partition)
	}
	if got, want := multiset(change.Result), multiset(result); got != want || len(change.Result) != len(result) {
		fail("result %s, the GPU has %s", got, want)
	}
	if change.Complete() {
		if b.has() != text(tallyOf(wanted)) || b.mode != wanted.MIG {
			fail("complete, but the GPU has %s", b.has())
		}
		for _, i := range b.instances {
			if len(i.Computes) == 0 {
				fail("GPU instance %d is left empty", i.GI)
			}
		}
		// No GPU instance more than the layout needs.
		if again, err := b.geometry.Place(wanted, nil); err != nil || len(change.Steps) > 0 && instances == 0 && len(b.instances) > distinct(again) {
			fail("%d GPU instances, %d would do", len(b.instances), distinct(again))
		}
	}
	for _, blocked := range change.Blocked {
		if !slices.Contains(before, state{blocked.Partition, blocked.UUID, true}) {
			fail("blocked by %s, which is not in use", blocked.UUID)
		}
	}
	second, err := mig.NewChange(b.geometry, b.mode, b.instances, wanted)
	if err != nil || len(second.Steps) > 0 || len(second.Doomed) > 0 {
		fail("the second time: %+v, %v", second, err)
	}
	if diff := cmp.Diff(change.Blocked, second.Blocked); diff != "" {
		fail("blocked the second time (-first +second):\n%s", diff)
	}
	return change
}

// finish frees the partitions that block, and checks that the layout is then reached without undoing earlier
// steps.
func finish(t *testing.T, b *gpuModel, wanted mig.Layout, change mig.Change) {
	t.Helper()
	before := b.partitions()
	made := make(map[string]bool)
	for _, p := range before {
		made[p.uuid] = !slices.Contains(change.Kept, p.uuid)
	}
	var busy uint
	for n, p := range before {
		blocks := slices.ContainsFunc(change.Blocked, func(x mig.Blocked) bool { return x.UUID == p.uuid })
		if p.busy && !blocks {
			busy |= 1 << n
		}
	}
	b.setBusy(busy)
	last := checkNewChange(t, b, wanted)
	if !last.Complete() {
		t.Fatalf("%v → %v is still blocked: %+v", before, wanted, last)
	}
	for _, uuid := range last.Doomed {
		if made[uuid] {
			t.Fatalf("%v → %v destroys %s, which it made itself: %+v", before, wanted, uuid, last)
		}
	}
}

func distinct(list []mig.Partition) int {
	seen := make(map[mig.Placement]bool)
	for _, p := range list {
		seen[p.Placement] = true
	}
	return len(seen)
}

func tallyOf(l mig.Layout) []mig.PartitionCount {
	var list []mig.Partition
	for _, c := range l.Partitions {
		for range c.Count {
			list = append(list, mig.Partition{Profile: c.Profile})
		}
	}
	return tally(list)
}

// leastDestroyed tries every subset of the GPU's partitions and returns the
// most of those in use, and then the most of the free ones, that can stay for
// good.
func leastDestroyed(b *gpuModel, wanted mig.Layout) (busy, free int) {
	all := b.partitions()
	for subset := range uint(1) << len(all) {
		left := make(map[mig.Profile]int)
		for _, c := range wanted.Partitions {
			left[c.Profile] += c.Count
		}
		var kept []mig.Partition
		keptBusy, short := 0, false
		for n, p := range all {
			if subset>>n&1 == 0 {
				continue
			}
			kept = append(kept, p.Partition)
			left[p.Profile]--
			short = short || left[p.Profile] < 0
			if p.busy {
				keptBusy++
			}
		}
		keptFree := len(kept) - keptBusy
		if short || keptBusy < busy || keptBusy == busy && keptFree <= free {
			continue
		}
		rest := mig.Layout{MIG: true}
		for p, count := range left {
			rest.Partitions = append(rest.Partitions, mig.PartitionCount{Profile: p, Count: count})
		}
		if _, err := b.geometry.Place(rest, kept); err == nil {
			busy, free = keptBusy, keptFree
		}
	}
	return busy, free
}
