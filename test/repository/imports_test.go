package repository

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/virgate/virgate/"

// arrows are the packages that each of our packages may import, for the folder and those below it.
// docs/explanation/architecture.md has the layers. The linter (.golangci.yml) checks each package's
// libraries and what is pure; this test checks the arrows in `make test`.
var arrows = map[string][]string{
	"mig":             {},
	"sharing":         {"mig"},
	"sharing/metrics": {"sharing"},
	"configs":         {"sharing", "mig"},
	"plugin":          {"sharing", "plugin/grant", "internal/wake"},
	"plugin/grant":    {"sharing"},
	"internal/agent":  {"mig", "sharing", "sharing/metrics", "configs", "plugin", "plugin/grant", "internal/claims", "internal/decide", "internal/dra", "internal/drapath", "internal/gpusettings", "internal/memoryguard", "internal/migchange", "internal/mpsshare", "internal/nodemetrics", "internal/nodereport", "internal/release", "internal/status", "internal/units", "internal/web", "internal/wake"},
	"internal/daemon": {
		"mig", "sharing", "configs", "plugin", "plugin/grant", "internal/agent", "internal/migchange", "internal/nodereport", "internal/nvml", "internal/simnode", "internal/configsource",
		"internal/features", "internal/mps", "internal/nodestatus", "internal/podresources", "internal/usage", "internal/state", "internal/cdi", "internal/host",
		"internal/claims", "internal/dra", "internal/dradriver", "internal/drapath", "internal/gpusettings", "internal/memoryguard", "internal/mpsshare", "internal/nodemetrics", "internal/release",
		"internal/migcaps", "internal/web",
	},
	"internal/cluster":      {"mig", "sharing", "internal/kube", "internal/nodereport", "internal/nodestatus", "internal/page", "internal/status", "internal/wake"},
	"internal/claims":       {"sharing", "internal/dra", "internal/units"},
	"internal/decide":       {"mig", "sharing", "plugin/grant", "internal/claims", "internal/dra", "internal/nodereport", "internal/units"},
	"internal/dra":          {"mig", "sharing"},
	"internal/dradriver":    {"internal/dra", "internal/kube", "internal/wake"},
	"internal/drapath":      {"mig", "sharing", "plugin", "internal/claims", "internal/decide", "internal/dra", "internal/migchange", "internal/units", "internal/wake"},
	"internal/features":     {"sharing"},
	"internal/gpusettings":  {"mig", "sharing", "internal/status", "internal/wake"},
	"internal/kube":         {"internal/wake"},
	"internal/memoryguard":  {"sharing", "internal/nodereport", "internal/wake"},
	"internal/migchange":    {"mig", "sharing", "internal/nodereport", "internal/units", "internal/wake"},
	"internal/mps":          {"sharing", "internal/nodereport", "internal/wake"},
	"internal/mpsshare":     {"sharing", "plugin", "internal/claims", "internal/decide", "internal/dra", "internal/nodereport", "internal/wake"},
	"internal/nodemetrics":  {"mig", "sharing", "sharing/metrics", "plugin", "internal/claims", "internal/decide", "internal/dra", "internal/nodereport", "internal/status", "internal/units"},
	"internal/nodereport":   {"mig", "sharing"},
	"internal/nvml":         {"mig", "sharing", "internal/wake"},
	"internal/nvml/driver":  {"mig", "internal/nvml", "internal/driverroot"},
	"internal/nvml/trace":   {"mig", "internal/nvml"},
	"internal/simnode":      {"mig", "sharing", "internal/nvml"},
	"internal/simkubelet":   {"sharing"},
	"internal/simdra":       {},
	"internal/simmps":       {"internal/mps"},
	"internal/command":      {"configs", "internal/status"},
	"internal/configsource": {"sharing", "configs", "internal/kube", "internal/wake"},
	"internal/nodestatus":   {"sharing", "internal/kube", "internal/nodereport", "internal/wake"},
	"internal/podresources": {"sharing", "plugin", "internal/wake"},
	"internal/status":       {"mig", "sharing", "plugin", "internal/claims", "internal/dra", "internal/nodereport", "internal/units"},
	"internal/units":        {},
	"internal/usage":        {"sharing"},
	"internal/release":      {"mig", "sharing", "internal/decide", "internal/nodereport", "internal/units", "internal/wake"},
	"internal/wake":         {},
	"internal/page":         {"mig", "sharing", "plugin", "internal/nodereport", "internal/status", "internal/units"},
	"internal/web":          {"sharing", "internal/nodereport", "internal/page", "internal/status", "internal/wake"},
	"internal/rollout":      {"internal/cluster", "internal/kube", "internal/nodereport", "internal/wake"},
	"internal/state":        {"mig", "sharing", "configs", "plugin"},
	"internal/cdi":          {"sharing", "plugin/grant", "internal/driverroot", "internal/migcaps"},
	"internal/driverroot":   {},
	"internal/host":         {"sharing", "plugin/grant", "internal/driverroot", "internal/migcaps", "internal/wake"},
	"internal/migcaps":      {},
}

