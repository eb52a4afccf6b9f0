package repository

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestLayout keeps the program readable in two columns and in a diff: at most 120 columns with a tab as four, one field
// per line in a literal of three or more keyed fields, no if header that reassigns, no assignment of three or more
// values. Tests have tables, whose rows are lines.
func TestLayout(t *testing.T) {
	files := 0
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		name, _ := filepath.Rel(repository, path)
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (name == "test" || name == "bin" || name != "." && strings.HasPrefix(entry.Name(), ".")):
			return fs.SkipDir
		case !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil || strings.HasPrefix(string(source), "// Code generated") {
			return err
		}
		files++
		for _, problem := range crowded(t, name, string(source)) {
			t.Error(problem)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 200 {
		t.Errorf("%d files: are they read?", files)
	}
}

// crowded returns the parts of the file that break these rules.
func crowded(t *testing.T, name, source string) (problems []string) {
	t.Helper()
	for i, line := range strings.Split(source, "\n") {
		if columns := utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    ")); columns > 120 {
			problems = append(problems, fmt.Sprintf("%s:%d: a line of %d columns, more than 120", name, i+1, columns))
		}
	}
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, name, source, 0)
	if err != nil {
		t.Fatal(err)
	}
	line := func(at token.Pos) int { return set.Position(at).Line }
	say := func(at token.Pos, what string) {
		problems = append(problems, fmt.Sprintf("%s:%d: %s", name, line(at), what))
	}
	ast.Inspect(file, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.CompositeLit:
			if keyed(node) < 3 {
				return true
			}
			previous := line(node.Lbrace)
			for _, element := range node.Elts {
				if line(element.Pos()) == previous {
					say(element.Pos(), "several fields of a literal on one line")
					break
				}
				previous = line(element.End())
			}
		case *ast.IfStmt:
			if assign, ok := node.Init.(*ast.AssignStmt); ok && assign.Tok == token.ASSIGN {
				say(node.Pos(), "an if header that reassigns")
			}
		case *ast.AssignStmt:
			if len(node.Rhs) > 2 {
				say(node.Pos(), "an assignment of three or more values")
			}
		}
		return true
	})
	return problems
}

func keyed(literal *ast.CompositeLit) (fields int) {
	for _, element := range literal.Elts {
		if _, ok := element.(*ast.KeyValueExpr); ok {
			fields++
		}
	}
	return fields
}

func TestCrowded(t *testing.T) {
	const good = "package p\n\nvar a = T{\n\tA: 1,\n\tB: 2,\n\tC: 3,\n}\n\nvar b = T{A: 1, B: 2}\n\n" +
		"func f() {\n\tif x := g(); x {\n\t}\n\tx, y := 1, 2\n\tx, y, z := h()\n}\n"
	if problems := crowded(t, "good.go", good); len(problems) > 0 {
		t.Error(problems)
	}
	for bad, want := range map[string]string{
		"var a = T{A: 1, B: 2, C: 3}":                                   "several fields of a literal",
		"var a = T{\n\tA: 1,\n\tB: 2, C: 3,\n}":                         "several fields of a literal",
		"func f() {\n\tif x = g(); x {\n\t}\n}":                         "an if header that reassigns",
		"func f() {\n\ta, b, c := 1, 2, 3\n}":                           "an assignment of three",
		"func f() {\n\tif a {\n\t} else if x = g(); x {\n\t}\n}":        "an if header that reassigns",
		"var a = `" + strings.Repeat("é", 111) + "`" /* 121 columns */ : "a line of 121 columns",
	} {
		problems := crowded(t, "bad.go", "package p\n\n"+bad+"\n")
		if len(problems) != 1 || !strings.Contains(problems[0], want) {
			t.Errorf("%s: %q, want %q", bad, problems, want)
		}
	}
}
