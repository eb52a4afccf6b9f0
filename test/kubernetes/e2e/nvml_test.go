package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// driverSource is a libnvidia-ml.so.1 in C that checks rights as the driver does.
const driverSource = "../../../internal/nvml/driver/testdata/fake.c"

// modprobeSource is the tests' nvidia-modprobe.
const modprobeSource = "../../../internal/nvml/driver/testdata/modprobe.c"

// testNVML has the chart's container load a driver's library and use it with the chart's rights: for whole
// GPUs and partitions, with SYS_ADMIN and without.
func testNVML(t *testing.T, c *cluster) {
	whole, partitioned := c.installDriver(t, "whole", "-DWHOLE"), c.installDriver(t, "partitioned")
	t.Cleanup(func() { c.label(t, "") })
	const notRead = "partitions cannot all be read: the container lacks the right to monitor MIG, which requires the capability SYS_ADMIN and NVIDIA_MIG_MONITOR_DEVICES=all"
	wholeGPUs := map[string]served{"nvidia.com/gpu": {2, "nvidia0 nvidia1"}}
	both := map[string]served{"nvidia.com/gpu": {1, "nvidia0"}, "nvidia.com/mig-1g.5gb": {2, "nvidia1"}}
	// The second GPU's partitions exist when the library is loaded; their nodes have been made.
	for _, slot := range []int{0, 2} {
		for part, minor := range map[string]int{"": 17 + 2*slot, "ci0/": 18 + 2*slot} {
			c.write(t, fmt.Sprintf("driver-partitioned/proc/driver/nvidia/capabilities/gpu1/mig/gi%d/%saccess", 7+slot, part),
				fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor))
		}
	}
	c.makeNodes(t, partitioned)
	for _, node := range []struct {
		name, driver string
		values       []string
		privileged   bool
		serves       map[string]served
		said         string
	}{
		{"whole GPUs", whole, []string{"migStrategy=none"}, false, wholeGPUs, ""},
		{"whole GPUs, privileged container", whole, []string{"migStrategy=none", "driverAccess=privileged"}, true, wholeGPUs, ""},
		{"partitions", partitioned, []string{"migStrategy=mixed"}, true, both, ""},
		{"partitions, SYS_ADMIN forbidden", partitioned, []string{"migStrategy=mixed", "mig.monitor=false"}, false, both, notRead},
	} {
		t.Run(node.name, func(t *testing.T) {
			c.installOn(t, node.driver, append(node.values, "config.map.plain=version: v1", "config.default=plain")...)
			c.serves(t, node.serves)
			c.hasSysAdmin(t, node.privileged)
			c.awaitCondition(t, v1.ConditionTrue, "Serving", node.said)
			c.saysOfMIG(t, node.said)
		})
	}
	t.Run("partitions, nodes come later", func(t *testing.T) { c.nodesComeLater(t, partitioned) })
	t.Run("IMEX channel", func(t *testing.T) { c.grantsChannel(t, whole) })
	t.Run("layouts, SYS_ADMIN without a privileged container", func(t *testing.T) {
		began := time.Now()
		c.profiles(t, "subscribing", map[string]string{"balanced": layoutProfile("all-balanced")})
		c.installOn(t, whole, "migStrategy=mixed", "mig.manage=true", "config.name=subscribing", "config.default=balanced", "--proc=/driver-root/proc",
			"securityContext.runAsUser=0", "securityContext.capabilities.add={SYS_ADMIN,MKNOD,SYS_CHROOT}")
		c.awaitEvent(t, began, "MIGFailed", "GPU 0", "privileged", "mig.manage")
		c.awaitEvent(t, began, "MIGFailed", "GPU 1", "privileged", "mig.manage")
		c.serves(t, wholeGPUs)
		if made, _ := filepath.Glob(filepath.Join(whole, "proc/driver/nvidia/capabilities/gpu*")); len(made) > 0 {
			t.Errorf("it has tried, and left %q", made)
		}
	})
	t.Run("layouts, SYS_ADMIN forbidden", func(t *testing.T) {
		began := time.Now()
		c.profiles(t, "forbidden", map[string]string{"balanced": layoutProfile("all-balanced")}) // config.map would refuse it.
		c.installOn(t, whole, "migStrategy=mixed", "mig.monitor=false", "config.name=forbidden", "config.default=balanced")
		c.awaitEvent(t, began, "MIGFailed", "GPU 0", "privileged", "mig.manage")
		c.awaitEvent(t, began, "MIGFailed", "GPU 1", "privileged", "mig.manage")
		c.serves(t, wholeGPUs)
	})
	t.Run("layouts", func(t *testing.T) { c.makesLayouts(t, whole) })
	t.Run("driver upgrade", func(t *testing.T) { c.upgradesDriver(t, whole) })
}

