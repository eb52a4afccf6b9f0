package usage

import (
	"strings"
	"testing"
)

const (
	uid       = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
	systemUID = "0a1b2c3d_4e5f_6071_8293_a4b5c6d7e8f9"
	staticUID = "0a1b2c3d4e5f60718293a4b5c6d7e8f9"
)

var (
	id    = strings.Repeat("0123456789abcdef", 4)
	other = strings.Repeat("fedcba9876543210", 4)
)

func TestCgroupContainer(t *testing.T) {
	for _, test := range []struct{ name, file, want string }{
		{"containerd, v2, systemd", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + systemUID + ".slice/cri-containerd-" + id + ".scope\n", id},
		{"guaranteed", "0::/kubepods.slice/kubepods-pod" + systemUID + ".slice/cri-containerd-" + id + ".scope\n", id},
		{"containerd, v2, cgroupfs", "0::/kubepods/burstable/pod" + uid + "/" + id + "\n", id},
		{"v1: the lines without the pod come first", "12:cpuset:/\n11:memory:/kubepods/besteffort/pod" + uid + "/" + id + "\n1:name=systemd:/kubepods/besteffort/pod" + uid + "/" + id + "\n", id},
		{"containerd under its own service", "0::/system.slice/containerd.service/kubepods-besteffort-pod" + systemUID + ".slice:cri-containerd:" + id + "\n", id},
		{"CRI-O with a group below", "0::/kubepods.slice/kubepods-pod" + systemUID + ".slice/crio-" + id + ".scope/container\n", id},
		{"CRI-O, conmon beside it", "0::/kubepods.slice/kubepods-pod" + systemUID + ".slice/crio-conmon-" + id + ".scope\n", id},
		{"docker shim", "0::/kubepods.slice/kubepods-pod" + systemUID + ".slice/docker-" + id + ".scope\n", id},
		{"static pod", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + staticUID + ".slice/cri-containerd-" + id + ".scope\n", id},
		{"node in a container: its ID comes first", "0::/docker/" + other + "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + systemUID + ".slice/cri-containerd-" + id + ".scope\n", id},
		{"relative, from a cgroup namespace", "0::/../../kubepods-pod" + systemUID + ".slice/cri-containerd-" + id + ".scope\n", id},
		{"a container's own containers come after it", "0::/kubepods/pod" + uid + "/" + id + "/docker/" + other + "\n", id},
		{"pod without a container", "0::/kubepods/pod" + uid + "\n", ""},
		{"docker, no pod", "0::/system.slice/docker-" + id + ".scope\n", ""},
		{"podman, no pod", "0::/machine.slice/libpod-" + id + ".scope\n", ""},
		{"host", "0::/user.slice/user-1000.slice/session-1.scope\n", ""},
		{"root", "0::/\n", ""},
		{"ID too long", "0::/kubepods/pod" + uid + "/" + id + "0\n", ""},
		{"UID too long", "0::/kubepods/pod" + uid + "0/" + id + "\n", ""},
		{"nothing", "", ""},
		{"no path", "0:\n", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := containerOf(test.file); got != test.want {
				t.Errorf("container %q, want %q", got, test.want)
			}
		})
	}
}

// FuzzCgroupContainer checks that an ID has 64 digits and is in the text after a pod.
func FuzzCgroupContainer(f *testing.F) {
	f.Add("0::/kubepods/pod" + uid + "/" + id + "\n")
	f.Add("0::/kubepods-pod" + systemUID + ".slice:cri-containerd:" + id)
	f.Add("1:a:b:c/pod" + staticUID + "-" + id + "\n\n")
	f.Fuzz(func(t *testing.T, file string) {
		got := containerOf(file)
		if got == "" {
			return
		}
		_, after, found := strings.Cut(file, "pod")
		if len(got) != 64 || strings.Trim(got, "0123456789abcdef") != "" || !found || !strings.Contains(after, got) {
			t.Errorf("container %q of %q", got, file)
		}
		if !isInPod(file) {
			t.Errorf("%q has a container and no pod", file)
		}
	})
}

func FuzzStart(f *testing.F) {
	f.Add("7 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20\n")
	f.Add("7 (")
	f.Fuzz(func(t *testing.T, stat string) {
		_, _ = parseStart(stat)
	})
}

func TestStart(t *testing.T) {
	const fields = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21\n"
	for _, test := range []struct {
		name, stat string
		want       ticks
	}{
		{"plain", "7 (sh)" + fields, 4711},
		{"blank and parenthesis in the name", "7 (a ) b) c)" + fields, 4711},
		{"cut off", "7 (sh) S 1 2 3", 0},
		{"no name", "7 sh" + fields, 0},
		{"not a number", strings.Replace("7 (sh)"+fields, "4711", "x", 1), 0},
		{"empty", "", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := parseStart(test.stat)
			if got != test.want || (err != nil) != (test.want == 0) {
				t.Errorf("start %d, %v; want %d", got, err, test.want)
			}
		})
	}
}
