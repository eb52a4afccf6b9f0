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
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// bench is a Writer with its own folder and a source that can fail.
type bench struct {
	*Writer
	t   *testing.T
	now time.Time
	// broken is the source's error; made counts its calls.
	broken error
	made   int
	// version is the source's.
	version string
	// holders are the units held by pods, blind means that they are unknown, and asked counts the calls of Held.
	holders []string
	blind   bool
	asked   int
}

func (b *bench) Version() string { return b.version }

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
	b.asked++
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

// restart replaces the Writer by a new one that knows only the folder.
func (b *bench) restart(dir string) {
	b.Writer = NewWriter(Options{Dir: dir, Source: b, Holders: b, Logger: slog.New(slog.DiscardHandler)})
	b.Writer.now = func() time.Time { return b.now }
}

// names are the result of Write, without the kind. It checks that a runtime finds
// the same.
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

// gpus makes so many GPUs. The last one has partitions with these IDs.
func gpus(count int, partitions ...string) []sharing.GPU {
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
	b.wants([]string{"gpu=0", "gpu=1:0", "gpu=GPU-0", "gpu=MIG-a", "gds=all"}, b.names(gpus(2, "MIG-a"), "gds"))
	info, err := os.Stat(b.path())
	if err != nil {
		t.Fatal(err)
	}
	// If nothing has changed, the source is not called and nothing is written.
	made := b.made
	b.now = b.now.Add(time.Hour)
	b.names(gpus(2, "MIG-a"), "gds")
	again, err := os.Stat(b.path())
	if err != nil || !os.SameFile(info, again) || b.made != made {
		t.Errorf("written again (%v) or asked %d times more", err, b.made-made)
	}
	// Health is not in the specs.
	sick := gpus(2, "MIG-a")
	sick[0].Health = sharing.Faulty("XID 79")
	b.names(sick, "gds")
	if b.made != made {
		t.Error("asked because of a fault")
	}
	b.version = "580.95.05"
	b.names(gpus(2, "MIG-a"), "gds")
	if b.made != made+2 {
		t.Errorf("asked %d times for two specs of another driver", b.made-made)
	}
	b.wants([]string{"gpu=0", "gpu=1", "gpu=1:0", "gpu=GPU-0", "gpu=GPU-1", "gpu=MIG-a", "gds=all"}, b.names(gpus(2), "gds"))
}

func TestNoGPUsNoFile(t *testing.T) {
	b := newBench(t)
	b.wants(nil, b.names(nil))
	if _, err := os.Stat(b.path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a spec without entries: %v", err)
	}
}

// TestOldEntriesOutliveTheSource checks that the node's units keep their entries while the driver cannot be read.
func TestOldEntriesOutliveTheSource(t *testing.T) {
	b := newBench(t)
	b.names(gpus(2), "gds")
	b.restart(b.options.Dir)
	b.broken = errors.New("driver is out")
	names, err := b.Write(t.Context(), gpus(3), []string{"gds"})
	if !errors.Is(err, b.broken) {
		t.Errorf("error is %v", err)
	}
	b.wants([]string{"gpu=0", "gpu=1", "gpu=GPU-0", "gpu=GPU-1", "gds=all"}, b.checked(names))
	spec, err := cdilib.ReadSpec(b.path(), 0)
	if err != nil || len(spec.ContainerEdits.DeviceNodes) != 4 {
		t.Errorf("all entries have in common %v, %v", spec.ContainerEdits, err)
	}

	// The source is called again, but not at once.
	made := b.made
	b.now = b.now.Add(9 * time.Second)
	if _, err := b.Write(t.Context(), gpus(3), nil); err == nil || b.made != made {
		t.Errorf("asked %d times more, error %v", b.made-made, err)
	}
	b.broken = nil
	b.now = b.now.Add(time.Second)
	if names := b.names(gpus(3), "gds"); len(names) != 7 {
		t.Errorf("entries %v", names)
	}
}

// TestOldDeviceNode checks that an entry that cannot be made again is removed when its GPU's device node changes,
// as the old node may be another GPU's.
func TestOldDeviceNode(t *testing.T) {
	b := newBench(t)
	b.names(gpus(2))
	b.broken = errors.New("no driver")
	moved := gpus(2)
	moved[0].Minor = 2
	names, err := b.Write(t.Context(), moved, nil)
	if !errors.Is(err, b.broken) {
		t.Errorf("error %v", err)
	}
	b.wants([]string{"gpu=1", "gpu=GPU-1"}, b.checked(names))
	b.broken = nil
	b.now = b.now.Add(time.Minute)
	b.wants([]string{"gpu=0", "gpu=1", "gpu=GPU-0", "gpu=GPU-1"}, b.names(moved))
}

