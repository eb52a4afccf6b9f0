package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

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

func inDriverRoot(command *exec.Cmd, root string, env Environment) (*exec.Cmd, error) {
	command.SysProcAttr.Chroot = root
	return command, nil
}
