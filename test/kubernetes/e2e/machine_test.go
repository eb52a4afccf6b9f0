package e2e

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/repeat"
)

// The tools that are built from their modules, at the newest version that was tried here.
var modules = []string{
	"github.com/containerd/containerd/v2/cmd/containerd@v2.3.7",
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2@v2.3.7",
	"github.com/containerd/containerd/v2/cmd/ctr@v2.3.7",
	"github.com/containernetworking/plugins/plugins/main/bridge@v1.9.1",
	"github.com/containernetworking/plugins/plugins/main/loopback@v1.9.1",
	"github.com/containernetworking/plugins/plugins/ipam/host-local@v1.9.1",
	"helm.sh/helm/v3/cmd/helm@v3.21.4",
	"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-container-runtime@v1.20.1",
}

// olderToolkits are versions of NVIDIA's runtime that differ from the one above in how they treat a
// container that requests the rights of MIG. They are built with LONG=1.
var olderToolkits = []string{"v1.17.8", "v1.18.0"}

// build builds the program, the images and the pods' program into the folder, and links
// the tools beside them. The tools stay in the cache for the next clone.
func build(folder, cache string) error {
	root, err := filepath.Abs("../../..")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	tools, err := buildTools(cache)
	if err != nil {
		return err
	}
	link := filepath.Join(folder, "tools")
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(tools, link); err != nil {
		return err
	}
	static := []string{"CGO_ENABLED=0"} // Their containers have no libraries.
	image := filepath.Join(root, "cmd/image")
	steps := []step{
		{root, nil, []string{"make", "--no-print-directory", "build", "OUTPUT=" + filepath.Join(folder, "virgate")}},
		{root, nil, []string{"make", "--no-print-directory", "kubectl-virgate", "PLUGIN=" + filepath.Join(folder, "kubectl-virgate")}},
		{image, static, []string{"go", "build", "-ldflags=-s -w", "-o", filepath.Join(folder, "shell"), "./shell"}},
		{".", nil, []string{"go", "build", "-ldflags=-s -w", "-o", filepath.Join(folder, "kubectl"), "./kubectl"}}, // This test needs most of its packages, too.
		{".", static, []string{"go", "build", "-ldflags=-s -w", "-o", filepath.Join(folder, "workload"), "./workload"}},
		{root, static, []string{"go", "build", "-ldflags=-s -w", "-o", filepath.Join(folder, "mpscontrol"), "./test/mpscontrol"}},
		{image, nil, []string{"go", "build", "-ldflags=-s -w", "-o", filepath.Join(folder, "image"), "."}},
	}
	for _, name := range images() {
		command := []string{filepath.Join(folder, "image"), "-binary", filepath.Join(folder, name.program),
			"-output", filepath.Join(folder, name.file), "-reference", name.reference, "-version", "e2e"}
		if name.program == "virgate" {
			command = append(command, "-shell", filepath.Join(folder, "shell"))
		}
		steps = append(steps, step{image, nil, command})
	}
	for _, step := range steps {
		if err := step.run(); err != nil {
			return err
		}
	}
	return nil
}

// buildTools installs the tools into a folder of the cache that is named after their
// versions, and returns it.
func buildTools(cache string) (folder string, err error) {
	versions := sha256.Sum256([]byte(runtime.Version() + strings.Join(modules, " ")))
	folder = filepath.Join(cache, fmt.Sprintf("e2e-%x", versions[:6]))
	if _, err := os.Stat(folder); err == nil {
		return folder, buildOlderToolkits(folder)
	}
	// The folder is renamed at the end, so that an interrupted build leaves no half of the tools.
	unfinished := folder + ".new"
	for _, module := range modules {
		if err := (step{".", []string{"GOBIN=" + unfinished}, []string{"go", "install", module}}).run(); err != nil {
			return "", err
		}
	}
	if err := os.Rename(unfinished, folder); err != nil {
		return "", err
	}
	return folder, buildOlderToolkits(folder)
}

