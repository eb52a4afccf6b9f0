package soak

import (
	"math/rand/v2"
	"slices"
)

// scheduler writes a schedule. It knows what the operations so far have made of
// the node, as far as that does not depend on the program.
type scheduler struct {
	random *rand.Rand
	// kills decides which restarts are kills.
	kills *rand.Rand
	out   []operation

	edits int
	// documents are by name; nil for one that cannot be used.
	documents map[string]*wish
	// selected names the document, layout the MIG label's layout.
	selected, layout string
	// inForce is what must be in force; awaited says that it was waited for.
	inForce wish
	awaited bool
	// badDocuments says on which way came what is rejected, by the documents or by
	// the labels.
	badDocuments bool

	conditions [boards]condition
	// pulled are ordinals; the last one comes back first.
	pulled []int

	pods []string
	made int

	// cutOff is how many operations are left until the API server is back; cuts
	// counts since the last settle.
	cutOff, cuts int
	// slow, unheard and silenced are what a settle has to end.
	slow, unheard, silenced bool
	// rough storms break connections; others leave them alone, so that no stream
	// may end.
	rough bool
}

// longStorm is the least length of a storm in a long schedule.
const longStorm = 60

// schedule is at least so many operations, the same whenever the seed is. It
// begins and ends with a settled node.
func schedule(seed uint64, operations int) []operation {
	s := &scheduler{random: rand.New(rand.NewPCG(seed, 1)), kills: rand.New(rand.NewPCG(seed, 2)), documents: map[string]*wish{}, selected: documentNames[0]}
	for _, name := range documentNames {
		s.write(name, s.anyWish())
	}
	s.out = append(s.out, operation{kind: label, text: s.selected})
	s.obey()
	s.settle()
	// What takes time is to come to rest, so long schedules have long storms.
	length := min(longStorm, max(1, operations/10))
	for len(s.out) < operations {
		s.rough = s.random.IntN(2) == 1
		for range length + s.random.IntN(length) {
			s.blow()
		}
		s.settle()
		for range 2 {
			s.calm()
		}
	}
	s.add(s.atRest(calmDrain))
	s.pods = nil
	s.settle()
	return s.out
}

func (s *scheduler) add(o operation) { s.out = append(s.out, o) }

// orKill is that kind of restart, or a kill.
func (s *scheduler) orKill(restart, kill kind) kind {
	return pick(s.kills, restart, kill)
}

// one is true once in n times.
func (s *scheduler) one(n int) bool { return s.random.IntN(n) == 0 }

func pick[T any](random *rand.Rand, of ...T) T { return of[random.IntN(len(of))] }

// settle ends what is only a disturbance and waits for all the rest.
func (s *scheduler) settle() {
	if s.silenced {
		s.add(operation{kind: silence})
		s.add(operation{kind: restartKubelet})
		s.silenced, s.unheard = false, true
	}
	if s.slow {
		s.add(operation{kind: slowStream})
		s.slow = false
	}
	if s.unheard {
		s.add(operation{kind: restorePods})
		s.unheard = false
	}
	for ordinal, c := range s.conditions {
		if (c == doubtful || s.one(3) && c != sound) && !slices.Contains(s.pulled, ordinal) {
			s.heal(ordinal)
		}
	}
	s.obey()
	s.add(s.atRest(settle))
	s.cuts = 0
}

// atRest is an operation on a node that is, or has to come, to rest.
func (s *scheduler) atRest(kind kind) operation {
	w := s.inForce
	_, good := s.wanted()
	return operation{kind: kind, wish: &w, conditions: slices.Clone(s.conditions[:]), rejected: !good, name: s.selected}
}

func (s *scheduler) mend() {
	if s.cutOff > 0 {
		s.add(operation{kind: mend})
		s.cutOff = 0
	}
}

func (s *scheduler) heal(ordinal int) {
	s.add(operation{kind: heal, board: ordinal})
	s.conditions[ordinal] = sound
}
