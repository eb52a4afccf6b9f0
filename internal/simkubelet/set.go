package simkubelet

import (
	"maps"
	"slices"
)

// set holds device IDs.
type set map[string]struct{}

func setOf(ids ...string) set {
	s := make(set, len(ids))
	for _, id := range ids {
		s[id] = struct{}{}
	}
	return s
}

func (s set) has(id string) bool { _, ok := s[id]; return ok }

func (s set) add(ids set) { maps.Copy(s, ids) }

func (s set) sorted() []string { return slices.Sorted(maps.Keys(s)) }

func (s set) union(t set) set {
	u := maps.Clone(s)
	if u == nil {
		u = set{}
	}
	u.add(t)
	return u
}

func (s set) without(t set) set {
	rest := set{}
	for id := range s {
		if !t.has(id) {
			rest[id] = struct{}{}
		}
	}
	return rest
}

func (s set) intersection(t set) set {
	both := set{}
	for id := range s {
		if t.has(id) {
			both[id] = struct{}{}
		}
	}
	return both
}
