package driver

import (
	"errors"
	"io/fs"
	"strings"
)

// The platforms on which NVIDIA's GPUs are not reached as on a server.
var (
	errWSL   = errors.New("WSL (there is /dev/dxg) is not supported: its GPUs have no device nodes that a container could be given")
	errTegra = errors.New("a Tegra system is not supported: its GPU is part of the processor and cannot be enumerated")
)

// platform says why the machine, a tree like "/", is of no use to this package;
// nil when it may be. The signs are those by which NVIDIA's go-nvlib tells.
func platform(machine fs.FS) error {
	if _, err := fs.Stat(machine, "dev/dxg"); err == nil {
		return errWSL
	}
	if _, err := fs.Stat(machine, "etc/nv_tegra_release"); err == nil {
		return errTegra
	}
	family, err := fs.ReadFile(machine, "sys/devices/soc0/family")
	if err == nil && strings.HasPrefix(strings.ToLower(string(family)), "tegra") {
		return errTegra
	}
	return nil
}
