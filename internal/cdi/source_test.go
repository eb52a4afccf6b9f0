package cdi

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/driverroot"
	"github.com/virgate/virgate/sharing"
	"tags.cncf.io/container-device-interface/specs-go"
)

// partitioned is a node with a whole GPU, a GPU whose only partition does not have
// index 0, and one with MIG and no partition.
func partitioned() []sharing.GPU {
	return []sharing.GPU{
		{UUID: "GPU-a", Index: 0, Minor: 3},
		{UUID: "GPU-b", Index: 1, Minor: 2, MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-b", Index: 4, GI: 9, CI: 1}}},
		{UUID: "GPU-c", Index: 2, Minor: 1, MIG: true},
	}
}

func TestUnits(t *testing.T) {
	names := map[string]string{}
	for _, u := range units(partitioned()) {
		names[u.id] = u.index
	}
	if diff := cmp.Diff(map[string]string{"GPU-a": "0", "MIG-b": "1:4"}, names); diff != "" {
		t.Errorf("units (-want +got):\n%s", diff)
	}
}

func TestFingerprint(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(gpus []sharing.GPU)
		same   bool
	}{
		{"nothing", func([]sharing.GPU) {}, true},
		{"a fault", func(g []sharing.GPU) { g[0].Health = sharing.Faulty("XID 79") }, true},
		{"the order", func(g []sharing.GPU) { g[0], g[1] = g[1], g[0] }, true},
		{"an ID", func(g []sharing.GPU) { g[0].UUID = "GPU-d" }, false},
		{"an index", func(g []sharing.GPU) { g[0].Index = 7 }, false},
		{"a minor", func(g []sharing.GPU) { g[0].Minor = 7 }, false},
		{"a GPU instance", func(g []sharing.GPU) { g[1].Partitions[0].GI = 7 }, false},
		{"a compute instance", func(g []sharing.GPU) { g[1].Partitions[0].CI = 7 }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			gpus := partitioned()
			test.change(gpus)
			if same := fingerprint(gpus) == fingerprint(partitioned()); same != test.same {
				t.Errorf("the same: %v", same)
			}
		})
	}
}

// TestCapabilityMinor checks the first and the last minor numbers of the driver's table
// (NVIDIA MIG User Guide, "Device Nodes and Capabilities").
func TestCapabilityMinor(t *testing.T) {
	for _, test := range []struct{ gpu, gi, want int }{{0, 0, 3}, {0, 1, 12}, {1, 0, 138}, {31, 14, 4322 - 8}} {
		if got := capabilityMinor(test.gpu, test.gi); got != test.want {
			t.Errorf("GPU %d, GPU instance %d: %d, want %d", test.gpu, test.gi, got, test.want)
		}
	}
}

// TestSpecFile checks the text of a whole spec. If a new version of the CDI library
// writes another text that means the same, update this one.
func TestSpecFile(t *testing.T) {
	b := newBench(t)
	gpus := gpus(2, "MIG-a")
	gpus[1].Minor = 7
	gpus[1].Partitions[0].CI = 2
	b.names(gpus)
	got, err := os.ReadFile(b.path())
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "spec.json")
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.TrimSpace(string(want)), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", golden, diff)
	}
}

func TestSimulatedWithoutMinor(t *testing.T) {
	spec, err := Simulated{}.Units([]sharing.GPU{{UUID: "GPU-0", Minor: -1}})
	if spec != nil || err != nil {
		t.Errorf("spec %v, error %v", spec, err)
	}
}

func TestCheckDeviceNodes(t *testing.T) {
	const noGPU = "no node of the GPU in /host/dev"
	entry := func(paths ...string) specs.Device {
		var d specs.Device
		for _, path := range paths {
			d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, &specs.DeviceNode{Path: path})
		}
		return d
	}
	for _, test := range []struct {
		name    string
		entries []specs.Device
		want    string
	}{
		{"no entry", nil, ""},
		{"a GPU", []specs.Device{entry("/dev/dri/card1", "/dev/nvidia12")}, ""},
		{"nothing", []specs.Device{entry()}, noGPU},
		{"other nodes", []specs.Device{entry("/dev/nvidiactl", "/dev/nvidia", "/dev/nvidia-uvm", "/dev/dri/card1")}, noGPU},
		{"the second entry", []specs.Device{entry("/dev/nvidia0"), entry()}, noGPU},
		{"capabilities of no GPU", []specs.Device{entry("/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31")}, noGPU},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ""
			if err := checkDeviceNodes(test.entries, "/host/dev"); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// TestDriverIsMissing passes without a driver and with one, which does not know the GPU.
func TestDriverIsMissing(t *testing.T) {
	root := t.TempDir()
	driver := NewDriver(DriverOptions{
		Find: func() Roots { return Roots{root, root} }, Host: Roots{"/", "/"},
		HookPath: "/usr/bin/nvidia-cdi-hook", Logger: slog.New(slog.DiscardHandler),
	})
	spec, err := driver.Units(gpus(1))
	if spec != nil || err == nil {
		t.Fatalf("spec %v, error %v", spec, err)
	}
	if !errors.Is(err, ErrNoDriver) && (!strings.Contains(err.Error(), "GPU-0") || !strings.Contains(err.Error(), root)) {
		t.Errorf("the error does not say what is missing where: %v", err)
	}
	if spec, err := driver.Units(nil); spec != nil || err != nil && !errors.Is(err, ErrNoDriver) {
		t.Errorf("of no GPUs: spec %v, error %v", spec, err)
	}
	for _, class := range []string{"gds", "mofed", "gdrcopy"} {
		spec, err := driver.Extra(class)
		if spec != nil || err == nil || !errors.Is(err, ErrNoDriver) && !strings.Contains(err.Error(), class+": this node has nothing of it") {
			t.Errorf("%s: spec %v, error %v", class, spec, err)
		}
	}
}

// TestDriverFingerprint checks that the fingerprint changes with each step of an
// installer, and only then.
func TestDriverFingerprint(t *testing.T) {
	for _, folder := range driverroot.LibraryFolders() {
		root := t.TempDir()
		if got := driverFingerprint(root); got != "" {
			t.Errorf("nothing is %q", got)
		}
		libraries := filepath.Join(root, folder)
		past := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		step := func(change error) string {
			t.Helper()
			// Some file systems have timestamps too coarse for a test.
			past = past.Add(time.Second)
			if err := errors.Join(change, os.Chtimes(libraries, time.Time{}, past)); err != nil {
				t.Fatal(err)
			}
			got := driverFingerprint(root)
			if again := driverFingerprint(root); again != got {
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
