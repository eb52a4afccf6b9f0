package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// merge makes a pass of outcomes, and keeps their boards for the next one.
func (s *scanner) merge(over []outcome) pass {
	if moved(over) {
		return pass{err: errMoved}
	}
	slices.SortFunc(over, func(a, b outcome) int { return cmp.Compare(a.index, b.index) })
	p := pass{full: true, unreadable: map[string]finding{}, pending: map[string]bool{}}
	var problems []error
	for _, o := range over {
		before := o.known
		o.known = o.board
		switch {
		case o.err != nil:
			problems = append(problems, fmt.Errorf("read GPU %d: %w", o.index, o.err))
			if before != nil {
				p.unreadable[before.fixed.UUID] = whyUnreadable(o.err)
			} else if !errors.Is(o.err, GPUIsLost) {
				p.obscure = true
			}
			continue
		case o.reading.problems != nil:
			problems = append(problems, fmt.Errorf("read GPU %d: %w", o.index, o.reading.problems))
		}
		uuid := o.reading.gpu.UUID
		o.reading.reset = o.renewed && s.dead[uuid]
		delete(s.dead, uuid)
		s.handles[uuid] = o.reading.device
		p.readings = append(p.readings, o.reading)
	}
	for _, place := range s.slots {
		switch {
		case place.busy && place.known != nil:
			p.pending[place.known.fixed.UUID] = true
		case place.busy:
			p.full = false
		}
	}
	s.link(p.readings)
	p.problems = errors.Join(problems...)
	return p
}

// moved says that two outcomes are of one board.
func moved(over []outcome) bool {
	seen := map[string]bool{}
	for _, o := range over {
		if o.err == nil && seen[o.reading.gpu.UUID] {
			return true
		}
		if o.err == nil {
			seen[o.reading.gpu.UUID] = true
		}
	}
	return false
}

// link enters the boards' links into the readings. What it reads of a board that
// is being looked at does not change.
func (s *scanner) link(readings []reading) {
	var boards []*board
	for _, place := range s.slots {
		if place.known != nil {
			boards = append(boards, place.known)
		}
	}
	linked := s.topology.connect(boards)
	for i := range readings {
		readings[i].gpu.Links = linked[readings[i].gpu.UUID]
	}
}

func whyUnreadable(err error) finding {
	if errors.Is(err, GPUIsLost) {
		return lost()
	}
	return unreadable(err)
}