// grantsChannel uses a profile that requires an IMEX channel, which the driver makes later.
func (c *cluster) grantsChannel(t *testing.T, driver string) {
	const profile = "version: v1\nimex:\n  required: true\n  channelIDs:\n  - 0"
	node := filepath.Join(driver, "dev/nvidia-caps-imex-channels/channel0")
	c.installOn(t, driver, "migStrategy=none", "config.map.fabric="+profile, "config.default=fabric")
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "2 devices, 0 healthy", "cannot be granted now: 2: there is no device "+node+", which imex.required asks for")
	c.awaitAllocatable(t, map[string]int64{})
	if err := os.Mkdir(filepath.Dir(node), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(242, 0))); err != nil {
		t.Fatal(err)
	}
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 2})
	c.run(t, pod("channel", "nvidia.com/gpu", 1))
	lines := c.printed(t, "channel")
	for _, want := range []string{"env NVIDIA_IMEX_CHANNELS=0", "device /dev/nvidia-caps-imex-channels/channel0"} {
		if !slices.Contains(lines, want) {
			t.Errorf("the pod printed %q, not %q", lines, want)
		}
	}
	c.remove(t, "channel")
}

func layoutProfile(layout string) string {
	return "version: v1\nmig:\n  manage: true\n  config: " + layout
}

// makesLayouts turns MIG on, makes partitions anew, and turns MIG off. In this node's PID namespace, which
// is not the machine's, the driver might hide processes. So nothing is changed until the plugin reads
// another /proc, according to which it is in the machine's.
func (c *cluster) makesLayouts(t *testing.T, driver string) {
	const small, off = "all-1g.5gb", "all-disabled"
	values := []string{"migStrategy=mixed", "mig.manage=true", "config.default=all-balanced"}
	for _, layout := range []string{"all-balanced", small, off} {
		values = append(values, "config.map."+strings.ReplaceAll(layout, ".", `\.`)+"="+layoutProfile(layout))
	}
	began := time.Now()
	c.installOn(t, driver, values...)
	c.hasSysAdmin(t, true)
	c.awaitEvent(t, began, "MIGBlocked", "in use: unknown", "hostPID")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 2})
	values = append(values, "--proc=/driver-root/proc")
	c.installOn(t, driver, values...)
	for _, each := range []struct {
		label  string
		serves map[string]served
	}{
		// A change of the MIG mode changes the minor numbers.
		{"", map[string]served{"nvidia.com/mig-1g.5gb": {4, "nvidia2 nvidia3"}, "nvidia.com/mig-2g.10gb": {2, "nvidia2 nvidia3"}, "nvidia.com/mig-3g.20gb": {2, "nvidia2 nvidia3"}}},
		{small, map[string]served{"nvidia.com/mig-1g.5gb": {14, "nvidia2 nvidia3"}}},
		{off, map[string]served{"nvidia.com/gpu": {2, "nvidia0 nvidia1"}}},
	} {
		c.label(t, each.label)
		c.serves(t, each.serves)
		c.awaitCondition(t, v1.ConditionTrue, "Serving")
	}

	// A CDI entry has the nodes' numbers, so the host needs no nodes.
	c.label(t, "")
	withCDI := append(values, "--cdi-dir=/var/run/cdi", "--cdi-disable-hooks=all")
	c.restartDriver(t, driver)
	c.installOn(t, driver, append(withCDI, "deviceListStrategy=cdi-cri")...)
	c.serves(t, map[string]served{"nvidia.com/mig-1g.5gb": {4, "nvidia2 nvidia3"}, "nvidia.com/mig-2g.10gb": {2, "nvidia2 nvidia3"}, "nvidia.com/mig-3g.20gb": {2, "nvidia2 nvidia3"}})
	if left, err := os.ReadDir(filepath.Join(driver, "dev/nvidia-caps")); len(left) > 0 {
		t.Errorf("with CDI %v were made, %v", left, err)
	}

	// The same for a claim that the scheduler makes for the resource's name.
	const claimed = "nvidia.com/mig-3g.20gb"
	c.restartDriver(t, driver)
	c.profiles(t, "claimed-partitions", map[string]string{"claimed": layoutProfile("all-balanced") + "\ndra:\n  resources: all"})
	c.installOn(t, driver, "migStrategy=mixed", "mig.manage=true", "config.name=claimed-partitions", "config.default=claimed",
		"deviceListStrategy=cdi-cri", "dra.enabled=true", "dra.resources={"+claimed+"}", "--proc=/driver-root/proc", "--cdi-dir=/var/run/cdi", "--cdi-disable-hooks=all")
	claims := numbered("claimed-partition", 2, claimed)
	c.runAll(t, claims)
	if gpus := c.givenNodes(t, claims, true); gpus != "nvidia2 nvidia3" {
		t.Errorf("by claims pods have the GPUs %q", gpus)
	}
	c.removeAll(t, claims)
}

