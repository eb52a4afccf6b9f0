package cdi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/sharing"
)

// bench is a Writer between a source that may fail and a folder.
type bench struct {
	*Writer
	t   *testing.T
	now time.Time
	// broken is what the source fails with; made counts its calls.
	broken error
	made   int
	// holders are what pods hold; blind says that it cannot be told.
	holders []string
	blind   bool
}

func (b *bench) Units(gpus []sharing.GPU) (*specs.Spec, error) {
	b.made++
	if b.broken != nil {
		return nil, b.broken
	}
	return Simulated{}.Units(gpus)
}

func (b *bench) Extra(class string) (*specs.Spec, error) {
	b.made++
	if b.broken != nil {
		return nil, b.broken
	}
	return Simulated{}.Extra(class)
}

func (b *bench) Held(context.Context) ([]sharing.Allocation, error) {
	if b.blind {
		return nil, errors.New("no kubelet")
	}
	return []sharing.Allocation{{Resource: "nvidia.com/gpu", Devices: b.holders}}, nil
}

func newBench(t *testing.T) *bench {
	b := &bench{t: t, now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	b.restart(t.TempDir())
	return b
}

// restart replaces the Writer by one that knows nothing but the folder.
func (b *bench) restart(dir string) {
	b.Writer = NewWriter(Options{Dir: dir, Source: b, Holders: b, Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return b.now }})
}

// names are what Write returns, without the kind, which must be what a runtime
// finds.
func (b *bench) names(gpus []sharing.GPU, extras ...string) []string {
	b.t.Helper()
	names, err := b.Write(b.t.Context(), gpus, extras)
	if err != nil {
		b.t.Fatal(err)
	}
	return b.checked(names)
}

func (b *bench) checked(names []string) []string {
	b.t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithAutoRefresh(false), cdilib.WithSpecDirs(b.options.Dir))
	if err != nil {
		b.t.Fatal(err)
	}
	sorted := slices.Sorted(slices.Values(names))
	if diff := cmp.Diff(cache.ListDevices(), sorted); diff != "" {
		b.t.Errorf("entries (-a runtime finds +Write returns):\n%s", diff)
	}
	for i, name := range names {
		names[i] = strings.TrimPrefix(name, "k8s.device-plugin.nvidia.com/")
	}
	return names
}

func (b *bench) path() string {
	return filepath.Join(b.options.Dir, "k8s.device-plugin.nvidia.com-gpu.json")
}

func (b *bench) wants(want, got []string) {
	b.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		b.t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// boards are so many GPUs, of which the last has partitions with these IDs.
func boards(count int, partitions ...string) []sharing.GPU {
	gpus := make([]sharing.GPU, count)
	for i := range gpus {
		gpus[i] = sharing.GPU{UUID: fmt.Sprintf("GPU-%d", i), Index: i, Minor: i}
	}
	for i, id := range partitions {
		last := &gpus[count-1]
		last.MIG = true
		last.Partitions = append(last.Partitions, sharing.Partition{UUID: id, Index: i, GI: i + 1})
	}
	return gpus
}

func TestWriteEntries(t *testing.T) {
	b := newBench(t)
	b.wants([]string{"gpu=0", "gpu=1:0", "gpu=GPU-0", "gpu=MIG-a", "gds=all"}, b.names(boards(2, "MIG-a"), "gds"))
	info, err := os.Stat(b.path())
	if err != nil {
		t.Fatal(err)
	}
	// Nothing new, nothing asked, nothing written.
	made := b.made
	b.now = b.now.Add(time.Hour)
	b.names(boards(2, "MIG-a"), "gds")
	again, err := os.Stat(b.path())
	if err != nil || !os.SameFile(info, again) || b.made != made {
		t.Errorf("written again (%v) or asked %d times more", err, b.made-made)
	}
	// A fault is no reason to write.
	sick := boards(2, "MIG-a")
	sick[0].Fault = "XID 79"
	b.names(sick, "gds")
	if b.made != made {
		t.Error("asked because of a fault")
	}
	b.wants([]string{"gpu=0", "gpu=1", "gpu=1:0", "gpu=GPU-0", "gpu=GPU-1", "gpu=MIG-a", "gds=all"}, b.names(boards(2), "gds"))
}

func TestNoBoardsNoFile(t *testing.T) {
	b := newBench(t)
	b.wants(nil, b.names(nil))
	if _, err := os.Stat(b.path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a spec without entries: %v", err)
	}
}

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
		b.holders = nil
		b.now = b.now.Add(time.Minute)
		b.wants(one, b.names(boards(1, "MIG-b")))
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

// TestLostBoardWithAnotherOnItsIndex has two boards of one index, as when one
// was lost and the driver counted anew.
func TestLostBoardWithAnotherOnItsIndex(t *testing.T) {
	b := newBench(t)
	gpus := boards(2)
	gpus[1].Index = 0
	b.wants([]string{"gpu=0", "gpu=GPU-0", "gpu=GPU-1"}, b.names(gpus))
}

func TestFileIsBroughtBack(t *testing.T) {
	for _, test := range []struct {
		name  string
		spoil func(path string) error
	}{
		{"removed", os.Remove},
		{"emptied", func(path string) error { return os.Truncate(path, 0) }},
		{"torn", func(path string) error { return os.WriteFile(path, []byte(`{"cdiVersion": "0.5`), 0o644) }},
		{"replaced", func(path string) error {
			return os.WriteFile(path, []byte(`{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"env":["A=B"]}}]}`), 0o644)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			want := b.names(boards(2))
			if err := test.spoil(b.path()); err != nil {
				t.Fatal(err)
			}
			made := b.made
			b.wants(want, b.names(boards(2)))
			if b.made != made {
				t.Error("the source was asked for what is known")
			}
		})
	}
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

// TestOldEntriesOutliveTheSource holds that a driver that cannot be read takes
// nothing away from the units that the node still has.
func TestOldEntriesOutliveTheSource(t *testing.T) {
	b := newBench(t)
	b.names(boards(2), "gds")
	b.restart(b.options.Dir)
	b.broken = errors.New("driver is out")
	names, err := b.Write(t.Context(), boards(3), []string{"gds"})
	if !errors.Is(err, b.broken) {
		t.Errorf("error is %v", err)
	}
	b.wants([]string{"gpu=0", "gpu=1", "gpu=GPU-0", "gpu=GPU-1", "gds=all"}, b.checked(names))

	// It is tried again, but not at once.
	made := b.made
	b.now = b.now.Add(9 * time.Second)
	if _, err := b.Write(t.Context(), boards(3), nil); err == nil || b.made != made {
		t.Errorf("asked %d times more, error %v", b.made-made, err)
	}
	b.broken = nil
	b.now = b.now.Add(time.Second)
	if names := b.names(boards(3), "gds"); len(names) != 7 {
		t.Errorf("entries %v", names)
	}
}

func TestFolderThatCannotBeWritten(t *testing.T) {
	b := newBench(t)
	b.options.Dir = filepath.Join(b.options.Dir, "cdi")
	b.restart(b.options.Dir)
	if err := os.WriteFile(b.options.Dir, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if names, err := b.Write(t.Context(), boards(1), nil); err == nil || names != nil {
			t.Errorf("names %v, error %v", names, err)
		}
	}
	if err := os.Remove(b.options.Dir); err != nil {
		t.Fatal(err)
	}
	b.wants([]string{"gpu=0", "gpu=GPU-0"}, b.names(boards(1)))
}
