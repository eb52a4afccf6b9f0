package repository

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// usedInConfigs are fields that configs itself uses, for a method that others call.
var usedInConfigs = map[string]string{
	"Config.Layouts":                          "SelectMIG",
	"Config.Allowed":                          "SelectedProfile.SelectMIG",
	"MIGLayout.Name":                          "SelectMIG",
	"MIGLayout.Blocks":                        "SelectMIG",
	"StartupSettings.DeviceDiscoveryStrategy": "CheckUnchanged; its two values mean the same here",
}

// TestKeysAreUsed checks that the program uses each field of configs.Config, and of the values in it, outside of
// configs: no key of a profile is read for nothing. TestEveryKeyIsRead in configs checks that each key has a field.
func TestKeysAreUsed(t *testing.T) {
	readFolders(t)
	loader := loader{set: token.NewFileSet(), ours: map[string]*types.Package{}}
	used := loader.load(t, module+"cmd/virgate", module+"configs")

	fields := 0
	seen := map[types.Type]bool{}
	var visit func(at types.Type)
	visit = func(at types.Type) {
		if seen[at] {
			return
		}
		seen[at] = true
		switch under := at.Underlying().(type) {
		case *types.Slice:
			visit(under.Elem())
		case *types.Map:
			visit(under.Elem())
		case *types.Struct:
			for field := range under.Fields() {
				fields++
				name := types.TypeString(at, func(*types.Package) string { return "" }) + "." + field.Name()
				switch known := usedInConfigs[name] != ""; {
				case !field.Exported() || !strings.HasPrefix(field.Pkg().Path(), module):
				case !used[field] && !known:
					t.Errorf("nothing outside configs uses %s", name)
				case used[field] && known:
					t.Errorf("%s is used outside configs: it is no exception", name)
				}
				visit(field.Type())
			}
		}
	}
	visit(loader.ours[module+"configs"].Scope().Lookup("Config").Type())
	if fields < 80 {
		t.Errorf("%d fields: are they found?", fields)
	}
}

// loader checks the types of packages: this module's from their source, libraries' from what the compiler exported.
type loader struct {
	set       *token.FileSet
	ours      map[string]*types.Package
	libraries types.Importer
}

func (l loader) Import(path string) (*types.Package, error) {
	if p := l.ours[path]; p != nil {
		return p, nil
	}
	return l.libraries.Import(path)
}

type listed struct {
	ImportPath, Dir, Export string
	GoFiles                 []string
}

func list(t *testing.T, arguments ...string) (packages []listed) {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json=ImportPath,Dir,Export,GoFiles"}, arguments...)...)
	output, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
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

// load loads a program and returns the fields that its packages, except one, use for more than assigning to them.
func (l *loader) load(t *testing.T, program, except string) map[types.Object]bool {
	t.Helper()
	packages := list(t, "-deps", program)
	export := []string{"-export"}
	for _, p := range packages {
		if !strings.HasPrefix(p.ImportPath, module) && p.ImportPath != "unsafe" {
			export = append(export, p.ImportPath)
		}
	}
	exports := map[string]string{}
	for _, p := range list(t, export...) {
		exports[p.ImportPath] = p.Export
	}
	l.libraries = importer.ForCompiler(l.set, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })

	used := map[types.Object]bool{}
	for _, p := range packages { // each behind those that it imports
		if !strings.HasPrefix(p.ImportPath, module) {
			continue
		}
		var files []*ast.File
		for _, name := range p.GoFiles {
			file, err := parser.ParseFile(l.set, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, file)
		}
		info := &types.Info{Selections: map[*ast.SelectorExpr]*types.Selection{}}
		check := types.Config{Importer: l, Error: func(error) {}} // Some: files with cgo are missing.
		l.ours[p.ImportPath], _ = check.Check(p.ImportPath, l.set, files, info)
		if p.ImportPath == except {
			continue
		}
		assigned := map[ast.Expr]bool{}
		for _, file := range files {
			ast.Inspect(file, func(node ast.Node) bool {
				if assign, ok := node.(*ast.AssignStmt); ok && assign.Tok == token.ASSIGN {
					for _, to := range assign.Lhs {
						assigned[to] = true
					}
				}
				return true
			})
		}
		for selector, selection := range info.Selections {
			if !assigned[selector] {
				used[selection.Obj()] = true
			}
		}
	}
	return used
}
