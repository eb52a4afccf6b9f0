package soak

import (
	"fmt"
	"slices"
)

// calm adds a check of a node at rest, which it leaves at rest.
func (s *scheduler) calm() {
	o := s.atRest(pick(s.random,
		calmHangup, calmRestart, calmBad, calmReplicas, calmXID, calmAdmit, calmContainers, calmDrop, calmDrain, calmSuccession, calmDeadKubelet))
	w := s.inForce
	switch o.kind {
	case calmRestart:
		o.kind = s.orKill(calmRestart, calmKill)
	case calmBad:
		if o.rejected {
			return
		}
		s.edits++
		o.text, o.count = s.badDocument(), s.edits
	case calmReplicas:
		if o.rejected || len(w.shares) == 0 {
			return
		}
		s.edits++
		w = *s.documents[s.selected]
		w.edit, w.shares = s.edits, slices.Clone(w.shares)
		changed := &w.shares[s.random.IntN(len(w.shares))]
		changed.replicas = 2 + (changed.replicas-2+1+s.random.IntN(2))%3
		changed.policy = pick(s.random, "distributed", "packed", "spread")
		o.wish = &w
		s.documents[s.selected] = &w
		s.inForce, _ = s.wanted()
		s.add(o)
		s.obey()
		o = s.atRest(settle)
		o.text = "streams"
	case calmXID:
		o.board, o.count = s.random.IntN(boards), s.random.IntN(100)
		if s.conditions[o.board] != sound || slices.Contains(s.pulled, o.board) {
			return
		}
	case calmDrop:
		o.resource = pick(s.random, w.names()...)
	case calmAdmit:
		s.made++
		o.text = fmt.Sprintf("probe-%d", s.made)
	case calmDrain:
		s.pods = nil
		s.add(o)
		o = s.atRest(settle)
	}
	s.add(o)
}
