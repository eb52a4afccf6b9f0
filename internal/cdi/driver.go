package cdi

import (
	"errors"
	"log/slog"
)

// DriverOptions say where the driver is. The paths of a spec are the host's,
// while what is looked at to make it is in this process's sight.
type DriverOptions struct {
	// Root and DevRoot are where the driver and its dev folder are in this
	// process's sight.
	Root, DevRoot string
	// HostRoot and HostDevRoot are where the host has them.
	HostRoot, HostDevRoot string
	// HookPath is the host's program that specs name as hook:
	// "/usr/bin/nvidia-cdi-hook".
	HookPath string
	// Features are nvcdi's feature flags.
	Features []string
	Logger   *slog.Logger
}

// ErrNoDriver is what a Driver answers in a program that was built without cgo,
// which nvcdi needs.
var ErrNoDriver = errors.New("this program was built without cgo and cannot make CDI specs of a real driver; use another deviceListStrategy than cdi-annotations and cdi-cri, or a program with cgo")
