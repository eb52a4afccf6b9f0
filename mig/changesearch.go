package mig

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// NewChange returns the smallest change of a GPU to the wanted layout. mode is true if MIG mode is
// on now; have are all GPU instances of the GPU.
//
// Partitions that are part of the layout stay, and partitions in use are neither destroyed nor
// moved. A free partition moves only if the layout is impossible otherwise, so that as few
// partitions as possible are destroyed and created. The search is exact: if the layout can be
// reached, it is. If partitions in use are in the way, Blocked names as few of them as possible,
// and the steps do everything that is possible now and will not have to be undone: they destroy
// partitions that the layout does not have, and create those that fit.
//
// Before EnableMIG, the caller must check that no process uses the GPU as a whole.
//
// It is an error if no GPU with this geometry can have the layout; the error then wraps ErrNoRoom,
// ErrUnknownProfile or ErrNoMIG. It is also an error if have contradicts itself. With an error, the
// Change is zero.
func NewChange(g Geometry, mode bool, have []Instance, want Layout) (Change, error) {
	if want.MIG && len(g.Profiles) == 0 && !g.Unlisted {
		return Change{}, fmt.Errorf("enable MIG: %w", ErrNoMIG)
	}
	wanted, err := g.expand(want)
	if err != nil {
		return Change{}, err
	}
	if err := g.arrange(g.assign(wanted, nil), nil); err != nil {
		return Change{}, err
	}
	have, err = g.checked(mode, have)
	if err != nil {
		return Change{}, err
	}
	search := newKeepSearch(g, have, wanted)
	// There is always a best outcome, because the layout fits on the empty GPU.
	search.choose(0, 0)
	change := search.best.change()
	// MIG mode can be switched off only when the last partition in use is gone.
	change.MIG = want.MIG || mode && !change.Complete()
	change.Steps, err = Steps(mode, have, change.Target())
	if err != nil {
		return Change{}, err
	}
	return change, nil
}

