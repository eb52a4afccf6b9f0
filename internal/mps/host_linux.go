package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// monotonic returns the nanoseconds since the node started. The clock is the same in all containers
// of the node and never goes back (clock_gettime(2)).
func monotonic() int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	return now.Nano()
}

// labelForContainers gives a directory the SELinux label that lets containers use its content, if
// the kernel enforces such labels.
func labelForContainers(path string) error {
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		return nil
	}
	err := syscall.Setxattr(path, "security.selinux", []byte("system_u:object_r:container_file_t:s0\x00"), 0)
	if err != nil && !errors.Is(err, syscall.ENOTSUP) {
		return fmt.Errorf("label %s for containers: %w", path, err)
	}
	return nil
}

// MountShm mounts a tmpfs of half the machine's memory for the units' directories below the root
// directory. It is for nodes on which the mounts of Run do not reach the host: in NVIDIA's
// DaemonSets only an init container can mount there (mps-control-daemon mount-shm). An existing
// mount stays, because pods use it.
func MountShm(root, proc string) error {
	kibibytes, err := memoryOf(filepath.Join(proc, "meminfo"))
	if err != nil {
		return err
	}
	return mountTmpfs(filepath.Join(root, hostShm), kibibytes/2, "755")
}

// mountTmpfs mounts a tmpfs of the given size and mode that containers may use. An existing mount
// stays, and is labelled: its label may have failed.
func mountTmpfs(path string, kibibytes uint64, mode string) error {
	if isMountPoint(path) {
		return labelForContainers(path)
	}
	if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // for all users, like /dev/shm
		return err
	}
	if err := syscall.Mount("shm", path, "tmpfs",
		syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC|syscall.MS_RELATIME,
		fmt.Sprintf("size=%dk,mode=%s", kibibytes, mode)); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", path, err)
	}
	return labelForContainers(path)
}

func unmount(path string) error {
	if err := syscall.Unmount(path, syscall.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return nil
}

// isMountPoint reports whether another file system is mounted at the path.
func isMountPoint(path string) bool {
	var at, above syscall.Stat_t
	return syscall.Lstat(path, &at) == nil && syscall.Lstat(filepath.Dir(path), &above) == nil && at.Dev != above.Dev
}

// deviceOf returns what the path leads to in the terms of mountinfo: the device of a tmpfs, and the
// directory in it; "" if it leads nowhere.
func deviceOf(path string) string {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	inside := "/"
	for !isMountPoint(path) && path != "/" {
		inside = filepath.Join("/", filepath.Base(path), inside)
		path = filepath.Dir(path)
	}
	var at syscall.Stat_t
	if err := syscall.Stat(path, &at); err != nil {
		return ""
	}
	return fmt.Sprintf("%d:%d%s", unix.Major(at.Dev), unix.Minor(at.Dev), inside)
}

// mountsReachHost reports whether a mount below the directory also appears on the host. That is so
// if the directory's own mount is shared (mount_namespaces(7)), as with mountPropagation
// Bidirectional.
func mountsReachHost(proc, dir string) (bool, error) {
	mounts, err := os.ReadFile(filepath.Join(proc, "self/mountinfo"))
	if err != nil {
		return false, err
	}
	longest, shared := 0, false
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) < 7 {
			continue
		}
		point := strings.TrimSuffix(fields[4], "/")
		if (dir == point || strings.HasPrefix(dir, point+"/")) && len(point)+1 >= longest {
			longest, shared = len(point)+1, false
			for _, field := range fields[6:slices.Index(fields, "-")] {
				shared = shared || strings.HasPrefix(field, "shared:")
			}
		}
	}
	return shared, nil
}

// memoryOf returns the machine's memory, read from a file like /proc/meminfo.
func memoryOf(meminfo string) (kibibytes uint64, err error) {
	file, err := os.Open(meminfo)
	if err != nil {
		return 0, err
	}
	defer func() { _ = file.Close() }()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if _, err := fmt.Sscanf(lines.Text(), "MemTotal: %d kB", &kibibytes); err == nil {
			return kibibytes, nil
		}
	}
	return 0, fmt.Errorf("%s does not say how much memory there is: %w", meminfo, fs.ErrInvalid)
}

