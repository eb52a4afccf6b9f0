package repository

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

const (
	nvmlPage  = "docs/internals/nvml.md"
	nvmlCode  = "internal/nvml/driver"
	goNVML    = "github.com/NVIDIA/go-nvml"
	goNVMLPkg = goNVML + "/pkg/nvml"
)

// nvmlRow is a row of the tables of calls in docs/internals/nvml.md.
type nvmlRow struct{ who, codes, differences string }

var (
	nvmlCall   = regexp.MustCompile("^`([A-Z][A-Za-z]+)`$")
	difference = regexp.MustCompile(`\bD[0-9]+\b`)
	version    = regexp.MustCompile(`_v[0-9]+$`)
)

// nvmlRows parses the page: the rows of its tables of calls by name, and the names of the differences that
// its list explains.
func nvmlRows(t *testing.T, page string) (rows map[string]nvmlRow, differences []string) {
	t.Helper()
	rows = map[string]nvmlRow{}
	for line := range strings.Lines(page) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if name := nvmlCall.FindStringSubmatch(cells[0]); name != nil && len(cells) == 5 {
			if _, twice := rows[name[1]]; twice {
				t.Errorf("%s has two rows", name[1])
			}
			rows[name[1]] = nvmlRow{who: cells[1], codes: cells[2], differences: cells[4]}
		}
		if difference.FindString(cells[0]) == cells[0] && cells[0] != "" {
			differences = append(differences, cells[0])
		}
	}
	return rows, differences
}

// TestNVMLCalls checks that docs/internals/nvml.md has a row for exactly the functions of NVML that the
// driver package calls, and that forward.c forwards each of them.
func TestNVMLCalls(t *testing.T) {
	rows, _ := nvmlRows(t, documents(t)[nvmlPage])
	calls := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(repository, nvmlCode, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if !strings.HasSuffix(file, "_test.go") {
			maps.Copy(calls, callsOfNVML(t, file, nil))
		}
	}
	// Each method of the Library is one of NVML's, with two exceptions.
	for library, i := reflect.TypeFor[nvml.Library](), 0; i < library.NumMethod(); i++ {
		switch method := library.Method(i).Name; method {
		case "DeviceGetNumaNodeId": // It is DeviceGetPciInfo and a file in sysfs.
		case "DeviceGetCurrentClocksEventReasons": // It is called under an older name.
			calls["DeviceGetCurrentClocksThrottleReasons"] = true
		default:
			calls[method] = true
		}
	}
	forward, err := os.ReadFile(filepath.Join(repository, nvmlCode, "forward.c"))
	if err != nil {
		t.Fatal(err)
	}
	forwarded := map[string]bool{}
	for _, match := range regexp.MustCompile(`\bF\(nvml(\w+),`).FindAllSubmatch(forward, -1) {
		forwarded[version.ReplaceAllString(string(match[1]), "")] = true
	}
	if len(calls) < 40 || len(forwarded) < 40 {
		t.Fatalf("%d calls, %d forwarded: are they read?", len(calls), len(forwarded))
	}
	for call := range calls {
		if _, ok := rows[call]; !ok {
			t.Errorf("%s has no row in %s", call, nvmlPage)
		}
		if !forwarded[call] {
			t.Errorf("%s is not in forward.c", call)
		}
	}
	for call := range rows {
		if !calls[call] {
			t.Errorf("%s has a row for %s, which the driver package does not call", nvmlPage, call)
		}
	}
	for call := range forwarded {
		if !calls[call] {
			t.Errorf("forward.c has %s, which nobody calls", call)
		}
	}
}

// callsOfNVML returns the functions of NVML that a Go file calls through go-nvml, whose methods have NVML's
// names: a Device's GetUUID is nvmlDeviceGetUUID.
func callsOfNVML(t *testing.T, path string, source any) map[string]bool {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	name := ""
	for _, spec := range file.Imports {
		if strings.Trim(spec.Path.Value, `"`) == goNVMLPkg {
			if name = "nvml"; spec.Name != nil {
				name = spec.Name.Name
			}
		}
	}
	prefixes := map[string]string{
		"Interface": "", "Device": "Device", "GpuInstance": "GpuInstance", "ComputeInstance": "ComputeInstance", "EventSet": "EventSet",
	}
	// typeOf is the prefix of the type's methods in nvml.h, if it is one of go-nvml's.
	typeOf := func(expression ast.Expr) (prefix string, ok bool) {
		selector, ok := expression.(*ast.SelectorExpr)
		if !ok {
			return "", false
		}
		if identifier, named := selector.X.(*ast.Ident); !named || identifier.Name != name {
			return "", false
		}
		prefix, ok = prefixes[selector.Sel.Name]
		return prefix, ok
	}
	calls := map[string]bool{}
	var visit func(node ast.Node, typed map[string]string)
	visit = func(node ast.Node, typed map[string]string) {
		ast.Inspect(node, func(inner ast.Node) bool {
			var signature *ast.FuncType
			var body *ast.BlockStmt
			switch inner := inner.(type) {
			case *ast.FuncDecl:
				signature, body = inner.Type, inner.Body
			case *ast.FuncLit:
				signature, body = inner.Type, inner.Body
			case *ast.SelectorExpr:
				prefix, ok := typeOf(inner.X) // Device.GetUUID as a function.
				switch x := inner.X.(type) {
				case *ast.Ident:
					prefix, ok = typed[x.Name]
				case *ast.ParenExpr: // The library that is open.
					ok = true
				}
				if ok && inner.Sel.Name != "Extensions" {
					calls[prefix+inner.Sel.Name] = true
				}
				return true
			}
			if body == nil {
				return true
			}
			within := maps.Clone(typed)
			for _, field := range signature.Params.List {
				prefix, ok := typeOf(field.Type)
				for _, parameter := range field.Names {
					if delete(within, parameter.Name); ok {
						within[parameter.Name] = prefix
					}
				}
			}
			visit(body, within)
			return false
		})
	}
	if name != "" {
		visit(file, map[string]string{})
	}
	return calls
}

