package mig

import (
	"cmp"
	"slices"
)

// plannedInstance is a GPU instance of the layout.
type plannedInstance struct {
	instance
	// ready are the instance's partitions that do not exist yet and can be created now, beside the
	// partitions in use that the layout does not have. waiting are those that cannot. Both are
	// sorted largest first.
	ready, waiting []Profile
}

// outcome decides where the layout's GPU instances go if the partitions in kept stay. It must be
// called only if there is a way to place them.
func (k *keepSearch) outcome(weight int) outcome {
	o := outcome{
		search: k,
		kept:   slices.Clone(k.kept),
		weight: weight,
	}
	live, extended, rest := k.assigned()
	now := k.live(k.occupied(k.kept))
	for n := range live {
		o.instances = append(o.instances, k.extended(live[n], extended[n], now))
	}
	var found []plannedInstance
	best := -1
	rest.place(0, 0, func() bool {
		if planned, score := k.planned(rest.fresh, now); score > best {
			best, found = score, planned
		}
		return false
	})
	o.instances = append(o.instances, found...)
	for _, s := range o.instances {
		o.ready += len(s.ready)
	}
	return o
}

// extended returns a GPU instance that stays, with the partitions to add to it. A partition in use,
// as in now, may still occupy their slices.
func (k *keepSearch) extended(before, after instance, now []instance) plannedInstance {
	s := plannedInstance{instance: after}
	free := now[s.at(now)].free
	for _, p := range after.partitions[len(before.partitions):] {
		if p.Compute <= free {
			free -= p.Compute
			s.ready = append(s.ready, p)
		} else {
			s.waiting = append(s.waiting, p)
		}
	}
	return s
}

// occupied returns, for each existing partition, whether it exists during the steps because it is
// kept or in use.
func (k *keepSearch) occupied(kept []bool) []bool {
	occupied := slices.Clone(kept)
	for n, p := range k.existing {
		occupied[n] = occupied[n] || p.Busy
	}
	return occupied
}

// readyScore exceeds the number of GPU instances that a GPU can have, so one more partition that
// can be created now outweighs all existing instances.
const readyScore = 1 << 10

// planned returns the placed new instances, each with the partitions that can be created now,
// beside the instances that exist during the steps. The score is the number of such partitions and,
// if that is equal, the number of instances that already exist there.
func (k *keepSearch) planned(fresh, now []instance) (planned []plannedInstance, score int) {
	beside := search{geometry: k.geometry, placed: slices.Clip(now)}
	for _, i := range fresh {
		if !beside.fits(i) {
			planned = append(planned, plannedInstance{instance: i, waiting: i.partitions})
			continue
		}
		beside.placed = append(beside.placed, i)
		planned = append(planned, plannedInstance{instance: i, ready: i.partitions})
		score += readyScore * len(i.partitions)
		if slices.ContainsFunc(k.have,
			func(h Instance) bool { return h.Placement == i.placement && h.Profile == i.info.Profile }) {
			score++
		}
	}
	return planned, score
}

// change returns the part of the outcome that can be done now, without steps yet.
func (o outcome) change() Change {
	var change Change
	stays := o.stays()
	for n, p := range o.search.existing {
		if stays[n] {
			change.Kept = append(change.Kept, p.UUID)
			change.Result = append(change.Result, Partition{p.profile, o.search.have[p.instance].Placement})
		} else {
			change.Doomed = append(change.Doomed, p.UUID)
		}
	}
	for _, s := range o.instances {
		for _, p := range s.ready {
			change.Result = append(change.Result, Partition{p, s.placement})
		}
	}
	change.Blocked = o.blocked()
	// Everything except the steps is sorted, so that equal changes have equal values.
	slices.Sort(change.Doomed)
	slices.Sort(change.Kept)
	slices.SortFunc(change.Result, comparePlaced)
	slices.SortStableFunc(change.Blocked, func(a, b Blocked) int {
		return cmp.Or(comparePlaced(a.Partition, b.Partition), cmp.Compare(a.UUID, b.UUID))
	})
	return change
}

// stays returns, for each existing partition, whether it exists after the steps. This includes kept
// partitions, partitions in use, and free ones that will move but remain usable until their new
// place is free, because nothing else needs their current place yet.
func (o outcome) stays() []bool {
	k := o.search
	stays := k.occupied(o.kept)
	remaining := k.live(stays)
	short := make(map[Profile]int)
	for _, s := range o.instances {
		for _, p := range s.waiting {
			short[p]++
		}
		made := 0 // slices of the partitions to be created now
		for _, p := range s.ready {
			made += p.Compute
		}
		if i := s.at(remaining); i >= 0 {
			remaining[i].free -= made
		} else if len(s.ready) > 0 {
			s.free = s.info.Profile.Slices - made
			remaining = append(remaining, s.instance)
		}
	}
	for n, p := range k.existing {
		if stays[n] || short[p.profile] == 0 {
			continue
		}
		own := newInstance(k.geometry.infoOf(p.profile), p.profile, k.have[p.instance].Placement)
		if i := own.at(remaining); i >= 0 {
			if remaining[i].info.Profile != own.info.Profile || remaining[i].free < p.Slices {
				continue
			}
			remaining[i].free -= p.Slices
		} else if beside := (search{geometry: k.geometry, placed: remaining}); beside.fits(own) {
			remaining = append(remaining, own)
		} else {
			continue
		}
		stays[n] = true
		short[p.profile]--
	}
	return stays
}

// at returns the index of the instance among the others by its placement; -1 if it is not one of
// them.
func (i instance) at(others []instance) int {
	return slices.IndexFunc(others, func(other instance) bool { return other.placement == i.placement })
}

// blocked returns the partitions in use that the layout does not have. Each has the wanted
// partitions that wait for it: those whose place it overlaps, and those whose place no such
// partition overlaps, because these could be waiting for any of them.
func (o outcome) blocked() []Blocked {
	var all []Blocked
	for n, p := range o.search.existing {
		if p.Busy && !o.kept[n] {
			all = append(all, Blocked{
				Partition: Partition{p.profile, o.search.have[p.instance].Placement},
				UUID:      p.UUID,
			})
		}
	}
	for _, s := range o.instances {
		inPlace := slices.ContainsFunc(all, func(b Blocked) bool { return b.Placement.Overlaps(s.placement) })
		for _, p := range s.waiting {
			for i := range all {
				if !inPlace || all[i].Placement.Overlaps(s.placement) {
					all[i].Waiting = append(all[i].Waiting, Partition{p, s.placement})
				}
			}
		}
	}
	for i := range all {
		slices.SortFunc(all[i].Waiting, comparePlaced)
	}
	return all
}