// buildOlderToolkits installs each version into its own folder, in make nightly.
func buildOlderToolkits(folder string) error {
	for _, version := range olderToolkits {
		in := filepath.Join(folder, version)
		if _, err := os.Stat(filepath.Join(in, runtimeProgram)); err == nil || !repeat.All() {
			continue
		}
		module := "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-container-runtime@" + version
		if err := (step{".", []string{"GOBIN=" + in}, []string{"go", "install", module}}).run(); err != nil {
			return err
		}
	}
	return nil
}

// step is a command that build runs.
type step struct {
	folder      string
	environment []string
	command     []string
}

func (s step) run() error {
	line := strings.Join(s.command, " ")
	fmt.Fprintln(os.Stderr, "e2e:", line)
	command := exec.Command(s.command[0], s.command[1:]...)
	command.Dir = s.folder
	command.Env = append(os.Environ(), s.environment...)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", line, err, output)
	}
	return nil
}

// image is an archive that the test imports into the node's containerd: there is no registry.
type image struct{ program, file, reference string }

// The images of the tests; the program's image also serves as a second version of itself.
const (
	workloadImage = "virgate.test/workload:1"
	virgateImage  = "virgate:" // as make image-tar names it
	version       = "0.1.0"    // the chart's appVersion
	nextVersion   = "0.1.1-e2e"
)

func images() []image {
	return []image{
		{"workload", "workload.tar", workloadImage},
		{"virgate", "virgate.tar", virgateImage + version},
		{"virgate", "virgate-next.tar", virgateImage + nextVersion},
	}
}

// removeAll removes the folder; its mounts went with their namespace.
func removeAll(folder string) error {
	if os.Getenv("E2E_KEEP") != "" {
		fmt.Fprintln(os.Stderr, "e2e: left in place:", folder)
		return nil
	}
	return os.RemoveAll(folder)
}

// toolsFolder and workFolder tell the inner processes where the folders are.
const (
	toolsFolder = "VIRGATE_E2E_TOOLS"
	workFolder  = "VIRGATE_E2E_WORK"
)

// hostName and the addresses belong to the node, in its own network. Pods reach the API server at the
// service's address, which is also this machine's: there is no kube-proxy.
const (
	hostName       = "node-1"
	nodeAddress    = "10.77.0.1"
	serviceAddress = "10.96.0.1"
)

// outside builds the tools and runs the tests again inside namespaces. Where that is impossible, the tests
// run here and are skipped.
func outside(m *testing.M) int {
	if reason := unable(); reason != "" {
		if os.Getenv("E2E") == "required" {
			fmt.Fprintln(os.Stderr, "e2e:", reason)
			return 1
		}
		return m.Run()
	}
	code, err := isolated()
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	return code
}

// unable returns the reason why this machine cannot run a node; empty if it can.
func unable() string {
	if os.Geteuid() != 0 {
		return "needs root, for namespaces and containers"
	}
	if _, err := exec.LookPath("runc"); err != nil {
		return "needs runc: install the package runc"
	}
	return ""
}

// isolated runs the tests inside the namespaces and returns their exit code.
func isolated() (code int, err error) {
	work, err := os.MkdirTemp("", "virgate-e2e-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, removeAll(work)) }()
	built := os.Getenv("E2E_BUILT")
	if built == "" {
		return 0, errors.New("run by make e2e, which builds what the tests need")
	}
	if err := linkAll(built, work); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, removeGroups(filepath.Base(work))) }()

	// The kernel sends Pdeathsig when the thread that started the child ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	child := again(asFirst)
	// The control plane has enough memory but little time, so it collects garbage less often.
	child.Env = append(child.Env, "GOGC=400", toolsFolder+"="+filepath.Join(built, "tools"), workFolder+"="+work)
	child.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := child.Start(); err != nil {
		return 0, fmt.Errorf("start namespaces: %w", err)
	}
	// A signal that ends the test ends the node with it, and removes the folders.
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ended
		_ = child.Process.Kill()
	}()
	return exitCode(child.Wait())
}