// InDriverRoot is the subcommand of virgate mps that calls EnterDriverRoot.
const InDriverRoot = "in-driver-root"

// selfPath is the path of this program's executable.
const selfPath = "/proc/self/exe"

// inDriverRoot makes the command run with the driver root as its root directory. There it sees its
// unit's directory under the same path as this process does, and the unit's memory as /dev/shm.
// This program sets up these mounts in a mount namespace of the command's own.
func inDriverRoot(command *exec.Cmd, root string, env Environment) *exec.Cmd {
	command.Args = slices.Concat([]string{"virgate", "mps", InDriverRoot, root, filepath.Dir(env.Pipe), command.Path},
		command.Args[1:])
	command.Path = selfPath
	command.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	return command
}

// EnterDriverRoot replaces this process by a program in the driver root. The arguments are the
// driver root, the directory of the unit, and the program's path and arguments. It returns only
// with an error.
//
// Nothing can be created in a driver root. Unless it is /, the new root is therefore a tmpfs that
// has everything of the driver root, and the unit's directory under its own path.
func EnterDriverRoot(arguments []string) error {
	if len(arguments) < 3 {
		return fmt.Errorf("%s: a driver root, a directory and a program are wanted", InDriverRoot)
	}
	root, dir := arguments[0], arguments[1]
	syscall.Umask(0o022) // The user of a server has to enter the directories made here.
	shm, err := filepath.EvalSymlinks(filepath.Join(dir, shmLink))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if root == "/" {
		if err := syscall.Mount(shm, "/dev/shm", "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s at /dev/shm: %w", shm, err)
		}
		if err := leaveMountsBelow(filepath.Dir(dir)); err != nil {
			return err
		}
		return fmt.Errorf("run %s: %w", arguments[2], syscall.Exec(arguments[2], arguments[2:], os.Environ()))
	}
	base := filepath.Join(filepath.Dir(dir), ".driver-root")
	if err := os.MkdirAll(base, 0o700); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", base, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount %s: %w", base, err)
	}
	bind := func(from, to string, flags uintptr) error {
		if err := os.MkdirAll(to, 0o755); err != nil { //nolint:gosec // a mount point
			return err
		}
		if err := syscall.Mount(from, to, "", syscall.MS_BIND|flags, ""); err != nil {
			return fmt.Errorf("mount %s at %s: %w", from, to, err)
		}
		return nil
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		from, to := filepath.Join(root, e.Name()), filepath.Join(base, e.Name())
		link, err := os.Readlink(from)
		switch {
		case err == nil:
			err = os.Symlink(link, to)
		case e.IsDir():
			err = bind(from, to, syscall.MS_REC)
		default:
			err = nil
		}
		if err != nil {
			return err
		}
	}
	mounts := []struct{ from, to string }{{dir, dir}, {"/proc", "/proc"}}
	if shm != "" {
		mounts = append(mounts, struct{ from, to string }{shm, "/dev/shm"})
	}
	if _, err := os.Stat(filepath.Join(base, "dev/nvidiactl")); err != nil { // Others are missing too.
		mounts = slices.Insert(mounts, 0, struct{ from, to string }{"/dev", "/dev"})
	}
	for _, m := range mounts {
		if err := bind(m.from, filepath.Join(base, m.to), 0); err != nil {
			return err
		}
	}
	if err := syscall.Chroot(base); err != nil {
		return fmt.Errorf("change the root to %s: %w", root, err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return fmt.Errorf("run %s of %s: %w", arguments[2], root, syscall.Exec(arguments[2], arguments[2:], os.Environ()))
}

// leaveMountsBelow unmounts, in this mount namespace only, what is mounted below the directory:
// other units' memory.
func leaveMountsBelow(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			if err := unmount(fields[4]); err != nil && !errors.Is(err, syscall.EINVAL) { // Unmounted with its parent.
				return err
			}
		}
	}
	return nil
}
