package mig

import (
	"cmp"
	"maps"
)

// recut looks for the partitions to keep, by trying. What is feasible with some
// partitions kept is so with fewer, which cuts most branches off; a board has
// 7 partitions at most, so that there are 128 choices at worst.
type recut struct {
	geometry Geometry
	have     []Instance
	// shapes are those of have, in the same order.
	shapes []Shape
	// present are the partitions of have, those worth most first.
	present []present
	// wanted are the partitions of the layout, largest first; quota counts those
	// of them that no kept partition is yet.
	wanted []Profile
	quota  map[Profile]int
	// kept says of each present partition whether it stays for good; ahead is the
	// weight of those from there on.
	kept  []bool
	ahead []int
	best  outcome
}

// outcome is what a choice of kept partitions leads to.
type outcome struct {
	recut *recut
	kept  []bool
	// weight is that of the kept ones.
	weight int
	// sites are the GPU instances of the layout.
	sites []site
	// ready is the number of partitions that can be made at once.
	ready int
}

// better prefers keeping what is there, then being done early, then few GPU
// instances, which leaves room.
func (o outcome) better(than outcome) bool {
	return than.kept == nil || cmp.Or(
		cmp.Compare(o.weight, than.weight),
		cmp.Compare(o.ready, than.ready),
		cmp.Compare(len(than.sites), len(o.sites)),
	) > 0
}

// solve finds the best outcome; of equal ones it is the first by rank. There is
// one, because the layout fits on the empty board.
func (r *recut) solve() outcome {
	r.choose(0, 0)
	return r.best
}

// choose decides about present[n:], with partitions of that weight kept so far.
func (r *recut) choose(n, weight int) {
	if r.best.kept != nil && weight+r.ahead[n] < r.best.weight {
		return
	}
	if n == len(r.present) {
		if o := r.outcome(weight); o.better(r.best) {
			r.best = o
		}
		return
	}
	p := r.present[n]
	// Of compute instances that are alike, those with the lower CI are kept.
	like := n > 0 && !r.kept[n-1] && r.present[n-1].profile == p.profile &&
		r.present[n-1].instance == p.instance && r.present[n-1].Busy == p.Busy
	if r.quota[p.profile] > 0 && !like {
		r.kept[n] = true
		r.quota[p.profile]--
		if r.feasible() {
			r.choose(n+1, weight+r.weight(p))
		}
		r.quota[p.profile]++
		r.kept[n] = false
	}
	r.choose(n+1, weight)
}

// feasible says that the rest of the layout fits beside what is kept, once all
// else is gone.
func (r *recut) feasible() bool {
	live := r.live(r.kept)
	all := r.geometry.fill(r.missing(), live)
	s := search{geometry: r.geometry, opened: all[len(live):], placed: all[:len(live):len(live)]}
	return s.place(0, 0)
}

// live are the GPU instances with a chosen partition, by start.
func (r *recut) live(chosen []bool) []instance {
	live := make([]instance, 0, len(r.have))
	for i := range r.have {
		if partitions := r.in(i, chosen); len(partitions) > 0 {
			live = append(live, r.outline(i, partitions))
		}
	}
	return live
}

// in are the profiles of the chosen partitions of a GPU instance.
func (r *recut) in(instance int, chosen []bool) []Profile {
	var profiles []Profile
	for n, p := range r.present {
		if p.instance == instance && chosen[n] {
			profiles = append(profiles, p.profile)
		}
	}
	return profiles
}

// outline is a GPU instance of the board with these of its partitions.
func (r *recut) outline(i int, partitions []Profile) instance {
	free := r.shapes[i].Profile.Slices
	for _, p := range partitions {
		free -= p.Compute
	}
	return instance{r.shapes[i], r.have[i].Placement, partitions, free}
}

// missing are the wanted partitions that none of the kept ones is, largest
// first.
func (r *recut) missing() []Profile {
	left := maps.Clone(r.quota)
	var missing []Profile
	for _, p := range r.wanted {
		if left[p] > 0 {
			left[p]--
			missing = append(missing, p)
		}
	}
	return missing
}
