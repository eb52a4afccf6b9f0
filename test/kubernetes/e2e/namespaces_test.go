package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// toolsFolder and workFolder tell the processes within where things are.
const (
	toolsFolder = "VIRGATE_E2E_TOOLS"
	workFolder  = "VIRGATE_E2E_WORK"
)

// hostName and the addresses are the node's, in a network of its own. Pods reach
// the API server at the service's address, which is this machine's too: there is
// no kube-proxy.
const (
	hostName       = "node-1"
	nodeAddress    = "10.77.0.1"
	serviceAddress = "10.96.0.1"
)

// outside builds the tools and runs the tests again inside namespaces; where that
// cannot be, they run here, and are skipped.
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

// unable is why this machine cannot play a node; empty if it can.
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
	tools, err := build(work)
	if err != nil {
		return 0, err
	}
	restore, err := kernelSettings()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, restore(), removeGroups(filepath.Base(work))) }()

	// The kernel sends Pdeathsig when the thread ends that started the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	child := again(asFirst)
	child.Env = append(child.Env, toolsFolder+"="+tools, workFolder+"="+work)
	child.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := child.Start(); err != nil {
		return 0, fmt.Errorf("start namespaces: %w", err)
	}
	// Whoever ends the test ends the node with it, and the folders go as well.
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ended
		_ = child.Process.Kill()
	}()
	return exitCode(child.Wait())
}

// first prepares the namespaces, starts the tests and takes in whoever loses its
// parent, as process 1 must.
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

// again is this program with these arguments in another role.
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
	// Containers that want the host's later mounts can have them from here on.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(hostName)); err != nil {
		return err
	}
	return network()
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
