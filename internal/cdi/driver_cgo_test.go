//go:build cgo && linux

package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/internal/driverroot"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/sharing"
)

// group owns the device nodes of driverRoots.
const group = 44

// driverRoots makes a folder with the libraries that nvcdi looks for, of the mock's
// driver version, and one with the device nodes of GPUs 0 and 1 and of GDRCopy.
func driverRoots(t *testing.T, together bool) (root, devRoot string) {
	t.Helper()
	root, devRoot = t.TempDir(), t.TempDir()
	if together {
		devRoot = root
	}
	if err := os.MkdirAll(filepath.Join(devRoot, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	install(t, root, "550.54.15")
	for minor, node := range []string{"nvidia0", "nvidia1", "nvidiactl", "gdrdrv"} {
		path := filepath.Join(devRoot, "dev", node)
		err := errors.Join(syscall.Mknod(path, syscall.S_IFCHR|0o660, majorNVIDIA<<8|minor), os.Chown(path, 0, group))
		if err != nil {
			t.Skipf("device nodes cannot be made here: %v", err)
		}
	}
	return root, devRoot
}

// install replaces the libraries with those of another driver version.
func install(t *testing.T, root, version string) {
	t.Helper()
	installInto(t, filepath.Join(root, "usr/lib/x86_64-linux-gnu"), version)
}

func installInto(t *testing.T, libraries, version string) {
	t.Helper()
	if err := errors.Join(os.RemoveAll(libraries), os.MkdirAll(libraries, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, library := range []string{"libcuda.so.", "libnvidia-ml.so."} {
		path := filepath.Join(libraries, library)
		if err := errors.Join(os.WriteFile(path+version, []byte("driver"), 0o644), os.Symlink(library+version, path+"1")); err != nil {
			t.Fatal(err)
		}
	}
}

// mockDriver is NVIDIA's mock of the driver of a DGX A100, with its first two GPUs as
// they are in the inventory.
func mockDriver(t *testing.T) (*server.Server, []sharing.GPU) {
	t.Helper()
	return mockGPUs(t, 2)
}

func mockGPUs(t *testing.T, count int) (*server.Server, []sharing.GPU) {
	t.Helper()
	library := dgxa100.New()
	var gpus []sharing.GPU
	for i := range count {
		device, ok := library.Devices[i].(*server.Device)
		if !ok {
			t.Fatalf("the mock has a %T", library.Devices[i])
		}
		// The mock does not implement this call.
		device.IsMigDeviceHandleFunc = func() (bool, nvml.Return) { return false, nvml.SUCCESS }
		gpus = append(gpus, sharing.GPU{UUID: device.UUID, Index: i, Minor: i})
	}
	return library, gpus
}

// TestDriverSpec checks the spec that results from NVIDIA's mock of a driver behind
// NVIDIA's library nvcdi.
func TestDriverSpec(t *testing.T) {
	for _, test := range []struct {
		name        string
		together    bool
		hostDevRoot string
		features    []string
		groups      []uint32
	}{
		{"one root", true, "/run/nvidia/driver", nil, []uint32{group}},
		{"devices elsewhere", false, "/host", []string{"no-additional-gids-for-device-nodes"}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			library, gpus := mockDriver(t)
			root, devRoot := driverRoots(t, test.together)
			var log bytes.Buffer
			driver := NewDriver(DriverOptions{
				Find: func() Roots { return Roots{root, devRoot} }, Host: Roots{"/run/nvidia/driver", test.hostDevRoot},
				HookPath: "/opt/nvidia-cdi-hook", Features: test.features,
				Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
			})
			driver.library = []nvcdi.Option{nvcdi.WithNvmlLib(library)}

			// An unknown GPU costs no other GPU its entry.
			lost := "GPU-00000000-0000-0000-0000-000000000000"
			spec, err := driver.Units(append(slices.Clone(gpus), sharing.GPU{UUID: lost, Index: 2, Minor: 2}))
			if err == nil || !strings.Contains(err.Error(), lost) {
				t.Errorf("error is %v", err)
			}
			nodes := map[string]string{}
			for _, device := range spec.Devices {
				// The hook for memory limits would end each container if the host's program is older.
				if hooks := device.ContainerEdits.Hooks; len(hooks) > 0 {
					t.Errorf("%s has hooks: %v", device.Name, hooks[0].Args)
				}
				for _, node := range device.ContainerEdits.DeviceNodes {
					nodes[device.Name] += node.Path + " from " + node.HostPath
				}
				if diff := cmp.Diff(test.groups, device.ContainerEdits.AdditionalGIDs); diff != "" {
					t.Errorf("groups of %s (-want +got):\n%s", device.Name, diff)
				}
			}
			first, second := "/dev/nvidia0 from "+test.hostDevRoot+"/dev/nvidia0", "/dev/nvidia1 from "+test.hostDevRoot+"/dev/nvidia1"
			want := map[string]string{"0": first, gpus[0].UUID: first, "1": second, gpus[1].UUID: second}
			if diff := cmp.Diff(want, nodes); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
			// An index is Virgate's, whatever the driver's index is now.
			gpus[0].Index, gpus[1].Index = 1, 0
			if renumbered, err := driver.Units(gpus); err != nil {
				t.Error(err)
			} else {
				for _, device := range renumbered.Devices {
					if path := device.ContainerEdits.DeviceNodes[0].Path; (device.Name == "1" || device.Name == gpus[0].UUID) != (path == "/dev/nvidia0") {
						t.Errorf("entry %s has %s", device.Name, path)
					}
				}
			}
			gpus[0].Index, gpus[1].Index = 0, 1
			checkCommon(t, spec.ContainerEdits, root)
			if !strings.Contains(log.String(), "level=DEBUG msg=nvcdi") {
				t.Errorf("nvcdi says nothing: %s", log.String())
			}

			spec, err = driver.Extra("gdrcopy")
			if err != nil || len(spec.Devices) != 1 || spec.Devices[0].Name != "all" ||
				spec.Devices[0].ContainerEdits.DeviceNodes[0].HostPath != test.hostDevRoot+"/dev/gdrdrv" {
				t.Errorf("gdrcopy: spec %+v, error %v", spec, err)
			}

			spec, err = driver.Extra("imex-channel")
			const channel = "/dev/nvidia-caps-imex-channels/channel0"
			if err != nil || spec.Kind != "k8s.device-plugin.nvidia.com/imex-channel" || len(spec.Devices) != 1 || spec.Devices[0].Name != "0" ||
				spec.Devices[0].ContainerEdits.DeviceNodes[0].Path != channel || spec.Devices[0].ContainerEdits.DeviceNodes[0].HostPath != test.hostDevRoot+channel {
				t.Errorf("IMEX channel: spec %+v, error %v", spec, err)
			}

			b := newBench(t)
			b.options.Source = driver
			entries := []string{"gpu=0", "gpu=1", "gpu=" + gpus[0].UUID, "gpu=" + gpus[1].UUID}
			slices.Sort(entries)
			b.wants(append(entries, "gdrcopy=all"), b.names(gpus, "gdrcopy"))
		})
	}
}

// TestDisabledHooks checks that specs of all classes leave out disabled hooks.
func TestDisabledHooks(t *testing.T) {
	root, devRoot := driverRoots(t, true)
	for _, test := range []struct {
		disabled        []string
		cache, symlinks bool
	}{
		{nil, true, true},
		{[]string{"update-ldcache", "unknown"}, false, true},
		{[]string{"create-symlinks", "update-ldcache"}, false, false},
		{[]string{"all"}, false, false},
	} {
		library, gpus := mockDriver(t)
		driver := NewDriver(DriverOptions{
			Find: func() Roots { return Roots{root, devRoot} }, Host: Roots{"/", "/"},
			HookPath: "/usr/bin/nvidia-ctk", DisabledHooks: test.disabled, Logger: slog.New(slog.DiscardHandler),
		})
		driver.library = []nvcdi.Option{nvcdi.WithNvmlLib(library)}
		spec, err := driver.Units(gpus)
		if err != nil {
			t.Fatal(err)
		}
		var hooks []string
		for _, edits := range append([]specs.ContainerEdits{spec.ContainerEdits}, spec.Devices[0].ContainerEdits) {
			for _, hook := range edits.Hooks {
				hooks = append(hooks, strings.Join(hook.Args, " "))
			}
		}
		has := func(name string) bool {
			return slices.ContainsFunc(hooks, func(hook string) bool { return strings.HasPrefix(hook, "nvidia-ctk hook "+name) })
		}
		if has("update-ldcache") != test.cache || has("create-symlinks") != test.symlinks || len(hooks) > 0 && slices.Contains(test.disabled, "all") {
			t.Errorf("without %q the hooks are %q", test.disabled, hooks)
		}
	}
}

// TestLibraryFolders checks that a spec has the driver's libraries from any folder of the driver root.
func TestLibraryFolders(t *testing.T) {
	for _, folder := range driverroot.LibraryFolders() {
		library, gpus := mockDriver(t)
		root, _ := driverRoots(t, true)
		for _, usual := range []string{"usr", "lib"} {
			if err := os.RemoveAll(filepath.Join(root, usual)); err != nil {
				t.Fatal(err)
			}
		}
		installInto(t, filepath.Join(root, folder), "550.54.15")
		driver := NewDriver(DriverOptions{
			Find: func() Roots { return Roots{root, root} }, Host: Roots{"/run/nvidia/driver", "/run/nvidia/driver"},
			HookPath: "/opt/nvidia-cdi-hook", Logger: slog.New(slog.DiscardHandler),
		})
		driver.library = []nvcdi.Option{nvcdi.WithNvmlLib(library)}
		spec, err := driver.Units(gpus)
		if err != nil {
			t.Errorf("%s: %v", folder, err)
			continue
		}
		want := &specs.Mount{HostPath: "/run/nvidia/driver/" + folder + "/libcuda.so.550.54.15", ContainerPath: "/" + folder + "/libcuda.so.550.54.15"}
		if !slices.ContainsFunc(spec.ContainerEdits.Mounts, func(m *specs.Mount) bool { return m.HostPath == want.HostPath && m.ContainerPath == want.ContainerPath }) {
			t.Errorf("%s: the mounts are %v", folder, spec.ContainerEdits.Mounts)
		}
	}
}

// TestGPUWithoutNode checks that a GPU without its device node has no entry, which would start containers without
// a GPU, and that the others have theirs.
func TestGPUWithoutNode(t *testing.T) {
	library, gpus := mockGPUs(t, 3)
	root, devRoot := driverRoots(t, false)
	driver := NewDriver(DriverOptions{
		Find: func() Roots { return Roots{root, devRoot} }, Host: Roots{"/", "/"},
		HookPath: "/opt/nvidia-cdi-hook", Logger: slog.New(slog.DiscardHandler),
	})
	driver.library = []nvcdi.Option{nvcdi.WithNvmlLib(library)}
	b := newBench(t)
	b.options.Source = driver
	names, err := b.Write(t.Context(), gpus, nil)
	if want := gpus[2].UUID + " with the driver at " + root + ": no node of the GPU in " + devRoot + "/dev"; !strings.Contains(fmt.Sprint(err), want) {
		t.Errorf("error is %v, want %q", err, want)
	}
	entries := []string{"gpu=0", "gpu=1", "gpu=" + gpus[0].UUID, "gpu=" + gpus[1].UUID}
	slices.Sort(entries)
	b.wants(entries, b.checked(names))
}

// TestFilesNotOnHost checks that no entry names a file that the host lacks, that the error names the file, and
// that a missing device node costs no other GPU its entry.
func TestFilesNotOnHost(t *testing.T) {
	const hook = "/opt/nvidia-cdi-hook"
	library, gpus := mockDriver(t)
	root, _ := driverRoots(t, true)
	host := t.TempDir()
	driver := NewDriver(DriverOptions{
		Find: func() Roots { return Roots{root, root} }, Host: Roots{"/", "/"}, Mounts: func() []Mount { return []Mount{{"/", host}} },
		HookPath: hook, Logger: slog.New(slog.DiscardHandler),
	})
	driver.library = []nvcdi.Option{nvcdi.WithNvmlLib(library)}
	b := newBench(t)
	b.options.Source = driver
	put := func(path string) {
		t.Helper()
		path = filepath.Join(host, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	const folder = "/usr/lib/x86_64-linux-gnu/"
	for _, lacks := range []string{folder + "libcuda.so.550.54.15", folder + "libnvidia-ml.so.550.54.15", "/dev/nvidiactl", hook} {
		names, err := b.Write(t.Context(), gpus, nil)
		if len(names) > 0 || !strings.Contains(fmt.Sprint(err), "the host has no "+lacks) {
			t.Fatalf("without %s: entries %v, error %v", lacks, names, err)
		}
		if _, err := os.Stat(b.path()); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("without %s there is a spec: %v", lacks, err)
		}
		put(lacks)
		b.now = b.now.Add(time.Minute)
	}
	put("/dev/nvidia0")
	names, err := b.Write(t.Context(), gpus, []string{"gdrcopy"})
	if got := fmt.Sprint(err); !strings.Contains(got, "entry "+gpus[1].UUID+": the host has no /dev/nvidia1") || !strings.Contains(got, "entry all: the host has no /dev/gdrdrv") {
		t.Errorf("error is %v", err)
	}
	entries := []string{"gpu=0", "gpu=" + gpus[0].UUID}
	b.wants(entries, b.checked(names))
}

// TestPartitionEntry checks that a partition's entry has its capability nodes by number, even if the host has no
// such nodes, as after a change by Virgate. An unexpected file of the driver costs only that partition its entry.
// The entries are made again if the driver's major number changes.
func TestPartitionEntry(t *testing.T) {
	library, gpus := mockDriver(t)
	root, _ := driverRoots(t, true)
	write := func(path, data string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(data), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	const of1 = migcaps.Folder + "/gpu1/mig/"
	write("/proc/devices", "195 nvidia\n236 nvidia-caps\n")
	write(of1+"gi7/access", "DeviceFileMinor: 192\nDeviceFileMode: 292\n")
	write(of1+"gi7/ci0/access", "DeviceFileMinor: 193\nDeviceFileMode: 256\n")
	write(of1+"gi8/access", "DeviceFileMinor: 201\nDeviceFileMode: 292\n")
	write(of1+"gi8/ci0/access", "DeviceFileMinor: many\n")
	gpus[1].MIG = true
	gpus[1].Partitions = []sharing.Partition{{UUID: "MIG-good", Index: 0, GI: 7}, {UUID: "MIG-bad", Index: 1, GI: 8}, {UUID: "MIG-gone", Index: 2, GI: 9}}
	driver := NewDriver(DriverOptions{
		Find: func() Roots { return Roots{root, root} }, Host: Roots{"/run/nvidia/driver", "/run/nvidia/driver"},
		Capabilities: migcaps.NewReader(root), HookPath: "/opt/nvidia-cdi-hook", Logger: slog.New(slog.DiscardHandler),
	})
	driver.library = []nvcdi.Option{nvcdi.WithNvmlLib(library)}
	spec, err := driver.Units(gpus)
	for _, want := range []string{of1 + `gi8/ci0/access: DeviceFileMinor is "many"`, "MIG-gone", "read " + of1 + "gi9/access: no such file"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("error is %v, want %q", err, want)
		}
	}
	got := map[string][]string{}
	for _, device := range spec.Devices {
		for _, node := range device.ContainerEdits.DeviceNodes {
			text := fmt.Sprintf("%s %s %d:%d", node.Path, node.HostPath, node.Major, node.Minor)
			if strings.HasPrefix(node.Path, "/dev/nvidia-caps/") {
				text += fmt.Sprint(" ", node.Type, " ", node.FileMode)
			}
			got[device.Name] = append(got[device.Name], text)
		}
	}
	whole := []string{"/dev/nvidia0 /run/nvidia/driver/dev/nvidia0 195:0"}
	partition := []string{
		"/dev/nvidia1 /run/nvidia/driver/dev/nvidia1 195:1",
		"/dev/nvidia-caps/nvidia-cap192  236:192 c -r--r--r--",
		"/dev/nvidia-caps/nvidia-cap193  236:193 c -r--------",
	}
	if diff := cmp.Diff(map[string][]string{"0": whole, gpus[0].UUID: whole, "1:0": partition, "MIG-good": partition}, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	before := driver.Version()
	write("/proc/devices", "195 nvidia\n237 nvidia-caps\n")
	if driver.Version() == before {
		t.Error("another major number is no other version")
	}
}

// TestDriverIsExchanged checks that entries have the new libraries after another driver version was installed,
// while the program runs with the same GPUs.
func TestDriverIsExchanged(t *testing.T) {
	library, gpus := mockDriver(t)
	root, _ := driverRoots(t, true)
	driver := NewDriver(DriverOptions{
		Find: func() Roots { return Roots{root, root} }, Host: Roots{"/", "/"},
		HookPath: "/opt/nvidia-cdi-hook", Logger: slog.New(slog.DiscardHandler),
	})
	driver.library = []nvcdi.Option{nvcdi.WithNvmlLib(library)}
	b := newBench(t)
	b.options.Source = driver
	b.names(gpus)
	made, err := os.Stat(b.path())
	if err != nil {
		t.Fatal(err)
	}
	b.names(gpus)
	if again, err := os.Stat(b.path()); err != nil || !os.SameFile(made, again) {
		t.Errorf("written again without reason: %v", err)
	}
	const version = "580.95.05"
	install(t, root, version)
	library.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return version, nvml.SUCCESS }
	b.names(gpus)
	spec, err := os.ReadFile(b.path())
	if err != nil || strings.Contains(string(spec), "550.54.15") || !strings.Contains(string(spec), "libcuda.so."+version) {
		t.Errorf("%v, the spec is %s", err, spec)
	}
}

// checkCommon checks that the common edits have the host's paths, and disable NVIDIA's runtime.
func checkCommon(t *testing.T, edits specs.ContainerEdits, root string) {
	t.Helper()
	if text := strings.Join(edits.Env, " "); !strings.Contains(text, "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("variables are %q", text)
	}
	libraries := 0
	for _, mount := range edits.Mounts {
		if strings.Contains(mount.HostPath, root) {
			t.Errorf("%s is this process's path", mount.HostPath)
		}
		if strings.HasPrefix(mount.HostPath, "/run/nvidia/driver/usr/lib/") && strings.HasSuffix(mount.HostPath, ".so.550.54.15") {
			libraries++
		}
	}
	if libraries != 2 {
		t.Errorf("%d libraries in %v", libraries, edits.Mounts)
	}
	var hooks []string
	for _, hook := range edits.Hooks {
		if hook.Path != "/opt/nvidia-cdi-hook" {
			t.Errorf("hook %s", hook.Path)
		}
		hooks = append(hooks, hook.Args[1])
	}
	slices.Sort(hooks)
	// From container toolkit 1.20.
	want := []string{"create-symlinks", "disable-device-node-modification", "enable-cuda-compat", "update-application-profile", "update-ldcache"}
	if diff := cmp.Diff(want, hooks); diff != "" {
		t.Errorf("hooks (-want +got):\n%s", diff)
	}
}
