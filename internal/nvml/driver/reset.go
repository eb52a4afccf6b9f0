package driver

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ResetGPU resets the GPU with that PCI bus ID by nvidia-smi, which NVML has no call for. It
// runs that of the first driver root that has one, with the root as its /, because it needs
// the libraries there, and the sockets of the persistence daemon, which then lets go of the
// GPU, too. That takes the capability SYS_CHROOT where the root is not /. The error has what
// nvidia-smi says.
func ResetGPU(ctx context.Context, options Options, busID string) error {
	return runSMI(ctx, options, "--gpu-reset", "-i", busID)
}

// SetTimeSlice sets the time slice of the GPU of that UUID to nvidia-smi's number of it, as
// ResetGPU resets. NVIDIA's DRA driver does the same (cmd/gpu-kubelet-plugin/nvlib.go): NVML
// has no call for that either.
func SetTimeSlice(ctx context.Context, options Options, gpu string, slice int) error {
	return runSMI(ctx, options, "compute-policy", "-i", gpu, "--set-timeslice", strconv.Itoa(slice))
}

// FindProgram finds a program of the driver: the first driver root that has it, and its path
// there.
func FindProgram(options Options, name string) (root, path string, err error) {
	// mig-parted looks in these folders (pkg/mig/reconfigure, find.go).
	in, file, looked := find(options.roots(), []string{"usr/bin", "usr/sbin", "bin", "sbin"}, name)
	if file == "" {
		return "", "", fmt.Errorf("no %s in %s", name, strings.Join(looked, ", "))
	}
	return in.path, "/" + file, nil
}

func runSMI(ctx context.Context, options Options, arguments ...string) error {
	root, path, err := FindProgram(options, "nvidia-smi")
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, path, arguments...)
	command.Dir, command.Env, command.WaitDelay = "/", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, 5*time.Second
	if root != "/" {
		command.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	}
	if said, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("run nvidia-smi of %s: %w: %s", root, err, strings.Join(strings.Fields(string(said[:min(len(said), 4096)])), " "))
	}
	return nil
}
