package host

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

// TestDriverFolders holds that a driver is found wherever installers put it.
func TestDriverFolders(t *testing.T) {
	for _, folder := range []string{"lib64", "lib", ""} {
		root := t.TempDir()
		h := New(Options{Root: root, Logger: slog.New(slog.DiscardHandler)})
		dev := filepath.Join(root, "dev")
		if err := errors.Join(os.Mkdir(dev, 0o755), os.WriteFile(filepath.Join(dev, "nvidiactl"), nil, 0o644), os.WriteFile(filepath.Join(dev, "nvidia-uvm"), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		for _, library := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
			if got := h.look("/opt/driver").noDriver; !strings.Contains(got, library) {
				t.Errorf("%q without %s: %q", folder, library, got)
			}
			path := filepath.Join(root, "opt/driver", folder, library)
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			if got := h.look("/opt/driver").noDriver; !strings.Contains(got, library) {
				t.Errorf("%q: a folder counts as %s", folder, library)
			}
			if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("driver"), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		if got := h.look("/opt/driver").noDriver; got != "" {
			t.Errorf("%q: %s", folder, got)
		}
	}
}

// TestNodesAreLookedFor holds that a unit is withheld whose node nobody has made,
// which no runtime starts a container with, and that it is not where nothing of
// the driver's dev is in sight.
func TestNodesAreLookedFor(t *testing.T) {
	b := newBench(t, time.Minute)
	grants := by(sharing.Envvar)
	grants.DeviceNodes = true
	lacks := func(units []sharing.GPU, unit, want string) {
		t.Helper()
		if got := b.Prepare(grants, units).Obstacles[unit]; got != want {
			t.Errorf("obstacle is %q, want %q", got, want)
		}
	}
	b.write("/driver/dev/nvidia7")
	lacks(gpus(), "GPU-0", "")
	b.write("/driver/dev/nvidiactl")
	lacks(gpus(), "GPU-0", "there is no /driver/dev/nvidia0")
	b.write("/driver/dev/nvidia0")
	lacks(gpus(), "GPU-0", "")

	b.write(minorsPath)
	if err := os.WriteFile(filepath.Join(b.root, minorsPath), []byte("gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	cut := []sharing.GPU{{UUID: "GPU-0", MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-0", GI: 1}}}}
	b.write("/driver/dev/nvidia-caps/nvidia-cap12")
	lacks(cut, "MIG-0", "there is no /driver/dev/nvidia-caps/nvidia-cap13")
	b.write("/driver/dev/nvidia-caps/nvidia-cap13")
	lacks(cut, "MIG-0", "")
}

// TestOwnDevIsNotTheHosts holds that nothing is said of nodes when the host's "/"
// is not mounted: a container's own dev has what it was given, and the host more.
func TestOwnDevIsNotTheHosts(t *testing.T) {
	for _, root := range []string{"", "/"} {
		devRoot := t.TempDir()
		if err := errors.Join(os.Mkdir(filepath.Join(devRoot, "dev"), 0o755), os.WriteFile(filepath.Join(devRoot, "dev/nvidiactl"), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		h := New(Options{Root: root, DevRoot: devRoot, Logger: slog.New(slog.DiscardHandler)})
		grants := by(sharing.Envvar)
		grants.DeviceNodes = true
		if got := h.Prepare(grants, gpus()); !granted(got) || !cmp.Equal([]string{"/dev/nvidiactl"}, got.ControlNodes[:1]) {
			t.Errorf("%q: %v, control nodes %v", root, got.Obstacles, got.ControlNodes)
		}
	}
}
