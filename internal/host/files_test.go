package host

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
)

// TestDriverFolders checks that a driver is found in every folder that installers use.
func TestDriverFolders(t *testing.T) {
	mounted := sharing.Grants{Strategies: []sharing.DeviceListStrategy{sharing.DriverMounts}, DriverHostPath: "/opt/driver"}
	for _, folder := range []string{"lib64", "lib", ""} {
		root := t.TempDir()
		h := New(Options{Root: root, Logger: slog.New(slog.DiscardHandler)})
		dev := filepath.Join(root, "dev")
		if err := errors.Join(os.Mkdir(dev, 0o755), os.WriteFile(filepath.Join(dev, "nvidiactl"), nil, 0o644), os.WriteFile(filepath.Join(dev, "nvidia-uvm"), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		for _, library := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
			if got := h.scan(mounted).noDriver; !strings.Contains(got, library) {
				t.Errorf("%q without %s: %q", folder, library, got)
			}
			path := filepath.Join(root, "opt/driver", folder, library)
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			if got := h.scan(mounted).noDriver; !strings.Contains(got, library) {
				t.Errorf("%q: a folder counts as %s", folder, library)
			}
			if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("driver"), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		if got := h.scan(mounted).noDriver; got != "" {
			t.Errorf("%q: %s", folder, got)
		}
	}
}

// TestDeviceNodesAreRequired checks that a unit is not offered while its device node
// is missing, because no runtime could start a container with it, but is offered if
// the driver's dev is not visible at all.
func TestDeviceNodesAreRequired(t *testing.T) {
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

// TestOwnDevIsNotTheHosts checks that no device node counts as missing if the host's
// "/" is not mounted: a container's own dev has fewer nodes than the host's.
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

func TestParseMinors(t *testing.T) {
	const table = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu31/gi14/ci7/access 4322\n"
	want := map[capability]int{{0, 0, -1}: 3, {0, 0, 0}: 4, {31, 14, 7}: 4322}
	if diff := cmp.Diff(want, parseMinors(table), cmp.AllowUnexported(capability{})); diff != "" {
		t.Errorf("minors (-want +got):\n%s", diff)
	}
}

// TestParseMinorsSkips checks that a line of a form that is not known, as a later driver may
// have, hides none of the others.
func TestParseMinorsSkips(t *testing.T) {
	for _, line := range []string{
		"gpu0/gi0/access", "gpu0/gi0 3", "gpu0/access 3", "gpu0/gi0/ci0/x0/access 3", "gi0/gpu0/access 3",
		"gpu-1/gi0/access 3", "gpu+1/gi0/access 3", "gpu0/gi0/access x", "gpu0/gi0/access -3", "gpu/gi/access 1", "other 3",
	} {
		got := parseMinors("gpu1/gi0/access 3\n" + line + "\ngpu1/gi1/access 4\n")
		want := map[capability]int{{1, 0, -1}: 3, {1, 1, -1}: 4}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(capability{})); diff != "" {
			t.Errorf("%q: minors (-want +got):\n%s", line, diff)
		}
	}
}

// FuzzParseMinors checks that a parsed table can be written and parsed again.
func FuzzParseMinors(f *testing.F) {
	f.Add("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n")
	f.Add("gpu00/gi1/access 010\n\n")
	f.Fuzz(func(t *testing.T, data string) {
		minors := parseMinors(data)
		var table strings.Builder
		for c, minor := range minors {
			if c.gpu < 0 || c.gi < 0 || c.ci < -1 || minor < 0 {
				t.Errorf("%+v %d", c, minor)
			}
			ci := ""
			if c.ci >= 0 {
				ci = fmt.Sprintf("/ci%d", c.ci)
			}
			fmt.Fprintf(&table, "gpu%d/gi%d%s/access %d\n", c.gpu, c.gi, ci, minor)
		}
		if diff := cmp.Diff(minors, parseMinors(table.String()), cmp.AllowUnexported(capability{})); diff != "" {
			t.Errorf("(-first +again):\n%s", diff)
		}
	})
}

// TestMayPartition holds who is not even tried: a process with neither SYS_ADMIN nor the
// device node to configure MIG.
func TestMayPartition(t *testing.T) {
	const none, sysAdmin, status = "00000000a80425fb", "00000000a82425fb", "Name:\tvirgate\nCapPrm:\t000001ffffffffff\nCapEff:\t%s\nCapBnd:\t000001ffffffffff\n"
	for name, test := range map[string]struct {
		status string
		node   bool
		want   bool
	}{
		"no right": {fmt.Sprintf(status, none), false, false}, "the capability": {fmt.Sprintf(status, sysAdmin), false, true},
		"the device node": {fmt.Sprintf(status, none), true, true}, "not told": {"Name:\tvirgate\n", false, true}, "no file": {"", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			files := map[string]string{"proc/self/status": test.status}
			if test.node {
				files["dev/nvidia-caps/nvidia-cap1"] = "a device"
			}
			for name, content := range files {
				path := filepath.Join(root, name)
				if content == "" {
					continue
				}
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			if got := MayPartition(os.DirFS(filepath.Join(root, "proc")), filepath.Join(root, "dev")); got != test.want {
				t.Errorf("may partition: %t", got)
			}
		})
	}
}

func TestPCIeRoot(t *testing.T) {
	root := t.TempDir()
	link := func(address, target string) {
		t.Helper()
		path := filepath.Join(root, "bus/pci/devices", address)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.Symlink(target, path)); err != nil {
			t.Fatal(err)
		}
	}
	link("0000:3b:00.0", "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0")
	link("10de:01:00.0", "../../../devices/pci10de:00/10de:01:00.0")
	link("0000:01:00.0", "../../../devices/platform/0000:01:00.0")
	link("0000:02:00.0", "../../../devices/pci0000:00")
	for busID, want := range map[string]string{
		"00000000:3B:00.0": "pci0000:3a", "000010DE:01:00.0": "pci10de:00", "00000000:01:00.0": "", "00000000:02:00.0": "", "00000000:FF:00.0": "", "": "",
	} {
		if got := PCIeRoot(os.DirFS(root), busID); got != want {
			t.Errorf("%s: %q, want %q", busID, got, want)
		}
	}
}
