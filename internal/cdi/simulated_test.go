package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

// TestCapabilityMinor has the first and the last minors of the driver's table
// (NVIDIA MIG User Guide, "Device Nodes and Capabilities").
func TestCapabilityMinor(t *testing.T) {
	for _, test := range []struct{ gpu, gi, want int }{{0, 0, 3}, {0, 1, 12}, {1, 0, 138}, {31, 14, 4322 - 8}} {
		if got := capabilityMinor(test.gpu, test.gi); got != test.want {
			t.Errorf("board %d, GPU instance %d: %d, want %d", test.gpu, test.gi, got, test.want)
		}
	}
}

// TestSpecFile has a whole spec once. Where the CDI library writes another text
// for it, take the new one over if a runtime reads both alike.
func TestSpecFile(t *testing.T) {
	b := newBench(t)
	gpus := boards(2, "MIG-a")
	gpus[1].Minor = 7
	gpus[1].Partitions[0].CI = 2
	b.names(gpus)
	got, err := os.ReadFile(b.path())
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "spec.json")
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.TrimSpace(string(want)), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", golden, diff)
	}
}

func TestSimulatedWithoutMinor(t *testing.T) {
	spec, err := Simulated{}.Units([]sharing.GPU{{UUID: "GPU-0", Minor: -1}})
	if spec != nil || err != nil {
		t.Errorf("spec %v, error %v", spec, err)
	}
}
