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

	"github.com/virgate/virgate/mig"
)

// ResetGPU resets the GPU with that PCI bus ID by nvidia-smi, because NVML has no call for it. It
// runs the nvidia-smi of the first driver root that has one, with the root as its /, because
// nvidia-smi needs the libraries there, and the sockets of the persistence daemon, which then also
// closes the GPU. This requires the capability SYS_CHROOT unless the root is /. The error contains
// nvidia-smi's output. It is mig.ErrInUse if nvidia-smi says that a program has the GPU open.
func ResetGPU(ctx context.Context, options Options, busID string) error {
	said, err := runSMI(ctx, options, "--gpu-reset", "-i", busID)
	said = strings.ToLower(said)
	if err != nil && (strings.Contains(said, "in use by") || strings.Contains(said, "being used by")) {
		return fmt.Errorf("%w: %w", mig.ErrInUse, err)
	}
	return err
}

// Persistence reports whether the GPU with that PCI bus ID is in persistence mode. It runs
// nvidia-smi as ResetGPU does, because a session with the driver would keep the GPU open for
// longer.
func Persistence(ctx context.Context, options Options, busID string) (bool, error) {
	said, err := runSMI(ctx, options, "-i", busID, "--query-gpu=persistence_mode", "--format=csv,noheader")
	if err != nil {
		return false, err
	}
	switch said = strings.TrimSpace(said); said {
	case "Enabled":
		return true, nil
	case "Disabled":
		return false, nil
	}
	return false,
		fmt.Errorf("nvidia-smi --query-gpu=persistence_mode of %s says %.100q, and neither Enabled nor Disabled", busID,
			said)
}

// SetPersistence turns persistence mode on or off.
func SetPersistence(ctx context.Context, options Options, busID string, on bool) error {
	mode := "0"
	if on {
		mode = "1"
	}
	_, err := runSMI(ctx, options, "-i", busID, "-pm", mode)
	return err
}

// SetTimeSlice sets the time slice of the GPU with that UUID; slice is nvidia-smi's number for it.
// It runs nvidia-smi as ResetGPU does, and as NVIDIA's DRA driver does
// (cmd/gpu-kubelet-plugin/nvlib.go), because NVML has no call for this either.
func SetTimeSlice(ctx context.Context, options Options, gpu string, slice int) error {
	_, err := runSMI(ctx, options, "compute-policy", "-i", gpu, "--set-timeslice", strconv.Itoa(slice))
	return err
}

// FindProgram finds a program of the driver. It returns the first driver root that has the program,
// and the program's path there.
func FindProgram(options Options, name string) (root, path string, err error) {
	// mig-parted searches these folders (pkg/mig/reconfigure, find.go).
	in, file, looked := find(options.roots(), []string{"usr/bin", "usr/sbin", "bin", "sbin"}, name)
	if file == "" {
		return "", "", fmt.Errorf("no %s in %s", name, strings.Join(looked, ", "))
	}
	return in.path, "/" + file, nil
}

func runSMI(ctx context.Context, options Options, arguments ...string) (said string, err error) {
	root, path, err := FindProgram(options, "nvidia-smi")
	if err != nil {
		return "", err
	}
	return invocation{root: root, path: path}.run(ctx, arguments...)
}

// invocation is a program of the driver and where to run it.
type invocation struct {
	// root is the program's /, and path is its path there.
	root, path string
	// env holds the variables in addition to PATH.
	env []string
}

// run runs the program and returns its output. An error contains the output too.
func (i invocation) run(ctx context.Context, arguments ...string) (said string, err error) {
	command := exec.CommandContext(ctx, i.path, arguments...)
	command.Dir, command.WaitDelay = "/", 5*time.Second
	command.Env = append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, i.env...)
	if i.root != "/" {
		command.SysProcAttr = &syscall.SysProcAttr{Chroot: i.root}
	}
	output, err := command.CombinedOutput()
	said = strings.Join(strings.Fields(string(output[:min(len(output), 4096)])), " ")
	if err != nil {
		return said, fmt.Errorf("run %s of %s: %w: %s", filepath.Base(i.path), i.root, err, said)
	}
	return said, nil
}
