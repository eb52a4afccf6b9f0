package repository

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files and THIRD_PARTY_LICENSES instead of comparing with them")

// TestLicences checks that THIRD_PARTY_LICENSES names every module that is linked into the program or the
// image's shell, with its version and licence text. After a change of go.mod: make licences.
func TestLicences(t *testing.T) {
	got := licences(t)
	file := filepath.Join(repository, "THIRD_PARTY_LICENSES")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("THIRD_PARTY_LICENSES is not what is linked; make licences (-file +linked):\n%s", diff)
	}
}

// licences returns each licence text once, below the modules that have it.
func licences(t *testing.T) string {
	t.Helper()
	var modules []string
	for _, program := range []struct{ folder, name string }{{repository, "./cmd/virgate"}, {repository, "./cmd/kubectl-virgate"}, {filepath.Join(repository, "cmd/image"), "./shell"}} {
		list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}", program.name)
		list.Dir = program.folder
		list.Env = append(os.Environ(), "CGO_ENABLED=1", "GOOS=linux", "GOARCH=amd64")
		output, err := list.Output()
		if err != nil {
			t.Fatal(err)
		}
		modules = append(modules, strings.Split(strings.TrimSpace(string(output)), "\n")...)
	}
	slices.Sort(modules)
	by := map[string][]string{}
	var texts []string
	for _, module := range slices.Compact(modules) {
		part := strings.Fields(module)
		if len(part) == 0 {
			continue
		}
		text := licenceOf(t, part[2])
		if by[text] == nil {
			texts = append(texts, text)
		}
		by[text] = append(by[text], part[0]+" "+part[1])
	}
	if len(texts) < 10 {
		t.Fatalf("%d licences: are the modules listed?", len(texts))
	}
	var b strings.Builder
	b.WriteString("Virgate's binaries contain Go's standard library (BSD-3-Clause, as golang.org/x/sys below) and the modules\nbelow, each under the licence that follows its name. Made by `make licences`.\n")
	for _, text := range texts {
		fmt.Fprintf(&b, "\n%s\n\n%s\n\n%s\n", strings.Repeat("=", 80), strings.Join(by[text], "\n"), text)
	}
	return b.String()
}

// licenceOf returns the licence files at the top of a module, and its notices, which the Apache licence
// requires to be passed on.
func licenceOf(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, entry := range entries {
		name, _, _ := strings.Cut(strings.ToUpper(entry.Name()), ".")
		if entry.IsDir() || name != "LICENSE" && name != "LICENCE" && name != "COPYING" && name != "NOTICE" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for line := range strings.Lines(string(text)) {
			lines = append(lines, strings.TrimRight(line, " \t\r\n"))
		}
		texts = append(texts, strings.Trim(strings.Join(lines, "\n"), "\n"))
	}
	if len(texts) == 0 {
		t.Errorf("%s has no licence", dir)
	}
	return strings.Join(texts, "\n\n")
}
