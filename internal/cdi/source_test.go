package cdi

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

// cut is a node with a whole board, a board with one partition, which is not its
// first, and one with none yet.
func cut() []sharing.GPU {
	return []sharing.GPU{
		{UUID: "GPU-a", Index: 0, Minor: 3},
		{UUID: "GPU-b", Index: 1, Minor: 2, MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-b", Index: 4, GI: 9, CI: 1}}},
		{UUID: "GPU-c", Index: 2, Minor: 1, MIG: true},
	}
}

func TestUnits(t *testing.T) {
	names := map[string]string{}
	for _, u := range units(cut()) {
		names[u.id] = u.index
	}
	if diff := cmp.Diff(map[string]string{"GPU-a": "0", "MIG-b": "1:4"}, names); diff != "" {
		t.Errorf("units (-want +got):\n%s", diff)
	}
}

func TestFingerprint(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(gpus []sharing.GPU)
		same   bool
	}{
		{"nothing", func([]sharing.GPU) {}, true},
		{"a fault", func(g []sharing.GPU) { g[0].Fault = "XID 79" }, true},
		{"the order", func(g []sharing.GPU) { g[0], g[1] = g[1], g[0] }, true},
		{"an ID", func(g []sharing.GPU) { g[0].UUID = "GPU-d" }, false},
		{"an index", func(g []sharing.GPU) { g[0].Index = 7 }, false},
		{"a minor", func(g []sharing.GPU) { g[0].Minor = 7 }, false},
		{"a GPU instance", func(g []sharing.GPU) { g[1].Partitions[0].GI = 7 }, false},
		{"a compute instance", func(g []sharing.GPU) { g[1].Partitions[0].CI = 7 }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			gpus := cut()
			test.change(gpus)
			if same := fingerprint(gpus) == fingerprint(cut()); same != test.same {
				t.Errorf("the same: %v", same)
			}
		})
	}
}
