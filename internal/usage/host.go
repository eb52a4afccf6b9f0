package usage

import (
	"errors"
	"fmt"
	"io/fs"
)

// initialNamespace is the link of the process ID namespace in which the kernel
// started (PROC_PID_INIT_INO, include/linux/proc_ns.h).
const initialNamespace = "pid:[4026531836]"

var errForeign = errors.New("the host's process IDs are not visible; the pod needs hostPID: true")

// seesHost returns an error when the process IDs in proc are not the host's. In
// a namespace of its own a program would find other processes under the driver's
// IDs, and even itself.
//
// The first namespace of the kernel is the host's, and that is certain. On a
// node that is a container itself, the host is that container: its first process
// is then neither in a pod nor where this one is. Whether the driver speaks of
// the processes there remains to be seen.
func seesHost(proc fs.FS, cgroups cgroups) (certain bool, err error) {
	if link, err := fs.ReadLink(proc, "self/ns/pid"); err == nil && link == initialNamespace {
		return true, nil
	}
	first, err := fs.ReadFile(proc, "1/cgroup")
	if err != nil {
		return false, fmt.Errorf("look for the host's first process: %w", err)
	}
	self, err := fs.ReadFile(proc, "self/cgroup")
	if err != nil {
		return false, fmt.Errorf("look for this process: %w", err)
	}
	if string(first) == string(self) || cgroups.inPod(string(first)) {
		return false, errForeign
	}
	return false, nil
}
