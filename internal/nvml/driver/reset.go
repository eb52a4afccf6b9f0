package driver

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
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
	return invocation{root: root, path: path}.run(ctx, arguments...)
}

// invocation is a program of the driver, and where to run it.
type invocation struct {
	// root is the program's /, and path is its path there.
	root, path string
	// env are variables beside PATH.
	env []string
}

// run runs it. The error has what it says.
func (i invocation) run(ctx context.Context, arguments ...string) error {
	command := exec.CommandContext(ctx, i.path, arguments...)
	command.Dir, command.WaitDelay = "/", 5*time.Second
	command.Env = append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, i.env...)
	if i.root != "/" {
		command.SysProcAttr = &syscall.SysProcAttr{Chroot: i.root}
	}
	if said, err := command.CombinedOutput(); err != nil {
		name := filepath.Base(i.path)
		return fmt.Errorf("run %s of %s: %w: %s", name, i.root, err, strings.Join(strings.Fields(string(said[:min(len(said), 4096)])), " "))
	}
	return nil
}
