package driver

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/driverroot"
)

func file() *fstest.MapFile { return &fstest.MapFile{Data: []byte("\x7fELF")} }

func link(target string) *fstest.MapFile {
	return &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
}

// TestFind checks which library is chosen from a driver root mounted at /driver-root, and from the host's root.
func TestFind(t *testing.T) {
	tests := []struct {
		name            string
		container, host fstest.MapFS
		want            string
	}{
		{"none", nil, nil, ""},
		{"as a driver is installed", fstest.MapFS{
			"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":         link("libnvidia-ml.so.580.65.06"),
			"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.65.06": file(),
		}, nil, "/driver-root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.65.06"},
		{"the container's root before the host's", fstest.MapFS{"lib64/libnvidia-ml.so.1": file()},
			fstest.MapFS{"usr/lib64/libnvidia-ml.so.1": file()}, "/driver-root/lib64/libnvidia-ml.so.1"},
		{"the host's where the container has none", fstest.MapFS{"usr/lib64": &fstest.MapFile{Mode: fs.ModeDir}},
			fstest.MapFS{"lib/aarch64-linux-gnu/libnvidia-ml.so.1": file()}, "/lib/aarch64-linux-gnu/libnvidia-ml.so.1"},
		{"folders in order", fstest.MapFS{
			"lib64/libnvidia-ml.so.1":                     file(),
			"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":  file(),
			"usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1": file(),
		}, nil, "/driver-root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"},
		{"an absolute link stays in the root", fstest.MapFS{
			"usr/lib64/libnvidia-ml.so.1": link("/opt/driver/libnvidia-ml.so.1"),
			"opt/driver":                  link("../../../opt/580"),
			"opt/580/libnvidia-ml.so.1":   file(),
		}, fstest.MapFS{"opt/driver/libnvidia-ml.so.1": file()}, "/driver-root/opt/580/libnvidia-ml.so.1"},
		{"a distribution with one architecture", fstest.MapFS{"usr/lib/libnvidia-ml.so.1": file()}, nil, "/driver-root/usr/lib/libnvidia-ml.so.1"},
		{"an installer's lib", fstest.MapFS{"lib/libnvidia-ml.so.1": file()}, nil, "/driver-root/lib/libnvidia-ml.so.1"},
		{"that of the architecture first", fstest.MapFS{"usr/lib/libnvidia-ml.so.1": file(), "lib/aarch64-linux-gnu/libnvidia-ml.so.1": file()}, nil, "/driver-root/lib/aarch64-linux-gnu/libnvidia-ml.so.1"},
		{"a folder that is a link", fstest.MapFS{
			"lib64":                       link("usr/lib64"),
			"usr/lib64":                   link("lib"),
			"usr/lib/libnvidia-ml.so.1":   link("./x/../libnvidia-ml.so.2"),
			"usr/lib/libnvidia-ml.so.2":   file(),
			"usr/lib/x/some-other-file.c": file(),
		}, nil, "/driver-root/usr/lib/libnvidia-ml.so.2"},
		{"a link to nowhere is passed over", fstest.MapFS{
			"usr/lib64/libnvidia-ml.so.1": link("libnvidia-ml.so.550"),
			"lib64/libnvidia-ml.so.1":     file(),
		}, nil, "/driver-root/lib64/libnvidia-ml.so.1"},
		{"links in a circle", fstest.MapFS{"usr/lib64": link("lib32"), "usr/lib32": link("lib64")}, nil, ""},
		{"a folder of that name", fstest.MapFS{"lib64/libnvidia-ml.so.1": &fstest.MapFile{Mode: fs.ModeDir}}, nil, ""},
		{"another version of the interface", fstest.MapFS{"lib64/libnvidia-ml.so": file()}, nil, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			in, got, looked := find([]root{{"/driver-root", test.container}, {"/", test.host}}, driverroot.LibraryFolders(), libraryName)
			if got != "" {
				got = filepath.Join(in.path, got)
			}
			if got != test.want {
				t.Errorf("found %q, want %q", got, test.want)
			}
			if test.want == "" && len(looked) != 2*len(driverroot.LibraryFolders()) {
				t.Errorf("looked in %q, want every folder of both roots", looked)
			}
		})
	}
}

