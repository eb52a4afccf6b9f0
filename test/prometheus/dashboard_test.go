package prometheus

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// dashboard is a Grafana dashboard, with the fields that the tests check.
type dashboard struct {
	ID            any
	UID           string
	Title         string
	SchemaVersion int
	Panels        []panel
	Templating    struct{ List []variable }
}

type panel struct {
	ID          int
	Type        string
	Title       string
	Description string
	Datasource  datasource
	GridPos     struct{ H, W, X, Y int }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []target
}

type target struct {
	RefID      string
	Expression string `json:"expr"`
	Legend     string `json:"legendFormat"`
	Datasource datasource
}

type variable struct {
	Name, Type string
	Definition string
	Datasource datasource
}

type datasource struct{ Type, UID string }

// chosen is the data source of the dashboards' variable.
var chosen = datasource{Type: "prometheus", UID: "${datasource}"}

func dashboardFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(dashboards)
	if err != nil || len(files) != 2 {
		t.Fatalf("dashboards: %v, %v", files, err)
	}
	return files
}

func readDashboard(t *testing.T, path string) dashboard {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return d
}

// TestDashboardsCanBeImported checks the form that Grafana 10 and later imports without a question: fixed
// names, the data source as a variable, and panels that do not overlap and say what they show, in which
// unit.
func TestDashboardsCanBeImported(t *testing.T) {
	for _, file := range dashboardFiles(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			d := readDashboard(t, file)
			if want := strings.TrimSuffix(filepath.Base(file), ".json"); d.UID != want || d.ID != nil || d.SchemaVersion < 38 {
				t.Errorf("uid %q, id %v, schema version %d; want uid %s, no id, 38 or newer", d.UID, d.ID, d.SchemaVersion, want)
			}
			if first := d.Templating.List[0]; first.Name != "datasource" || first.Type != "datasource" {
				t.Errorf("the first variable is %+v", first)
			}
			for _, v := range d.Templating.List[1:] {
				if v.Type != "query" || v.Datasource != chosen {
					t.Errorf("variable %s: type %s, data source %v", v.Name, v.Type, v.Datasource)
				}
			}
			if !slices.ContainsFunc(d.Templating.List, func(v variable) bool { return v.Name == "node" }) {
				t.Error("no variable for the node")
			}
			for i, p := range d.Panels {
				p.check(t)
				if p.ID != i+1 {
					t.Errorf("%s: id %d, want its place, %d", p.Title, p.ID, i+1)
				}
				for _, other := range d.Panels[:i] {
					if p.overlaps(other) {
						t.Errorf("%s overlaps %s", p.Title, other.Title)
					}
				}
			}
		})
	}
}

func (p panel) check(t *testing.T) {
	t.Helper()
	if p.Title == "" || p.GridPos.X+p.GridPos.W > 24 || p.GridPos.W*p.GridPos.H == 0 {
		t.Errorf("panel %d: title %q at %+v", p.ID, p.Title, p.GridPos)
	}
	if p.Type == "row" {
		return
	}
	if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || p.Datasource != chosen || len(p.Targets) == 0 {
		t.Errorf("%s: description %q, unit %q, data source %v, %d targets", p.Title, p.Description, p.FieldConfig.Defaults.Unit, p.Datasource, len(p.Targets))
	}
	for i, target := range p.Targets {
		if target.Datasource != chosen || target.RefID != string(rune('A'+i)) {
			t.Errorf("%s: target %s of data source %v", p.Title, target.RefID, target.Datasource)
		}
		// A query over all nodes ignores the reader's choice.
		if !strings.Contains(target.Expression, `"$node"`) && !strings.Contains(target.Expression, "ALERTS") {
			t.Errorf("%s: %s does not ask for the chosen node", p.Title, target.Expression)
		}
	}
}

func (p panel) overlaps(q panel) bool {
	a, b := p.GridPos, q.GridPos
	return a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H
}

// TestDashboardsNameExistingAlerts checks the names of alerts in descriptions.
func TestDashboardsNameExistingAlerts(t *testing.T) {
	sections := headings(t, runbookFile, "###")
	for _, file := range dashboardFiles(t) {
		for _, p := range readDashboard(t, file).Panels {
			_, names, _ := strings.Cut(p.Description, "Runbook: ")
			for _, name := range strings.FieldsFunc(names, func(r rune) bool { return strings.ContainsRune(" ,.", r) }) {
				if !slices.Contains(sections, name) {
					t.Errorf("%s: the runbook has no section %s", p.Title, name)
				}
			}
		}
	}
}

// TestDashboardsAreIndented keeps diffs of the files readable.
func TestDashboardsAreIndented(t *testing.T) {
	for _, file := range dashboardFiles(t) {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var indented bytes.Buffer
		if err := json.Indent(&indented, bytes.TrimSpace(data), "", "  "); err != nil {
			t.Fatal(err)
		}
		if indented.WriteByte('\n'); !bytes.Equal(indented.Bytes(), data) {
			t.Errorf("%s: not indented by two spaces", file)
		}
	}
}
