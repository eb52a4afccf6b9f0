package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// mpsRoot is the chart's default.
const mpsRoot = "/run/nvidia/mps"

// testMPS shares two GPUs by MPS, with a stand-in for NVIDIA's daemon in the driver root. It checks what
// pods see, switches to and from the other sharing modes while pods hold GPUs, and tests a daemon that dies
// and does not come back.
func testMPS(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	byMPS := func(several bool) string {
		return fmt.Sprintf("version: v1\nsharing: {mps: {failRequestsGreaterThanOne: %t, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n", !several)
	}
	c.profiles(t, "mps", map[string]string{"slices": replicas("4"), "mps": byMPS(false), "several": byMPS(true), "whole": "version: v1\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "slices")
	t.Cleanup(func() { // After the chart and its daemons are gone.
		c.uninstall(t)
		removeMPSRoot(t)
	})
	c.install(t, "node=sim:t4x2", "config.name=mps", "mps.enabled=true", "nvidiaDriverRoot="+c.mpsDriver(t), "metrics.perContainer=true", "--sample=500ms")
	switches := func(profile string, devices int64) {
		t.Helper()
		began := time.Now()
		c.label(t, profile)
		c.awaitAllocatable(t, map[string]int64{shared: devices})
		c.report.note("MPS: to "+profile+", label to allocatable", took(began))
	}

	// The GPU whose pod has a time slice waits for that pod.
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.run(t, pod("mps-slice", shared, 1))
	slice := c.podStates(t, []string{"mps-slice"})
	switches("mps", 4)
	// The driver is older than R580: clients share memory by files, which pods can list.
	logs, err := filepath.Glob(mpsRoot + "/GPU-*/log")
	if err != nil || len(logs) == 0 {
		t.Fatalf("no daemon has a log directory: %q, %v", logs, err)
	}
	for _, dir := range logs {
		if err := os.WriteFile(filepath.Join(dir, "fault"), []byte("older"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c.run(t, pod("mps-client", shared, 1))
	client := c.podStates(t, []string{"mps-client"})
	gpu := client["mps-client"].GPU
	if gpu == slice["mps-slice"].GPU {
		t.Errorf("%s is shared by time slices and by MPS", gpu)
	}
	c.sharesByMPS(t, "mps-client", gpu, 1, "at most 25")
	c.seesNoOtherUnit(t, "mps-client", gpu)
	c.run(t, pod("mps-none", "cpu", 1))
	always := c.attack(t, "mps-none")
	for _, reached := range c.attack(t, "mps-slice") {
		if !slices.Contains(always, reached) {
			t.Errorf("a hostile container with a time slice %s, one without a GPU does not", reached)
		}
	}
	for _, reached := range c.attack(t, "mps-client") {
		own := reached == "reaches /mps" || strings.Contains(reached, "/mps/"+gpu) || strings.Contains(reached, "/dev/shm/")
		if !own && !slices.Contains(always, reached) {
			t.Errorf("a hostile client of MPS %s, a container without a GPU does not", reached)
		}
	}
	c.remove(t, "mps-none")
	c.undisturbed(t, slice)
	own := pod("mps-own-volume", shared, 1)
	own.Spec.Volumes = append(own.Spec.Volumes, v1.Volume{Name: "shm", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}}})
	own.Spec.Containers[0].VolumeMounts = append(own.Spec.Containers[0].VolumeMounts, v1.VolumeMount{Name: "shm", MountPath: "/dev/shm"})
	c.run(t, own)
	if lines := c.printed(t, own.Name); !slices.ContainsFunc(lines, func(line string) bool {
		return strings.HasPrefix(line, "mps: MPS client failed to open the server's memory")
	}) {
		t.Errorf("a pod with a volume at /dev/shm printed %q", lines)
	}
	c.remove(t, own.Name)
	began := time.Now()
	c.remove(t, "mps-slice")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.report.note("MPS: the last time slice ends, to allocatable", took(began))

	// If a daemon dies, only its own GPU's devices are withdrawn.
	other := slices.IndexFunc(c.mpsUnits(t), func(unit string) bool { return unit != gpu })
	unit := c.mpsUnits(t)[other]
	fault := filepath.Join(mpsRoot, unit, "log", "fault")
	if err := os.WriteFile(fault, []byte("refuse"), 0o644); err != nil {
		t.Fatal(err)
	}
	c.killDaemon(t, unit)
	c.awaitAllocatable(t, map[string]int64{shared: 4})
	c.awaitSeries(t, c.plugin(t), "virgate_unit_devices", "4", `state="unhealthy"`, `unit_uuid="`+unit+`"`)
	c.awaitSeries(t, c.plugin(t), "virgate_unit_devices", "0", `state="unhealthy"`, `unit_uuid="`+gpu+`"`)
	if err := os.Remove(fault); err != nil {
		t.Fatal(err)
	}
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.undisturbed(t, client)

	// A pod with two shares gets twice the limits of one.
	switches("several", 8)
	c.awaitProfile(t, "several", "applied") // The number of devices is the same as before, so it proves nothing.
	c.run(t, pod("mps-twice", shared, 2))
	twice := c.printedVariable(t, "mps-twice", "NVIDIA_VISIBLE_DEVICES")
	c.sharesByMPS(t, "mps-twice", twice, 2, "at most")
	c.remove(t, "mps-twice")

	switches("whole", 1)
	c.undisturbed(t, client)
	c.remove(t, "mps-client")
	c.awaitAllocatable(t, map[string]int64{shared: 2})
	c.await(t, "the daemons to end", func() error {
		if left := daemons(t, ""); len(left) > 0 {
			return fmt.Errorf("there are %v", left)
		}
		return nil
	})
	switches("mps", 8)
	switches("slices", 8)
}

// mpsDriver makes a driver root with the stand-in for NVIDIA's daemon, and returns its path.
func (c *cluster) mpsDriver(t *testing.T) string {
	t.Helper()
	root := c.path("driver-mps")
	c.installMPSControl(t, root)
	return root
}

// installMPSControl adds the stand-in for NVIDIA's daemon to the driver root.
func (c *cluster) installMPSControl(t *testing.T, root string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(c.path("mpscontrol"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "usr/bin/nvidia-cuda-mps-control"), program, 0o755); err != nil {
		t.Fatal(err)
	}
}

// removeMPSRoot removes the leftovers of daemons that have ended.
func removeMPSRoot(t *testing.T) {
	t.Helper()
	mounted, err := filepath.Glob(mpsRoot + "/*/memory")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(mounted, mpsRoot+"/shm", mpsRoot+"/.shm") {
		for unix.Unmount(path, unix.MNT_DETACH) == nil {
		}
	}
	if err := os.RemoveAll(mpsRoot); err != nil {
		t.Error(err)
	}
}

// mpsUnits waits until each of the two GPUs has a daemon that listens, and returns the GPUs.
func (c *cluster) mpsUnits(t *testing.T) (units []string) {
	t.Helper()
	c.await(t, "two daemons", func() error {
		found, err := filepath.Glob(mpsRoot + "/GPU-*/pipe/control")
		if err != nil || len(found) != 2 {
			return fmt.Errorf("daemons listen at %q, %w", found, err)
		}
		units = nil
		for _, path := range found {
			units = append(units, filepath.Base(filepath.Dir(filepath.Dir(path))))
		}
		return nil
	})
	return units
}

// sharesByMPS checks that the pod, a client of MPS, sees the limits of this number of four shares.
func (c *cluster) sharesByMPS(t *testing.T, name, gpu string, shares int, ceiling string) {
	t.Helper()
	lines := c.printed(t, name)
	for _, want := range []string{
		"env CUDA_MPS_PIPE_DIRECTORY=/mps/" + gpu + "/pipe",
		fmt.Sprintf("env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", 25*shares),
		fmt.Sprintf("env CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=%dM", shares*15360/4),
		"mps: " + ceiling,
	} {
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, want) }) {
			t.Errorf("pod %s printed %q, nothing with %q", name, lines, want)
		}
	}
	if !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, "env NVIDIA_VISIBLE_DEVICES=GPU-") }) {
		t.Errorf("pod %s has no GPU: %q", name, lines)
	}
}

