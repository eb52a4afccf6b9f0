package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The tools that are built from their modules, at the newest version that was
// tried here.
var modules = []string{
	"github.com/containerd/containerd/v2/cmd/containerd@v2.3.7",
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2@v2.3.7",
	"github.com/containerd/containerd/v2/cmd/ctr@v2.3.7",
	"github.com/containernetworking/plugins/plugins/main/bridge@v1.9.1",
	"github.com/containernetworking/plugins/plugins/main/loopback@v1.9.1",
	"github.com/containernetworking/plugins/plugins/ipam/host-local@v1.9.1",
	"helm.sh/helm/v3/cmd/helm@v3.21.4",
}

// build builds the program and the images into the work folder, and the tools into
// one that stays for the next run, which it returns.
func build(work string) (tools string, err error) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		return "", err
	}
	tools = filepath.Join(root, ".cache", "e2e")
	steps := [][]string{}
	for _, module := range modules {
		steps = append(steps, []string{".", "go", "install", module})
	}
	steps = append(steps,
		[]string{root, "make", "--no-print-directory", "build", "OUTPUT=" + filepath.Join(work, "virgate")},
		[]string{".", "go", "build", "-ldflags=-s -w", "-o", filepath.Join(work, "workload"), "./workload"},
	)
	for _, name := range images() {
		steps = append(steps, []string{filepath.Join(root, "cmd/image"), "go", "run", ".", "-binary", filepath.Join(work, name.program),
			"-output", filepath.Join(work, name.file), "-reference", name.reference, "-version", "e2e"})
	}
	for _, step := range steps {
		fmt.Fprintln(os.Stderr, "e2e:", strings.Join(step[1:], " "))
		command := exec.Command(step[1], step[2:]...)
		command.Dir = step[0]
		command.Env = append(os.Environ(), "GOBIN="+tools)
		if step[len(step)-1] == "./workload" {
			command.Env = append(command.Env, "CGO_ENABLED=0") // Static: its image holds nothing else.
		}
		if output, err := command.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", strings.Join(step[1:], " "), err, output)
		}
	}
	return tools, nil
}

// image is an archive that the node's containerd is given: there is no registry.
type image struct{ program, file, reference string }

// The images of the tests; the program's stands also for a second version of it.
const (
	workloadImage = "virgate.test/workload:1"
	virgateImage  = "docker.io/library/virgate:"
	version       = "0.1.0" // the chart's appVersion
	nextVersion   = "0.1.1-e2e"
)

func images() []image {
	return []image{
		{"workload", "workload.tar", workloadImage},
		{"virgate", "virgate.tar", virgateImage + version},
		{"virgate", "virgate-next.tar", virgateImage + nextVersion},
	}
}

// kernelSettings returns what gives back the settings of the kernel that a kubelet
// changes.
func kernelSettings() (restore func() error, err error) {
	before := map[string][]byte{}
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"} {
		path := filepath.Join("/proc/sys", name)
		value, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		before[path] = value
	}
	return func() error {
		var all error
		for path, value := range before {
			all = errors.Join(all, os.WriteFile(path, value, 0o644))
		}
		return all
	}, nil
}

// removeAll removes the folder, whose mounts went with their namespace.
func removeAll(folder string) error {
	if os.Getenv("E2E_KEEP") != "" {
		fmt.Fprintln(os.Stderr, "e2e: left in place:", folder)
		return nil
	}
	return os.RemoveAll(folder)
}
