package host

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// specs answer with what they were given.
type specs struct {
	mu    sync.Mutex
	names []string
	err   error
	// extras are those of the last order, of writes.
	extras []string
	writes int
	// block, while not nil, is waited for, whatever happens to the caller.
	block chan struct{}
}

func (s *specs) Write(_ context.Context, _ []sharing.GPU, extras []string) ([]string, error) {
	s.mu.Lock()
	block := s.block
	s.mu.Unlock()
	if block != nil {
		<-block
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.extras = extras
	s.writes++
	return s.names, s.err
}

func (s *specs) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// bench is a Host that is watched, and the file system that it looks at.
type bench struct {
	*Host
	t       *testing.T
	root    string
	specs   *specs
	changes chan struct{}
	// stop ends Watch and returns its error.
	stop func() error
}

func newBench(t *testing.T, patience time.Duration) *bench {
	b := &bench{t: t, root: t.TempDir(), specs: &specs{}, changes: make(chan struct{}, 1)}
	b.Host = New(Options{Root: b.root, DevRoot: "/driver", Specs: b.specs, Interval: time.Millisecond, Patience: patience, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- b.Watch(ctx, func() {
			select {
			case b.changes <- struct{}{}:
			default:
			}
		})
	}()
	b.stop = sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() { _ = b.stop() })
	return b
}

func (b *bench) write(path string) {
	b.t.Helper()
	path = filepath.Join(b.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("driver"), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// await prepares again at every change until the answer is as wanted.
func (b *bench) await(grants sharing.Grants, wanted func(plugin.Host) bool) {
	b.t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		got := b.Prepare(grants, gpus())
		if wanted(got) {
			return
		}
		select {
		case <-b.changes:
		case <-deadline:
			b.t.Fatalf("the host stays at %+v", got)
		}
	}
}

func gpus() []sharing.GPU { return []sharing.GPU{{UUID: "GPU-0", Minor: 0}} }

func by(strategies ...sharing.ListStrategy) sharing.Grants {
	return sharing.Grants{Strategies: strategies, DriverHostPath: "/home/kubernetes/bin/nvidia"}
}

func granted(h plugin.Host) bool { return len(h.Obstacles) == 0 }

// TestDriverInstaller is the case "driver installer": the driver arrives piece
// by piece, and is mounted when it is complete.
func TestDriverInstaller(t *testing.T) {
	b := newBench(t, time.Minute)
	grants := by(sharing.DriverMounts)
	const folder = "/home/kubernetes/bin/nvidia"
	lacks := func(what string) {
		t.Helper()
		where := folder + " has"
		if strings.Contains(what, "/dev/") {
			where = "there is"
		}
		want := map[string]string{"GPU-0": "the driver is not installed yet: " + where + " no " + what}
		b.await(grants, func(h plugin.Host) bool { return cmp.Equal(want, h.Obstacles) })
	}
	lacks("libcuda.so.1 and no libnvidia-ml.so.1")
	b.write(folder + "/lib64/libnvidia-ml.so.1")
	lacks("libcuda.so.1")
	// A link that leads nowhere yet, and an empty file, are no library.
	library := filepath.Join(b.root, folder, "lib64/libcuda.so.1")
	if err := os.Symlink("libcuda.so.580.95.05", library); err != nil {
		t.Fatal(err)
	}
	lacks("libcuda.so.1")
	if err := os.WriteFile(filepath.Join(b.root, folder, "lib64/libcuda.so.580.95.05"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	lacks("libcuda.so.1")
	b.write(folder + "/lib64/libcuda.so.580.95.05")
	// Libraries do not make a node: that is the work of the kernel's modules.
	lacks("/driver/dev/nvidiactl and no /driver/dev/nvidia-uvm")
	b.write("/driver/dev/nvidiactl")
	lacks("/driver/dev/nvidia-uvm")
	// A node that is elsewhere is not where grants have it.
	b.write("/dev/nvidia-uvm")
	lacks("/driver/dev/nvidia-uvm")
	b.write("/driver/dev/nvidia-uvm")
	b.await(grants, func(h plugin.Host) bool {
		return cmp.Equal(map[string]string{"GPU-0": "there is no /driver/dev/nvidia0"}, h.Obstacles)
	})
	b.write("/driver/dev/nvidia0")
	b.await(grants, granted)
	// Uninstalled.
	if err := os.RemoveAll(filepath.Join(b.root, folder)); err != nil {
		t.Fatal(err)
	}
	lacks("libcuda.so.1 and no libnvidia-ml.so.1")
}

func TestDefaults(t *testing.T) {
	h := New(Options{Logger: slog.New(slog.DiscardHandler)})
	if h.options.Interval != time.Second || h.options.Patience != 2*time.Second {
		t.Errorf("looks every %s and waits %s", h.options.Interval, h.options.Patience)
	}
}

// TestMinorsCannotBeRead holds that partitions are withheld, and why, when the
// driver's table is not there or is another one than is known.
func TestMinorsCannotBeRead(t *testing.T) {
	b := newBench(t, time.Minute)
	grants := by(sharing.Envvar)
	grants.DeviceNodes = true
	cut := []sharing.GPU{{UUID: "GPU-0", MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-0", GI: 1}}}}
	reads := func(want string) {
		t.Helper()
		if got := b.Prepare(grants, cut).Obstacles["MIG-0"]; !strings.Contains(got, want) {
			t.Errorf("obstacle is %q", got)
		}
	}
	reads("there is no " + minorsPath)
	b.write(minorsPath)
	reads(`"driver" is no capability`)
}

func TestControlNodesAppear(t *testing.T) {
	b := newBench(t, time.Minute)
	grants := by(sharing.Envvar)
	b.write("/driver/dev/nvidiactl")
	b.await(grants, func(h plugin.Host) bool { return cmp.Equal([]string{"/dev/nvidiactl"}, h.ControlNodes) })
	// Where the driver's dev cannot be seen, our own must do.
	b.write("/dev/nvidia-uvm")
	b.await(grants, func(h plugin.Host) bool {
		return cmp.Equal([]string{"/dev/nvidiactl", "/dev/nvidia-uvm"}, h.ControlNodes)
	})
}

func TestEntriesAreWaitedFor(t *testing.T) {
	b := newBench(t, time.Minute)
	b.specs.set(func() {
		b.specs.names = []string{plugin.CDIName("gpu", "GPU-0"), plugin.CDIName("gpu", "0"), plugin.CDIName("mofed", "all")}
	})
	grants := by(sharing.CDICRI)
	grants.GDS, grants.MOFED = true, true
	got := b.Prepare(grants, gpus())
	if !granted(got) || !cmp.Equal([]string{plugin.CDIName("mofed", "all")}, got.Extras) {
		t.Errorf("obstacles %v, extras %v", got.Obstacles, got.Extras)
	}
	b.specs.set(func() {
		if !cmp.Equal([]string{"gds", "mofed"}, b.specs.extras) {
			t.Errorf("ordered were %v", b.specs.extras)
		}
	})
}

func TestMissingEntryIsAnObstacle(t *testing.T) {
	b := newBench(t, time.Minute)
	b.specs.set(func() { b.specs.err = errors.New("driver is out") })
	if got := b.Prepare(by(sharing.CDICRI), gpus()).Obstacles["GPU-0"]; got != "it has no CDI entry: driver is out" {
		t.Errorf("obstacle is %q", got)
	}
	if got := b.Prepare(by(sharing.Envvar), gpus()); !granted(got) {
		t.Errorf("without CDI it is %v", got.Obstacles)
	}
	b.specs.set(func() {
		b.specs.err, b.specs.names = nil, []string{plugin.CDIName("gpu", "GPU-0"), plugin.CDIName("gpu", "0")}
	})
	b.await(by(sharing.CDICRI), granted)
}

// TestSlowDriverHoldsNobodyUp holds that specs that take long delay one plan and
// no more, and that the units are granted when they are there.
func TestSlowDriverHoldsNobodyUp(t *testing.T) {
	b := newBench(t, 10*time.Millisecond)
	block := make(chan struct{})
	b.specs.set(func() {
		b.specs.block = block
		b.specs.names = []string{plugin.CDIName("gpu", "GPU-0"), plugin.CDIName("gpu", "0")}
	})
	if got := b.Prepare(by(sharing.CDICRI), gpus()).Obstacles["GPU-0"]; !strings.Contains(got, "none is written yet") {
		t.Errorf("obstacle is %q", got)
	}
	// The next one does not wait: a wait would meet this patience.
	b.options.Patience = time.Hour
	if got := b.Prepare(by(sharing.CDICRI), gpus()); granted(got) {
		t.Error("granted without an entry")
	}
	b.specs.set(func() { b.specs.block = nil })
	close(block)
	b.await(by(sharing.CDICRI), granted)
}

func TestStuckDriverIsLeftBehind(t *testing.T) {
	b := newBench(t, time.Millisecond)
	block := make(chan struct{})
	defer close(block)
	b.specs.set(func() { b.specs.block = block })
	b.Prepare(by(sharing.CDICRI), gpus())
	if err := b.stop(); err == nil || !strings.Contains(err.Error(), "CDI specs") {
		t.Errorf("error is %v", err)
	}
}

func TestNoSpecs(t *testing.T) {
	b := newBench(t, time.Minute)
	b.options.Specs = nil
	if got := b.Prepare(by(sharing.CDICRI), gpus()).Obstacles["GPU-0"]; !strings.Contains(got, "cannot make CDI specs") {
		t.Errorf("obstacle is %q", got)
	}
	if err := b.stop(); err != nil {
		t.Error(err)
	}
}
