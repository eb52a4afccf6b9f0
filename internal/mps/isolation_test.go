package mps_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simmps"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

// containerMounts is the variable with the mounts of a process that acts as a container.
const containerMounts = "VIRGATE_TEST_MPS_CONTAINER"

// container is a pod's container with the mounts of an MPS grant: it has its own mount namespace and root
// directory, and runs as root. It is a client of its unit's daemon until it ends.
type container struct {
	command *exec.Cmd
	input   interface{ Close() error }
	lines   *bufio.Scanner
}

// beContainer is the container's process. It prints what it sees and could do.
func beContainer(mounts string) {
	say := func(format string, values ...any) { _, _ = fmt.Fprintf(os.Stdout, format+"\n", values...) }
	root := "/tmp/container"
	must := func(err error) {
		if err != nil {
			say("broken: %v", err)
			os.Exit(1) //nolint:forbidigo // It is the whole program.
		}
	}
	must(os.MkdirAll(root, 0o755))
	must(syscall.Mount("tmpfs", root, "tmpfs", 0, ""))
	var pipe string
	for line := range strings.Lines(mounts) {
		var m api.Mount
		_, _ = fmt.Sscan(line, &m.HostPath, &m.ContainerPath, &m.ReadOnly)
		to := root + m.ContainerPath
		must(os.MkdirAll(to, 0o755))
		must(syscall.Mount(m.HostPath, to, "", syscall.MS_BIND|syscall.MS_REC, ""))
		if m.ReadOnly {
			must(syscall.Mount("", to, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
			pipe = m.ContainerPath
		}
	}
	must(syscall.Chroot(root))
	must(os.Chdir("/"))
	client, err := simmps.Connect(context.Background(), pipe, os.Getpid())
	say("connect: %v", err)
	_ = filepath.WalkDir("/", func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			say("sees %s", path)
		}
		return err
	})
	attack := func(what string, err error) { say("%s: %v", what, err) }
	attack("socket of its own", os.WriteFile(pipe+"/mine", nil, 0o600))
	attack("socket removed", os.Remove(pipe+"/control"))
	attack("memory", os.WriteFile(fmt.Sprintf("/dev/shm/of-%d", os.Getpid()), nil, 0o600))
	say("done")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n') // Until it is ended.
	if client != nil {
		_ = client.Close()
	}
	os.Exit(0) //nolint:forbidigo // It is the whole program.
}

// mountsOf are the MPS mounts of a container with a share of the unit.
func (n *node) mountsOf(unit string) (text string) {
	for _, m := range grant.MPSAccess(n.root, unit, sharing.MPSLimit{ThreadPercentage: 50}).Mounts {
		text += fmt.Sprintln(m.HostPath, m.ContainerPath, m.ReadOnly)
	}
	return text
}

// runContainer starts a container, and returns its output.
func (n *node) runContainer(mounts string) (c *container, said []string) {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	c = &container{command: exec.Command(self)}
	c.command.Env = append(os.Environ(), containerMounts+"="+mounts)
	c.command.Stderr = n
	c.command.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	input, err := c.command.StdinPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	output, err := c.command.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := c.command.Start(); err != nil {
		n.t.Fatal(err)
	}
	c.input, c.lines = input, bufio.NewScanner(output)
	n.t.Cleanup(c.end)
	for c.lines.Scan() && c.lines.Text() != "done" {
		said = append(said, c.lines.Text())
	}
	return c, said
}

func (c *container) end() {
	_ = c.input.Close()
	_ = c.command.Wait()
}

// newMountingNode is a node whose root directory is a separate mount, as in the container mps.
func newMountingNode(t *testing.T, propagation uintptr) *node {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("to mount requires root")
	}
	n := newNode(t, program(t))
	mount(t, "root", n.root)
	if err := syscall.Mount("", n.root, "", propagation, ""); err != nil {
		t.Fatal(err)
	}
	n.options.OwnShm, n.options.Proc = true, "/proc"
	return n
}