// TestRoots checks that a missing mount is not searched.
func TestRoots(t *testing.T) {
	there := t.TempDir()
	tests := []struct {
		name    string
		options Options
		want    []string
	}{
		{"nothing said", Options{}, []string{"/"}},
		{"not mounted", Options{ContainerDriverRoot: there + "/none"}, []string{"/"}},
		{"mounted", Options{ContainerDriverRoot: there, DriverRoot: "/run/nvidia/driver"}, []string{there, "/run/nvidia/driver"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, r := range test.options.roots() {
				got = append(got, r.path)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("roots (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPlatform(t *testing.T) {
	content := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	tests := []struct {
		name    string
		machine fstest.MapFS
		want    error
	}{
		{"a server", fstest.MapFS{"dev/nvidia0": file(), "sys/devices/soc0/family": content("Graviton\n")}, nil},
		{"WSL", fstest.MapFS{"dev/dxg": file()}, errWSL},
		{"Tegra by its release file", fstest.MapFS{"etc/nv_tegra_release": file()}, errTegra},
		{"Tegra by its processor", fstest.MapFS{"sys/devices/soc0/family": content("Tegra\n")}, errTegra},
		{"Tegra, an older kernel", fstest.MapFS{"sys/devices/soc0/family": content("tegra234")}, errTegra},
		{"a processor that is unlike Tegra", fstest.MapFS{"sys/devices/soc0/family": content("NoTegra")}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if err := platform(test.machine); !errors.Is(err, test.want) {
				t.Errorf("%v, want %v", err, test.want)
			}
		})
	}
}

func TestNUMANode(t *testing.T) {
	machine := fstest.MapFS{}
	for bus, node := range map[string]string{
		"0000:3b:00.0": "1\n", "0000:af:1f.0": "0", "10000:01:00.0": "3\n", "0000:01:00.0": "-1\n", "0000:02:00.0": "?", "0000:04:00.0": "-2",
	} {
		machine["sys/bus/pci/devices/"+bus+"/numa_node"] = &fstest.MapFile{Data: []byte(node)}
	}
	tests := []struct {
		name string
		at   address
		want int
	}{
		{"a node", address{0, 0x3b, 0}, 1},
		{"node 0, a device number", address{0, 0xaf, 0x1f}, 0},
		{"a domain of more than four digits", address{0x10000, 1, 0}, 3},
		{"no node", address{0, 1, 0}, -1},
		{"an impossible node", address{0, 4, 0}, -1},
		{"unreadable", address{0, 2, 0}, -1},
		{"absent", address{0, 3, 0}, -1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := numaNode(machine, test.at); got != test.want {
				t.Errorf("node %d of %s, want %d", got, test.at, test.want)
			}
		})
	}
	if got, want := (address{0x10000, 0x3b, 2}).String(), "00010000:3B:02.0"; got != want {
		t.Errorf("address %q, want %q", got, want)
	}
}

// TestBinding checks that each binding of the driver is told apart: the kernel makes another node for each.
func TestBinding(t *testing.T) {
	machine := t.TempDir()
	folder := filepath.Join(machine, "sys/bus/pci/devices/0000:3b:00.0")
	bind := func() uint64 {
		t.Helper()
		if err := errors.Join(os.Symlink("../drivers/nvidia", folder+"/next"), os.Rename(folder+"/next", folder+"/driver")); err != nil {
			t.Fatal(err)
		}
		return binding(os.DirFS(machine), address{0, 0x3b, 0})
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if got := binding(os.DirFS(machine), address{0, 0x3b, 0}); got != 0 {
		t.Errorf("binding %d of a GPU without a driver", got)
	}
	first := bind()
	if again := binding(os.DirFS(machine), address{0, 0x3b, 0}); first == 0 || again != first {
		t.Errorf("binding %d, and then %d", first, again)
	}
	if second := bind(); second == 0 || second == first {
		t.Errorf("binding %d after %d", second, first)
	}
	if got := binding(fstest.MapFS{"sys/bus/pci/devices/0000:3b:00.0/driver": {Mode: fs.ModeSymlink}}, address{0, 0x3b, 0}); got != 0 {
		t.Errorf("binding %d where files have no numbers", got)
	}
}

// FuzzMachine checks that any content of the kernel's files gives a NUMA node of -1 or more, and that a machine
// is refused only for a known reason.
func FuzzMachine(f *testing.F) {
	for _, text := range []string{"0\n", "1", "-1\n", "-2", "99999999999999999999", "+1", "0x1", "", "tegra234", "TEGRA"} {
		f.Add(text, text)
	}
	f.Fuzz(func(t *testing.T, node, family string) {
		machine := fstest.MapFS{
			"sys/bus/pci/devices/0000:3b:00.0/numa_node": {Data: []byte(node)},
			"sys/devices/soc0/family":                    {Data: []byte(family)},
		}
		if n := numaNode(machine, address{bus: 0x3b}); n < -1 {
			t.Errorf("%q is node %d", node, n)
		}
		if err := platform(machine); err != nil && err != errTegra { //nolint:errorlint // it is returned as it is
			t.Errorf("%q: %v", family, err)
		}
	})
}

func TestClass(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       uint32
	}{{"a GPU without a display", "0x030200\n", 0x030200}, {"no number", "3D\n", 0}, {"nothing", "", 0}} {
		t.Run(test.name, func(t *testing.T) {
			machine := fstest.MapFS{"sys/bus/pci/devices/0000:3b:00.0/class": {Data: []byte(test.text)}}
			if got := class(machine, address{0, 0x3b, 0}); got != test.want {
				t.Errorf("class %#x, want %#x", got, test.want)
			}
		})
	}
}

func TestVersions(t *testing.T) {
	const closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
	const open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs-builder@U16-I3-B14-4-3)  Fri Aug 16 21:22:33 UTC 2024\nGCC version:\n"
	for _, test := range []struct{ name, sys, proc, want string }{
		{"no module", "", "", ""},
		{"closed", "", closed, "535.129.03"},
		{"open", "", open, "560.35.03"},
		{"a container's file of proc, which NVIDIA's runtime has copied when it started", "580.65.06\n", closed, "580.65.06"},
		{"of two numbers", "580.1\n", "", "580.1"},
		{"something else", "srcversion\n", "NVRM version: unknown\nGCC version: 12.3.0\n", ""},
	} {
		machine := fstest.MapFS{}
		for name, text := range map[string]string{"sys/module/nvidia/version": test.sys, "proc/driver/nvidia/version": test.proc} {
			if text != "" {
				machine[name] = &fstest.MapFile{Data: []byte(text)}
			}
		}
		if got := moduleVersion(machine); got != test.want {
			t.Errorf("%s: module %q, want %q", test.name, got, test.want)
		}
	}
	for path, want := range map[string]string{
		"/driver-root/usr/lib64/libnvidia-ml.so.570.124.06": "570.124.06", "/usr/lib64/libnvidia-ml.so.1": "", "libnvidia-ml.so.1": "", "/x/nvml": "",
	} {
		if got := libraryVersion(path); got != want {
			t.Errorf("%s: library %q, want %q", path, got, want)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
