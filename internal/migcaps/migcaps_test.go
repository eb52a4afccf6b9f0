package migcaps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const devices = "Character devices:\n  1 mem\n195 nvidia\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n\nBlock devices:\n  8 sd\n237 nvidia-caps\n"

func access(minor int) string {
	return fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor)
}

// write makes the file below the root.
func write(t *testing.T, root, path, data string) {
	t.Helper()
	path = filepath.Join(root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(data), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// TestPartition checks a partition's nodes, and that unexpected files of the driver are not guessed at: the error
// names the file and the value.
func TestPartition(t *testing.T) {
	const gi, ci = Folder + "/gpu2/mig/gi7/access", Folder + "/gpu2/mig/gi7/ci1/access"
	good := map[string]string{"/proc/devices": devices, gi: access(192), ci: access(194)}
	for _, test := range []struct {
		name, file, data, want string
		missing                bool
	}{
		{"as the driver writes them", "", "", "", false},
		{"no capabilities", "/proc/devices", "Character devices:\n195 nvidia\n", "/proc/devices: nvidia-caps is not listed", true},
		{"a block device of that name", "/proc/devices", "Character devices:\n\nBlock devices:\n237 nvidia-caps\n", "nvidia-caps is not listed", true},
		{"no number", "/proc/devices", "Character devices:\n2x6 nvidia-caps\n", `/proc/devices: the major number of nvidia-caps is "2x6"`, false},
		{"major 0", "/proc/devices", "Character devices:\n0 nvidia-caps\n", `is "0", which is none from 1 to 4095`, false},
		{"empty", gi, "", gi + ": DeviceFileMinor is missing", false},
		{"a minor that is text", ci, "DeviceFileMinor: twelve\nDeviceFileMode: 292\n", ci + `: DeviceFileMinor is "twelve"`, false},
		{"a minor below 0", gi, "DeviceFileMinor: -1\nDeviceFileMode: 292\n", `DeviceFileMinor is "-1"`, false},
		{"a minor that no node can have", gi, "DeviceFileMinor: 1048576\nDeviceFileMode: 292\n", `DeviceFileMinor is "1048576", which is no number up to 1048575`, false},
		{"a minor twice", gi, "DeviceFileMinor: 1\nDeviceFileMinor: 2\nDeviceFileMode: 292\n", "DeviceFileMinor is there twice", false},
		{"no mode", gi, "DeviceFileMinor: 1\n", "DeviceFileMode is missing", false},
		{"a mode with more than permissions", gi, "DeviceFileMinor: 1\nDeviceFileMode: 8630\n", `DeviceFileMode is "8630"`, false},
		{"a line that nobody knows yet", gi, "DeviceFileOwner: 0\n\n" + access(192), "", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := t.TempDir()
			for file, data := range good {
				if file == test.file {
					data = test.data
				}
				write(t, root, file, data)
			}
			got, err := NewReader(root).Partition(2, 7, 1)
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) || errors.Is(err, fs.ErrNotExist) != test.missing || got != nil {
					t.Errorf("%v, %v, want an error with %q", got, err, test.want)
				}
				return
			}
			want := []Node{
				{Path: "/dev/nvidia-caps/nvidia-cap192", Access: gi, Major: 236, Minor: 192, Mode: 0o444},
				{Path: "/dev/nvidia-caps/nvidia-cap194", Access: ci, Major: 236, Minor: 194, Mode: 0o444},
			}
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

// TestNoInstance checks that an instance that only mig-minors has gets no nodes, and which files are read if a
// container sees several.
func TestNoInstance(t *testing.T) {
	bare, host := t.TempDir(), t.TempDir()
	write(t, host, "/proc/devices", devices)
	write(t, host, Folder+"/gpu0/mig/gi1/access", access(12))
	write(t, host, "/proc/driver/nvidia-caps/mig-minors", "gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n")
	reader := NewReader(bare, host)
	_, err := reader.Partition(0, 1, 0)
	if want := "read " + Folder + "/gpu0/mig/gi1/ci0/access: no such file or directory"; err == nil || err.Error() != want || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want %q", err, want)
	}
	write(t, host, Folder+"/gpu0/mig/gi1/ci0/access", access(13))
	if nodes, err := reader.Partition(0, 1, 0); len(nodes) != 2 || nodes[1].Path != "/dev/nvidia-caps/nvidia-cap13" {
		t.Errorf("%v, %v", nodes, err)
	}
}

// FuzzParse checks that any text gives an error or a number that a device node can have.
func FuzzParse(f *testing.F) {
	f.Add(devices)
	f.Add(access(12))
	f.Add("DeviceFileMinor: 99999999999999999999\nDeviceFileMode: 0x1ff")
	f.Add("236 nvidia-caps\x00")
	f.Fuzz(func(t *testing.T, data string) {
		if major, err := ParseMajor(data); err == nil && (major < 1 || major > 4095) {
			t.Errorf("major %d", major)
		}
		if minor, mode, err := ParseAccess(data); err == nil && (minor < 0 || minor > 1<<20-1 || mode != mode.Perm()) {
			t.Errorf("minor %d, mode %o", minor, mode)
		}
	})
}
