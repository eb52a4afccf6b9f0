package cdi

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestDriverIsMissing needs no driver; with one, the board is unknown to it.
func TestDriverIsMissing(t *testing.T) {
	root := t.TempDir()
	driver := NewDriver(DriverOptions{
		Find: func() Roots { return Roots{root, root} }, Host: Roots{"/", "/"},
		HookPath: "/usr/bin/nvidia-cdi-hook", Logger: slog.New(slog.DiscardHandler),
	})
	spec, err := driver.Units(boards(1))
	if spec != nil || err == nil {
		t.Fatalf("spec %v, error %v", spec, err)
	}
	if !errors.Is(err, ErrNoDriver) && (!strings.Contains(err.Error(), "GPU-0") || !strings.Contains(err.Error(), root)) {
		t.Errorf("the error does not say what is missing where: %v", err)
	}
	if spec, err := driver.Units(nil); spec != nil || err != nil && !errors.Is(err, ErrNoDriver) {
		t.Errorf("of no boards: spec %v, error %v", spec, err)
	}
	for _, class := range []string{"gds", "mofed", "gdrcopy"} {
		spec, err := driver.Extra(class)
		if spec != nil || err == nil || !errors.Is(err, ErrNoDriver) && !strings.Contains(err.Error(), class+": this node has nothing of it") {
			t.Errorf("%s: spec %v, error %v", class, spec, err)
		}
	}
}

// TestInstalled holds that each step of an installer shows, and nothing else.
func TestInstalled(t *testing.T) {
	for _, folder := range []string{
		"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
	} {
		root := t.TempDir()
		if got := installed(root); got != "" {
			t.Errorf("nothing is %q", got)
		}
		libraries := filepath.Join(root, folder)
		past := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		step := func(change error) string {
			t.Helper()
			// Some file systems count time in steps that a test is faster than.
			past = past.Add(time.Second)
			if err := errors.Join(change, os.Chtimes(libraries, time.Time{}, past)); err != nil {
				t.Fatal(err)
			}
			got := installed(root)
			if again := installed(root); again != got {
				t.Errorf("%s: %q and %q", folder, got, again)
			}
			return got
		}
		steps := []string{
			step(os.MkdirAll(libraries, 0o755)),
			step(os.Symlink("libnvidia-ml.so.580.95.05", filepath.Join(libraries, "libnvidia-ml.so.1"))),
			step(os.WriteFile(filepath.Join(libraries, "libcuda.so.580.95.05"), nil, 0o644)),
			step(os.Remove(filepath.Join(libraries, "libnvidia-ml.so.1"))),
		}
		if steps[0] != "" || steps[1] == "" || steps[2] == "" || steps[1] == steps[2] || steps[3] != "" {
			t.Errorf("%s: %q", folder, steps)
		}
	}
}
