package driver

import (
	"cmp"
	"errors"
	"os"
)

// ErrNoCgo is Open's error in a program that was built without cgo.
var ErrNoCgo = errors.New("built without cgo: this program cannot open a driver")

// Options say where the driver is; the zero value is a driver that is installed
// on this machine in the usual places.
type Options struct {
	// DriverRoot is where the driver is installed on the host, "/" when empty. It
	// is of use here only if the host's files are at the same place for this
	// process, as without a container.
	DriverRoot string
	// ContainerDriverRoot is where the driver root is mounted in this process's
	// container. It is looked at first, if it exists; empty for nowhere.
	ContainerDriverRoot string
	// MachineRoot is the folder above sys, dev and etc of the machine that the
	// process runs on, "/" when empty. Tests set it.
	MachineRoot string
}

// roots are where the library is looked for, in order.
func (o Options) roots() []root {
	var roots []root
	if o.ContainerDriverRoot != "" {
		if info, err := os.Stat(o.ContainerDriverRoot); err == nil && info.IsDir() {
			roots = append(roots, newRoot(o.ContainerDriverRoot))
		}
	}
	return append(roots, newRoot(cmp.Or(o.DriverRoot, "/")))
}

func (o Options) machine() string { return cmp.Or(o.MachineRoot, "/") }
