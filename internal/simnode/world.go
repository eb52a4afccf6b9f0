package simnode

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/virgate/virgate/internal/nvml"
)

// SetWorld puts the node, which nobody uses yet, where calls are answered otherwise, by a
// comma-separated list; docs/internals/nvml.md has the calls:
//
//	unprivileged   this process may neither change nor monitor MIG
//	monitor-only   this process may monitor MIG, and not change it
//	passthrough    a virtual machine has the GPUs: before Hopper, MIG mode changes with a Reboot
//	client=NAME    another program has the GPUs open, and is in no list of processes
//	own-pids       this process does not see the processes of other PID namespaces
//	moving-minors  a change of MIG mode gives the GPU another minor number
//	late-profiles  the driver lists MIG profiles only while MIG mode is on
//	no-subscription  this process has SYS_ADMIN in a container that is not privileged: it may open no
//	               GPU instance's node, and so make and destroy no compute instance
//	old-driver     the driver has no recovery action and no margin of temperature, and no events of the former
//	fabric         GPUs from Hopper on are in a fabric of NVLinks, which they have to join: see SetFabric
//	confidential   the machine does confidential computing, and its ready state is not set: see SetReady
//	persistence    the GPUs are in persistence mode, and no daemon that nvidia-smi reaches lets go of one
//	unlisted=N     the driver does not list the last N of the GPUs that it is bound to
//	no-nodes       the container has the driver's libraries and none of its device nodes
//	other-module=VERSION  the loaded kernel module is of that version, and the libraries are not: the
//	               driver cannot be opened
func (n *Node) SetWorld(list string) error {
	names, unlisted := strings.Split(list, ","), 0
	for _, name := range names {
		kind, value, _ := strings.Cut(name, "=")
		known := slices.Contains([]string{
			"unprivileged", "monitor-only", "passthrough", "own-pids", "moving-minors", "late-profiles",
			"no-subscription", oldDriver, "fabric", "confidential", "persistence", "no-nodes",
		}, name)
		switch {
		case list == "" || known || (kind == "client" || kind == "other-module") && value != "":
		case kind == "unlisted":
			count, err := strconv.ParseUint(value, 10, 8)
			if err != nil {
				return fmt.Errorf("world %q: %q is no number of GPUs", name, value)
			}
			unlisted = int(count)
		default:
			return fmt.Errorf(
				"no world %q: there are unprivileged, monitor-only, passthrough, client=NAME, own-pids, "+
					"moving-minors, late-profiles, no-subscription, old-driver, fabric, confidential, persistence, "+
					"unlisted=N, no-nodes, other-module=VERSION", name)
		}
	}
	n.worlds, n.unlisted = names, unlisted
	for _, g := range n.gpus {
		if n.is("fabric") && g.Architecture >= nvml.Hopper {
			g.fabric = nvml.FabricInfo{State: nvml.FabricInProgress}
		}
		g.persistence = n.is("persistence")
	}
	return nil
}

const oldDriver = "old-driver"

// OwnPIDs says that this process does not see the processes of other PID namespaces.
func (n *Node) OwnPIDs() bool { return n.is("own-pids") }

// MayChangeMIG says that this process has the right to, as far as it can find out.
func (n *Node) MayChangeMIG() bool {
	return !n.is("monitor-only") && !n.is("unprivileged") && !n.is("no-subscription")
}

// is says that the node is in the world, which is "client" for any client.
func (n *Node) is(world string) bool {
	return slices.ContainsFunc(n.worlds,
		func(name string) bool { return name == world || strings.HasPrefix(name, world+"=") })
}

// mismatch is why the driver cannot be opened in the world other-module.
func (n *Node) mismatch() error {
	for _, world := range n.worlds {
		if version, is := strings.CutPrefix(world, "other-module="); is && version != driverVersion {
			return &nvml.VersionMismatch{Libraries: driverVersion, Module: version}
		}
	}
	return nil
}

// SetClient has the program of the world client open the GPUs, or close them, as DCGM does when a
// label of the Node pauses it.
func (n *Node) SetClient(open bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.clientAway = !open
}

// hasClient says that the program of the world client has the GPUs open. It must be called with the lock.
func (n *Node) hasClient() bool { return n.is("client") && !n.clientAway }

// listedGPUs is how many of its GPUs the driver lists.
func (n *Node) listedGPUs() int {
	if n.is("no-nodes") {
		return 0
	}
	return max(0, len(n.gpus)-n.unlisted)
}

// LoseNodes takes the driver's device nodes from this process's container, as systemctl daemon-reload
// does where the runtime has told systemd of none of them (k8s-device-plugin#426): what is open stays
// open, and nothing more can be opened.
func (n *Node) LoseNodes() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.nodesLost = true
}

// Bound implements nvml.Kernel: the addresses of all GPUs, whether or not the driver lists them.
func (n *Node) Bound() ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var addresses []string
	for _, g := range n.gpus {
		addresses = append(addresses, g.busID())
	}
	return addresses, nil
}

// OpenControl implements nvml.Kernel.
func (n *Node) OpenControl() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.nodesLost || n.is("no-nodes") {
		return &fs.PathError{
			Op:   "open",
			Path: "/dev/nvidiactl",
			Err:  syscall.EPERM,
		}
	}
	return nil
}

// refuses says that the call takes a right that this process does not have. Those for
// instances may all be refused, also where nvml.h does not say so. The handle of a GPU
// with MIG answers for all its instances, to the privileged only.
func (n *Node) refuses(call nvml.Call, t target) bool {
	name := call.Method
	instances := strings.Contains(name, "Instance") && !strings.HasSuffix(name, "InstanceId")
	ofAll := name == "DeviceGetMemoryInfo" || strings.HasSuffix(name, "RunningProcesses")
	changes := slices.Contains(migChanges, name) || name == "DeviceSetComputeMode"
	subscribes := slices.Contains([]string{"GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy"}, name)
	mayChange := !n.is("monitor-only") && !n.is("unprivileged")
	return !mayChange && changes || n.is("no-subscription") && subscribes ||
		n.is("unprivileged") && (instances || ofAll && t.gpu != nil && t.gpu.mig && t.compute == nil)
}

// Reboot is a reboot of the machine, but for this program, which runs on: all GPUs are
// reset, and their MIG mode is the pending one, or off from Hopper on.
func (n *Node) Reboot() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, g := range n.gpus {
		g.mig = g.migPending && g.Architecture < nvml.Hopper
		g.migPending = g.mig
		g.lost = false
		n.reset(g)
		g.load()
	}
	n.wakeWaits()
}
