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

// InDriverRoot is the subcommand of virgate mps that calls EnterDriverRoot.
const InDriverRoot = "in-driver-root"

func inDriverRoot(command *exec.Cmd, _ string, _ Environment) *exec.Cmd { return command }

// EnterDriverRoot is for Linux.
func EnterDriverRoot([]string) error { return errNotLinux }
