package driver

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/virgate/virgate/internal/driverroot"
)

// loaders returns where programs of a root expect the dynamic loader, by the psABI of amd64 and of
// arm64.
func loaders() []string { return []string{"lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"} }

// MakeNodes runs a program of the driver to create the device nodes for these capability files,
// such as "/proc/driver/nvidia/capabilities/gpu0/mig/gi7/access". The program is nvidia-modprobe
// or, if there is none, nvidia-smi, which creates the nodes of all partitions. It creates the nodes
// in the dev of the root in which it runs:
//
//   - the driver's root, if containers get nodes from its dev;
//   - else the host's root, with the driver's library preloaded, as mig-parted does
//     (pkg/mig/reconfigure/reconfigure.go);
//   - else this process's own root. That is for a driver root that is not a complete root, as on
//     GKE, and works only if this process has the host's dev.
//
// This requires the capabilities SYS_CHROOT and MKNOD, and a container whose device cgroup allows
// any node. An error contains the program's output. Success does not mean that the nodes exist.
func MakeNodes(ctx context.Context, options Options, files []string) error {
	root, program, err := FindProgram(options, "nvidia-modprobe")
	var arguments []string
	for _, file := range files {
		arguments = append(arguments, "-f", file)
	}
	if err != nil {
		var missing error
		root, program, missing = FindProgram(options, "nvidia-smi")
		if missing != nil {
			return errors.Join(err, missing)
		}
		arguments = nil
	}
	_, err = options.place(root, program).run(ctx, arguments...)
	return err
}

// place returns where to run the program at that path in the root, so that it creates nodes in the
// dev from which containers get theirs. MakeNodes describes the choice.
func (o Options) place(in, program string) invocation {
	root := newRoot(in)
	sameDev := filepath.Join("/", o.DevRoot) == filepath.Join("/", o.DriverRoot)
	host := filepath.Join("/", o.HostRoot)
	switch {
	case sameDev && hasLoader(root.files):
		return invocation{root: in, path: program}
	case host != "/":
		onHost := filepath.Join("/", o.DriverRoot)
		return invocation{
			root: host,
			path: filepath.Join(onHost, program),
			env:  libraryEnv(root, onHost),
		}
	}
	return invocation{
		root: "/",
		path: filepath.Join(in, program),
		env:  libraryEnv(root, in),
	}
}

// libraryEnv makes a program find the driver's library in the root, which the program sees at path.
func libraryEnv(in root, path string) []string {
	_, file, _ := find([]root{in}, driverroot.LibraryFolders(), libraryName)
	if file == "" {
		return nil
	}
	return []string{"LD_PRELOAD=" + filepath.Join(path, file)}
}

func hasLoader(root fs.FS) bool {
	for _, loader := range loaders() {
		if file, err := driverroot.Resolve(root, loader); err == nil {
			if info, err := fs.Stat(root, file); err == nil && info.Mode().IsRegular() {
				return true
			}
		}
	}
	return false
}