// forbidden returns why folder must not import path; "" when it may.
func forbidden(folder, path string) string {
	nearest := ""
	for at := range arrows {
		if (folder == at || strings.HasPrefix(folder, at+"/")) && len(at) > len(nearest) {
			nearest = at
		}
	}
	target, ours := strings.CutPrefix(path, module)
	within := target == nearest || strings.HasPrefix(target, nearest+"/") && arrows[target] == nil
	switch {
	case strings.HasPrefix(folder, "cmd/") || strings.HasPrefix(folder, "test/"):
		return ""
	case path == "C" && folder != "internal/nvml/driver":
		return "everything but internal/nvml/driver builds without a C compiler"
	case nearest == "":
		return "the package has no arrows: state them here and in .golangci.yml, and the package in docs/explanation/architecture.md"
	case ours && !within && !slices.Contains(arrows[nearest], target):
		return nearest + " may import only " + strings.Join(arrows[nearest], ", ")
	}
	return ""
}

// TestImports checks the arrows in this repository. Files may be built only with or only without cgo, so it
// checks both; listing needs no C compiler.
func TestImports(t *testing.T) {
	readFolders(t)
	for _, cgo := range []string{"CGO_ENABLED=0", "CGO_ENABLED=1"} {
		command := exec.CommandContext(t.Context(), "go", "list", "-e", "-json=ImportPath,Imports", module+"...")
		command.Env = append(os.Environ(), cgo)
		output, err := command.Output()
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		seen := map[string]bool{}
		for decoder := json.NewDecoder(strings.NewReader(string(output))); ; {
			var p struct {
				ImportPath string
				Imports    []string
			}
			if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", command, err)
			}
			folder := strings.TrimPrefix(p.ImportPath, module)
			seen[folder] = true
			for _, path := range p.Imports {
				if why := forbidden(folder, path); why != "" {
					t.Errorf("%s imports %s: %s", folder, path, why)
				}
			}
		}
		for folder := range arrows {
			if !seen[folder] {
				t.Errorf("%s is no package: its arrows are held against nothing", folder)
			}
		}
	}
}

// TestLinked checks that the node's program contains nothing of what people run on their own machine, such
// as the clientset of every Kubernetes API, and no simulator except that of --node sim:.
func TestLinked(t *testing.T) {
	readFolders(t)
	for _, cgo := range []string{"CGO_ENABLED=0", "CGO_ENABLED=1"} {
		command := exec.CommandContext(t.Context(), "go", "list", "-deps", module+"cmd/virgate")
		command.Env = append(os.Environ(), cgo)
		output, err := command.Output()
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		linked := strings.Fields(string(output))
		if !slices.Contains(linked, module+"internal/daemon") {
			t.Fatalf("%s: internal/daemon is not linked: is it listed?", cgo)
		}
		if slices.ContainsFunc(linked, func(path string) bool { return strings.HasPrefix(path, "k8s.io/client-go/kubernetes") }) {
			t.Errorf("%s: cmd/virgate links k8s.io/client-go/kubernetes", cgo)
		}
		for _, name := range []string{"cluster", "rollout", "simdra", "simkubelet", "simmps"} {
			if slices.Contains(linked, module+"internal/"+name) {
				t.Errorf("%s: cmd/virgate links internal/%s", cgo, name)
			}
		}
	}
}

// readFolders reads the folders of the tree. go test reuses a cached pass until something changes that the
// test itself has read; what go list reads as a separate process does not count.
func readFolders(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && path != repository && entry.IsDir() && strings.HasPrefix(entry.Name(), ".") {
			return fs.SkipDir
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestForbidden(t *testing.T) {
	for _, test := range []struct {
		folder, path string
		want         bool
	}{
		{"mig", "strings", false},
		{"sharing", module + "mig", false},
		{"mig", module + "sharing", true},
		{"sharing", module + "internal/nvml", true},
		{"sharing/metrics", module + "sharing", false},
		{"sharing", module + "sharing/metrics", true},
		{"configs/tables", module + "configs", false},
		{"plugin/grant", module + "plugin", true},
		{"mig/tables", module + "sharing", true},
		{"migrate", "strings", true},
		{"internal/state", module + "internal/nvml", true},
		{"internal/agent", module + "internal/configsource", true},
		{"cmd/virgate", module + "internal/agent", false},
		{"internal/nvml/driver", "C", false},
		{"internal/nvml", "C", true},
	} {
		if got := forbidden(test.folder, test.path); (got != "") != test.want {
			t.Errorf("%s imports %s: %q", test.folder, test.path, got)
		}
	}
}
