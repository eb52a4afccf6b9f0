//go:build linux

package cdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"
)

// TestMissing has a host that is seen in part.
func TestMissing(t *testing.T) {
	host := t.TempDir()
	for _, file := range []string{"lib/libcuda.so.580.1", "dev/nvidia0", "bin/hook"} {
		path := filepath.Join(host, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink("/gone", filepath.Join(host, "bin/broken")), os.Symlink("/bin/hook", filepath.Join(host, "bin/linked"))); err != nil {
		t.Fatal(err)
	}
	mount := func(path string) specs.ContainerEdits {
		return specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: path, ContainerPath: path}}}
	}
	hook := func(path string) specs.ContainerEdits {
		return specs.ContainerEdits{Hooks: []*specs.Hook{{Path: path}}}
	}
	nodes := func(n specs.DeviceNode) specs.ContainerEdits {
		return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{&n}}
	}
	driver := []Mount{{"/driver", host}}
	for _, test := range []struct {
		name   string
		mounts []Mount
		edits  specs.ContainerEdits
		want   string
	}{
		{"a library", driver, mount("/driver/lib/libcuda.so.580.1"), ""},
		{"none", driver, mount("/driver/lib/libcuda.so.570.1"), "the host has no /driver/lib/libcuda.so.570.1"},
		{"elsewhere", driver, mount("/drivers/lib/libcuda.so.570.1"), ""},
		{"a folder that is a file", driver, mount("/driver/lib/libcuda.so.580.1/x"), "the host has no /driver/lib/libcuda.so.580.1/x"},
		{"a node", driver, nodes(specs.DeviceNode{Path: "/dev/nvidia0", HostPath: "/driver/dev/nvidia0"}), ""},
		{"no node", driver, nodes(specs.DeviceNode{Path: "/dev/nvidia1", HostPath: "/driver/dev/nvidia1"}), "the host has no /driver/dev/nvidia1"},
		{"no node with another path", []Mount{{"/", host}}, nodes(specs.DeviceNode{Path: "/dev/nvidia1"}), "the host has no /dev/nvidia1"},
		{"a node by its numbers", []Mount{{"/", host}}, nodes(specs.DeviceNode{Path: "/dev/nvidia-caps/nvidia-cap1", Type: "c", Major: 236, Minor: 1}), ""},
		{"a hook", driver, hook("/driver/bin/hook"), ""},
		{"no hook", driver, hook("/driver/bin/other"), "the host has no /driver/bin/other, the hook of CDI specs"},
		{"a hook that is not seen", driver, hook("/opt/toolkit/hook"), ""},
		{"a link, which the host follows", []Mount{{"/", host}}, hook("/bin/linked"), ""},
		{"a link to nowhere", []Mount{{"/", host}}, hook("/bin/broken"), "the host has no /bin/broken, the hook of CDI specs"},
		{"the first mount counts", []Mount{{"/", t.TempDir()}, {"/driver", host}}, hook("/driver/bin/hook"), "the host has no /driver/bin/hook"},
		{"nothing known", nil, hook("/driver/bin/other"), ""},
	} {
		if got := fmt.Sprint(missing(test.mounts, test.edits)); test.want == "" && got != "<nil>" || !strings.HasPrefix(got, test.want) {
			t.Errorf("%s: %s, want %q", test.name, got, test.want)
		}
	}
}

// TestMountedLibrary has a library mounted into this container by a runtime, and nothing of the host: its path on
// the host is unknown.
func TestMountedLibrary(t *testing.T) {
	folder := t.TempDir()
	from, to := filepath.Join(folder, "host.so"), filepath.Join(folder, "libcuda.so.580.1")
	for _, path := range []string{from, to} {
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	edits := specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: to, ContainerPath: to}}}
	here := []Mount{{"/", "/"}}
	if err := missing(here, edits); err != nil {
		t.Errorf("a file of its own: %v", err)
	}
	if err := syscall.Mount(from, to, "", syscall.MS_BIND, ""); err != nil {
		t.Skipf("nothing can be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(to, 0); err != nil {
			t.Error(err)
		}
	})
	if err := missing(here, edits); err == nil || !strings.Contains(err.Error(), to+" was mounted into this container") {
		t.Errorf("a mounted one: %v", err)
	}
	if err := missing([]Mount{{folder, folder}}, edits); err != nil {
		t.Errorf("the host's folder is seen: %v", err)
	}
}
