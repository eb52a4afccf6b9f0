package nodestatus

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestEventsDocument compares the Events in docs/reference/kubernetes-objects.md with events.go: their reasons,
// and which are Normal.
func TestEventsDocument(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "events.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	reasons, normal := map[string]string{}, []string{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			if name := n.Names[0].Name; strings.HasPrefix(name, "Reason") {
				reasons[name], _ = strconv.Unquote(n.Values[0].(*ast.BasicLit).Value)
			}
		case *ast.CallExpr:
			if kind, isName := n.Fun.(*ast.Ident); isName && kind.Name == "normal" {
				normal = append(normal, reasons[n.Args[0].(*ast.Ident).Name])
			}
		}
		return true
	})
	slices.Sort(normal)

	data, err := os.ReadFile("../../docs/reference/kubernetes-objects.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(data), "\n## Events\n")
	section, _, _ = strings.Cut(section, "\n## ")
	code := regexp.MustCompile("`([A-Za-z]+)`")
	namesIn := func(text string) (names []string) {
		for _, match := range code.FindAllStringSubmatch(text, -1) {
			names = append(names, match[1])
		}
		slices.Sort(names)
		return names
	}
	var cells, normalText string
	for line := range strings.Lines(section) {
		if row := strings.Split(line, "|"); len(row) == 4 {
			cells += row[1]
		} else if names, _, found := strings.Cut(line, " are Normal, all others Warning"); found {
			normalText = names
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Values(reasons)), namesIn(cells)); diff != "" {
		t.Errorf("reasons (-code +document):\n%s", diff)
	}
	if diff := cmp.Diff(normal, namesIn(normalText)); diff != "" {
		t.Errorf("Normal Events (-code +document):\n%s", diff)
	}
}
