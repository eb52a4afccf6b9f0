package configs

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func TestParseFileKinds(t *testing.T) {
	tests := []struct {
		name, document string
		want           DocumentKind
		valid          bool
	}{
		{"empty", "", KindProfile, true},
		{"profile", "version: v1", KindProfile, true},
		{"no mapping", "[]", KindProfile, false},
		{"mig-configs", "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}", KindMIGConfigs, true},
		{"ConfigMap", "apiVersion: v1\nkind: ConfigMap", KindConfigMap, true},
		{"ConfigMap with nothing but data", "data: {}", KindConfigMap, false},
		{"several manifests", "kind: Namespace\n---\napiVersion: v1\nkind: ConfigMap\ndata: {a: ''}", KindManifests, true},
		{"a list", "kind: List\nitems: [{apiVersion: v1, kind: ConfigMap, data: {a: ''}}]", KindManifests, true},
		{"an empty document before a manifest", "---\n---\napiVersion: v1\nkind: ConfigMap", KindConfigMap, true},
		{"another kind", "kind: Secret\ndata: {a: ''}", KindManifests, false},
		{"Helm values", "config: {map: {a: ''}}", KindHelmValues, true},
		{"Helm values of a parent chart", "plugin: {config: {map: {a: ''}}}", KindHelmValues, true},
		{"Helm values with the operator's layouts", "migManager: {config: {data: {a: 'mig-configs: {}'}}}", KindHelmValues, false},
		{"a HelmRelease", "kind: HelmRelease\nspec: {values: {config: {map: {a: ''}}}}", KindManifests, true},
		{"an Application", "kind: Application\nspec: {source: {helm: {values: 'devicePlugin: {config: {data: {a: \"\"}}}'}}}", KindManifests, true},
		{"kind before mig-configs", "mig-configs: {}\nkind: ConfigMap", KindConfigMap, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := ParseFile("f", []byte(test.document), nil)
			if got.Kind != test.want || got.Name != "f" || (err == nil) != test.valid {
				t.Errorf("got kind %s and error %v", got.Kind, err)
			}
		})
	}
}

// TestKeyIsChecked checks that what is wrong with the chosen profile, with layouts, which
// any profile can name, and with the manifest is a problem.
func TestKeyIsChecked(t *testing.T) {
	for _, test := range []struct{ document, want string }{
		{"apiVersion: v1\nkind: ConfigMap\ndata: {a: 'flag: {}', b: '['}", "f[data.a]:1: flag: unknown key"},
		{"apiVersion: v1\nkind: ConfigMap\ndata: {a: '', b: '{version: v1, mig-configs: {}}'}", "f[data.b]:1: mig-configs"},
		{"apiVersion: v2\nkind: ConfigMap\ndata: {a: '', b: '['}", "f:1: apiVersion"},
	} {
		_, err := ParseKey("f", []byte(test.document), "a", nil)
		if problems, ok := err.(Problems); !ok || len(problems) != 1 || !strings.Contains(err.Error(), test.want) { //nolint:errorlint // It is of that type.
			t.Errorf("got %v, want %q and no more", err, test.want)
		}
	}
}

func TestSelect(t *testing.T) {
	const manifest = "apiVersion: v1\nkind: ConfigMap\ndata:\n"
	const layouts = "  layouts: '{version: v1, mig-configs: {a: [{devices: all, mig-enabled: false}]}}'\n"
	const mixed = "  mixed: 'flags: {migStrategy: mixed}'\n"
	tests := []struct {
		name, document, key string
		// want is the strategy of the profile that is selected.
		want sharing.MIGStrategy
		err  string
	}{
		{"profile", "flags: {migStrategy: mixed}", "", sharing.MIGMixed, ""},
		{"profile with a key", "", "any", "", `select "any" from f: it is no ConfigMap and has no keys`},
		{"mig-parted", "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}", "", "", "select from f: it is a mig-parted document, which has no profile"},
		{"the only profile", manifest + layouts + mixed, "", sharing.MIGMixed, ""},
		{"by key", manifest + mixed + "  default: ''\n", "mixed", sharing.MIGMixed, ""},
		{"by key beside what is wrong", manifest + mixed + "  mps: 'sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}'\n  syntax: '['\n  number: 3\n  \"a key\": ''\n", "mixed", sharing.MIGMixed, ""},
		{"by key with a layout of another", manifest + layouts + "  a: 'mig: {manage: false, config: a}'\n  b: '['\n", "a", sharing.MIGNone, ""},
		{"from a list", "kind: List\nitems: [{apiVersion: v1, kind: ConfigMap, data: {mixed: 'flags: {migStrategy: mixed}'}}]", "", sharing.MIGMixed, ""},
		{"from Helm values", "config: {map: {none: '', mixed: 'flags: {migStrategy: mixed}'}}", "mixed", sharing.MIGMixed, ""},
		{"several", manifest + mixed + "  default: ''\n", "", "", "select from f: several keys hold a profile, choose one of default, mixed"},
		{"no such key", manifest + mixed + "  default: ''\n", "other", "", `select from f: no key "other", there is default, mixed`},
		{"key of layouts", manifest + layouts + mixed, "layouts", "", "select from f: key layouts is a mig-parted document, which has no profile"},
		{"no profile", manifest + layouts, "", "", "select from f: no key holds a profile"},
		{"nothing", manifest, "any", "", "select from f: no key holds a profile"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			file, err := ParseKey("f", []byte(test.document), test.key, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := file.Select(test.key)
			if test.err != "" {
				if err == nil || err.Error() != test.err {
					t.Errorf("error is %v, want %s", err, test.err)
				}
				return
			}
			if err != nil || got.Profile.MIGStrategy != test.want {
				t.Errorf("got strategy %s and error %v", got.Profile.MIGStrategy, err)
			}
		})
	}
}