func TestFolderThatCannotBeWritten(t *testing.T) {
	b := newBench(t)
	b.options.Dir = filepath.Join(b.options.Dir, "cdi")
	b.restart(b.options.Dir)
	if err := os.WriteFile(b.options.Dir, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if names, err := b.Write(t.Context(), gpus(1), nil); err == nil || names != nil {
			t.Errorf("names %v, error %v", names, err)
		}
	}
	if err := os.Remove(b.options.Dir); err != nil {
		t.Fatal(err)
	}
	b.wants([]string{"gpu=0", "gpu=GPU-0"}, b.names(gpus(1)))
	// An entry that was in the file before is no longer returned.
	if err := errors.Join(os.RemoveAll(b.options.Dir), os.WriteFile(b.options.Dir, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if names, err := b.Write(t.Context(), gpus(1), nil); err == nil || names != nil {
		t.Errorf("names %v, error %v", names, err)
	}
}

// TestTruncatedExtra checks that both errors are reported if the file is unusable and
// cannot be made again.
func TestTruncatedExtra(t *testing.T) {
	b := newBench(t)
	b.broken = errors.New("no module")
	path := filepath.Join(b.options.Dir, "k8s.device-plugin.nvidia.com-gds.json")
	if err := os.WriteFile(path, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	names, err := b.Write(t.Context(), nil, []string{"gds"})
	if names != nil || !errors.Is(err, b.broken) || !strings.Contains(err.Error(), "read the CDI spec") {
		t.Errorf("names %v, error %v", names, err)
	}
}

func TestEntryStaysWhileNeeded(t *testing.T) {
	gone := func(b *bench, after time.Duration) []string {
		b.names(gpus(1, "MIG-a"))
		b.names(gpus(1, "MIG-b"))
		b.now = b.now.Add(after)
		return b.names(gpus(1, "MIG-b"))
	}
	both := []string{"gpu=0:0", "gpu=MIG-a", "gpu=MIG-b"}
	one := []string{"gpu=0:0", "gpu=MIG-b"}
	t.Run("just gone", func(t *testing.T) { b := newBench(t); b.wants(both, gone(b, 9*time.Minute)) })
	t.Run("long gone", func(t *testing.T) { b := newBench(t); b.wants(one, gone(b, 10*time.Minute)) })
	t.Run("long gone and held", func(t *testing.T) {
		b := newBench(t)
		b.holders = []string{"MIG-a::3"}
		b.wants(both, gone(b, 24*time.Hour))
		b.names(gpus(1, "MIG-b"))
		if b.asked != 1 {
			t.Errorf("asked %d times within a minute", b.asked)
		}
		b.holders = nil
		b.now = b.now.Add(time.Minute)
		b.wants(one, b.names(gpus(1, "MIG-b")))
	})
	t.Run("many long gone, one question", func(t *testing.T) {
		b := newBench(t)
		b.names(gpus(1, "MIG-a", "MIG-b", "MIG-c"))
		b.names(gpus(1))
		b.now = b.now.Add(24 * time.Hour)
		b.wants([]string{"gpu=0", "gpu=GPU-0"}, b.names(gpus(1)))
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
		b.names(gpus(1, "MIG-a"))
		b.restart(b.options.Dir)
		b.wants(both, b.names(gpus(1, "MIG-b")))
	})
	t.Run("back in time", func(t *testing.T) {
		b := newBench(t)
		gone(b, 9*time.Minute)
		b.names(gpus(1, "MIG-a"))
		b.names(gpus(1, "MIG-b"))
		b.now = b.now.Add(9 * time.Minute)
		b.wants(both, b.names(gpus(1, "MIG-b")))
	})
}

func TestIndexNamesTheNewUnit(t *testing.T) {
	b := newBench(t)
	b.names(gpus(1, "MIG-a", "MIG-b"))
	gpus := gpus(1, "MIG-c")
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

// TestIndexOfAnotherUnit removes a GPU, so that the other one gets its index, while the driver fails. The old
// entry by that index must not be used for the remaining GPU.
func TestIndexOfAnotherUnit(t *testing.T) {
	b := newBench(t)
	b.names(gpus(2))
	moved := gpus(2)[1:]
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

// TestLostGPUWithAnotherOnItsIndex has two GPUs with one index, as when one was lost
// and the driver enumerated the others again.
func TestLostGPUWithAnotherOnItsIndex(t *testing.T) {
	b := newBench(t)
	gpus := gpus(2)
	gpus[1].Index = 0
	b.wants([]string{"gpu=0", "gpu=GPU-0", "gpu=GPU-1"}, b.names(gpus))
}

func TestRetainedEntrySurvivesRemoval(t *testing.T) {
	b := newBench(t)
	b.names(gpus(1, "MIG-a"))
	want := b.names(gpus(1, "MIG-b"))
	if err := os.Remove(b.path()); err != nil {
		t.Fatal(err)
	}
	b.wants(want, b.names(gpus(1, "MIG-b")))
}

// TestTwoWriters has two Virgates write at the same time, each for GPUs that the other does not have. A runtime
// always finds a complete file with the held entry, and in the end both know the file's content.
func TestTwoWriters(t *testing.T) {
	old := newBench(t)
	old.holders = []string{"MIG-held"}
	old.names(gpus(1, "MIG-held"))
	next := newBench(t)
	next.holders = old.holders
	next.restart(old.options.Dir)

	var ended atomic.Bool
	var runtime, writers sync.WaitGroup
	reads := 0
	runtime.Go(func() {
		for last := false; !last; reads++ {
			last = ended.Load()
			spec, err := cdilib.ReadSpec(old.path(), 0)
			if err != nil || spec.GetDevice("MIG-held") == nil || len(spec.ContainerEdits.DeviceNodes) != 4 {
				t.Errorf("a runtime reads %v, %v", spec, err)
				return
			}
		}
	})
	for first, b := range []*bench{old, next} {
		writers.Go(func() {
			for i := range 40 {
				if _, err := b.Write(t.Context(), gpus(2+(first+i)%3, "MIG-more"), nil); err != nil {
					t.Errorf("Virgate %d: %v", first, err)
					return
				}
			}
		})
	}
	writers.Wait()
	ended.Store(true)
	runtime.Wait()
	// At its next Write, each sees that the other has written.
	for range 2 {
		for _, b := range []*bench{old, next} {
			if names := b.names(gpus(4)); !slices.Contains(names, "gpu=MIG-held") {
				t.Errorf("entries %v", names)
			}
		}
	}
	old.wants([]string{"k8s.device-plugin.nvidia.com-gpu.json"}, old.files())
}

// TestSuccessorKeepsWhatPodsHold starts a second Virgate while the first one still runs
// and has just lost a unit; the second one retains the unit's entry for the full time.
func TestSuccessorKeepsWhatPodsHold(t *testing.T) {
	old := newBench(t)
	old.holders = []string{"MIG-a"}
	old.names(gpus(1, "MIG-a"))
	old.names(gpus(1, "MIG-b"))
	next := newBench(t)
	next.holders = old.holders
	next.restart(old.options.Dir)
	both := []string{"gpu=0:0", "gpu=MIG-a", "gpu=MIG-b"}
	for _, b := range []*bench{next, old} {
		b.now = b.now.AddDate(0, 0, 1)
		b.wants(both, b.names(gpus(1, "MIG-b")))
	}
	// The pod ends: whichever sees it first removes the entry, and it is not restored.
	old.holders, next.holders = nil, nil
	for _, b := range []*bench{next, old, next} {
		b.now = b.now.AddDate(0, 0, 1)
		b.wants([]string{"gpu=0:0", "gpu=MIG-b"}, b.names(gpus(1, "MIG-b")))
	}
}

// FuzzExisting checks that for any existing spec files, Write makes the entries of the node's units and returns
// names that a runtime finds.
func FuzzExisting(f *testing.F) {
	good := `{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"old","containerEdits":{"env":["A=B"]}}]}`
	f.Add([]byte(good), []byte(good))
	f.Add([]byte(`{"cdiVersion":"0.5`), []byte("cdiVersion: 0.5.0\nkind: k8s.device-plugin.nvidia.com/gpu\ndevices: [{name: GPU-0, containerEdits: {env: [A=B]}}]"))
	f.Add([]byte(`{"cdiVersion":"99.0.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[]}`), []byte("\x00"))
	f.Add([]byte(`{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"0"},{"name":"0"},{"name":"\u001b"}]}`), []byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, there, beside []byte) {
		dir := t.TempDir()
		w := NewWriter(Options{Dir: dir, Source: Simulated{}, Logger: slog.New(slog.DiscardHandler)})
		for path, data := range map[string][]byte{w.units.file.path(): there, filepath.Join(dir, "other.yaml"): beside} {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		names, err := w.Write(t.Context(), gpus(2), nil)
		cache, failed := cdilib.NewCache(cdilib.WithAutoRefresh(false), cdilib.WithSpecDirs(dir))
		if failed != nil {
			t.Fatal(failed)
		}
		found := cache.ListDevices()
		for _, name := range names {
			if !slices.Contains(found, name) {
				t.Errorf("no runtime finds %s", name)
			}
		}
		if err == nil && !slices.Contains(names, "k8s.device-plugin.nvidia.com/gpu=GPU-1") {
			t.Errorf("no error, and the entries are %q", names)
		}
	})
}

// TestSpecsAfterAPause checks that the specs are made again right after a pause, as the driver may be another
// one.
func TestSpecsAfterAPause(t *testing.T) {
	b := newBench(t)
	gpus := []sharing.GPU{{UUID: "GPU-11111111-1111-1111-1111-111111111111"}}
	b.version = "570"
	refused := error(nil)
	b.options.Source = Guarded{Source: b, Open: func(use func()) error {
		if refused != nil {
			return refused
		}
		use()
		return nil
	}}
	b.names(gpus)
	refused, b.version = errors.New("the driver is released"), "580"
	if names, err := b.Write(t.Context(), gpus, nil); err == nil || len(names) == 0 {
		t.Fatalf("in the pause: %v, %v", names, err)
	}
	b.now = b.now.Add(time.Second)
	refused = nil
	made := b.made
	names, err := b.Write(t.Context(), gpus, nil)
	if b.made == made {
		t.Errorf("after the pause the entries %v count as there, and are those of driver 570: %v", names, err)
	}
}
