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
	// version is the source's.
	version string
	// holders are what pods hold; blind says that it cannot be told; asked counts
	// how often it was asked.
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
	b.version = "580.95.05"
	b.names(boards(2, "MIG-a"), "gds")
	if b.made != made+2 {
		t.Errorf("asked %d times for two specs of another driver", b.made-made)
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
	spec, err := cdilib.ReadSpec(b.path(), 0)
	if err != nil || len(spec.ContainerEdits.DeviceNodes) != 4 {
		t.Errorf("all entries have in common %v, %v", spec.ContainerEdits, err)
	}

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
	// What was there once is no entry any more.
	if err := errors.Join(os.RemoveAll(b.options.Dir), os.WriteFile(b.options.Dir, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if names, err := b.Write(t.Context(), boards(1), nil); err == nil || names != nil {
		t.Errorf("names %v, error %v", names, err)
	}
}

// TestTornExtra holds that one of which nothing is left is told with both
// reasons.
func TestTornExtra(t *testing.T) {
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
