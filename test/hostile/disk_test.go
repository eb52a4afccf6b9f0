package hostile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// disk mounts a file system of 128 KiB, or skips the test where it may not.
func disk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=128k"); err != nil {
		t.Skipf("a small file system cannot be mounted here: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// fill leaves no room.
func fill(t *testing.T, dir string) {
	t.Helper()
	file, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	block := bytes.Repeat([]byte{1}, 4096)
	for err == nil {
		_, err = file.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}

func remount(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT|flags, ""); err != nil {
		t.Fatal(err)
	}
}

// TestDiskThatTakesNothing holds that the node is served, and says what it lacks,
// while the disk with the state file and the CDI specs takes nothing, and that all
// is as it should be when it does again.
func TestDiskThatTakesNothing(t *testing.T) {
	const byCDI = "flags: {plugin: {deviceListStrategy: cdi-annotations}}\n"
	for _, test := range []struct {
		name      string
		spoil     func(t *testing.T, dir string)
		mend      func(t *testing.T, dir string)
		complaint string
	}{
		{"full", fill, func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
				t.Fatal(err)
			}
		}, "no space left on device"},
		{"read-only", func(t *testing.T, dir string) { remount(t, dir, syscall.MS_RDONLY) },
			func(t *testing.T, dir string) { remount(t, dir, 0) }, "read-only file system"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := disk(t)
			p := start(t, options{stateDir: dir, cdiDir: filepath.Join(dir, "cdi"), profile: byCDI + replicas(2)})
			p.shows(gpu, 4)
			p.says("/metrics", "virgate_state_last_write_successful 1\n")

			test.spoil(t, dir)
			p.write(byCDI + replicas(3))
			p.shows(gpu, 6)
			p.says("/metrics", "virgate_state_last_write_successful 0\n")
			p.says("/api/v1/status", test.complaint)
			// Of a board that comes now no runtime finds the entry; the others serve.
			if _, err := p.node.Add("h100"); err != nil {
				t.Fatal(err)
			}
			p.says("/api/v1/status", "cannot be granted now: 1: it has no CDI entry: write the CDI spec")
			p.shows(gpu, 6)
			if n := strings.Count(p.log.String(), "lists not kept for a restart, serving goes on"); n != 1 {
				t.Errorf("the log says it %d times:\n%s", n, p.log)
			}

			test.mend(t, dir)
			p.shows(gpu, 9)
			p.says("/metrics", "virgate_state_last_write_successful 1\n")
			left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
			if more, _ := filepath.Glob(filepath.Join(dir, "cdi", ".*")); err != nil || len(left)+len(more) > 0 {
				t.Errorf("left behind: %q %q %v", left, more, err)
			}
		})
	}
}
