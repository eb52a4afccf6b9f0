package sharing

import "testing"

// TestFairShareIsNoMoreThanTheUnit is of a container that holds more devices of a
// unit than it is offered as by now.
func TestFairShareIsNoMoreThanTheUnit(t *testing.T) {
	s := shares{replicas: map[string]int{"u": 2}, memory: map[string]uint64{"u": 100}}
	if got := s.over("u", 3, KnownFigure(120)); got != KnownFigure(20) {
		t.Errorf("%+v over, want 20", got)
	}
}
