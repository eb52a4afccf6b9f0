package mig

import (
	"cmp"
	"slices"
)

// change is what can be done now on the way to the outcome.
func (o outcome) change() Change {
	var change Change
	stays := o.stays()
	for i, instance := range o.recut.have {
		left := 0
		for n, p := range o.recut.present {
			switch {
			case p.instance != i:
			case stays[n]:
				left++
				change.Kept = append(change.Kept, p.UUID)
				change.Result = append(change.Result, Placed{p.profile, instance.Placement})
			default:
				change.destroy(instance, p.Compute)
			}
		}
		if left == 0 && !o.reuses(i) {
			change.Steps = append(change.Steps, instanceStep(DestroyInstance, instance))
		}
	}
	slices.SortFunc(o.sites, func(a, b site) int { return cmp.Compare(a.placement.Start, b.placement.Start) })
	for _, s := range o.sites {
		change.create(s, o.recut)
	}
	change.Blocked = o.blocked()
	change.sort()
	return change
}

// stays says of each present partition whether it is there after the steps:
// those kept for good, those in use, and of the free ones that have to move
// those whose new place is not free yet and that are in nobody's way.
func (o outcome) stays() []bool {
	r := o.recut
	stays := r.occupied(o.kept)
	standing := r.live(stays)
	short := make(map[Profile]int)
	for _, s := range o.sites {
		for n, p := range s.fresh {
			if !s.ready[n] {
				short[p]++
			}
		}
		if i := s.at(standing); i >= 0 {
			standing[i].free -= s.made()
		} else if s.ready[0] {
			s.free = s.shape.Profile.Slices - s.made()
			standing = append(standing, s.instance)
		}
	}
	for n, p := range r.present {
		if stays[n] || short[p.profile] == 0 {
			continue
		}
		own := r.outline(p.instance, []Profile{p.profile})
		if i := (site{instance: own}).at(standing); i >= 0 {
			if standing[i].shape.Profile != own.shape.Profile || standing[i].free < p.Slices {
				continue
			}
			standing[i].free -= p.Slices
		} else if beside := (search{geometry: r.geometry, placed: standing}); beside.fits(own) {
			standing = append(standing, own)
		} else {
			continue
		}
		stays[n] = true
		short[p.profile]--
	}
	return stays
}

// at is the place of the site among the instances; -1 if it is not there.
func (s site) at(instances []instance) int {
	return slices.IndexFunc(instances, func(i instance) bool { return i.placement == s.placement })
}

// made is the number of compute slices of the partitions that are made now.
func (s site) made() int {
	slices := 0
	for n, p := range s.fresh {
		if s.ready[n] {
			slices += p.Compute
		}
	}
	return slices
}

// reuses says that the GPU instance is part of the layout.
func (o outcome) reuses(i int) bool {
	return slices.ContainsFunc(o.sites, func(s site) bool { return s.have == i })
}

// blocked are the partitions in use that are not kept for good, with what waits
// for each: the partitions whose place it takes, or, where no one takes the
// place, for all of them.
func (o outcome) blocked() []Blocked {
	var all []Blocked
	for n, p := range o.recut.present {
		if p.Busy && !o.kept[n] {
			all = append(all, Blocked{Placed: Placed{p.profile, o.recut.have[p.instance].Placement}, UUID: p.UUID})
		}
	}
	for _, s := range o.sites {
		inPlace := slices.ContainsFunc(all, func(b Blocked) bool { return b.Placement.Overlaps(s.placement) })
		for n, p := range s.fresh {
			if s.ready[n] {
				continue
			}
			for i := range all {
				if !inPlace || all[i].Placement.Overlaps(s.placement) {
					all[i].Waiting = append(all[i].Waiting, Placed{p, s.placement})
				}
			}
		}
	}
	for i := range all {
		slices.SortFunc(all[i].Waiting, comparePlaced)
	}
	return all
}
