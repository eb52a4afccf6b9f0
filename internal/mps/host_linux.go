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

// monotonic is the node's time in nanoseconds since it started, which is the same in all of its
// containers and never goes back (clock_gettime(2)).
func monotonic() int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	return now.Nano()
}

// labelForContainers gives a directory the SELinux label with which containers may use what is
// in it, where the kernel enforces such labels.
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

// MountShm mounts a tmpfs of half the machine's memory at shm below the root directory, as
// NVIDIA's mps-control-daemon mount-shm does. One that is mounted stays: pods use it.
func MountShm(root, proc string) error {
	path := filepath.Join(root, "shm")
	mounts, err := os.ReadFile(filepath.Join(proc, "self/mountinfo"))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		// "36 35 98:0 /root /mount/point options - type source options"; see proc(5).
		if fields := strings.Fields(line); len(fields) > 4 && fields[4] == path {
			return nil
		}
	}
	kibibytes, err := memoryOf(filepath.Join(proc, "meminfo"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // of all users, like /dev/shm
		return err
	}
	if err := syscall.Mount("shm", path, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC|syscall.MS_RELATIME, fmt.Sprintf("size=%dk,mode=1777", kibibytes/2)); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", path, err)
	}
	return labelForContainers(path)
}

// memoryOf is the machine's memory, from a file like /proc/meminfo.
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

// inDriverRoot has the command run with the driver root as its root, in which it sees the
// directory of MPS and its /dev/shm as this process does. Nothing can be made in a driver root,
// so this program mounts that in a mount namespace of the command's own.
func inDriverRoot(command *exec.Cmd, root string, env Environment) *exec.Cmd {
	mpsRoot := filepath.Dir(env.Shm)
	command.Args = slices.Concat([]string{"virgate", "mps", InDriverRoot, root, mpsRoot, command.Path}, command.Args[1:])
	command.Path = "/proc/self/exe"
	command.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	return command
}

// EnterDriverRoot becomes the program in the driver root. The arguments are the driver root, the
// directory of MPS, the program's path and its arguments. It returns only with an error.
//
// The new root is a tmpfs with all that is in the driver root, and with the directory of MPS
// under its own path.
func EnterDriverRoot(arguments []string) error {
	if len(arguments) < 3 {
		return fmt.Errorf("%s: a driver root, a directory and a program are wanted", InDriverRoot)
	}
	root, mpsRoot := arguments[0], arguments[1]
	syscall.Umask(0o022) // A server's user has to enter what is made here.
	base := filepath.Join(mpsRoot, ".driver-root")
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
	mounts := []struct{ from, to string }{{mpsRoot, mpsRoot}, {"/proc", "/proc"}, {filepath.Join(mpsRoot, "shm"), "/dev/shm"}}
	if _, err := os.Stat(filepath.Join(base, "dev/nvidiactl")); err != nil { // Nor are the others there.
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
