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

// WorldFlag is the flag with which programs take SetWorld's list, and WorldUsage is its help.
const (
	WorldFlag  = "sim-world"
	WorldUsage = "what a simulated node's driver has to live with, between commas: unprivileged, monitor-only, " +
		"passthrough, client=NAME, own-pids, moving-minors, late-profiles, no-subscription, old-driver, fabric, " +
		"confidential, lazy, persistence, unlisted=N, no-nodes, other-module=VERSION"
)

// SetWorld changes how the node answers calls. It must be called before the node is used. The list
// is separated by commas; docs/internals/nvml.md describes the calls:
//
//	unprivileged   this process may neither change nor monitor MIG
//	monitor-only   this process may monitor MIG, but not change it
//	passthrough    a virtual machine has the GPUs: before Hopper, MIG mode changes with a Reboot
//	client=NAME    another program has the GPUs open, but is in no list of processes
//	own-pids       this process does not see the processes of other PID namespaces
//	moving-minors  a change of MIG mode gives the GPU another minor number
//	late-profiles  the driver lists MIG profiles only while MIG mode is on
//	no-subscription  this process has SYS_ADMIN in a container that is not privileged: it may not open
//	               GPU instances' device nodes, so it can neither create nor destroy compute instances
//	old-driver     the driver reports no recovery action, no event of one, and no temperature margin
//	fabric         GPUs from Hopper on are in an NVLink fabric, which they have to join: see SetFabric
//	confidential   the machine does confidential computing, and its ready state is not set: see SetReady
//	lazy           Init opens no GPU: only looking a GPU up does
//	persistence    the GPUs are in persistence mode, and no daemon that nvidia-smi reaches closes them
//	unlisted=N     the driver does not list the last N of the GPUs that it is bound to
//	no-nodes       the container has the driver's libraries but none of its device nodes
//	other-module=VERSION  the loaded kernel module has that version, but the libraries have another:
//	               the driver cannot be opened
func (n *Node) SetWorld(list string) error {
	names, unlisted := strings.Split(list, ","), 0
	for _, name := range names {
		kind, value, _ := strings.Cut(name, "=")
		known := slices.Contains([]string{
			"unprivileged", "monitor-only", "passthrough", "own-pids", "moving-minors", "late-profiles",
			"no-subscription", oldDriver, "fabric", "confidential", "lazy", "persistence", "no-nodes",
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
					"moving-minors, late-profiles, no-subscription, old-driver, fabric, confidential, lazy, "+
					"persistence, unlisted=N, no-nodes, other-module=VERSION", name)
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

// OwnPIDs reports whether this process does not see the processes of other PID namespaces.
func (n *Node) OwnPIDs() bool { return n.is("own-pids") }

// MayChangeMIG reports whether this process has the right to change MIG, as far as it can find out.
func (n *Node) MayChangeMIG() bool {
	return !n.is("monitor-only") && !n.is("unprivileged") && !n.is("no-subscription")
}

// is reports whether the node is in the world; "client" matches a client of any name.
func (n *Node) is(world string) bool {
	return slices.ContainsFunc(n.worlds,
		func(name string) bool { return name == world || strings.HasPrefix(name, world+"=") })
}

// mismatch returns why the driver cannot be opened in the world other-module.
func (n *Node) mismatch() error {
	for _, world := range n.worlds {
		if version, is := strings.CutPrefix(world, "other-module="); is && version != driverVersion {
			return &nvml.VersionMismatch{Libraries: driverVersion, Module: version}
		}
	}
	return nil
}

// SetClient makes the program of the world client open the GPUs, or close them as DCGM does when a
// label of the Node pauses it.
func (n *Node) SetClient(open bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.clientAway = !open
}

// hasClient reports whether the program of the world client has the GPUs open. The caller holds the
// lock.
func (n *Node) hasClient() bool { return n.is("client") && !n.clientAway }

// GPUOpen implements nvml.Kernel.
func (n *Node) GPUOpen() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.gpus, n.hasOpen)
}

// hasOpen reports whether this program has the GPU open. As in R580, Init opens all GPUs, and
// looking one up opens it again. The caller holds the lock.
func (n *Node) hasOpen(g *simGPU) bool {
	return g.opened || n.opened > 0 && !n.is("lazy")
}

// listedGPUs returns how many of its GPUs the driver lists.
func (n *Node) listedGPUs() int {
	return max(0, len(n.gpus)-n.unlisted)
}

// LoseNodes takes the driver's device nodes from this process's container, as systemctl
// daemon-reload does if the runtime has not declared them to systemd (k8s-device-plugin#426). What
// is open stays open, but nothing more can be opened.
func (n *Node) LoseNodes() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.nodesLost = true
}

// Bound implements nvml.Kernel. It returns the addresses of all GPUs, whether or not the driver
// lists them.
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

// refuses reports whether the call requires a right that this process does not have. Calls for
// instances may all be refused, even where nvml.h does not say so. The handle of a GPU with MIG
// answers for all its instances, but only to a privileged process.
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

// Reboot reboots the machine, except for this program, which runs on. All GPUs are reset. Their MIG
// mode is the pending one, or off from Hopper on.
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