// nodesComeLater has partitions without device nodes, in a container that may not create the nodes.
func (c *cluster) nodesComeLater(t *testing.T, driver string) {
	c.restartDriver(t, driver)
	c.installOn(t, driver, "migStrategy=mixed", "config.map.plain=version: v1", "config.default=plain")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 1})
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "there is no "+filepath.Join(driver, "dev/nvidia-caps/nvidia-cap17"), "mig.manage")
	c.makeNodes(t, driver)
	c.serves(t, map[string]served{"nvidia.com/gpu": {1, "nvidia0"}, "nvidia.com/mig-1g.5gb": {2, "nvidia1"}})
}

// installDriver makes a driver root with the library, NVIDIA's program that makes device nodes, and the
// device nodes that exist before any partition. It returns the root's path. As on a node, dev and proc are
// separate mounts.
func (c *cluster) installDriver(t *testing.T, name string, flags ...string) (root string) {
	t.Helper()
	return c.installVersion(t, name, "580.1", flags...)
}

// installVersion is installDriver for a driver of that version.
func (c *cluster) installVersion(t *testing.T, name, version string, flags ...string) (root string) {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		if os.Getenv("E2E") == "required" {
			t.Fatal(err)
		}
		t.Skip("no C compiler named cc, so the program cannot load a library either")
	}
	root = c.path("driver-" + name)
	for _, folder := range []string{"usr/lib64", "usr/bin", "dev", "proc"} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, folder := range []string{"dev", "proc"} {
		path := filepath.Join(root, folder)
		if err := unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			// A mount at a second path, such as the operator's, may have gone with it.
			if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
				t.Error(err)
			}
		})
	}
	for _, build := range [][]string{
		append([]string{"-shared", "-fPIC", "-DNEW", `-DVERSION="` + version + `"`, fmt.Sprintf("-DMAJOR=%d", capsMajor), `-DPROC="/driver-root/proc"`,
			"-o", filepath.Join(root, "usr/lib64/libnvidia-ml.so."+version), driverSource}, flags...),
		{"-static", "-o", filepath.Join(root, "usr/bin/nvidia-modprobe"), modprobeSource},
	} {
		if output, err := exec.Command(compiler, build...).CombinedOutput(); err != nil {
			t.Fatalf("cc: %v\n%s", err, output)
		}
	}
	c.write(t, filepath.Join("driver-"+name, "usr/lib64/libcuda.so."+version), "NVIDIA's")
	// With a loader, the root counts as one that programs can run in; the tests' program needs none.
	for _, loader := range []string{"lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"} {
		c.write(t, filepath.Join("driver-"+name, loader), "the loader")
	}
	for _, library := range []string{"libnvidia-ml.so", "libcuda.so"} {
		if err := os.Symlink(library+"."+version, filepath.Join(root, "usr/lib64", library+".1")); err != nil {
			t.Fatal(err)
		}
	}
	node := func(name string, major, minor uint32) {
		if err := unix.Mknod(filepath.Join(root, "dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); err != nil {
			t.Fatal(err)
		}
	}
	// The driver's own numbers; the module for unified memory may have any.
	node("nvidiactl", 195, 255)
	node("nvidia-uvm", 240, 0)
	for gpu := range uint32(4) { // The library's GPUs have other minors after a change of MIG mode.
		node(fmt.Sprintf("nvidia%d", gpu), 195, gpu)
	}
	c.write(t, filepath.Join("driver-"+name, "proc/devices"), fmt.Sprintf("Character devices:\n  1 mem\n195 nvidia\n%d nvidia-caps\n\nBlock devices:\n  8 sd\n", capsMajor))
	for minor, right := range []string{"config", "monitor"} { // These exist from the driver's start.
		c.write(t, filepath.Join("driver-"+name, "proc/driver/nvidia/capabilities/mig", right), fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 256\nDeviceFileModify: 1\n", minor+1))
	}
	// The driver also lists instances that do not exist.
	minors := "config 1\nmonitor 2\n"
	for next, gpu := 3, 0; gpu < 4; gpu++ {
		for instance := 7; instance < 14; instance++ {
			minors += fmt.Sprintf("gpu%d/gi%d/access %d\ngpu%[1]d/gi%[2]d/ci0/access %[4]d\n", gpu, instance, next, next+1)
			next += 2
		}
	}
	c.write(t, filepath.Join("driver-"+name, "proc/driver/nvidia-caps/mig-minors"), minors)
	c.write(t, filepath.Join("driver-"+name, "proc/self/ns/README"), "")
	if err := os.Symlink("pid:[4026531836]", filepath.Join(root, "proc/self/ns/pid")); err != nil { // The machine's.
		t.Fatal(err)
	}
	return root
}

// capsMajor is the major number of capability nodes; a driver gets it when it is loaded.
const capsMajor = 241

// restartDriver removes what programs have left of the driver: partitions end with the program that has
// loaded the tests' library, and nodes with the machine.
func (c *cluster) restartDriver(t *testing.T, driver string) {
	t.Helper()
	c.uninstall(t)
	left, err := filepath.Glob(filepath.Join(driver, "proc/driver/nvidia/capabilities/gpu*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range append(left, filepath.Join(driver, "dev/nvidia-caps")) {
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
	}
}

// makeNodes has NVIDIA's program make the nodes of existing partitions, as mig-manager does.
func (c *cluster) makeNodes(t *testing.T, driver string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(driver, "proc/driver/nvidia/capabilities/gpu*/mig/gi*/access"))
	within, errs := filepath.Glob(filepath.Join(driver, "proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*/access"))
	if err != nil || errs != nil || len(files) == 0 {
		t.Fatalf("there are %q, %v, %v", files, err, errs)
	}
	for _, file := range append(files, within...) {
		command := exec.Command("/usr/bin/nvidia-modprobe", "-f", strings.TrimPrefix(file, driver))
		command.SysProcAttr = &syscall.SysProcAttr{Chroot: driver}
		command.Dir = "/"
		if output, err := command.CombinedOutput(); err != nil {
			t.Fatalf("nvidia-modprobe: %v\n%s", err, output)
		}
	}
}

// installOn installs the chart on a node with the driver.
func (c *cluster) installOn(t *testing.T, driver string, values ...string) {
	t.Helper()
	c.install(t, append(values, "node=nvml", "compatWithCPUManager=true",
		"nvidiaDriverRoot="+driver, "nvidiaDevRoot="+driver)...)
}

// hasSysAdmin checks whether the plugin's process has the capability.
func (c *cluster) hasSysAdmin(t *testing.T, want bool) {
	t.Helper()
	for _, process := range processes(t, c.plugin(t)) {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", process))
		if err != nil {
			t.Fatal(err)
		}
		_, line, _ := strings.Cut(string(status), "CapEff:")
		line, _, _ = strings.Cut(line, "\n")
		effective, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if got := effective>>unix.CAP_SYS_ADMIN&1 == 1; got != want {
			t.Errorf("the plugin has SYS_ADMIN: %t, want %t", got, want)
		}
	}
}

// saysOfMIG checks that the plugin's log and `virgate status` name the missing right.
func (c *cluster) saysOfMIG(t *testing.T, want string) {
	t.Helper()
	plugin := c.plugin(t)
	log, err := c.client.CoreV1().Pods(namespace).GetLogs(plugin.Name, &v1.PodLogOptions{}).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	status := ""
	c.await(t, "virgate status", func() error {
		if status, err = c.exec(t, plugin, "virgate", "status"); !strings.Contains(status, "nvidia.com/") {
			return fmt.Errorf("it says %q, %w", status, err)
		}
		return nil
	})
	for where, text := range map[string]string{"log": string(log), "status": status} {
		if got := strings.Contains(text, "SYS_ADMIN"); got != (want != "") {
			t.Errorf("the %s names SYS_ADMIN: %t, want %t:\n%s", where, got, want != "", text)
		}
	}
}

// served is the number of a resource's devices on the node, on the GPUs of these device nodes.
type served struct {
	devices int64
	gpus    string
}

// serves waits until the node offers exactly these resources, and has a pod use each device.
func (c *cluster) serves(t *testing.T, want map[string]served) {
	t.Helper()
	counts := map[string]int64{}
	for resource, each := range want {
		counts[resource] = each.devices
	}
	c.awaitAllocatable(t, counts)
	for resource, each := range want {
		pods := numbered("nodes-"+strings.NewReplacer("nvidia.com/", "", ".", "-").Replace(resource), int(each.devices), resource)
		c.runAll(t, pods)
		if gpus := c.givenNodes(t, pods, strings.Contains(resource, "mig-")); gpus != each.gpus {
			t.Errorf("pods with %s have the GPUs %q, want %q", resource, gpus, each.gpus)
		}
		c.removeAll(t, pods)
	}
}

// givenNodes checks that each pod was given its own device nodes, and returns the GPUs' ones.
func (c *cluster) givenNodes(t *testing.T, pods []*v1.Pod, partitions bool) string {
	t.Helper()
	want := map[string]int{"GPU": 1, "nvidiactl": 1, "nvidia-uvm": 1}
	if partitions {
		want["capability"] = 2
	}
	given, gpus := map[string]string{}, map[string]bool{}
	for _, pod := range pods {
		var own []string
		kinds := map[string]int{}
		for _, line := range c.printed(t, pod.Name) {
			node, ok := strings.CutPrefix(line, "device /dev/")
			switch {
			case !ok:
				continue
			case strings.HasPrefix(node, "nvidia-caps/"):
				kinds["capability"]++
				own = append(own, node)
			case strings.Trim(strings.TrimPrefix(node, "nvidia"), "0123456789") == "":
				kinds["GPU"]++
				own = append(own, node)
				gpus[node] = true
			default:
				kinds[node]++
			}
		}
		if !maps.Equal(kinds, want) {
			t.Errorf("pod %s has device nodes %v, want %v: %q", pod.Name, kinds, want, own)
		}
		slices.Sort(own)
		nodes := strings.Join(own, " ")
		if other, twice := given[nodes]; twice {
			t.Errorf("pods %s and %s have the same device nodes: %s", other, pod.Name, nodes)
		}
		given[nodes] = pod.Name
	}
	return strings.Join(slices.Sorted(maps.Keys(gpus)), " ")
}
