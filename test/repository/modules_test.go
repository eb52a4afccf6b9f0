package repository

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestModulesOfTests checks which modules go.mod requires only for tests. A scan of the program for
// vulnerabilities covers all of go.mod; test/chart, test/kubernetes and cmd/image are separate modules.
func TestModulesOfTests(t *testing.T) {
	run := func(arguments ...string) []byte {
		command := exec.CommandContext(t.Context(), "go", arguments...)
		command.Dir = repository
		output, err := command.Output()
		if err != nil {
			t.Fatal(err)
		}
		return output
	}
	var file struct {
		Require []struct {
			Path     string
			Indirect bool
		}
	}
	if err := json.Unmarshal(run("mod", "edit", "-json"), &file); err != nil {
		t.Fatal(err)
	}
	linked := strings.Fields(string(run("list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./cmd/...")))
	var tests []string
	for _, module := range file.Require {
		if !module.Indirect && !slices.Contains(linked, module.Path) {
			tests = append(tests, module.Path)
		}
	}
	if diff := cmp.Diff([]string{"github.com/google/go-cmp", "github.com/rogpeppe/go-internal"}, tests); diff != "" {
		t.Errorf("modules that only tests need (-want +got): give their tests a module of its own, as test/chart has:\n%s", diff)
	}
}
