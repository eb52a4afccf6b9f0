package driver

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// mount mounts for the time of the test.
func mount(t *testing.T, source, target, kind string, flags uintptr) {
	t.Helper()
	must(t, os.MkdirAll(target, 0o755))
	err := syscall.Mount(source, target, kind, flags, "")
	if errors.Is(err, syscall.EPERM) {
		t.Skip("to mount requires root with SYS_ADMIN")
	}
	must(t, err)
	t.Cleanup(func() { _ = syscall.Unmount(target, syscall.MNT_DETACH) })
}

// addLibrary puts a driver's library into the root. It is not loaded here.
func addLibrary(t *testing.T, root, version string) {
	t.Helper()
	folder := filepath.Join(root, "usr/lib64")
	must(t, os.MkdirAll(folder, 0o755))
	must(t, os.WriteFile(filepath.Join(folder, "libnvidia-ml.so."+version), nil, 0o600))
	must(t, os.Symlink("libnvidia-ml.so."+version, filepath.Join(folder, libraryName)))
}

// operatorsRoots are the host's folder in which the GPU Operator's driver container mounts its root, and the
// chart's container's view of it: the root mounted at its start, and the folder.
func operatorsRoots(t *testing.T) (host, root, folder string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("to mount requires root")
	}
	at := t.TempDir()
	host, root, folder = filepath.Join(at, "run/nvidia"), filepath.Join(at, "container/driver-root"), filepath.Join(at, "container/driver-root-parent")
	mount(t, "tmpfs", host, "tmpfs", 0)
	must(t, syscall.Mount("", host, "", syscall.MS_SHARED, "")) // As systemd has all mounts.
	must(t, os.MkdirAll(filepath.Join(host, "driver"), 0o755))
	return host, root, folder
}

// startContainer binds them as a container runtime does for mountPropagation HostToContainer.
func startContainer(t *testing.T, host, root, folder string) {
	t.Helper()
	for from, to := range map[string]string{filepath.Join(host, "driver"): root, host: folder} {
		mount(t, from, to, "", syscall.MS_BIND|syscall.MS_REC)
		must(t, syscall.Mount("", to, "", syscall.MS_SLAVE|syscall.MS_REC, ""))
	}
}

// TestRootReplaced simulates an upgrade: the driver's container unmounts its root lazily, and the next one mounts
// another. A container that has bound the root keeps the old one.
func TestRootReplaced(t *testing.T) {
	host, root, folder := operatorsRoots(t)
	driver := filepath.Join(host, "driver")
	watch := func(n string) RootWatch {
		return RootWatch{Mounted: root + n, Host: filepath.Join(folder+n, "driver"), Interval: time.Millisecond}
	}
	start := func(n string) { startContainer(t, host, root+n, folder+n) }
	expect := func(when string, w RootWatch, want rootState) {
		t.Helper()
		if got, err := w.look(); got != want || err != nil {
			t.Errorf("%s: %v, %v; want %v", when, got, err, want)
		}
	}
	start("0")
	expect("before there is a driver", watch("0"), rootMounted)
	mount(t, "tmpfs", driver, "tmpfs", 0)
	addLibrary(t, driver, "570.1")
	expect("a driver that came after the container, whose mount the folder gets", watch("0"), rootMounted)
	start("1")
	expect("started with the driver", watch("1"), rootMounted)

	must(t, syscall.Unmount(driver, syscall.MNT_DETACH))
	expect("unmounted", watch("1"), rootGone)
	if _, err := os.Stat(filepath.Join(root+"1", "usr/lib64", libraryName)); err != nil {
		t.Fatalf("the container does not keep the old root: %v", err)
	}
	mount(t, "tmpfs", driver, "tmpfs", 0)
	expect("nothing is installed yet", watch("1"), rootGone)
	addLibrary(t, driver, "580.1")
	expect("another driver", watch("1"), rootReplaced)
	if err := watch("1").Run(t.Context()); err == nil || !strings.Contains(err.Error(), "another driver is mounted") {
		t.Errorf("Run: %v", err)
	}
	start("2")
	expect("the container that comes next", watch("2"), rootMounted)
	must(t, os.Remove(filepath.Join(driver, "usr/lib64", libraryName)))
	addLibrary(t, driver, "590.1")
	expect("installed in place, as on GKE", watch("2"), rootMounted)
}

// TestRootGone checks that a missing driver of the host is logged once, and so is its return.
func TestRootGone(t *testing.T) {
	at, log := t.TempDir(), make(chan string, 10)
	must(t, os.Mkdir(filepath.Join(at, "driver"), 0o755))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	watch := RootWatch{
		Mounted: filepath.Join(at, "driver"), Host: filepath.Join(at, "host"), Interval: time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(lines(log), nil)),
	}
	go func() { ended <- watch.Run(ctx) }()
	if line := <-log; !strings.Contains(line, "WARN") || !strings.Contains(line, "no longer mounted") {
		t.Errorf("logged %s", line)
	}
	must(t, os.Symlink("driver", filepath.Join(at, "host")))
	if line := <-log; !strings.Contains(line, "INFO") || !strings.Contains(line, "is mounted again") {
		t.Errorf("logged %s", line)
	}
	stop()
	if err := <-ended; err != nil || len(log) > 0 {
		t.Errorf("at the end: %v, %d more lines", err, len(log))
	}
}

// lines has each line of a log.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

// TestNothingToCompare checks that a watch that could never see a change is refused.
func TestNothingToCompare(t *testing.T) {
	at := t.TempDir()
	for _, test := range []struct{ mounted, host, want string }{
		{filepath.Join(at, "none"), at, "none: no such file or directory"},
		{at, "driver", `"driver" is no absolute path`},
		{at, at, "is the driver root itself"},
	} {
		err := RootWatch{Mounted: test.mounted, Host: test.host}.Check()
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("Check of %q and %q: %v, want %s", test.mounted, test.host, err, test.want)
		}
	}
	if err := (RootWatch{Mounted: at, Host: filepath.Join(at, "later")}).Check(); err != nil {
		t.Error(err)
	}
}
