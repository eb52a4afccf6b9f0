package driver

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
)

var _ nvml.Kernel = Kernel{}

// machineWith makes a tree of these files in a folder; a value that begins with -> is a link.
func machineWith(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		target, isLink := strings.CutPrefix(text, "->")
		var err error
		if isLink {
			err = os.Symlink(target, path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestBound checks which devices of the driver nvidia are GPUs that NVML should list.
func TestBound(t *testing.T) {
	const devices, information = "sys/bus/pci/devices/", "proc/driver/nvidia/gpus/0000:3b:00.0/information"
	// A link of the driver's folder leads to a device, as the kernel's do.
	bind := func(files map[string]string, address, class string) {
		files[boundGPUs+"/"+address] = "->../../devices/" + address
		files[devices+address+"/class"] = class + "\n"
	}
	files := map[string]string{boundGPUs + "/bind": "", boundGPUs + "/module": "->../../../../module/nvidia"}
	bind(files, "10000:01:00.0", "0x030000")
	bind(files, "0000:3b:00.0", "0x030200")
	bind(files, "0000:af:00.0", "0x030200")
	bind(files, "0000:af:00.4", "0x030200")                           // A virtual function,
	bind(files, "0000:b0:00.0", "0x030200")                           // and one with an address on another bus.
	files[devices+"0000:b0:00.0/physfn"] = "->../0000:af:00.0"        //
	bind(files, "0000:c1:00.0", "0x068000")                           // A bridge.
	files[boundGPUs+"/0000:c2:00.0"] = "->../../devices/0000:c2:00.0" // It is just being taken out.
	for _, test := range []struct {
		name, visible string
		more          map[string]string
		want          []string
	}{
		{"all", "all", nil, []string{"00000000:3B:00.0", "00000000:AF:00.0", "00010000:01:00.0"}},
		{"by path", "management.nvidia.com/gpu=all", nil, []string{"00000000:3B:00.0", "00000000:AF:00.0", "00010000:01:00.0"}},
		{"not by NVIDIA's runtime", "", nil, []string{"00000000:3B:00.0", "00000000:AF:00.0", "00010000:01:00.0"}},
		{"some, by the user's wish", "0,1", nil, nil},
		{"excluded", "all", map[string]string{information: "Model: \t\t Tesla T4\nGPU Excluded:\t Yes\n"}, []string{"00000000:AF:00.0", "00010000:01:00.0"}},
		{"not excluded", "all", map[string]string{information: "GPU Excluded:\t No\n"}, []string{"00000000:3B:00.0", "00000000:AF:00.0", "00010000:01:00.0"}},
		{"an unknown word", "all", map[string]string{information: "GPU Excluded:\t Maybe\n"}, []string{"00000000:3B:00.0", "00000000:AF:00.0", "00010000:01:00.0"}},
	} {
		tree := map[string]string{}
		for _, part := range []map[string]string{files, test.more} {
			for name, text := range part {
				tree[name] = text
			}
		}
		got, err := Kernel{Options: Options{MachineRoot: machineWith(t, tree)}, VisibleDevices: test.visible}.Bound()
		if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", test.name, err, diff)
		}
	}
	if got, err := (Kernel{Options: Options{MachineRoot: t.TempDir()}}).Bound(); got != nil || err != nil {
		t.Errorf("without the driver: %q, %v", got, err)
	}
	// The host's /proc shows what the container's hides.
	host := machineWith(t, map[string]string{information: "GPU Excluded:\t Yes\n"})
	options := Options{MachineRoot: machineWith(t, files), HostRoot: host}
	if got, err := (Kernel{Options: options}).Bound(); err != nil || len(got) != 2 {
		t.Errorf("excluded, as the host tells: %q, %v", got, err)
	}
}

func TestOpenControl(t *testing.T) {
	root := machineWith(t, map[string]string{"dev/nvidiactl": ""})
	if err := (Kernel{Options: Options{MachineRoot: root}}).OpenControl(); err != nil {
		t.Error(err)
	}
	if err := (Kernel{Options: Options{MachineRoot: t.TempDir()}}).OpenControl(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the node: %v", err)
	}
}

func TestGPUOpen(t *testing.T) {
	for name, want := range map[string]bool{"nvidia7": true, "nvidiactl": false, "nvidia-uvm": false, "nvidia-cap1": false} {
		file, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if got := (Kernel{}).GPUOpen(); got != want {
				t.Errorf("with %s open: %t", name, got)
			}
			_ = os.Remove(file.Name()) // It stays open.
		}
		_ = file.Close()
		if (Kernel{}).GPUOpen() {
			t.Errorf("with %s closed", name)
		}
	}
}
