package cdi

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
)

// TestDriverIsMissing needs no driver; with one, the board is unknown to it.
func TestDriverIsMissing(t *testing.T) {
	root := t.TempDir()
	driver := NewDriver(DriverOptions{
		Root: root, DevRoot: root, HostRoot: "/", HostDevRoot: "/", HookPath: "/usr/bin/nvidia-cdi-hook",
		Logger: slog.New(slog.DiscardHandler),
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
		if spec, err := driver.Extra(class); spec == nil && err == nil {
			t.Errorf("%s: neither a spec nor an error", class)
		}
	}
}