// linkAll links the files of one folder into another.
func linkAll(from, to string) error {
	files, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := os.Symlink(filepath.Join(from, file.Name()), filepath.Join(to, file.Name())); err != nil {
			return err
		}
	}
	return nil
}

// first prepares the namespaces, starts the tests and adopts orphaned processes, as process 1 must.
func first() int {
	if err := prepare(os.Getenv(workFolder)); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: prepare namespaces:", err)
		return 1
	}
	child := again(asTest)
	if err := child.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			fmt.Fprintln(os.Stderr, "e2e: wait for the tests:", err)
			return 1
		case pid == child.Process.Pid && status.Signaled():
			return 128 + int(status.Signal())
		case pid == child.Process.Pid:
			return status.ExitStatus()
		}
	}
}

// again is a command that runs this program with the same arguments in another role.
func again(name string) *exec.Cmd {
	child := exec.Command("/proc/self/exe", os.Args[1:]...)
	child.Env = append(os.Environ(), role+"="+name)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	return child
}

func exitCode(err error) (int, error) {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

// prepare gives the node its own folders, name and network.
func prepare(work string) error {
	if err := addGroups(filepath.Base(work)); err != nil {
		return fmt.Errorf("add control groups: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("part from the machine's mounts: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := coverKernelSettings(filepath.Join(work, "sysctl")); err != nil {
		return err
	}
	for _, folder := range []string{"/var/lib", "/var/log", "/run"} {
		own := filepath.Join(work, "node", folder)
		if err := os.MkdirAll(own, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(own, folder, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("replace %s: %w", folder, err)
		}
	}
	hosts := filepath.Join(work, "hosts")
	if err := os.WriteFile(hosts, []byte("127.0.0.1 localhost\n"+nodeAddress+" "+hostName+"\n"), 0o644); err != nil {
		return err
	}
	if err := unix.Mount(hosts, "/etc/hosts", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("replace /etc/hosts: %w", err)
	}
	// From here on, containers can have the host's later mounts.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(hostName)); err != nil {
		return err
	}
	return network()
}

// coverKernelSettings covers the kernel settings that a kubelet changes with files: the settings belong to
// the whole machine.
func coverKernelSettings(folder string) error {
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"} {
		path := filepath.Join("/proc/sys", name)
		value, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		file := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, value, 0o644); err != nil {
			return err
		}
		if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("cover %s: %w", path, err)
		}
	}
	return nil
}

func network() error {
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	node := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "node0"}}
	if err := netlink.LinkAdd(node); err != nil {
		return fmt.Errorf("add network device: %w", err)
	}
	for _, own := range []struct {
		link    netlink.Link
		address string
	}{{loopback, serviceAddress}, {node, nodeAddress}} {
		address := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(own.address), Mask: net.CIDRMask(32, 32)}}
		if err := netlink.AddrAdd(own.link, address); err != nil {
			return fmt.Errorf("give %s to %s: %w", own.address, own.link.Attrs().Name, err)
		}
		if err := netlink.LinkSetUp(own.link); err != nil {
			return err
		}
	}
	// A default route, so that the kubelet finds the node's address.
	return netlink.RouteAdd(&netlink.Route{LinkIndex: node.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}})
}

const groupRoot = "/sys/fs/cgroup"

// hierarchies are the roots of the machine's control groups: a single one in version 2, one for each
// controller in version 1.
func hierarchies() ([]string, error) {
	if _, err := os.Stat(filepath.Join(groupRoot, "cgroup.controllers")); err == nil {
		return []string{groupRoot}, nil
	}
	return filepath.Glob(filepath.Join(groupRoot, "*"))
}

