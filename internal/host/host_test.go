package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

// specs is a Specs that returns the names and error set by the test.
type specs struct {
	mu    sync.Mutex
	names []string
	err   error
	// extras are the extras of the last write, writes the number of writes.
	extras []string
	writes int
	// Write returns only when block is closed, unless it is nil; before that it sends
	// to waiting if there is room.
	block   chan struct{}
	waiting chan struct{}
}

func (s *specs) Write(_ context.Context, _ []sharing.GPU, extras []string) ([]string, error) {
	s.mu.Lock()
	block, waiting := s.block, s.waiting
	s.mu.Unlock()
	if block != nil {
		select {
		case waiting <- struct{}{}:
		default:
		}
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

// bench is a Host that runs, with its file system.
type bench struct {
	*Host
	t       *testing.T
	root    string
	specs   *specs
	maker   *maker
	log     *bytes.Buffer
	changes chan struct{}
	// stop ends Watch and returns its error.
	stop func() error
}

func newBench(t *testing.T, patience time.Duration) *bench {
	return newBenchWith(t, patience, time.Millisecond, nil)
}

// newBenchWith is newBench with another interval, and with a maker of nodes.
func newBenchWith(t *testing.T, patience, interval time.Duration, m *maker) *bench {
	b := &bench{t: t, root: t.TempDir(), specs: &specs{}, maker: m, log: &bytes.Buffer{}, changes: make(chan struct{}, 1)}
	options := Options{
		Root: b.root, DevRoot: "/driver", Specs: b.specs, Capabilities: migcaps.NewReader(b.root),
		Interval: interval, PrepareTimeout: patience, Logger: slog.New(slog.NewTextHandler(b.log, nil)),
	}
	if m != nil {
		m.dev, options.Maker = filepath.Join(b.root, "driver"), m
	}
	b.Host = New(options)
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
	b.writeText(path, "driver")
}

func (b *bench) writeText(path, text string) {
	b.t.Helper()
	path = filepath.Join(b.root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		b.t.Fatal(err)
	}
}

// capabilities sets the driver's files for the partition of partitioned, with this minor number and the next.
func (b *bench) capabilities(minor int) {
	b.t.Helper()
	const gi = migcaps.Folder + "/gpu0/mig/gi1/"
	b.writeText("/proc/devices", "195 nvidia\n236 nvidia-caps\n")
	for i, file := range []string{"access", "ci0/access"} {
		b.writeText(gi+file, fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\n", minor+i))
	}
}

// partitioned is a GPU with one partition.
func partitioned() []sharing.GPU {
	return []sharing.GPU{{UUID: "GPU-0", MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-0", GI: 1}}}}
}

// maker makes the node of each file that it is asked for, unless it fails.
type maker struct {
	mu    sync.Mutex
	dev   string
	err   error
	lazy  bool
	asked [][]string
}

func (m *maker) MakeNodes(_ context.Context, files []string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked = append(m.asked, files)
	if m.err != nil || m.lazy {
		return m.err
	}
	for i := range files {
		path := filepath.Join(m.dev, "dev/nvidia-caps", fmt.Sprintf("nvidia-cap%d", 12+i))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
			return err
		}
	}
	return nil
}

func (m *maker) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

// await calls Prepare after each change until the result is as wanted.
func (b *bench) await(grants sharing.Grants, wanted func(grant.Host) bool) {
	b.t.Helper()
	late, cancel := context.WithTimeout(b.t.Context(), await.Patience)
	defer cancel()
	for {
		got := b.Prepare(grants, gpus())
		if wanted(got) {
			return
		}
		select {
		case <-b.changes:
		case <-late.Done():
			b.t.Fatalf("the host stays at %+v", got)
		}
	}
}

func gpus() []sharing.GPU { return []sharing.GPU{{UUID: "GPU-0", Minor: 0}} }

func by(strategies ...sharing.DeviceListStrategy) sharing.Grants {
	return sharing.Grants{Strategies: strategies, DriverHostPath: "/home/kubernetes/bin/nvidia"}
}

func granted(h grant.Host) bool { return len(h.Obstacles) == 0 }

// TestDriverInstaller checks that a driver that is installed piece by piece is mounted
// when it is complete.
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
		b.await(grants, func(h grant.Host) bool { return cmp.Equal(want, h.Obstacles) })
	}
	lacks("libcuda.so.1 and no libnvidia-ml.so.1")
	b.write(folder + "/lib64/libnvidia-ml.so.1")
	lacks("libcuda.so.1")
	// A dangling link and an empty file are no libraries.
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
	// The device nodes come only with the kernel modules.
	lacks("/driver/dev/nvidiactl and no /driver/dev/nvidia-uvm")
	b.write("/driver/dev/nvidiactl")
	lacks("/driver/dev/nvidia-uvm")
	// Grants do not use a node at another path.
	b.write("/dev/nvidia-uvm")
	lacks("/driver/dev/nvidia-uvm")
	b.write("/driver/dev/nvidia-uvm")
	b.await(grants, func(h grant.Host) bool {
		return cmp.Equal(map[string]string{"GPU-0": "there is no /driver/dev/nvidia0"}, h.Obstacles)
	})
	b.write("/driver/dev/nvidia0")
	b.await(grants, granted)
	// The driver is uninstalled.
	if err := os.RemoveAll(filepath.Join(b.root, folder)); err != nil {
		t.Fatal(err)
	}
	lacks("libcuda.so.1 and no libnvidia-ml.so.1")
}

func TestDefaults(t *testing.T) {
	h := New(Options{Logger: slog.New(slog.DiscardHandler)})
	if h.options.Interval != time.Second || h.options.PrepareTimeout != 2*time.Second {
		t.Errorf("looks every %s and waits %s", h.options.Interval, h.options.PrepareTimeout)
	}
}

// TestCapabilitiesCannotBeRead checks that a partition is not offered, with the reason, if its files of the
// driver are missing or malformed. One warning has the file and the value.
func TestCapabilitiesCannotBeRead(t *testing.T) {
	b := newBench(t, time.Minute)
	grants := by(sharing.Envvar)
	grants.DeviceNodes = true
	reads := func(want string) {
		t.Helper()
		if got := b.Prepare(grants, partitioned()).Obstacles["MIG-0"]; !strings.Contains(got, want) {
			t.Errorf("obstacle is %q, want %q", got, want)
		}
	}
	const gi = migcaps.Folder + "/gpu0/mig/gi1/access"
	b.capabilities(12)
	if err := os.Remove(filepath.Join(b.root, gi)); err != nil {
		t.Fatal(err)
	}
	reads("the device nodes of the partition are not known: read " + gi + ": no such file")
	b.writeText(gi, "DeviceFileMinor: 0x12\nDeviceFileMode: 292\n")
	for range 3 {
		reads(gi + `: DeviceFileMinor is "0x12"`)
	}
	b.writeText("/proc/devices", "Character devices:\n")
	reads("/proc/devices: nvidia-caps is not listed")
	if said := b.log.String(); strings.Count(said, "\n") != 1 || !strings.Contains(said, "level=WARN") || !strings.Contains(said, gi) || !strings.Contains(said, "0x12") {
		t.Errorf("logged:\n%s", said)
	}
	// A strategy without nodes does not look for them.
	if got := b.Prepare(by(sharing.Envvar), partitioned()).Obstacles; len(got) > 0 {
		t.Errorf("by %s the obstacles are %v", sharing.Envvar, got)
	}
}

func TestControlNodesAppear(t *testing.T) {
	b := newBench(t, time.Minute)
	grants := by(sharing.Envvar)
	b.write("/driver/dev/nvidiactl")
	b.await(grants, func(h grant.Host) bool { return cmp.Equal([]string{"/dev/nvidiactl"}, h.ControlNodes) })
	// If the driver's dev is not visible, this process's own is used.
	b.write("/dev/nvidia-uvm")
	b.await(grants, func(h grant.Host) bool {
		return cmp.Equal([]string{"/dev/nvidiactl", "/dev/nvidia-uvm"}, h.ControlNodes)
	})
}

func TestEntriesAreWaitedFor(t *testing.T) {
	b := newBench(t, time.Minute)
	b.specs.set(func() {
		b.specs.names = []string{grant.CDIName("gpu", "GPU-0"), grant.CDIName("gpu", "0"), grant.CDIName("mofed", "all")}
	})
	grants := by(sharing.CDICRI)
	grants.GDS, grants.MOFED = true, true
	got := b.Prepare(grants, gpus())
	if !granted(got) || !cmp.Equal([]string{grant.CDIName("mofed", "all")}, got.Extras) {
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
		b.specs.err, b.specs.names = nil, []string{grant.CDIName("gpu", "GPU-0"), grant.CDIName("gpu", "0")}
	})
	b.await(by(sharing.CDICRI), granted)
}

// TestSlowDriverDelaysPrepareOnce checks that slow specs delay only one plan, and that
// the units are granted when the specs are written.
func TestSlowDriverDelaysPrepareOnce(t *testing.T) {
	b := newBench(t, 10*time.Millisecond)
	block := make(chan struct{})
	b.specs.set(func() {
		b.specs.block = block
		b.specs.names = []string{grant.CDIName("gpu", "GPU-0"), grant.CDIName("gpu", "0")}
	})
	if got := b.Prepare(by(sharing.CDICRI), gpus()).Obstacles["GPU-0"]; !strings.Contains(got, "none is written yet") {
		t.Errorf("obstacle is %q", got)
	}
	// The next one does not wait: if it did, it would take this long.
	b.options.PrepareTimeout = time.Hour
	if got := b.Prepare(by(sharing.CDICRI), gpus()); granted(got) {
		t.Error("granted without an entry")
	}
	b.specs.set(func() { b.specs.block = nil })
	close(block)
	b.await(by(sharing.CDICRI), granted)
}

func TestHungDriverIsAbandoned(t *testing.T) {
	b := newBench(t, time.Millisecond)
	block := make(chan struct{})
	defer close(block)
	waiting := make(chan struct{}, 1)
	b.specs.set(func() { b.specs.block, b.specs.waiting = block, waiting })
	b.Prepare(by(sharing.CDICRI), gpus())
	<-waiting
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

// watched is a Host with the default times in a synctest bubble.
type watched struct {
	*Host
	specs   *specs
	log     *bytes.Buffer
	changes atomic.Int64
}

// inBubble runs the test with a Host whose Watch runs.
func inBubble(t *testing.T, test func(t *testing.T, w *watched)) {
	synctest.Test(t, func(t *testing.T) {
		w := &watched{specs: &specs{}, log: &bytes.Buffer{}}
		w.Host = New(Options{Root: t.TempDir(), Specs: w.specs, Logger: slog.New(slog.NewTextHandler(w.log, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- w.Watch(ctx, func() { w.changes.Add(1) }) }()
		test(t, w)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// pass lets time pass in a bubble.
func pass(d time.Duration) {
	<-time.After(d) //nolint:forbidigo // in a synctest bubble: the time is simulated
}

// changed counts the changes that Watch has reported.
func (w *watched) changed() int64 {
	synctest.Wait()
	return w.changes.Load()
}

func both() []string { return []string{grant.CDIName("gpu", "GPU-0"), grant.CDIName("gpu", "0")} }

// TestUnchangedIsNotReported checks that Watch reports no change without one.
func TestUnchangedIsNotReported(t *testing.T) {
	inBubble(t, func(t *testing.T, w *watched) {
		pass(time.Minute)
		if w.changed() != 0 {
			t.Error("changed before anything was asked for")
		}
		w.Prepare(by(sharing.Envvar), gpus())
		pass(time.Minute)
		if w.changed() != 0 || w.specs.writes != 0 {
			t.Errorf("%d changes, %d specs written without CDI", w.changed(), w.specs.writes)
		}
		w.specs.set(func() { w.specs.names = both() })
		w.Prepare(by(sharing.CDICRI), gpus())
		pass(time.Minute)
		if w.changed() != 0 || w.specs.writes < 50 {
			t.Errorf("%d changes, %d looks at the specs in a minute", w.changed(), w.specs.writes)
		}
		w.specs.set(func() { w.specs.names = nil })
		pass(1100 * time.Millisecond)
		if w.changed() == 0 {
			t.Error("entries that are gone change nothing")
		}
	})
}

// TestLateSpecs checks that late specs are reported when they are written, and that
// Prepare waits for the next ones again.
func TestLateSpecs(t *testing.T) {
	inBubble(t, func(t *testing.T, w *watched) {
		block := make(chan struct{})
		w.specs.set(func() { w.specs.block, w.specs.names = block, both() })
		start := time.Now()
		w.Prepare(by(sharing.CDICRI), gpus())
		waited := time.Since(start) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if waited != 2*time.Second {
			t.Errorf("waited %s", waited)
		}
		pass(100 * time.Millisecond)
		w.specs.set(func() { w.specs.block = nil })
		close(block)
		if w.changed() == 0 {
			t.Error("not told when the specs are there")
		}

		block = make(chan struct{})
		w.specs.set(func() { w.specs.block = block })
		start = time.Now()
		w.Prepare(by(sharing.CDICRI), gpus())
		waited = time.Since(start) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if waited != 2*time.Second {
			t.Errorf("waited %s the next time", waited)
		}
		close(block)
	})
}

// TestPrepareReturnsWhenWatchEnds checks that the end of the program, which waits for
// Prepare, does not wait for specs that will not be written.
func TestPrepareReturnsWhenWatchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		block := make(chan struct{})
		h := New(Options{Root: t.TempDir(), Specs: &specs{block: block}, Logger: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- h.Watch(ctx, func() {}) }()
		start := time.Now()
		go func() {
			pass(100 * time.Millisecond)
			cancel()
		}()
		h.Prepare(by(sharing.CDICRI), gpus())
		waited := time.Since(start) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if waited != 100*time.Millisecond {
			t.Errorf("waited %s, and the end came after 100ms", waited)
		}
		close(block)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		start = time.Now()
		h.Prepare(by(sharing.CDICRI), gpus())
		waited = time.Since(start) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if waited != 0 {
			t.Errorf("waited %s after the end", waited)
		}
	})
}

// TestProblemIsLoggedOnce checks that a lasting problem is logged once.
func TestProblemIsLoggedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *watched) {
		problem := func(err error) {
			w.specs.set(func() { w.specs.err = err })
			w.Prepare(by(sharing.CDICRI), gpus())
			pass(10 * time.Second)
			synctest.Wait()
		}
		problem(errors.New("driver is out"))
		problem(errors.New("disk is full"))
		problem(nil)
		if got := w.log.String(); strings.Count(got, "\n") != 2 || strings.Count(got, "cdi specs incomplete") != 2 {
			t.Errorf("logged:\n%s", got)
		}
	})
}

// made are the device nodes of the host.
func made(paths ...string) map[string]bool {
	nodes := map[string]bool{}
	for _, path := range paths {
		nodes[path] = true
	}
	return nodes
}

// TestNodesAreMade checks that a partition's missing nodes are made with the first plan and when they are gone,
// and that a failure to do so is the obstacle.
func TestNodesAreMade(t *testing.T) {
	m := &maker{}
	b := newBenchWith(t, time.Minute, time.Millisecond, m)
	b.write("/driver/dev/nvidiactl")
	b.write("/driver/dev/nvidia0")
	b.capabilities(12)
	grants := by(sharing.Envvar)
	grants.DeviceNodes = true
	if got := b.Prepare(grants, partitioned()); !granted(got) {
		t.Errorf("the obstacles are %v", got.Obstacles)
	}
	const gi = migcaps.Folder + "/gpu0/mig/gi1/"
	gone := func() {
		t.Helper()
		if err := os.RemoveAll(filepath.Join(b.root, "driver/dev/nvidia-caps")); err != nil {
			t.Fatal(err)
		}
	}
	// Nothing is made if only CDI entries are used, which have the numbers.
	b.specs.set(func() { b.specs.names = []string{grant.CDIName("gpu", "MIG-0"), grant.CDIName("gpu", "0:0")} })
	if got := b.Prepare(by(sharing.CDICRI), partitioned()); !granted(got) {
		t.Errorf("by CDI the obstacles are %v", got.Obstacles)
	}
	gone()
	for range 3 {
		b.Prepare(by(sharing.CDICRI), partitioned())
	}
	m.set(func() {
		if diff := cmp.Diff([][]string{{gi + "access", gi + "ci0/access"}}, m.asked); diff != "" {
			t.Errorf("asked for (-want +got):\n%s", diff)
		}
		m.err = errors.New("no nvidia-modprobe in /driver-root/usr/bin")
	})
	gone()
	const lacks = "there is no /driver/dev/nvidia-caps/nvidia-cap12: "
	if got := b.Prepare(grants, partitioned()).Obstacles["MIG-0"]; got != lacks+"no nvidia-modprobe in /driver-root/usr/bin" {
		t.Errorf("the obstacle is %q", got)
	}
}

// TestNodesAreMadeAgain checks that a program that makes no node is run again, but not at once.
func TestNodesAreMadeAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &maker{lazy: true}
		b := newBenchWith(t, time.Second, time.Second, m)
		b.write("/driver/dev/nvidiactl")
		b.write("/driver/dev/nvidia0")
		b.capabilities(12)
		grants := by(sharing.Envvar)
		grants.DeviceNodes = true
		want := "there is no /driver/dev/nvidia-caps/nvidia-cap12: NVIDIA's program has not made it"
		if got := b.Prepare(grants, partitioned()).Obstacles["MIG-0"]; got != want {
			t.Errorf("the obstacle is %q, want %q", got, want)
		}
		pass(25 * time.Second)
		m.set(func() {
			if len(m.asked) != 3 {
				t.Errorf("asked %d times in 25 s", len(m.asked))
			}
			m.lazy = false
		})
		pass(10 * time.Second)
		if got := b.Prepare(grants, partitioned()); !granted(got) {
			t.Errorf("the obstacles are %v", got.Obstacles)
		}
		if err := b.stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestIMEX checks that a channel is granted as soon as the node has it, as the strategy needs it, and that if the
// profile requires it, nothing is granted before.
func TestIMEX(t *testing.T) {
	const missing = "there is no device /driver/dev/nvidia-caps-imex-channels/channel0"
	entry := grant.CDIName("imex-channel", "0")
	for _, test := range []struct {
		name     string
		strategy sharing.DeviceListStrategy
		required bool
	}{
		{"envvar", sharing.Envvar, false}, {"envvar, required", sharing.Envvar, true},
		{"CDI", sharing.CDICRI, false}, {"CDI, required", sharing.CDICRI, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, time.Minute)
			cdi := test.strategy == sharing.CDICRI
			b.specs.set(func() { b.specs.names = []string{grant.CDIName("gpu", "GPU-0"), grant.CDIName("gpu", "0")} })
			grants := by(test.strategy)
			grants.IMEXChannels, grants.IMEXRequired = []string{"0"}, test.required
			lacks := func(why string) {
				t.Helper()
				b.await(grants, func(h grant.Host) bool {
					obstacle := ""
					if test.required {
						obstacle = why + ", which imex.required asks for"
					}
					return len(h.IMEXChannels) == 0 && h.IMEXLacks == why && h.Obstacles["GPU-0"] == obstacle
				})
			}
			lacks(missing)
			b.write("/driver" + grant.IMEXNode("0"))
			lacks(missing) // It is a file.
			path := filepath.Join(b.root, "/driver", grant.IMEXNode("0"))
			if err := errors.Join(os.Remove(path), os.Symlink("/dev/null", path)); err != nil {
				t.Fatal(err)
			}
			if cdi {
				lacks("IMEX channel 0 has no CDI entry: none is written yet")
				b.specs.set(func() { b.specs.names = append(b.specs.names, entry) })
			}
			b.await(grants, func(h grant.Host) bool {
				return cmp.Equal(h.IMEXChannels, []string{"0"}) && h.IMEXLacks == "" && granted(h)
			})
			if b.specs.set(func() {
				if asked := cmp.Equal(b.specs.extras, []string{"imex-channel"}); asked != cdi {
					t.Errorf("CDI classes %v", b.specs.extras)
				}
			}); os.Remove(path) != nil {
				t.Fatal("it cannot be removed")
			}
			lacks(missing)
			grants.IMEXChannels = nil
			b.await(grants, func(h grant.Host) bool { return h.IMEXChannels == nil && granted(h) })
		})
	}
}

func TestAssemble(t *testing.T) {
	cut := sharing.GPU{UUID: "GPU-1", Index: 1, Minor: 4, MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-a", GI: 2, CI: 1}}}
	hidden := cut
	hidden.Minor = -1
	const gi = "/dev/nvidia-caps/nvidia-cap30"
	table := files{capabilities: map[string][]migcaps.Node{"MIG-a": {{Path: gi}, {Path: "/dev/nvidia-caps/nvidia-cap32"}}}}
	const noNode = "the driver does not tell its device node"
	const unknown = "the device nodes of the partition are not known: no file"
	tests := []struct {
		name      string
		grants    sharing.Grants
		gpu       sharing.GPU
		files     files
		entries   entries
		nodes     map[string][]string
		obstacles map[string]string
	}{
		{"a GPU", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: 7}, files{}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, nil},
		{"a GPU without node", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: -1}, files{}, entries{},
			map[string][]string{"GPU-0": nil}, map[string]string{"GPU-0": noNode}},
		{"that needs none", sharing.Grants{}, sharing.GPU{UUID: "GPU-0", Minor: -1}, files{}, entries{},
			map[string][]string{"GPU-0": nil}, nil},
		{"a partition", sharing.Grants{DeviceNodes: true}, cut, table, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": {"/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap32"}}, nil},
		{"a partition of a GPU without node", by(sharing.DriverMounts), hidden, table, entries{},
			map[string][]string{"GPU-1": nil, "MIG-a": nil}, map[string]string{"MIG-a": noNode}},
		{"a partition of which the driver tells nothing", by(sharing.DriverMounts), cut, files{unknown: map[string]error{"MIG-a": errors.New("no file")}}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": nil}, map[string]string{"MIG-a": unknown}},
		{"no driver", by(sharing.DriverMounts), cut, files{capabilities: table.capabilities, noDriver: "no driver"}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": {"/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap32"}},
			map[string]string{"MIG-a": "no driver"}},
		{"a GPU whose node is not made", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: 7}, files{nodes: made("/dev/nvidia1")}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, map[string]string{"GPU-0": "there is no /driver/dev/nvidia7"}},
		{"one whose node is made", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: 7}, files{nodes: made("/dev/nvidia7")}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, nil},
		{"a GPU that needs no node", by(sharing.Envvar), sharing.GPU{UUID: "GPU-0", Minor: 7}, files{nodes: made()}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, nil},
		{"a partition whose capability is not made", by(sharing.DriverMounts), cut,
			files{capabilities: table.capabilities, nodes: made("/dev/nvidia4", gi)}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": {"/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap32"}},
			map[string]string{"MIG-a": "there is no /driver/dev/nvidia-caps/nvidia-cap32: nobody has made it"}},
		{"an entry by UUID only", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0"}, files{}, entries{names: map[string]bool{grant.CDIName("gpu", "GPU-0"): true}},
			map[string][]string{"GPU-0": {"/dev/nvidia0"}}, map[string]string{"GPU-0": "it has no CDI entry: none is written yet"}},
		{"an entry by index only", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0"}, files{}, entries{names: map[string]bool{grant.CDIName("gpu", "0"): true}, problem: "driver is out"},
			map[string][]string{"GPU-0": {"/dev/nvidia0"}}, map[string]string{"GPU-0": "it has no CDI entry: driver is out"}},
		{"both entries", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0"}, files{}, entries{names: map[string]bool{grant.CDIName("gpu", "GPU-0"): true, grant.CDIName("gpu", "0"): true}},
			map[string][]string{"GPU-0": {"/dev/nvidia0"}}, nil},
		{"entries with the node that the GPU had before", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0", Minor: 2}, files{},
			entries{names: map[string]bool{grant.CDIName("gpu", "GPU-0"): true, grant.CDIName("gpu", "0"): true}, minors: map[string]int{"GPU-0": 0}},
			map[string][]string{"GPU-0": {"/dev/nvidia2"}}, map[string]string{"GPU-0": "it has no CDI entry: none is written yet"}},
		{"entries with its node", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0", Minor: 2}, files{},
			entries{names: map[string]bool{grant.CDIName("gpu", "GPU-0"): true, grant.CDIName("gpu", "0"): true}, minors: map[string]int{"GPU-0": 2}},
			map[string][]string{"GPU-0": {"/dev/nvidia2"}}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := assemble(test.grants, "/driver", []sharing.GPU{test.gpu}, test.files, test.entries, "nobody has made it")
			if got.DevRoot != "/driver" {
				t.Errorf("the nodes are below %q", got.DevRoot)
			}
			if diff := cmp.Diff(test.nodes, got.Nodes); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
			if len(got.Obstacles) > 0 || len(test.obstacles) > 0 {
				if diff := cmp.Diff(test.obstacles, got.Obstacles); diff != "" {
					t.Errorf("obstacles (-want +got):\n%s", diff)
				}
			}
		})
	}
}
