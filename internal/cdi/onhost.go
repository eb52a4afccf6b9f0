package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/virgate/virgate/internal/driverroot"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Mount is a folder of the host that this process sees as Here. If both are "/", no folder is
// mounted: this process runs on the host itself, or cannot see the host's files.
type Mount struct{ Host, Here string }

// missing returns an error that names the first file of the edits that is not on the host: no
// runtime could start a container with these edits. Files in folders that this process does not see
// count as present.
func missing(mounts []Mount, edits specs.ContainerEdits) error {
	for _, mount := range edits.Mounts {
		if err := onHost(mounts, mount.HostPath); err != nil {
			return err
		}
	}
	for _, node := range edits.DeviceNodes {
		if node.Type != "" && node.Major != 0 {
			continue // A runtime creates it from its numbers.
		}
		path := node.HostPath
		if path == "" {
			path = node.Path
		}
		if err := onHost(mounts, path); err != nil {
			return err
		}
	}
	for _, hook := range edits.Hooks {
		if err := onHost(mounts, hook.Path); err != nil {
			return fmt.Errorf(
				"%w, the hook of CDI specs: it comes with NVIDIA's container toolkit, and plugin.nvidiaCTKPath (the "+
					"chart's cdi.nvidiaHookPath) says where it is", err)
		}
	}
	return nil
}

func onHost(mounts []Mount, path string) error {
	for _, mount := range mounts {
		below, err := filepath.Rel(mount.Host, path)
		if err != nil || below == ".." || strings.HasPrefix(below, "../") {
			continue
		}
		if mount.Here == "/" && isMount(path) {
			return fmt.Errorf(
				"%s was mounted into this container and may be elsewhere on the host: the host's driver root has to "+
					"be mounted, too", path)
		}
		if _, err := driverroot.Resolve(os.DirFS(mount.Here), below); err != nil && !errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("the host has no %s", path)
		}
		return nil
	}
	return nil
}

// isMount reports whether the file itself is a mount point, as files mounted by a container runtime
// are, and not just part of a mounted folder.
func isMount(path string) bool {
	const mountPoint = 4 // proc_pid_mountinfo(5)
	text, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > mountPoint && fields[mountPoint] == path {
			return true
		}
	}
	return false
}