// mount mounts a tmpfs until the end of the test.
func mount(t *testing.T, name, at string) {
	t.Helper()
	err := errors.Join(os.MkdirAll(at, 0o755), syscall.Mount(name, at, "tmpfs", 0, "mode=755"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for syscall.Unmount(at, syscall.MNT_DETACH) == nil {
		}
	})
}

func of(unit string) nodereport.MPSUnit {
	return nodereport.MPSUnit{ID: unit, GPU: unit, MemoryParts: 8}
}

// TestNoOtherUnit checks that a client of one GPU sees neither daemon nor clients of another GPU, and cannot
// replace its own daemon, wherever the units' memory is mounted.
func TestNoOtherUnit(t *testing.T) {
	t.Parallel()
	for name, propagation := range map[string]uintptr{"mounts reach the host": syscall.MS_SHARED, "mount-shm": syscall.MS_PRIVATE} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newMountingNode(t, propagation)
			if propagation == syscall.MS_PRIVATE {
				if err := mps.MountShm(n.root, "/proc"); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = syscall.Unmount(filepath.Join(n.root, ".shm"), syscall.MNT_DETACH) })
			}
			n.options.Timing.Stop = 10 * time.Millisecond // Containers are clients to the end.
			stop := n.supervise()
			n.connect()
			n.client.Want([]mps.Unit{of(gpu), of(other)})
			n.await(gpu+" ready", other+" ready")
			n.older(gpu, other)
			for unit, another := range map[string]string{gpu: other, other: gpu} {
				mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", n.daemon(unit)))
				if err != nil || strings.Contains(string(mounts), filepath.Join(n.root, another)) {
					t.Errorf("the daemon of %s has memory of %s: %v, %s", unit, another, err, mounts)
				}
			}
			_, said := n.runContainer(n.mountsOf(other))
			n.checkIsolated(other, said, 1)
			one, said := n.runContainer(n.mountsOf(gpu))
			n.checkIsolated(gpu, said, 1)
			_, said = n.runContainer(n.mountsOf(gpu)) // Clients of one GPU see each other's memory, as MPS has it.
			n.checkIsolated(gpu, said, 2)
			one.end()
			n.client.Want([]mps.Unit{of(other)})
			n.await(other + " ready")
			if left, err := os.ReadDir(filepath.Join(n.root, ".shm", gpu)); len(left) > 0 || n.exists(gpu) {
				t.Errorf("%s has left %v, %v", gpu, left, err)
			}
			stop()
		})
	}
}

// checkIsolated checks the output of a container of the unit, with so many files in /dev/shm.
func (n *node) checkIsolated(unit string, said []string, files int) {
	n.t.Helper()
	pipe := "/mps/" + unit + "/pipe"
	for _, want := range []string{"connect: <nil>", "memory: <nil>", "sees " + pipe + "/control"} {
		if !slices.Contains(said, want) {
			n.t.Errorf("a client of %s says nothing of %q: %q", unit, want, said)
		}
	}
	seen := 0
	for _, line := range said {
		path, sees := strings.CutPrefix(line, "sees ")
		switch {
		case sees && strings.HasPrefix(path, "/dev/shm/"):
			seen++
		case sees && !strings.HasPrefix(path, pipe+"/"):
			n.t.Errorf("a client of %s %s", unit, line)
		case strings.HasPrefix(line, "socket") && !strings.HasSuffix(line, "read-only file system"):
			n.t.Errorf("a client of %s: %s", unit, line)
		}
	}
	if seen != files {
		n.t.Errorf("a client of %s sees %d files in /dev/shm, want %d: %q", unit, seen, files, said)
	}
}

