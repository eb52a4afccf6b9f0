package cdi

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

func TestEntryStaysWhileNeeded(t *testing.T) {
	gone := func(b *bench, after time.Duration) []string {
		b.names(boards(1, "MIG-a"))
		b.names(boards(1, "MIG-b"))
		b.now = b.now.Add(after)
		return b.names(boards(1, "MIG-b"))
	}
	both := []string{"gpu=0:0", "gpu=MIG-a", "gpu=MIG-b"}
	one := []string{"gpu=0:0", "gpu=MIG-b"}
	t.Run("just gone", func(t *testing.T) { b := newBench(t); b.wants(both, gone(b, 9*time.Minute)) })
	t.Run("long gone", func(t *testing.T) { b := newBench(t); b.wants(one, gone(b, 10*time.Minute)) })
	t.Run("long gone and held", func(t *testing.T) {
		b := newBench(t)
		b.holders = []string{"MIG-a::3"}
		b.wants(both, gone(b, 24*time.Hour))
		b.names(boards(1, "MIG-b"))
		if b.asked != 1 {
			t.Errorf("asked %d times within a minute", b.asked)
		}
		b.holders = nil
		b.now = b.now.Add(time.Minute)
		b.wants(one, b.names(boards(1, "MIG-b")))
	})
	t.Run("many long gone, one question", func(t *testing.T) {
		b := newBench(t)
		b.names(boards(1, "MIG-a", "MIG-b", "MIG-c"))
		b.names(boards(1))
		b.now = b.now.Add(24 * time.Hour)
		b.wants([]string{"gpu=0", "gpu=GPU-0"}, b.names(boards(1)))
		if b.asked != 1 {
			t.Errorf("asked %d times for entries that leave together", b.asked)
		}
	})
	t.Run("nobody can tell", func(t *testing.T) {
		b := newBench(t)
		b.blind = true
		b.wants(both, gone(b, 24*time.Hour))
	})
	t.Run("no kubelet to ask", func(t *testing.T) {
		b := newBench(t)
		b.options.Holders = nil
		b.wants(both, gone(b, 24*time.Hour))
	})
	t.Run("over a restart", func(t *testing.T) {
		b := newBench(t)
		b.names(boards(1, "MIG-a"))
		b.restart(b.options.Dir)
		b.wants(both, b.names(boards(1, "MIG-b")))
	})
	t.Run("back in time", func(t *testing.T) {
		b := newBench(t)
		gone(b, 9*time.Minute)
		b.names(boards(1, "MIG-a"))
		b.names(boards(1, "MIG-b"))
		b.now = b.now.Add(9 * time.Minute)
		b.wants(both, b.names(boards(1, "MIG-b")))
	})
}

func TestIndexNamesTheNewUnit(t *testing.T) {
	b := newBench(t)
	b.names(boards(1, "MIG-a", "MIG-b"))
	gpus := boards(1, "MIG-c")
	gpus[0].Partitions[0].GI = 5
	b.names(gpus)
	spec, err := cdilib.ReadSpec(b.path(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(spec.GetDevice("MIG-c").ContainerEdits, spec.GetDevice("0:0").ContainerEdits); diff != "" {
		t.Errorf("the index still names another partition (-MIG-c +0:0):\n%s", diff)
	}
}

// TestIndexOfAnotherUnit has a board leave, so that the other one has its index
// now, while the driver cannot be asked: the old entry of that index is no entry
// of the board that is there.
func TestIndexOfAnotherUnit(t *testing.T) {
	b := newBench(t)
	b.names(boards(2))
	moved := boards(2)[1:]
	moved[0].Index = 0
	b.broken = errors.New("driver is out")
	names, err := b.Write(t.Context(), moved, nil)
	if !errors.Is(err, b.broken) {
		t.Errorf("error is %v", err)
	}
	if slices.Contains(b.checked(names), "gpu=0") {
		t.Errorf("index 0 still names GPU-0: %v", names)
	}
	b.broken = nil
	b.now = b.now.Add(time.Minute)
	b.wants([]string{"gpu=0", "gpu=1", "gpu=GPU-0", "gpu=GPU-1"}, b.names(moved))
}

// TestLostBoardWithAnotherOnItsIndex has two boards of one index, as when one
// was lost and the driver counted anew.
func TestLostBoardWithAnotherOnItsIndex(t *testing.T) {
	b := newBench(t)
	gpus := boards(2)
	gpus[1].Index = 0
	b.wants([]string{"gpu=0", "gpu=GPU-0", "gpu=GPU-1"}, b.names(gpus))
}

func TestRetainedEntrySurvivesRemoval(t *testing.T) {
	b := newBench(t)
	b.names(boards(1, "MIG-a"))
	want := b.names(boards(1, "MIG-b"))
	if err := os.Remove(b.path()); err != nil {
		t.Fatal(err)
	}
	b.wants(want, b.names(boards(1, "MIG-b")))
}