// seesNoOtherUnit checks that the pod, a client of the unit, sees no memory of other units' clients. A
// stand-in for an older daemon names the files by user and server, and writes the unit into them.
func (c *cluster) seesNoOtherUnit(t *testing.T, name, unit string) {
	t.Helper()
	for _, line := range c.printed(t, name) {
		if file, is := strings.CutPrefix(line, "shm "); is && !strings.HasSuffix(file, " of "+unit) {
			t.Errorf("pod %s of %s sees %q", name, unit, line)
		}
	}
}

// attack has the pod's container try what a hostile tenant would, and returns what it could reach.
func (c *cluster) attack(t *testing.T, name string) (reached []string) {
	t.Helper()
	c.printed(t, name) // It handles the signal from now on.
	pod, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range processes(t, pod) {
		if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	c.await(t, "the attack by pod "+name, func() error {
		lines := c.printed(t, name)
		if !slices.Contains(lines, "attacked") {
			return errNotYet
		}
		reached = slices.DeleteFunc(lines, func(line string) bool { return !strings.HasPrefix(line, "reaches ") })
		return nil
	})
	return reached
}

// killDaemon kills the control daemon of the unit.
func (c *cluster) killDaemon(t *testing.T, unit string) {
	t.Helper()
	found := daemons(t, unit)
	if len(found) == 0 {
		t.Fatalf("no daemon of %s", unit)
	}
	for _, pid := range found {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
}

// daemons are the processes of NVIDIA's programs for the unit; "" for any unit.
func daemons(t *testing.T, unit string) (pids []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		environment, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "environ"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		executable, _ := os.Readlink(filepath.Join("/proc", entry.Name(), "exe"))
		if filepath.Base(executable) == "nvidia-cuda-mps-control" && bytes.Contains(environment, []byte("CUDA_MPS_PIPE_DIRECTORY=/mps/"+unit)) {
			pids = append(pids, pid)
		}
	}
	return pids
}