// TestUnitMemory checks that units' memory is at most half of the machine's, that it survives a restart, and that
// its mount is removed with the unit.
func TestUnitMemory(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t, syscall.MS_SHARED)
	stop := n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{of(gpu)})
	n.await(gpu + " ready")
	path := filepath.Join(n.root, gpu, "shm")
	var memory syscall.Statfs_t
	var machine syscall.Sysinfo_t
	if err := errors.Join(syscall.Statfs(path, &memory), syscall.Sysinfo(&machine)); err != nil {
		t.Fatal(err)
	}
	if size, want := int64(memory.Blocks)*memory.Bsize, int64(machine.Totalram)/16; size > want || size < want-1<<20 {
		t.Errorf("one of eight units has %d bytes, want %d", size, want)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o777 || info.Mode()&os.ModeSticky == 0 {
		t.Errorf("%v, %v, want as /dev/shm", info.Mode(), err)
	}
	if err := os.WriteFile(path+"/mark", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	stop()
	n.supervise()
	n.await(gpu + " ready")
	if _, err := os.Stat(path + "/mark"); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	n.client.Want(nil)
	n.await()
	if mounts := n.mounts(); len(mounts) != 1 || n.exists(gpu) {
		t.Errorf("mounted are %q", mounts)
	}
}

// TestDirectoryInPlaceOfTheLink checks that a daemon starts even if the container runtime has created the unit's
// directories, for a container restarted after the unit was removed.
func TestDirectoryInPlaceOfTheLink(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t, syscall.MS_SHARED)
	for _, path := range []string{gpu + "/shm", gpu + "/pipe", other + "/shm/of-a-program"} {
		if err := os.MkdirAll(filepath.Join(n.root, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{of(gpu), of(other)})
	n.await(gpu+" ready", other+" ready")
	n.older(gpu, other)
	for _, unit := range []string{gpu, other} {
		_, said := n.runContainer(n.mountsOf(unit))
		n.checkIsolated(unit, said, 1)
	}
}

// mounts are the mount points at and below the root directory.
func (n *node) mounts() (points []string) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if point := strings.Fields(line)[4]; strings.HasPrefix(point, n.root) {
			points = append(points, point)
		}
	}
	return points
}

// TestMountShm checks the mount of the init container of NVIDIA's DaemonSet.
func TestMountShm(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("to mount requires root")
	}
	root := t.TempDir()
	for range 2 {
		if err := mps.MountShm(root, "/proc"); err != nil {
			t.Fatal(err)
		}
	}
	shm := filepath.Join(root, ".shm")
	t.Cleanup(func() { _ = syscall.Unmount(shm, 0) })
	var memory syscall.Statfs_t
	var machine syscall.Sysinfo_t
	if err := errors.Join(syscall.Statfs(shm, &memory), syscall.Sysinfo(&machine)); err != nil {
		t.Fatal(err)
	}
	half := int64(machine.Totalram) / 2
	if size := int64(memory.Blocks) * memory.Bsize; size < half-1<<20 || size > half+1<<20 {
		t.Errorf("%d bytes, want half of the machine's %d", size, machine.Totalram)
	}
	if err := syscall.Unmount(shm, 0); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Unmount(shm, 0); err == nil {
		t.Error("mounted twice")
	}
	if err := mps.MountShm(root, t.TempDir()); err == nil {
		t.Error("no error without /proc")
	}
}

// TestDriverRoot checks that the daemon of a driver installed elsewhere sees its unit's directory and memory at the
// usual paths.
func TestDriverRoot(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t, syscall.MS_SHARED)
	p := program(t)
	_, path, _ := p.Find()
	p.Find = func() (string, string, error) { return "/.", path, nil } // Not "/", and the same.
	n.options.Control = p
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{of(gpu), of(other)})
	n.await(gpu+" ready", other+" ready")
	if err := os.WriteFile(filepath.Join(n.root, gpu, "shm/mark"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join("/proc", fmt.Sprint(n.daemon(gpu)), "root")
	for _, path := range []string{"/dev/shm/mark", "/dev/null", "/proc/self", n.pipe(gpu) + "/control"} {
		if _, err := os.Lstat(root + path); err != nil {
			t.Errorf("in the driver root: %v", err)
		}
	}
	if _, err := os.Stat("/dev/shm/mark"); err == nil {
		t.Error("mounted for everybody")
	}
	n.client.Want([]mps.Unit{})
	n.await()
}

// TestNoMemory checks that a daemon is not started if its clients would fill the host's own file system.
func TestNoMemory(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t, syscall.MS_PRIVATE)
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{of(gpu)})
	n.await(gpu + " failed+that requires virgate mps mount-shm before this program, or mountPropagation Bidirectional")
}

