package mig

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Placement is the position of a GPU instance on its GPU, in memory slots.
type Placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// Overlaps reports whether the placements have a slot in common.
func (p Placement) Overlaps(q Placement) bool {
	return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

// String returns "start:size", as printed by nvidia-smi mig -lgi.
func (p Placement) String() string { return fmt.Sprintf("%d:%d", p.Start, p.Size) }

var (
	// ErrNoRoom means that the GPU can have a partition of the profile, but not together with the
	// others.
	ErrNoRoom = errors.New("no room on the GPU")
	// ErrUnknownProfile means that the GPU cannot have partitions of the profile.
	ErrUnknownProfile = errors.New("the GPU has no such profile")
	// ErrUnlisted means that it will be known only with MIG mode on whether the GPU can have them.
	ErrUnlisted = errors.New(
		"the driver says which profiles the GPU has only while MIG mode is on: the layout all-enabled turns it on")
)

// Partition is a partition and the placement of its GPU instance. Partitions that share a GPU
// instance, such as two 1c.2g.10gb, have the same Placement.
type Partition struct {
	Profile   Profile   `json:"profile"`
	Placement Placement `json:"placement"`
}

// Place finds places on the GPU for the wanted partitions beside the kept ones, which do not move.
// The wanted partitions are in addition to the kept ones. Place returns only the wanted ones,
// sorted by start.
//
// The search is exact: if there is a way to place them, Place finds one, and the one that leaves
// the most room for large profiles later. Otherwise the error names the profile without a place,
// and wraps ErrNoRoom or ErrUnknownProfile. It is another error if the kept partitions contradict
// each other or the GPU, if a count is negative, or if partitions are wanted with MIG off.
//
// A partition with fewer compute slices than its GPU instance shares a GPU instance with others,
// kept or new, if enough slices are free there. Within a GPU instance, Place only counts compute
// slices; the driver decides which sizes of compute instances exist.
func (g Geometry) Place(wanted Layout, kept []Partition) ([]Partition, error) {
	partitions, err := g.expand(wanted)
	if err != nil {
		return nil, err
	}
	live, err := g.instances(kept)
	if err != nil {
		return nil, err
	}
	all := g.assign(partitions, live)
	if err := g.arrange(all[len(live):], live); err != nil {
		return nil, err
	}
	var placed []Partition
	for n, i := range all {
		added := i.partitions
		if n < len(live) {
			added = added[len(live[n].partitions):]
		}
		for _, p := range added {
			placed = append(placed, Partition{p, i.placement})
		}
	}
	slices.SortFunc(placed, comparePlaced)
	return placed, nil
}

// Fits returns an error, as Place does, if an empty GPU cannot have the layout. at is the index of
// the first of its Partitions that the GPU cannot have even alone; -1 if it can have each of them.
func (g Geometry) Fits(layout Layout) (at int, err error) {
	if _, err := g.Place(layout, nil); err == nil {
		return -1, nil
	}
	for n, c := range layout.Partitions {
		info, known := g.ProfileInfo(c.Profile)
		if !known {
			return n, g.lacks()
		}
		_, err := g.Place(Layout{MIG: layout.MIG, Partitions: []PartitionCount{c}}, nil)
		if errors.Is(err, ErrNoRoom) {
			err = fmt.Errorf("%w, which has %d at most", ErrNoRoom, info.Max*(c.Profile.Slices/c.Profile.Compute))
		}
		if err != nil {
			return n, err
		}
	}
	_, err = g.Place(layout, nil)
	return -1, err
}

func comparePlaced(a, b Partition) int {
	return cmp.Or(
		cmp.Compare(a.Placement.Start, b.Placement.Start),
		a.Profile.Compare(b.Profile),
	)
}

// expand lists the wanted partitions one by one, largest first.
func (g Geometry) expand(wanted Layout) ([]Profile, error) {
	var list []Profile
	for _, c := range wanted.Partitions {
		if c.Count < 0 {
			return nil, fmt.Errorf("place %d of %s: the count is negative", c.Count, c.Profile)
		}
		if c.Count == 0 {
			continue
		}
		if !wanted.MIG {
			return nil, fmt.Errorf("place %s: the layout has MIG off", c.Profile)
		}
		if _, ok := g.ProfileInfo(c.Profile); !ok {
			return nil, fmt.Errorf("place %w", g.unknown(c.Profile))
		}
		// Each partition needs a compute slice, so no more can fit. The check prevents an absurdly
		// long list.
		if c.Count > g.Slices {
			return nil, fmt.Errorf("place %d of %s on %d slices: %w", c.Count, c.Profile, g.Slices, ErrNoRoom)
		}
		for range c.Count {
			list = append(list, c.Profile)
		}
	}
	slices.SortFunc(list, func(p, q Profile) int { return q.Compare(p) })
	return list, nil
}

// unknown returns the error for a profile that the GPU does not have, with the profiles that the
// driver lists.
func (g Geometry) unknown(p Profile) error { return fmt.Errorf("%s: %w", p, g.lacks()) }

// lacks returns the error of unknown without the profile.
func (g Geometry) lacks() error {
	switch {
	case g.Unlisted:
		return ErrUnlisted
	case len(g.Profiles) == 0:
		return ErrUnknownProfile
	}
	names := make([]string, len(g.Profiles))
	for i, shape := range g.Profiles {
		names[i] = shape.Profile.String()
	}
	return fmt.Errorf("%w (it has %s)", ErrUnknownProfile, strings.Join(names, ", "))
}

// instance is a GPU instance with its partitions. It exists already, or is new and must be placed.
type instance struct {
	info       ProfileInfo
	placement  Placement
	partitions []Profile
	// free is the number of compute slices that no partition has.
	free int
}

func newInstance(info ProfileInfo, p Profile, at Placement) instance {
	return instance{
		info:       info,
		placement:  at,
		partitions: []Profile{p},
		free:       p.Slices - p.Compute,
	}
}

func (i *instance) add(p Profile) bool {
	if i.info.Profile != p.Instance() || i.free < p.Compute {
		return false
	}
	i.partitions = append(i.partitions, p)
	i.free -= p.Compute
	return true
}

// infoOf is ProfileInfo for existing partitions. A partition whose profile the geometry lacks still
// occupies slots and slices.
func (g Geometry) infoOf(p Profile) ProfileInfo {
	info, ok := g.ProfileInfo(p)
	if !ok {
		info.Profile = p.Instance()
	}
	return info
}

// instances returns the GPU instances of the kept partitions, sorted by start.
func (g Geometry) instances(kept []Partition) ([]instance, error) {
	kept = slices.SortedFunc(slices.Values(kept), comparePlaced)
	var live []instance
	for _, k := range kept {
		at := k.Placement
		if at.Start < 0 || at.Size < 1 || at.Size > g.Slots-at.Start {
			return nil, fmt.Errorf("kept %s at %s lies outside the GPU's %d slots", k.Profile, at, g.Slots)
		}
		// They are sorted by start, so only the last one can overlap this one.
		if n := len(live); n > 0 && live[n-1].placement.Overlaps(at) {
			last := &live[n-1]
			if last.placement != at || !last.add(k.Profile) {
				return nil, fmt.Errorf("kept %s at %s overlaps kept %s at %s", k.Profile, at, last.partitions[0],
					last.placement)
			}
			continue
		}
		live = append(live, newInstance(g.infoOf(k.Profile), k.Profile, at))
	}
	return live, nil
}

// assign puts each partition into the first GPU instance that it fits into, or else into a new one.
// It returns the live instances in their order, and then the new ones, which still have to be
// placed.
//
// The partitions must be sorted largest first. Then there are no more new GPU instances than
// needed: instances with up to 3 slices are filled completely in that order, and a GPU has only one
// larger instance.
func (g Geometry) assign(partitions []Profile, live []instance) []instance {
	all := slices.Clone(live)
	for _, p := range partitions {
		i := 0
		for i < len(all) && !all[i].add(p) {
			i++
		}
		if i == len(all) {
			info, _ := g.ProfileInfo(p)
			all = append(all, newInstance(info, p, Placement{}))
		}
	}
	return all
}

// search finds placements by backtracking. A 7-slice GPU has only 2,319 legal layouts, so a simple
// search is enough.
type search struct {
	geometry Geometry
	// fresh are the instances to place, largest first, with their starts in the order of preferred.
	// On every known GPU a larger profile has no more starts than a smaller one, so the hardest
	// comes first and the first try succeeds.
	fresh []instance
	// placed are the live instances and the new ones placed so far.
	placed []instance
	// deepest is the largest number of new instances placed together so far.
	deepest int
}

// arrange sets the placements of the new instances, which are sorted largest first.
func (g Geometry) arrange(fresh, live []instance) error {
	for i := range fresh {
		fresh[i].info.Starts = preferred(fresh[i].info)
	}
	s := search{
		geometry: g,
		fresh:    fresh,
		placed:   slices.Clone(live),
	}
	if s.place(0, 0, anyPlaces) {
		return nil
	}
	// The instances before the deepest one fit together, but not with it.
	var beside []string
	for _, i := range append(slices.Clone(live), fresh[:s.deepest]...) {
		for _, p := range i.partitions {
			beside = append(beside, p.String())
		}
	}
	missing := fresh[s.deepest].partitions[0]
	if len(beside) == 0 {
		return fmt.Errorf("place %s: %w", missing, ErrNoRoom)
	}
	return fmt.Errorf("place %s beside %s: %w", missing, strings.Join(beside, ", "), ErrNoRoom)
}

// place finds placements for fresh[n:]; the first of these must be at one of info.Starts[from:]. It
// calls placed for each way to place all of them, until placed returns true.
func (s *search) place(n, from int, placed func() bool) bool {
	s.deepest = max(s.deepest, n)
	if n == len(s.fresh) {
		return placed()
	}
	next := &s.fresh[n]
	for i := from; i < len(next.info.Starts); i++ {
		next.placement = Placement{Start: next.info.Starts[i], Size: next.info.Size}
		if !s.fits(*next) {
			continue
		}
		// Instances with equally many partitions of one profile are interchangeable, so one order
		// is enough.
		after := 0
		if n+1 < len(s.fresh) && s.fresh[n+1].info.Profile == next.info.Profile &&
			len(s.fresh[n+1].partitions) == len(next.partitions) {
			after = i + 1
		}
		s.placed = append(s.placed, *next)
		if s.place(n+1, after, placed) {
			return true
		}
		s.placed = s.placed[:len(s.placed)-1]
	}
	return false
}

// anyPlaces makes search.place stop at the first placements found.
func anyPlaces() bool { return true }

// preferred returns a profile's starts in the order that leaves the most room for large profiles
// later. Profiles with an odd number of slices go to the high end, because 4g fits only at slot 0,
// and because the last slot of a 7-slice GPU has no slice of its own and is best used for a 3g or a
// 1g with double memory. The others go to the low end, where they leave slots 4 to 7 to a 3g.
func preferred(info ProfileInfo) []int {
	starts := slices.Clone(info.Starts)
	if info.Profile.Slices%2 == 1 {
		slices.Reverse(starts)
	}
	return starts
}

// fits reports whether the instance fits beside the placed ones.
func (s *search) fits(next instance) bool {
	used, alike := next.info.Profile.Slices, 0
	for _, other := range s.placed {
		if other.placement.Overlaps(next.placement) || exclude(other.info.Profile, next.info.Profile) {
			return false
		}
		used += other.info.Profile.Slices
		if shareMaximum(other.info.Profile, next.info.Profile) {
			alike++
		}
	}
	return used <= s.geometry.Slices &&
		alike < next.info.Max &&
		next.placement.Start+next.placement.Size <= s.geometry.Slots
}

// Unreachable returns the number of free memory slots in which no GPU instance can be placed beside
// the existing ones.
func (g Geometry) Unreachable(have []Instance) int {
	var taken, open []Placement
	used := 0
	for _, instance := range have {
		used += instance.Profile.Slices
		taken = append(taken, instance.Placement)
	}
	for _, info := range g.Profiles {
		for _, start := range info.Starts {
			at := Placement{Start: start, Size: info.Size}
			if used+info.Profile.Slices <= g.Slices && start >= 0 && start+info.Size <= g.Slots &&
				!slices.ContainsFunc(taken, at.Overlaps) {
				open = append(open, at)
			}
		}
	}
	count := 0
	for slot := range g.Slots {
		at := Placement{Start: slot, Size: 1}
		if !slices.ContainsFunc(taken, at.Overlaps) && !slices.ContainsFunc(open, at.Overlaps) {
			count++
		}
	}
	return count
}