func TestParseFileAppliesOverrides(t *testing.T) {
	overrides := Overrides{"flags.migStrategy": {Value: "mixed", Source: "--mig-strategy"}}
	for _, document := range []string{"", "apiVersion: v1\nkind: ConfigMap\ndata: {any: ''}"} {
		file, err := ParseFile("f", []byte(document), overrides)
		if err != nil {
			t.Fatal(err)
		}
		config, err := file.Select("")
		if err != nil || config.Profile.MIGStrategy != sharing.MIGMixed {
			t.Errorf("%s: got %s, %v", strings.SplitN(document, "\n", 2)[0], config.Profile.MIGStrategy, err)
		}
	}
}

func readCase(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/cases/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestCases reads the documents that Virgate was asked to take as they are.
func TestCases(t *testing.T) {
	slicing, err := ParseFile("slicing", readCase(t, "time-slicing-configmap.yaml"), nil)
	if err != nil {
		t.Fatal(err)
	}
	share := sharing.ReplicatedResource{Path: "sharing.timeSlicing.resources[0]", Resource: "nvidia.com/gpu", Replicas: 4, Policy: sharing.Distributed}
	if len(slicing.Entries) != 1 || slicing.Entries[0].Name != "any" || slicing.Entries[0].Kind != KindProfile {
		t.Fatalf("time-slicing: %+v", slicing)
	}
	if diff := cmp.Diff(withDefaults(shares(share)), slicing.Entries[0].Config.Profile, compareSelectors); diff != "" {
		t.Errorf("time-slicing (-want +got):\n%s", diff)
	}

	got, err := ParseFile("mig", readCase(t, "mig-configmap.yaml"), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []File{{Name: "config.yaml", Place: "mig[data.config.yaml]", Kind: KindMIGConfigs, MIG: MIGLayouts{
		{Name: "all-1g.5gb", Blocks: []sharing.LayoutBlock{{All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: profile(t, "1g.5gb"), Count: 7}}}}}},
		{Name: "all-2g.10gb", Blocks: []sharing.LayoutBlock{{All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: profile(t, "2g.10gb"), Count: 3}}}}}},
	}}}
	if diff := cmp.Diff(want, got.Entries, compareSelectors, unplaced); diff != "" {
		t.Errorf("mig (-want +got):\n%s", diff)
	}
}

// TestCaseEnvironment gives the variables of the DaemonSet as overrides.
func TestCaseEnvironment(t *testing.T) {
	overrides := make(Overrides)
	manifest := string(readCase(t, "daemonset-env.yaml"))
	for _, s := range Settings() {
		if _, rest, ok := strings.Cut(manifest, "{name: "+s.Env+", value: \""); ok {
			value, _, _ := strings.Cut(rest, `"`)
			overrides[s.Path] = Override{Value: value, Source: "$" + s.Env}
		}
	}
	if len(overrides) != 3 {
		t.Fatalf("the manifest gives %v", overrides)
	}
	config, err := Parse("", nil, overrides)
	if err != nil {
		t.Fatal(err)
	}
	if config.Startup.FailOnInitError || config.Profile.DeviceIDs != sharing.ByUUID || len(config.Notes) > 0 {
		t.Errorf("config is %+v", config)
	}
}

// TestConfigMapLines has one mistake in each way of writing a document.
func TestConfigMapLines(t *testing.T) {
	const head = "apiVersion: v1\nkind: ConfigMap\ndata:\n"
	tests := []struct {
		name, data string
		line       int
	}{
		{"literal", "  a: |\n    version: v1\n    typo: 1\n", 6},
		{"literal, blank lines first", "  a: |\n\n    version: v1\n\n    typo: 1\n", 8},
		{"literal, stripped", "  a: |-\n    version: v1\n    typo: 1", 6},
		{"literal, with a comment", "  a: | # the default\n    version: v1\n    typo: 1", 6},
		{"literal, indented on purpose", "  a: |2\n    version: v1\n    typo: 1\n", 6},
		{"literal, CRLF", "  a: |\r\n    version: v1\r\n    typo: 1\r\n", 6},
		{"literal, syntax error", "  a: |\n    version: v1\n    typo: [\n", 6},
		{"quoted", "  a: \"version: v1\\ntypo: 1\"\n", 2},
		{"quoted, over lines", "  a: 'version: v1\n\n    typo: 1'\n", 2},
		{"JSON in text", "  a: '{\"typo\": 1}'\n", 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := ParseFile("m.yaml", []byte(head+test.data), nil)
			var problems Problems
			if !errors.As(err, &problems) || len(problems) != 1 {
				t.Fatalf("error is %v", err)
			}
			if p := problems[0]; p.File != "m.yaml[data.a]" || p.Line != test.line {
				t.Errorf("reported at %s:%d, want line %d", p.File, p.Line, test.line)
			}
		})
	}
}

func TestConfigMapEntriesAreSorted(t *testing.T) {
	manifest := `{"apiVersion":"v1","kind":"ConfigMap","immutable":true,"metadata":{"labels":{"a":"b"}},"data":{"b":"","c":"version: v1\nflags: {migStrategy: single}\n","a":"version: v1"}}`
	got, err := ParseFile("m.json", []byte(manifest), nil)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, e := range got.Entries {
		keys = append(keys, e.Name)
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, keys); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if notes := got.Entries[2].Config.Notes; len(notes) != 1 || notes[0].Line != 2 {
		t.Errorf("notes of c are %v", notes)
	}
	if notes := got.Entries[0].Config.Notes; len(notes) != 0 {
		t.Errorf("notes of a are %v", notes)
	}
}
