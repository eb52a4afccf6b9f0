package driver

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/virgate/virgate/internal/driverroot"
)

// loaders are where programs of a root expect the dynamic loader, by the psABI of amd64 and of arm64.
func loaders() []string { return []string{"lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"} }

// MakeNodes has the driver's program make the device nodes of the capabilities that these files tell,
// such as "/proc/driver/nvidia/capabilities/gpu0/mig/gi7/access": nvidia-modprobe, or nvidia-smi, which
// makes those of all partitions, where there is none. It makes them in the dev of the root it runs in:
//
//   - the driver's, if containers are given that root's dev;
//   - else the host's, with the driver's library preloaded, as mig-parted does
//     (pkg/mig/reconfigure/reconfigure.go);
//   - else this process's own. That is for a driver root that is no root, as on GKE, and of use where
//     this process has the host's dev.
//
// That takes the capabilities SYS_CHROOT and MKNOD, and a container whose device cgroup allows any
// node. An error has what the program says. No error does not mean that the nodes are there.
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

// place says where to run the program that the root has at that path, so that it makes nodes in the
// dev that containers are given. It is MakeNodes' choice.
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

// libraryEnv has a program find the driver's library, which is in the root, where that is seen at path.
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
