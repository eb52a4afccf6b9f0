package driver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestWhereNodesAreMade checks in which root the driver's program runs, by the contents of the roots.
func TestWhereNodesAreMade(t *testing.T) {
	for _, test := range []struct {
		name string
		// files are below the mounted driver root; driver and dev are the host's paths.
		files    []string
		driver   string
		dev      string
		hostRoot string
		want     invocation
	}{
		{
			name: "the driver's root, and its dev", files: []string{"usr/bin/nvidia-modprobe", "lib64/ld-linux-x86-64.so.2", "usr/lib64/libnvidia-ml.so.1"},
			driver: "/run/nvidia/driver", dev: "/run/nvidia/driver", hostRoot: "/host",
			want: invocation{root: "ROOT", path: "/usr/bin/nvidia-modprobe"},
		},
		{
			name: "the host's root as the driver's, on arm64", files: []string{"usr/sbin/nvidia-modprobe", "lib/ld-linux-aarch64.so.1"},
			driver: "/", dev: "",
			want: invocation{root: "ROOT", path: "/usr/sbin/nvidia-modprobe"},
		},
		{
			name: "another dev than the driver's root has", files: []string{"usr/bin/nvidia-modprobe", "lib64/ld-linux-x86-64.so.2", "usr/lib64/libnvidia-ml.so.1"},
			driver: "/run/nvidia/driver", dev: "/", hostRoot: "/host",
			want: invocation{root: "/host", path: "/run/nvidia/driver/usr/bin/nvidia-modprobe", env: []string{"LD_PRELOAD=/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"}},
		},
		{
			name: "GKE's folder, with the host's root", files: []string{"bin/nvidia-modprobe", "lib64/libnvidia-ml.so.1"},
			driver: "/home/kubernetes/bin/nvidia", dev: "/", hostRoot: "/host",
			want: invocation{root: "/host", path: "/home/kubernetes/bin/nvidia/bin/nvidia-modprobe", env: []string{"LD_PRELOAD=/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1"}},
		},
		{
			name: "a driver root that has the dev, and is no root", files: []string{"bin/nvidia-modprobe", "lib64/libnvidia-ml.so.1"},
			driver: "/opt/nvidia", dev: "/opt/nvidia", hostRoot: "/host",
			want: invocation{root: "/host", path: "/opt/nvidia/bin/nvidia-modprobe", env: []string{"LD_PRELOAD=/opt/nvidia/lib64/libnvidia-ml.so.1"}},
		},
		{
			name: "GKE's folder", files: []string{"bin/nvidia-modprobe", "lib64/libnvidia-ml.so.1"},
			driver: "/home/kubernetes/bin/nvidia", dev: "/",
			want: invocation{root: "/", path: "ROOT/bin/nvidia-modprobe", env: []string{"LD_PRELOAD=ROOT/lib64/libnvidia-ml.so.1"}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := t.TempDir()
			for _, file := range test.files {
				path := filepath.Join(root, file)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o755)); err != nil {
					t.Fatal(err)
				}
			}
			options := Options{ContainerDriverRoot: root, DriverRoot: test.driver, DevRoot: test.dev, HostRoot: test.hostRoot}
			in, program, err := FindProgram(options, "nvidia-modprobe")
			if err != nil {
				t.Fatal(err)
			}
			got := options.place(in, program)
			for i, at := range append([]string{got.root, got.path}, got.env...) {
				at = strings.ReplaceAll(at, root, "ROOT")
				switch i {
				case 0:
					got.root = at
				case 1:
					got.path = at
				default:
					got.env[i-2] = at
				}
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(invocation{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestMakeNodes runs a script in place of the driver's programs, with the driver root as its root.
func TestMakeNodes(t *testing.T) {
	root, shell := rootWithShell(t)
	options := Options{ContainerDriverRoot: root, DriverRoot: filepath.Join(root, "none"), DevRoot: filepath.Join(root, "none")}
	files := []string{"/proc/driver/nvidia/capabilities/gpu0/mig/gi7/access", "/proc/driver/nvidia/capabilities/gpu0/mig/gi7/ci0/access"}
	err := MakeNodes(t.Context(), options, files)
	for _, name := range []string{"nvidia-modprobe", "nvidia-smi"} {
		if err == nil || !strings.Contains(err.Error(), "no "+name+" in "+filepath.Join(root, "usr/bin")) {
			t.Errorf("without programs: %v", err)
		}
	}
	// A program that runs in the root writes its arguments to a file that only the root has.
	for _, each := range []struct{ program, want string }{
		{"nvidia-smi", "nvidia-smi \n"},
		{"nvidia-modprobe", "nvidia-modprobe -f " + files[0] + " -f " + files[1] + "\n"},
	} {
		script := "#!" + shell + "\necho " + each.program + " \"$@\" >/said\n"
		if err := os.WriteFile(filepath.Join(root, "usr/bin", each.program), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := MakeNodes(t.Context(), options, files); err != nil {
			t.Fatal(err)
		}
		if said, err := os.ReadFile(filepath.Join(root, "said")); err != nil || strings.ReplaceAll(string(said), " \n", "\n") != strings.ReplaceAll(each.want, " \n", "\n") {
			t.Errorf("it was called with %q, %v, want %q", said, err, each.want)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "usr/bin/nvidia-modprobe"), []byte("#!"+shell+"\necho 'Read-only file system' >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := MakeNodes(t.Context(), options, files); err == nil || !strings.HasSuffix(err.Error(), "run nvidia-modprobe of "+root+": exit status 1: Read-only file system") {
		t.Errorf("refused: %v", err)
	}
}
