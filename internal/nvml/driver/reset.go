package driver

import (
	"context"
	"fmt"
	"io/fs"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// smiFolders are the folders below a driver root in which mig-parted looks for nvidia-smi
// (pkg/mig/reconfigure, find.go).
func smiFolders() []string { return []string{"usr/bin", "usr/sbin", "bin", "sbin"} }

// ResetGPU resets the GPU with that PCI bus ID by nvidia-smi, which NVML has no call for. It
// runs that of the first driver root that has one, with the root as its /, because it needs
// the libraries there, and the sockets of the persistence daemon, which then lets go of the
// GPU, too. That takes the capability SYS_CHROOT where the root is not /. The error has what
// nvidia-smi says.
func ResetGPU(ctx context.Context, options Options, busID string) error {
	var looked []string
	for _, r := range options.roots() {
		for _, folder := range smiFolders() {
			looked = append(looked, filepath.Join(r.path, folder))
			name, err := resolve(r.files, path.Join(folder, "nvidia-smi"))
			if err != nil {
				continue
			}
			if info, err := fs.Stat(r.files, name); err != nil || !info.Mode().IsRegular() {
				continue
			}
			command := exec.CommandContext(ctx, "/"+name, "--gpu-reset", "-i", busID)
			command.Dir, command.Env, command.WaitDelay = "/", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, 5*time.Second
			if r.path != "/" {
				command.SysProcAttr = &syscall.SysProcAttr{Chroot: r.path}
			}
			if said, err := command.CombinedOutput(); err != nil {
				return fmt.Errorf("run nvidia-smi of %s: %w: %s", r.path, err, strings.Join(strings.Fields(string(said[:min(len(said), 4096)])), " "))
			}
			return nil
		}
	}
	return fmt.Errorf("no nvidia-smi in %s", strings.Join(looked, ", "))
}
