package nvml

import "testing"

// TestNVLinks checks how many links two GPUs share: directly or through switches, never through a third GPU.
func TestNVLinks(t *testing.T) {
	at := func(bus string, links map[string]int) *knownGPU {
		b := &knownGPU{links: links}
		b.fixed.PCIBusID = bus
		return b
	}
	onBus := map[string]bool{"A": true, "B": true, "C": true}
	tests := []struct {
		name string
		a, b *knownGPU
		want int
	}{
		{"none", at("a", nil), at("b", nil), 0},
		{"direct", at("a", map[string]int{"B": 4}), at("b", map[string]int{"A": 4}), 4},
		{"through a third GPU", at("a", map[string]int{"C": 2}), at("b", map[string]int{"C": 2}), 0},
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

// TestWindowTakesNoSampleTwice is for drivers that return samples older than asked for.
func TestWindowTakesNoSampleTwice(t *testing.T) {
	w := sampleWindow{seen: 100, begun: true}
	work := w.add([]ProcessSample{{PID: 1, Time: 100, SM: 90}, {PID: 1, Time: 200, SM: 10}}, nil, nil)
	if got := work(1); got == nil || *got != 0.1 || w.seen != 200 {
		t.Errorf("SM %+v up to %d, want that of the second sample", got, w.seen)
	}
}

// TestWindowTakesNoNonsense is for drivers that return uninitialised samples.
func TestWindowTakesNoNonsense(t *testing.T) {
	w := sampleWindow{seen: 100, begun: true}
	work := w.add([]ProcessSample{
		{PID: 1, Time: 200, SM: 10}, {PID: 1, Time: 1 << 63, SM: 1 << 31}, {PID: 1, Time: 300, SM: -1}, {PID: 2, Time: 210, SM: 100},
	}, nil, nil)
	if one, two := work(1), work(2); one == nil || *one != 0.1 || two == nil || *two != 1 || w.seen != 210 {
		t.Errorf("SM %+v and %+v up to %d", one, two, w.seen)
	}
}
