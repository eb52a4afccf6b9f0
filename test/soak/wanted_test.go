package soak

import (
	"fmt"
	"maps"
	"slices"
)

// documentNames are the profiles in the ConfigMap.
var documentNames = []string{"day", "night", "weekend"}

// anyWish is a document's content.
func (s *scheduler) anyWish() wish {
	w := wish{byModel: s.one(3), oneOnly: s.one(5)}
	if !s.one(3) {
		w.layout = pick(s.random, slices.Sorted(maps.Keys(layouts()))...)
	}
	names := []string{gpuName, "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb"}
	if w.byModel {
		names = append(names, h100Name)
	}
	for _, name := range names {
		if s.one(2) {
			w.shares = append(w.shares, share{
				resource: name, replicas: 2 + s.random.IntN(3), renamed: s.one(4),
				policy: pick(s.random, "distributed", "packed", "spread"),
			})
		}
	}
	if s.one(5) {
		w.excluded = append(w.excluded, s.random.IntN(boards))
	}
	return w
}

// write puts a good document in place.
func (s *scheduler) write(name string, w wish) {
	s.edits++
	w.edit = s.edits
	s.change(operation{kind: edit, name: name, wish: &w}, func() { s.documents[name] = &w })
}

// spoil puts a bad one in the place of the chosen one. Of another, a label that
// chooses it might be seen before it is.
func (s *scheduler) spoil() {
	name := s.selected
	s.edits++
	s.change(operation{kind: edit, name: name, text: s.badDocument()}, func() { s.documents[name] = nil })
}

// badDocument names its number where the error will quote it.
func (s *scheduler) badDocument() string {
	form := pick(s.random,
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: -%d}]}}\n",
		"flags: {edit%d: true}\n",
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/edit%d, replicas: 2}]}}\n",
		"flags: {migStrategy: mixed}\nmig: {manage: true, config: edit%d}\n",
		"version: edit%d\n",
		"edit%d: {timeSlicing: [\n",
	)
	return fmt.Sprintf(form, s.edits)
}

// change adds an operation on the profile. One that is to be rejected leaves
// the last good profile in force, so which one that is must be certain first.
func (s *scheduler) change(o operation, do func()) {
	before := *s
	before.documents = maps.Clone(s.documents)
	_, was := s.wanted()
	do()
	wanted, ok := s.wanted()
	if !ok && (s.cutOff > 0 || !was && s.badDocuments != (o.kind == edit)) {
		*s = before // Nothing can be certain.
		return
	}
	if !ok && !s.awaited {
		after := *s
		*s = before
		s.obey()
		after.out, after.awaited = s.out, true
		*s = after
	}
	s.add(o)
	if !ok {
		// Labels and documents come on two ways. What is changed next must not come
		// before this, nor this be taken for seen because of something on the other.
		s.badDocuments = o.kind == edit
		s.add(operation{kind: obeyed, rejected: true})
	}
	if ok {
		s.awaited = s.awaited && wanted.edit == s.inForce.edit && wanted.layout == s.inForce.layout && wanted.labelled == s.inForce.labelled
		s.inForce = wanted
	}
}

// wanted is what labels and documents say; false when that cannot be had.
func (s *scheduler) wanted() (wish, bool) {
	document := s.documents[s.selected]
	if document == nil {
		return wish{}, false
	}
	w := *document
	if w.layout != "" && s.layout != "" {
		if _, known := layouts()[s.layout]; !known {
			return wish{}, false
		}
		w.own, w.layout, w.labelled = w.layout, s.layout, true
	}
	return w, true
}

// obey waits until the profile is in force. It cannot be seen to be while the
// wanted one is rejected; then it was waited for before.
func (s *scheduler) obey() {
	s.mend()
	if _, ok := s.wanted(); ok {
		w := s.inForce
		s.add(operation{kind: obeyed, wish: &w, name: s.selected})
	}
	s.awaited = true
}

func (s *scheduler) profile() {
	switch n := s.random.IntN(20); {
	case n < 8 && slices.Contains(documentNames, s.selected):
		s.write(s.selected, s.anyWish())
	case n < 10:
		s.write(pick(s.random, documentNames...), s.anyWish())
	case n < 14:
		s.flip(pick(s.random, documentNames...))
	case n < 15:
		s.flip(pick(s.random, "", fmt.Sprintf("missing%d", s.edits)))
	case n < 17:
		value := pick(s.random, "", "all-balanced", "all-1g.10gb", "all-disabled", "all-9g.90gb")
		s.change(operation{kind: migLabel, text: value}, func() { s.layout = value })
	case slices.Contains(documentNames, s.selected):
		s.spoil()
	}
}

func (s *scheduler) flip(value string) {
	s.change(operation{kind: label, text: value}, func() { s.selected = value })
}