// addGroups makes the node's own control groups of that name. The kubelet makes all others below them.
func addGroups(name string) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		group := filepath.Join(root, name)
		if err := os.Mkdir(group, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		// A cpuset group of version 1 is useless without these.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				continue
			}
			if err := os.WriteFile(filepath.Join(group, file), value, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeGroups removes these groups and those that the kubelet and containerd made.
func removeGroups(name string) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	var all error
	for _, root := range roots {
		var groups []string
		err := filepath.WalkDir(filepath.Join(root, name), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				groups = append(groups, path)
			}
			return err
		})
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		all = errors.Join(all, err)
		for i := len(groups) - 1; i >= 0; i-- {
			all = errors.Join(all, unix.Rmdir(groups[i]))
		}
	}
	return all
}

// runtimeSocket is containerd's socket, for the kubelet.
const runtimeSocket = "/run/containerd/containerd.sock"

// startNode starts containerd with the images, and the kubelet.
func (c *cluster) startNode(t *testing.T) {
	t.Helper()
	c.write(t, "containerd.toml", `version = 3
root = '`+c.path("containerd")+`'
state = '/run/containerd'
[grpc]
address = '`+runtimeSocket+`'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '`+workloadImage+`'
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['`+c.tools+`']
conf_dir = '`+c.path("cni")+`'
`+c.nvidiaRuntime(t))
	c.write(t, "cni/10-pods.conflist", `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true,
"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.78.0.0/20"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "/run/cni"}}]}`)
	c.containerd = c.component(t, "containerd", func() *exec.Cmd {
		command := exec.Command(filepath.Join(c.tools, "containerd"), "--config", c.path("containerd.toml"))
		command.Env = append(os.Environ(), "PATH="+c.tools+":"+os.Getenv("PATH"))
		return command
	})
	c.await(t, "containerd", func() error {
		return exec.Command(filepath.Join(c.tools, "ctr"), "--address", runtimeSocket, "version").Run()
	})
	for _, image := range images() {
		importing := exec.Command(filepath.Join(c.tools, "ctr"), "--address", runtimeSocket, "--namespace", "k8s.io", "images", "import", c.path(image.file))
		if output, err := importing.CombinedOutput(); err != nil {
			t.Fatalf("import %s: %v\n%s", image.file, err, output)
		}
	}
	c.write(t, "kubelet.yaml", `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://`+runtimeSocket+`
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /`+filepath.Base(c.work)+`
enforceNodeAllocatable: []
failSwapOn: false
resolvConf: ""
volumePluginDir: /var/lib/kubelet/volume-plugins
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
nodeStatusUpdateFrequency: 1s
nodeStatusReportFrequency: 5m
syncFrequency: 10s
maxPods: 500
podsPerCore: 0
kubeAPIQPS: 200
kubeAPIBurst: 400
eventRecordQPS: 0
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
evictionHard: {memory.available: 50Mi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
`)
	c.kubelet = c.kubernetes(t, "kubelet",
		"--config="+c.path("kubelet.yaml"), "--kubeconfig="+c.path("node.conf"), "--hostname-override="+hostName,
		"--node-ip="+nodeAddress, "--cert-dir="+c.path("kubelet"),
		"--vmodule=client=2,kubelet=2", // Its log shows when a plugin's devices and a pod arrive; handovers reads it.
		// The chart's affinity requires this label; node feature discovery sets it elsewhere.
		"--node-labels=nvidia.com/gpu.present=true",
	)
	c.await(t, "the node to be ready", func() error {
		node, err := c.client.CoreV1().Nodes().Get(t.Context(), hostName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == v1.NodeReady && condition.Status == v1.ConditionTrue {
				return nil
			}
		}
		return errNotYet
	})
}

// removePods ends all pods: their mounts must not outlive the kubelet.
func (c *cluster) removePods(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	namespaces, err := c.client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Log(err)
		return
	}
	now := int64(0)
	for _, namespace := range namespaces.Items {
		_ = c.client.CoreV1().Pods(namespace.Name).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
	}
}
