// Package imports holds the import arrows of docs/architecture.md: imports only
// go down. It looks at what is built into the program; what tests may import,
// the linter says.
package imports

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestTree checks this repository. Files may be built with cgo only or without
// cgo only, so it looks at both; listing needs no C compiler.
func TestTree(t *testing.T) {
	watch(t, "../..")
	for _, cgo := range []string{"CGO_ENABLED=0", "CGO_ENABLED=1"} {
		t.Run(cgo, func(t *testing.T) {
			seen := map[string]bool{}
			for _, p := range list(t, cgo) {
				folder := strings.TrimPrefix(p.ImportPath, module+"/")
				seen[folder] = true
				for _, wrong := range check(folder, p.Imports) {
					t.Error(wrong)
				}
			}
			for _, folder := range []string{"mig", "sharing"} {
				if !seen[folder] {
					t.Errorf("go list does not name %s: the rules were held against nothing", folder)
				}
			}
		})
	}
}

// watch reads the folders of the tree. go test takes a pass from its cache
// until something changes that the test itself has read; what go list reads in
// a process of its own does not count.
func watch(t *testing.T, root string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && path != root && entry.IsDir() && strings.HasPrefix(entry.Name(), ".") {
			return fs.SkipDir
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// listed is the part of go list's answer that matters here.
type listed struct {
	ImportPath string
	Imports    []string
}

// list lists the packages even when the tree does not build: what is broken,
// the compiler says.
func list(t *testing.T, environment string) []listed {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "list", "-e", "-json=ImportPath,Imports", module+"/...")
	command.Env = append(os.Environ(), environment)
	var complaint bytes.Buffer
	command.Stderr = &complaint
	output, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, &complaint)
	}
	var packages []listed
	for decoder := json.NewDecoder(bytes.NewReader(output)); ; {
		var p listed
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		packages = append(packages, p)
	}
}

func TestCheck(t *testing.T) {
	const ours = module + "/"
	tests := []struct {
		name   string
		folder string
		path   string
		want   string // "" when the import is allowed
	}{
		{"standard library", "mig", "strings", ""},
		{"sharing down to mig", "sharing", ours + "mig", ""},
		{"mig up to sharing", "mig", ours + "sharing", "mig imports sharing: mig → the standard library only"},
		{"domain into internal", "sharing", ours + "internal/nvml", "sharing imports internal/nvml: sharing → mig only"},
		{"domain to a foreign library", "sharing", "sigs.k8s.io/yaml", "sharing imports sigs.k8s.io/yaml: sharing → mig only"},
		{"a listed foreign library", "configs", "sigs.k8s.io/yaml", ""},
		{"a package of a listed library", "plugin", "google.golang.org/grpc/codes", ""},
		{"a library that only begins alike", "internal/nvml/driver", "github.com/NVIDIA/go-nvml-fork", "internal/nvml/driver imports github.com/NVIDIA/go-nvml-fork: internal/nvml/driver → mig, internal/nvml, github.com/NVIDIA/go-nvml only"},
		{"metrics has its own rule", "sharing/metrics", "github.com/prometheus/client_golang/prometheus", ""},
		{"sharing has no metrics", "sharing", "github.com/prometheus/client_golang/prometheus", "sharing imports github.com/prometheus/client_golang/prometheus: sharing → mig only"},
		{"a folder below shares the rule", "plugin", ours + "plugin/grant", ""},
		{"a folder below is bound by the rule", "mig/tables", ours + "sharing", "mig/tables imports sharing: mig → the standard library only"},
		{"a folder that only begins alike", "migrate", "strings", "migrate has no rule: state its arrows in test/imports and .golangci.yml"},
		{"adapter to adapter", "internal/state", ours + "internal/nvml", "internal/state imports internal/nvml: internal/state → mig, sharing, configs, plugin only"},
		{"simulator to the library it simulates", "internal/simnode", ours + "internal/nvml", ""},
		{"simulator to the driver", "internal/simnode", ours + "internal/nvml/driver", "internal/simnode imports internal/nvml/driver: internal/simnode → mig, sharing, internal/nvml, sigs.k8s.io/yaml, go.yaml.in/yaml/v3 only"},
		{"agent to plugin", "internal/agent", ours + "plugin", ""},
		{"agent to an adapter", "internal/agent", ours + "internal/policy", "internal/agent imports internal/policy: internal/agent → mig, sharing, sharing/metrics, configs, plugin, github.com/prometheus/client_golang, github.com/prometheus/exporter-toolkit, golang.org/x/sync, golang.org/x/time only"},
		{"cmd to everything", "cmd/virgate", ours + "internal/agent", ""},
		{"cmd to a new library", "cmd/virgate", "github.com/urfave/cli/v3", ""},
		{"pure: files", "configs", "os", "configs imports os: configs is pure: no I/O, no process, no randomness"},
		{"pure: network", "sharing", "net/http", "sharing imports net/http: sharing is pure: no I/O, no process, no randomness"},
		{"pure: randomness", "mig", "math/rand/v2", "mig imports math/rand/v2: mig is pure: no I/O, no process, no randomness"},
		{"pure: durations are values", "sharing", "time", ""},
		{"not pure: files", "plugin", "os", ""},
		{"cgo in the driver", "internal/nvml/driver", "C", ""},
		{"cgo elsewhere", "cmd/virgate", "C", "cmd/virgate imports C: only internal/nvml/driver does: everything else builds without a C compiler"},
		{"go-nvml elsewhere", "internal/nvml", "github.com/NVIDIA/go-nvml/pkg/nvml", "internal/nvml imports github.com/NVIDIA/go-nvml/pkg/nvml: only internal/nvml/driver does: it needs cgo"},
		{"nvcdi in cdi", "internal/cdi", "github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi", ""},
		{"the CDI library elsewhere", "cmd/virgate", "tags.cncf.io/container-device-interface/pkg/cdi", "cmd/virgate imports tags.cncf.io/container-device-interface/pkg/cdi: only internal/cdi does: CDI specs are made in one place"},
		{"the host to CDI", "internal/host", ours + "internal/cdi", "internal/host imports internal/cdi: internal/host → sharing, plugin only"},
		{"client-go in policy", "internal/policy", "k8s.io/client-go/kubernetes", ""},
		{"client-go in cmd", "cmd/virgate", "k8s.io/client-go/kubernetes", "cmd/virgate imports k8s.io/client-go/kubernetes: only internal/policy does: no other package talks to the API server"},
		{"commands in test", "test/imports", "os/exec", ""},
		{"commands elsewhere", "internal/agent", "os/exec", "internal/agent imports os/exec: only test does: Virgate runs no commands"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var want []string
			if test.want != "" {
				want = []string{test.want}
			}
			if diff := cmp.Diff(want, check(test.folder, []string{test.path})); diff != "" {
				t.Errorf("check(%q, %q) (-want +got):\n%s", test.folder, test.path, diff)
			}
		})
	}
}
