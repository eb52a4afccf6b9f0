package soak

import (
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

func TestWitness(t *testing.T) {
	list := func(ids ...string) simkubelet.Event {
		e := simkubelet.Event{Kind: simkubelet.Listed, Resource: gpuName}
		for _, id := range ids {
			name, sick := strings.CutSuffix(id, " sick")
			e.Devices = append(e.Devices, simkubelet.Device{ID: name, Healthy: !sick})
		}
		return e
	}
	grant := func(pod string, ids ...string) simkubelet.Event {
		e := list(ids...)
		e.Kind, e.Pod = simkubelet.Granted, pod
		return e
	}
	registered, opened, ended := simkubelet.Event{Kind: simkubelet.Registering, Resource: gpuName},
		simkubelet.Event{Kind: simkubelet.StreamOpened, Resource: gpuName}, simkubelet.Event{Kind: simkubelet.StreamEnded, Resource: gpuName}
	dropped := ended
	dropped.ByKubelet = true
	begin := []simkubelet.Event{{Kind: simkubelet.Started}, registered, opened}
	freed := simkubelet.Event{Kind: simkubelet.Freed, Pod: "a"}
	tests := []struct {
		name   string
		events []simkubelet.Event
		want   string
	}{
		{"grows and shrinks in two steps", []simkubelet.Event{list("GPU-0::0"), list("GPU-0::0", "GPU-0::1"), list("GPU-0::0", "GPU-0::1 sick"), list("GPU-0::0")}, ""},
		{"drops a Healthy device", []simkubelet.Event{list("GPU-0::0", "GPU-0::1"), list("GPU-0::0")}, "invariant 6: GPU-0::1"},
		{"drops a held device", []simkubelet.Event{list("GPU-0::0"), grant("a", "GPU-0::0"), list("GPU-0::0 sick"), list()}, "invariant 5: GPU-0::0"},
		{"drops one that was held", []simkubelet.Event{list("GPU-0::0"), grant("a", "GPU-0::0"), freed, list("GPU-0::0 sick"), list()}, ""},
		{"names a device twice", []simkubelet.Event{list("GPU-0::0", "GPU-0::0")}, "twice"},
		{"ends a stream", []simkubelet.Event{list("GPU-0"), ended}, "invariant 1: the stream"},
		{"ends the stream of a drained name", []simkubelet.Event{list("GPU-0 sick"), ended}, ""},
		{"ends the stream of a held device", []simkubelet.Event{list("GPU-0"), grant("a", "GPU-0"), list("GPU-0 sick"), ended}, "invariant 1: the stream"},
		{"ends the stream of a name without devices", []simkubelet.Event{list(), ended}, ""},
		{"opens a second stream", []simkubelet.Event{list("GPU-0"), opened}, "invariant 4: nvidia.com/gpu has 2 streams"},
		{"opens a second stream that nobody could foresee", []simkubelet.Event{list("GPU-0 sick"), opened}, ""},
		{"a dropped stream", []simkubelet.Event{list("GPU-0"), dropped, registered, opened}, ""},
		{"registers beside its stream", []simkubelet.Event{list("GPU-0"), registered}, "invariant 1: nvidia.com/gpu is registered"},
		{"one board alone for two pods", []simkubelet.Event{grant("a", "GPU-0"), grant("b", "GPU-0")}, "invariant 7"},
		{"shared after alone", []simkubelet.Event{grant("a", "GPU-0"), grant("b", "GPU-0::1")}, "invariant 7"},
		{"shared twice", []simkubelet.Event{grant("a", "GPU-0::0"), grant("b", "GPU-0::1")}, ""},
		{"alone when the other has ended", []simkubelet.Event{grant("a", "GPU-0::0"), freed, grant("b", "GPU-0")}, ""},
		{"a board under a partition", []simkubelet.Event{grant("a", "MIG-0"), grant("b", "GPU-0")}, "invariant 7"},
		{"a partition under a board", []simkubelet.Event{grant("a", "GPU-0::0"), grant("b", "MIG-0")}, "invariant 7"},
		{"a partition that is gone", []simkubelet.Event{grant("a", "MIG-9")}, "invariant 9"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWitness(func() []simnode.Board {
				return []simnode.Board{{UUID: "GPU-0", Partitions: []simnode.Partition{{UUID: "MIG-0"}}}}
			})
			for _, e := range append(begin[:len(begin):len(begin)], test.events...) {
				w.take(e)
			}
			got := strings.Join(w.check(), "\n")
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("complaints %q, want %q", got, test.want)
			}
		})
	}
}

// A partition that pods hold must stay, whoever took it.
func TestWitnessOfADestroyedPartition(t *testing.T) {
	boards := []simnode.Board{{UUID: "GPU-0", Partitions: []simnode.Partition{{UUID: "MIG-0"}}}}
	w := newWitness(func() []simnode.Board { return boards })
	w.take(simkubelet.Event{Kind: simkubelet.Granted, Resource: gpuName, Pod: "a", Devices: []simkubelet.Device{{ID: "MIG-0"}}})
	if wrong := w.check(); len(wrong) > 0 {
		t.Fatal(wrong)
	}
	boards[0].Partitions = nil
	if wrong := strings.Join(w.check(), "\n"); !strings.Contains(wrong, "invariant 9: MIG-0 was destroyed") {
		t.Errorf("complaints %q", wrong)
	}
}
