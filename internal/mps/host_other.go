//go:build !linux

package mps

import (
	"errors"
	"os/exec"
	"time"
)

// NVIDIA has MPS for Linux alone. Elsewhere the program is for simulated nodes.

var errNotLinux = errors.New("MPS is for Linux")

func monotonic() int64 { return time.Now().UnixNano() }

func labelForContainers(string) error { return nil }

// MountShm is for Linux.
func MountShm(string, string) error { return errNotLinux }

func mountTmpfs(string, uint64, string) error { return errNotLinux }

func unmount(string) error { return errNotLinux }

func isMountPoint(string) bool { return false }

func deviceOf(string) string { return "" }

func mountsReachHost(string, string) (bool, error) { return false, errNotLinux }

func memoryOf(string) (uint64, error) { return 0, errNotLinux }

// InDriverRoot is the subcommand of virgate mps that calls EnterDriverRoot.
const InDriverRoot = "in-driver-root"

// selfPath is this program.
const selfPath = "/proc/self/exe"

func inDriverRoot(command *exec.Cmd, _ string, _ Environment) *exec.Cmd { return command }

// EnterDriverRoot is for Linux.
func EnterDriverRoot([]string) error { return errNotLinux }