// checked returns a copy of the GPU instances sorted by start, with their compute instances sorted
// by CI. It is an error if they contradict each other or the GPU.
func (g Geometry) checked(mode bool, have []Instance) ([]Instance, error) {
	if !mode && len(have) > 0 {
		return nil, errors.New("a GPU with MIG off has GPU instances")
	}
	sorted := slices.SortedFunc(slices.Values(have),
		func(a, b Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	outlines := make([]Partition, len(sorted))
	for i, instance := range sorted {
		outlines[i] = Partition{instance.Profile, instance.Placement}
		computes := slices.SortedFunc(slices.Values(instance.Computes),
			func(a, b Compute) int { return cmp.Compare(a.CI, b.CI) })
		sorted[i].Computes = computes
		free := instance.Profile.Slices
		for _, c := range computes {
			free -= c.Slices
			if c.Slices < 1 || free < 0 {
				return nil, fmt.Errorf("partition %s of GPU instance %d does not fit its %d slices", c.UUID,
					instance.GI, instance.Profile.Slices)
			}
		}
	}
	_, err := g.instances(outlines)
	return sorted, err
}

// existing is an existing partition of the GPU.
type existing struct {
	Compute
	profile Profile
	// instance is the index of its GPU instance in keepSearch.have.
	instance int
}

// newKeepSearch prepares the search. wanted is sorted largest first, have by start.
func newKeepSearch(g Geometry, have []Instance, wanted []Profile) *keepSearch {
	g.Profiles = slices.Clone(g.Profiles)
	for i, info := range g.Profiles {
		g.Profiles[i].Starts = preferred(info)
	}
	k := &keepSearch{
		geometry: g,
		have:     have,
		wanted:   wanted,
		unmet:    make(map[Profile]int),
	}
	for _, p := range wanted {
		k.unmet[p]++
	}
	for i, instance := range have {
		for _, c := range instance.Computes {
			k.existing = append(k.existing, existing{c, instance.Partition(c), i})
		}
	}
	slices.SortStableFunc(k.existing, k.rank)
	k.kept = make([]bool, len(k.existing))
	k.weightFrom = make([]int, len(k.existing)+1)
	for i, p := range slices.Backward(k.existing) {
		k.weightFrom[i] = k.weightFrom[i+1] + k.weight(p)
	}
	return k
}

// rank sorts partitions by how much they are worth keeping: first those in use, then those where
// Place would put them, because they leave the most room.
func (k *keepSearch) rank(p, q existing) int {
	return cmp.Or(
		cmp.Compare(k.weight(q), k.weight(p)),
		cmp.Compare(k.detour(p.instance), k.detour(q.instance)),
		cmp.Compare(p.instance, q.instance),
		cmp.Compare(q.Slices, p.Slices),
	)
}

// detour returns how many other starts Place would try before the GPU instance's start.
func (k *keepSearch) detour(i int) int {
	starts := k.geometry.infoOf(k.have[i].Profile).Starts
	if at := slices.Index(starts, k.have[i].Placement.Start); at >= 0 {
		return at
	}
	return len(starts)
}

// weight returns how much it counts to keep the partition: one in use counts more than all free
// ones together.
func (k *keepSearch) weight(p existing) int {
	if p.Busy {
		return len(k.existing) + 1
	}
	return 1
}

// keepSearch finds the partitions to keep by backtracking. If a set of partitions is feasible,
// every subset of it is too, which cuts off most branches. A GPU has at most 7 partitions, so there
// are at most 128 choices.
type keepSearch struct {
	geometry Geometry
	have     []Instance
	// existing are the partitions of have, sorted by rank.
	existing []existing
	// wanted are the partitions of the layout, largest first. unmet counts the wanted partitions
	// for which no existing one is kept so far.
	wanted []Profile
	unmet  map[Profile]int
	// kept has, for each existing partition, whether it becomes part of the layout.
	kept []bool
	// weightFrom is the weight of existing[n:], by n.
	weightFrom []int
	// best is the best outcome so far; of equal ones, the first by rank.
	best outcome
}

// outcome is the layout that results from a choice of kept partitions.
type outcome struct {
	search    *keepSearch
	kept      []bool
	weight    int
	instances []plannedInstance
	// ready is the number of partitions that can be created now.
	ready int
}

// better reports whether o is better: it keeps more of the existing partitions, or else creates
// more partitions now, or else has fewer GPU instances, which leaves more room.
func (o outcome) better(than outcome) bool {
	return than.kept == nil || cmp.Or(
		cmp.Compare(o.weight, than.weight),
		cmp.Compare(o.ready, than.ready),
		cmp.Compare(len(than.instances), len(o.instances)),
	) > 0
}

// choose decides about existing[n:]; weight is the weight of the partitions kept so far.
func (k *keepSearch) choose(n, weight int) {
	if k.best.kept != nil && weight+k.weightFrom[n] < k.best.weight {
		return
	}
	if n == len(k.existing) {
		if o := k.outcome(weight); o.better(k.best) {
			k.best = o
		}
		return
	}
	p := k.existing[n]
	if k.unmet[p.profile] > 0 {
		k.kept[n] = true
		k.unmet[p.profile]--
		if k.feasible() {
			k.choose(n+1, weight+k.weight(p))
		}
		k.unmet[p.profile]++
		k.kept[n] = false
	}
	k.choose(n+1, weight)
}

// feasible reports whether the rest of the layout fits beside the kept partitions after all others
// are destroyed.
func (k *keepSearch) feasible() bool {
	_, _, rest := k.assigned()
	return rest.place(0, 0, anyPlaces)
}

// assigned returns the kept GPU instances, the same with the partitions to add to them, and the
// search for places of the GPU instances to make.
func (k *keepSearch) assigned() (live, extended []instance, rest search) {
	live = k.live(k.kept)
	all := k.geometry.assign(k.missing(), live)
	extended = all[:len(live):len(live)]
	return live, extended, search{
		geometry: k.geometry,
		fresh:    all[len(live):],
		placed:   extended,
	}
}

// live returns the GPU instances with a chosen partition, sorted by start.
func (k *keepSearch) live(chosen []bool) []instance {
	var partitions []Partition
	for n, p := range k.existing {
		if chosen[n] {
			partitions = append(partitions, Partition{p.profile, k.have[p.instance].Placement})
		}
	}
	live, _ := k.geometry.instances(partitions) // No error: all of them were checked together.
	return live
}

// missing returns the wanted partitions for which no existing one is kept, largest first.
func (k *keepSearch) missing() []Profile {
	left := maps.Clone(k.unmet)
	var missing []Profile
	for _, p := range k.wanted {
		if left[p] > 0 {
			left[p]--
			missing = append(missing, p)
		}
	}
	return missing
}