func TestCallsOfNVML(t *testing.T) {
	source := `package driver
import gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
func f(d nvml.Device, set gonvml.EventSet) {
	call(d, gonvml.Device.GetName)
	call(d, func(d gonvml.Device) int { return d.GetGpuInstanceProfileInfoV(1).V2() })
	set.Wait(3)
	d.Unrelated()
	(*l.api.Load()).Shutdown()
	call(func(api gonvml.Interface) error { return api.Extensions().LookupSymbol(api.DeviceGetCount()) })
}`
	got := slices.Sorted(maps.Keys(callsOfNVML(t, "f.go", source)))
	if want := []string{"DeviceGetCount", "DeviceGetGpuInstanceProfileInfoV", "DeviceGetName", "EventSetWait", "Shutdown"}; !slices.Equal(got, want) {
		t.Errorf("calls %q, want %q", got, want)
	}
}

// documentedElsewhere maps functions that nvml.h calls deprecated without saying what they return to those
// that it names instead, and a function to the older version that is called.
var documentedElsewhere = map[string]string{
	"DeviceGetTemperature":                  "DeviceGetTemperatureV",
	"DeviceGetCurrentClocksThrottleReasons": "DeviceGetCurrentClocksEventReasons",
	// Virgate calls the second version. The third, of R615, delivers other events.
	"EventSetWait": "EventSetWait_v2",
}

// TestNVMLHeader checks that each row of docs/internals/nvml.md agrees with nvml.h on who may make the call
// and which codes it returns. It leaves out the codes that every call may return: UNINITIALIZED,
// INVALID_ARGUMENT and UNKNOWN.
func TestNVMLHeader(t *testing.T) {
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", goNVML)
	list.Dir = repository
	folder, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(string(bytes.TrimSpace(folder)), "pkg/nvml/nvml.h"))
	if err != nil {
		t.Fatal(err)
	}
	returns := regexp.MustCompile(`-\s+\\ref NVML_ERROR_(\w+)`)
	rows, _ := nvmlRows(t, documents(t)[nvmlPage])
	for call, row := range rows {
		comment := commentOf(string(header), call)
		if other := documentedElsewhere[call]; other != "" {
			comment = commentOf(string(header), other)
		}
		var codes []string
		for _, match := range returns.FindAllStringSubmatch(comment, -1) {
			if !slices.Contains([]string{"UNINITIALIZED", "INVALID_ARGUMENT", "UNKNOWN"}, match[1]) {
				codes = append(codes, match[1])
			}
		}
		slices.Sort(codes)
		want := strings.Join(slices.Compact(codes), ", ")
		if want == "" {
			want = "none"
		}
		if row.codes != want {
			t.Errorf("%s returns %s, says nvml.h; the page says %s", call, want, row.codes)
		}
		who := "all"
		switch {
		case strings.Contains(comment, "Requires root"): // "root user", or "root/admin permissions".
			who = "root"
		case strings.Contains(comment, "Requires privileged user"):
			who = "privileged"
		case strings.Contains(comment, "appropriate privileges"):
			who = "all; with MIG, privileged"
		}
		if row.who != who {
			t.Errorf("%s is for %q, says nvml.h; the page says %q", call, who, row.who)
		}
	}
}

// commentOf returns nvml.h's comment on the newest version of a function.
func commentOf(header, call string) string {
	const declares = "nvmlReturn_t DECLDIR "
	for _, suffix := range []string{"_v3", "_v2", ""} {
		before, _, declared := strings.Cut(header, declares+"nvml"+call+suffix+"(")
		if !declared {
			continue
		}
		return before[strings.LastIndex(before, declares)+1:]
	}
	return ""
}

// TestNVMLDifferences checks that each difference of the simulated driver that a row or a sentence names is
// explained, that a row names each explained one, and that docs/internals/hardware.md lists all of them.
func TestNVMLDifferences(t *testing.T) {
	rows, explained := nvmlRows(t, documents(t)[nvmlPage])
	listed := difference.FindAllString(documents(t)["docs/internals/hardware.md"], -1)
	named := map[string]bool{}
	for call, row := range rows {
		found := difference.FindAllString(row.differences, -1)
		if len(found) == 0 && row.differences != "obeys" {
			t.Errorf("%s: is it simulated as it is? The row says %q", call, row.differences)
		}
		for _, name := range found {
			if named[name] = true; !slices.Contains(explained, name) {
				t.Errorf("%s has %s, which the page does not explain", call, name)
			}
		}
	}
	for i, name := range explained {
		if !named[name] {
			t.Errorf("no call has %s", name)
		}
		if slices.Contains(explained[:i], name) {
			t.Errorf("%s is explained twice", name)
		}
		if !slices.Contains(listed, name) {
			t.Errorf("%s is not on the list of docs/internals/hardware.md", name)
		}
	}
	for _, page := range []string{nvmlPage, "docs/internals/hardware.md"} {
		for _, name := range difference.FindAllString(documents(t)[page], -1) {
			if !slices.Contains(explained, name) {
				t.Errorf("%s speaks of %s, which is not explained", page, name)
			}
		}
	}
	if len(explained) < 10 {
		t.Errorf("%d differences: are they read?", len(explained))
	}
}
