package nvmltest_test

import (
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/nvmltest"
	"github.com/virgate/virgate/internal/simnode"
)

// TestSimulated holds the suite against simulated nodes, as they are and as the
// program uses them, with deadlines.
func TestSimulated(t *testing.T) {
	for name, want := range map[string]nvmltest.Expect{
		"a30x4+all-balanced":    {GPUs: 4, Partitions: 12},
		"dgx-a100+all-balanced": {GPUs: 8, Partitions: 32},
		"dgx-b200":              {GPUs: 8},
		"empty":                 {},
		"l40sx8":                {GPUs: 8},
		"mixed":                 {GPUs: 6, Partitions: 11},
		"t4":                    {GPUs: 1},
	} {
		t.Run(name, func(t *testing.T) { run(t, name, want, func(n *simnode.Node) nvml.Library { return n }) })
		t.Run(name+" with deadlines", func(t *testing.T) {
			run(t, name, want, func(n *simnode.Node) nvml.Library { return nvml.WithDeadlines(n, nvml.Limits{}) })
		})
	}
}

func run(t *testing.T, name string, want nvmltest.Expect, through func(*simnode.Node) nvml.Library) {
	var node *simnode.Node
	want.Event = func(t *testing.T, gpu int) {
		if err := node.XID(gpu, 94, nvml.WholeBoard, nvml.WholeBoard); err != nil {
			t.Fatal(err)
		}
	}
	nvmltest.Run(t, func(t *testing.T) nvml.Library {
		var err error
		if node, err = simnode.New(name); err != nil {
			t.Fatal(err)
		}
		return through(node)
	}, want)
}
