package nvml

import "testing"

// TestNVLinks holds how many links two boards share: directly, through switches,
// and never through a third board.
func TestNVLinks(t *testing.T) {
	at := func(bus string, links map[string]int) *board {
		b := &board{links: links}
		b.fixed.PCIBusID = bus
		return b
	}
	onBus := map[string]bool{"A": true, "B": true, "C": true}
	tests := []struct {
		name string
		a, b *board
		want int
	}{
		{"none", at("a", nil), at("b", nil), 0},
		{"direct", at("a", map[string]int{"B": 4}), at("b", map[string]int{"A": 4}), 4},
		{"through a third board", at("a", map[string]int{"C": 2}), at("b", map[string]int{"C": 2}), 0},
		{"through switches", at("a", map[string]int{"X": 2, "Y": 2}), at("b", map[string]int{"X": 2, "Y": 1}), 3},
		{"at unlike switches", at("a", map[string]int{"X": 2}), at("b", map[string]int{"Y": 2}), 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := nvLinks(test.a, test.b, onBus); got != test.want {
				t.Errorf("%d links, want %d", got, test.want)
			}
		})
	}
}
