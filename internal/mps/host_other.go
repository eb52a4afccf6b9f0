//go:build !linux

package mps

import (
	"errors"
	"os/exec"
	"time"
)

// NVIDIA's MPS exists on Linux only. On other systems this program is for simulated nodes.

var errNotLinux = errors.New("MPS is for Linux")

func monotonic() int64 { return time.Now().UnixNano() }

func labelForContainers(string) error { return nil }

// MountShm works on Linux only.
func MountShm(string, string) error { return errNotLinux }

func mountTmpfs(string, uint64, string) error { return errNotLinux }

func unmount(string) error { return errNotLinux }

func isMountPoint(string) bool { return false }

func deviceOf(string) string { return "" }

func mountsReachHost(string, string) (bool, error) { return false, errNotLinux }

func memoryOf(string) (uint64, error) { return 0, errNotLinux }

// InDriverRoot is the subcommand of virgate mps that calls EnterDriverRoot.
const InDriverRoot = "in-driver-root"

// selfPath is the path of this program's executable.
const selfPath = "/proc/self/exe"

func inDriverRoot(command *exec.Cmd, _ string, _ Environment) *exec.Cmd { return command }

// EnterDriverRoot works on Linux only.
func EnterDriverRoot([]string) error { return errNotLinux }