// TestUpgrade checks that containers started by an older version share the memory of all units, and that they and
// later ones keep it until the unit is free. A unit that is free at the start gets its own memory.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t, syscall.MS_SHARED)
	common := filepath.Join(n.root, "shm")
	mount(t, "shm", common)
	if err := os.MkdirAll(n.pipe(gpu), 0o755); err != nil {
		t.Fatal(err)
	}
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{of(gpu), of(other)})
	n.await(gpu+" ready+its programs share /dev/shm with those of other units", other+" ready")
	n.awaitCommon(gpu)
	n.older(gpu, other)
	old, said := n.runContainer(strings.ReplaceAll(n.mountsOf(gpu), n.root+"/"+gpu+"/shm", common))
	n.checkIsolated(gpu, said, 1)
	_, said = n.runContainer(n.mountsOf(other))
	n.checkIsolated(other, said, 1)
	late, said := n.runContainer(n.mountsOf(gpu))
	n.checkIsolated(gpu, said, 2)

	vacant := of(gpu)
	vacant.Vacant = true
	late.end()
	n.client.Want([]mps.Unit{vacant, of(other)}) // The last one's container still ends.
	await.True(t, "a look at the containers", func() bool { return n.logged("the memory of all units is still held") })
	n.awaitCommon(gpu)
	old.end()
	n.awaitCommon()
	n.await(gpu+" ready", other+" ready")
	_, said = n.runContainer(n.mountsOf(gpu))
	n.checkIsolated(gpu, said, 1)
	if n.exists("shm") {
		t.Error("the memory of all units is there still")
	}
}

// awaitCommon waits until exactly these units have the common memory.
func (n *node) awaitCommon(units ...string) {
	n.t.Helper()
	n.until(fmt.Sprintf("the memory of all units for %q", units), func() (bool, string) {
		states, connected := n.client.States()
		var common []string
		for _, state := range states {
			if state.CommonMemory {
				common = append(common, state.ID)
			}
		}
		return connected && slices.Equal(common, units), fmt.Sprint(states)
	})
}

// older makes the units' daemons older than R580: their memory is a file in /dev/shm. Tests that
// check which memory clients see need it.
func (n *node) older(units ...string) {
	n.t.Helper()
	for _, unit := range units {
		n.fault(unit, "older")
	}
}

// TestOwnVolume checks that a container keeps its own volume at /dev/shm. If the daemon uses /dev/shm, MPS does not
// work in that container, and the unit's state shows it.
func TestOwnVolume(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t, syscall.MS_SHARED)
	control := &asking{Control: n.options.Control, look: n.lookAgain}
	n.options.Control = control
	n.supervise()
	n.connect()
	n.client.Want([]mps.Unit{of(gpu), of(other)})
	n.await(gpu+" ready", other+" ready")
	n.older(other)
	volume := filepath.Join(n.root, "volume")
	mount(t, "volume", volume)
	own := fmt.Sprintln(volume, "/dev/shm", false)
	_, said := n.runContainer(n.mountsOf(gpu) + own)
	if !slices.Contains(said, "connect: <nil>") {
		t.Errorf("with a daemon of R580 it says %q", said)
	}
	c, said := n.runContainer(n.mountsOf(other) + own)
	if !slices.ContainsFunc(said, func(line string) bool {
		return strings.HasPrefix(line, "connect: MPS client failed to open the server's memory")
	}) {
		t.Errorf("with an older daemon it says %q", said)
	}
	n.await(gpu+" ready", fmt.Sprintf("%s ready+process %d has a volume of its own at /dev/shm", other, c.command.Process.Pid))
	asked := control.asked.Load()
	n.until("30 more questions", func() (bool, string) { return control.asked.Load() > asked+30, fmt.Sprint(control.asked.Load()) })
	if states, _ := n.client.States(); states[0].Reason != "" {
		t.Errorf("with a daemon of R580: %+v", states[0])
	}
}

func (n *node) logged(text string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return strings.Contains(n.log.String(), text)
}
