package mig

import "slices"

// site is a GPU instance of the layout.
type site struct {
	instance
	// have is its place in recut.have; -1 for one that is not there yet.
	have int
	// fresh are its partitions that are not there yet, largest first, ready says
	// of each whether it can be made now, beside the partitions in use that have
	// to go.
	fresh []Profile
	ready []bool
}

// outcome settles where the layout's GPU instances lie, for the partitions kept
// now. There is a place for them.
func (r *recut) outcome(weight int) outcome {
	o := outcome{recut: r, kept: slices.Clone(r.kept), weight: weight}
	live := r.live(r.kept)
	all := r.geometry.fill(r.missing(), live)
	for n := range live {
		o.sites = append(o.sites, r.grown(live[n], all[n]))
	}
	a := arrangement{
		recut:  r,
		search: search{geometry: r.geometry, opened: all[len(live):], placed: all[:len(live):len(live)]},
		now:    r.live(r.occupied(r.kept)),
		best:   -1,
	}
	a.place(0, 0, 0)
	o.sites = append(o.sites, a.found...)
	for _, s := range o.sites {
		for _, ready := range s.ready {
			if ready {
				o.ready++
			}
		}
	}
	return o
}

// grown is a GPU instance that stays with what is added to it. A partition in
// use that has to go may still take the slices.
func (r *recut) grown(before, after instance) site {
	s := site{instance: after, have: r.at(after.placement), fresh: after.partitions[len(before.partitions):]}
	free := r.outline(s.have, r.in(s.have, r.occupied(r.kept))).free
	for _, p := range s.fresh {
		fits := p.Compute <= free
		if fits {
			free -= p.Compute
		}
		s.ready = append(s.ready, fits)
	}
	return s
}

// occupied says of each present partition whether it is there while the steps
// are made: kept for good, or in use.
func (r *recut) occupied(kept []bool) []bool {
	occupied := slices.Clone(kept)
	for n, p := range r.present {
		occupied[n] = occupied[n] || p.Busy
	}
	return occupied
}

// at is the place in have of the GPU instance there; -1 for none.
func (r *recut) at(p Placement) int {
	return slices.IndexFunc(r.have, func(i Instance) bool { return i.Placement == p })
}

// arrangement looks for the placements of opened of which most partitions can
// be made now, and then most GPU instances are there already.
type arrangement struct {
	recut *recut
	search
	// now are the GPU instances that stand while the steps are made, with those
	// of the ones placed so far that can be made now.
	now []instance
	// placedSites are the sites of opened that are placed so far, found the best
	// of them all with its score.
	placedSites []site
	found       []site
	best        int
}

// place is search.place, but goes on while a better arrangement is possible.
func (a *arrangement) place(n, from, score int) {
	if score+a.possible(n) <= a.best {
		return
	}
	if n == len(a.opened) {
		a.best, a.found = score, slices.Clone(a.placedSites)
		return
	}
	next := &a.opened[n]
	for i := from; i < len(next.shape.Starts); i++ {
		next.placement = Placement{Start: next.shape.Starts[i], Size: next.shape.Size}
		if !a.fits(*next) {
			continue
		}
		// As in search, but with other partitions an instance scores otherwise.
		after := 0
		if n+1 < len(a.opened) && a.opened[n+1].shape.Profile == next.shape.Profile &&
			len(a.opened[n+1].partitions) == len(next.partitions) {
			after = i + 1
		}
		s := a.site(*next)
		a.placed = append(a.placed, *next)
		a.placedSites = append(a.placedSites, s)
		if s.ready[0] {
			a.now = append(a.now, *next)
		}
		a.place(n+1, after, score+s.score())
		if s.ready[0] {
			a.now = a.now[:len(a.now)-1]
		}
		a.placedSites = a.placedSites[:len(a.placedSites)-1]
		a.placed = a.placed[:len(a.placed)-1]
	}
}

// site says what the placement of an opened instance means now.
func (a *arrangement) site(opened instance) site {
	beside := search{geometry: a.geometry, placed: a.now}
	fits := beside.fits(opened)
	s := site{instance: opened, have: -1, fresh: opened.partitions, ready: slices.Repeat([]bool{fits}, len(opened.partitions))}
	if i := a.recut.at(opened.placement); fits && i >= 0 && a.recut.have[i].Profile == opened.shape.Profile {
		s.have = i
	}
	return s
}

// readyScore is above the number of GPU instances that a board can have.
const readyScore = 1 << 10

func (s site) score() int {
	score := 0
	if s.have >= 0 {
		score = 1
	}
	if s.ready[0] {
		score += readyScore * len(s.fresh)
	}
	return score
}

// possible bounds the score of opened[n:].
func (a *arrangement) possible(n int) int {
	score := 0
	for _, i := range a.opened[n:] {
		score += readyScore * len(i.partitions)
		if slices.ContainsFunc(a.recut.have, func(h Instance) bool { return h.Profile == i.shape.Profile }) {
			score++
		}
	}
	return score
}
