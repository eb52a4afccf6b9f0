package host

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/driverroot"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/sharing"
)

// TestDriverFolders checks that a driver is found in every folder that installers use.
func TestDriverFolders(t *testing.T) {
	mounted := sharing.Grants{Strategies: []sharing.DeviceListStrategy{sharing.DriverMounts}, DriverHostPath: "/opt/driver"}
	for _, folder := range append(driverroot.LibraryFolders(), "") {
		root := t.TempDir()
		h := New(Options{Root: root, Logger: slog.New(slog.DiscardHandler)})
		dev := filepath.Join(root, "dev")
		if err := errors.Join(os.Mkdir(dev, 0o755), os.WriteFile(filepath.Join(dev, "nvidiactl"), nil, 0o644), os.WriteFile(filepath.Join(dev, "nvidia-uvm"), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		for _, library := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
			if got := h.scan(mounted, nil).noDriver; !strings.Contains(got, library) {
				t.Errorf("%q without %s: %q", folder, library, got)
			}
			path := filepath.Join(root, "opt/driver", folder, library)
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			if got := h.scan(mounted, nil).noDriver; !strings.Contains(got, library) {
				t.Errorf("%q: a folder counts as %s", folder, library)
			}
			if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("driver"), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		if got := h.scan(mounted, nil).noDriver; got != "" {
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

	b.capabilities(12)
	b.write("/driver/dev/nvidia-caps/nvidia-cap12")
	lacks(partitioned(), "MIG-0", "there is no /driver/dev/nvidia-caps/nvidia-cap13: it was not made: nvidia-modprobe or nvidia-smi does that, or this program with the chart's mig.manage")
	b.write("/driver/dev/nvidia-caps/nvidia-cap13")
	lacks(partitioned(), "MIG-0", "")
}

// TestMountedDev checks that nodes are looked for where the driver's dev is mounted, where the
// host's "/" is not.
func TestMountedDev(t *testing.T) {
	dev := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(dev, "dev"), 0o755), os.WriteFile(filepath.Join(dev, "dev/nvidiactl"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	h := New(Options{DevRoot: "/run/nvidia/driver", Dev: dev, Logger: slog.New(slog.DiscardHandler)})
	grants := by(sharing.Envvar)
	grants.DeviceNodes = true
	got := h.Prepare(grants, gpus())
	if why := got.Obstacles["GPU-0"]; why != "there is no /run/nvidia/driver/dev/nvidia0" {
		t.Errorf("the obstacle is %q", why)
	}
	if !slices.Contains(got.ControlNodes, "/dev/nvidiactl") {
		t.Errorf("control nodes %v", got.ControlNodes)
	}
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

// TestMayPartition checks that a process with neither SYS_ADMIN nor the device node to configure MIG does not
// even try.
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
			if got := MayPartition(os.DirFS(filepath.Join(root, "proc")), filepath.Join(root, "dev"), migcaps.NewReader(root)); got != test.want {
				t.Errorf("may partition: %t", got)
			}
		})
	}
}

// TestMayOpenCapabilities checks how a process detects that it cannot make compute instances: the kernel refuses
// it the node. A number without a driver is not refused.
func TestMayOpenCapabilities(t *testing.T) {
	const unprivileged = "VIRGATE_TEST_MAY_OPEN"
	if folder := os.Getenv(unprivileged); folder != "" {
		if mayOpenCapabilities(migcaps.NewReader(folder), []string{filepath.Join(folder, "scratch")}) {
			t.Error("a process that may make no device node may open one")
		}
		return
	}
	if os.Getuid() != 0 {
		t.Skip("to make device nodes requires root")
	}
	root := t.TempDir()
	reader, scratch := migcaps.NewReader(root), filepath.Join(root, "scratch")
	write := func(path, data string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(data), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	write(migcaps.Folder+"/mig/config", "DeviceFileMinor: 1\n")
	if !mayOpenCapabilities(reader, []string{filepath.Join(root, "none")}) {
		t.Error("without a driver that has MIG, it is refused")
	}
	// Majors from 256 on are free unless requested (Linux, fs/char_dev.c); 1:3 is /dev/null.
	write("/proc/devices", "1 mem\n4000 nvidia-caps\n")
	if !mayOpenCapabilities(reader, []string{filepath.Join(root, "none")}) {
		t.Error("where nothing can be tried, it is refused")
	}
	if err := errors.Join(os.Mkdir(scratch, 0o755), os.Chmod(scratch, 0o777), os.Chmod(root, 0o755)); err != nil {
		t.Fatal(err)
	}
	if err := openNode(scratch, 1, 3); err != nil {
		t.Skipf("device nodes cannot be made and opened here: %v", err)
	}
	if !mayOpenCapabilities(reader, []string{filepath.Join(root, "none"), scratch}) {
		t.Error("without a driver behind the node, it is refused")
	}
	if left, err := os.ReadDir(scratch); len(left) > 0 || err != nil {
		t.Errorf("left are %v, %v", left, err)
	}
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The folders above may be accessible to root only, so another user gets both by descriptors.
	program, err := os.Open(own)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = program.Close() }()
	folder, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = folder.Close() }()
	again := exec.CommandContext(t.Context(), "/proc/self/fd/3", "-test.run=^"+t.Name()+"$")
	again.ExtraFiles = []*os.File{program, folder}
	again.Env = append(os.Environ(), unprivileged+"=/proc/self/fd/4")
	again.Dir = "/"
	again.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if said, err := again.CombinedOutput(); err != nil {
		t.Errorf("as another user: %v\n%s", err, said)
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
