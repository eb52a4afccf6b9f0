package configs

import (
	"errors"
	"fmt"
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
		{"Helm values of a parent chart", "plugin: {config: {map: {a: 'version: v1'}}}", KindHelmValues, true},
		{"Helm values without a GPU's document", "nfd: {worker: {config: {data: {a: 'core: {}'}}}}\ndevicePlugin: {enabled: true}", KindHelmValues, false},
		{"Helm values with limits", "resources: {limits: {cpu: 1}}\nmig: {manage: true}\ndra: {}\nconfig: {map: {a: ''}}", KindHelmValues, true},
		{"a profile with a key of Helm values", "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}\nconfig: {map: {a: ''}}", KindProfile, false},
		{"a version with a key of Helm values", "version: v1\nconfig: {map: {a: ''}}", KindProfile, false},
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

// TestUnrelatedDocuments checks that documents of other programs in a file are ignored.
func TestUnrelatedDocuments(t *testing.T) {
	const good = "apiVersion: v1\nkind: ConfigMap\ndata: {any: 'flags: {migStrategy: mixed}'}\n---\n"
	const values = "devicePlugin: {config: {data: {any: 'flags: {migStrategy: mixed}'}}}\n"
	tests := []struct {
		name, document string
		// skipped is the place of a note about an unread key; err is in a problem.
		skipped, err string
	}{
		{"a script", good + "apiVersion: v1\nkind: ConfigMap\ndata: {run.sh: 'echo [ ${HOME}'}", "7: data", ""},
		{"another program's YAML", good + "apiVersion: v1\nkind: ConfigMap\ndata: {config.yaml: '{version: 3, services: {a: b}}'}", "7: data", ""},
		{"flags of another program", good + "apiVersion: v1\nkind: ConfigMap\ndata: {flags.json: '{\"flags\": {\"new-ui\": {\"state\": \"ENABLED\"}}}'}", "7: data", ""},
		{"binary data", good + "apiVersion: v1\nkind: ConfigMap\nbinaryData: {a: AAAA}", "", ""},
		{"another kind", good + "kind: Thing\nspec: {config: {data: {a: b}}}", "6: spec.config.data", ""},
		{"numbers in another kind", good + "kind: Thing\nspec: {config: {map: {a: 1}}}", "6: spec.config.map", ""},
		{"values that are text", good + "kind: Thing\nspec: {values: 'a: ['}", "", ""},
		{"NFD beside the plugin", values + "nfd: {worker: {config: {data: {x: 'core: {sleepInterval: 60s}'}}}}", "2: nfd.worker.config.data", ""},
		{"a mistake in a profile", good + "apiVersion: v1\nkind: ConfigMap\ndata: {a: 'version: v1', b: 'flag: {}'}", "", "f[data.b]:1: flag: unknown key"},
		{"a syntax error in a profile", good + "apiVersion: v1\nkind: ConfigMap\ndata: {a: 'sharing: ['}", "", "f[data.a]:1: not valid YAML"},
		{"a mistake below devicePlugin", "sub: {devicePlugin: {config: {data: {any: 'flag: {}'}}}}", "", "flag: unknown key"},
		{"a mistake where all is unrelated", "kind: Namespace\n---\napiVersion: v1\nkind: ConfigMap\ndata: {any: 'flag: {}'}", "", "f[data.any]:1: flag: unknown key"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			file, err := ParseFile("f", []byte(test.document), nil)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("error is %v, want %s", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if config, err := file.Select(""); err != nil || config.Profile.MIGStrategy != sharing.MIGMixed {
				t.Errorf("selected %s, %v", config.Profile.MIGStrategy, err)
			}
			var skipped []string
			for _, note := range file.Config.Notes {
				skipped = append(skipped, fmt.Sprintf("%d: %s", note.Line, note.Path))
			}
			if got := strings.Join(skipped, ", "); got != test.skipped {
				t.Errorf("notes are at %q, want %q", got, test.skipped)
			}
		})
	}
}

// TestRepeatedKey checks that a key in several ConfigMaps of a file is noted, and that the error names their
// lines.
func TestRepeatedKey(t *testing.T) {
	const manifest = "apiVersion: v1\nkind: ConfigMap\ndata:\n  %s: |\n    version: v1\n---\n"
	same := fmt.Sprintf(manifest+manifest, "config.yaml", "config.yaml")
	file, err := ParseFile("f", []byte(same), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []Note{{Line: 10, Path: "data.config.yaml", Message: "the key is on line 4 already, in another ConfigMap: a profile can be chosen by its key only if one ConfigMap of the file has it"}}
	if diff := cmp.Diff(want, file.Config.Notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
	for _, test := range []struct{ document, key, want string }{
		{same, "", "select from f: several ConfigMaps have the key config.yaml, on lines 4 and 10: leave one of them in the file"},
		{same, "config.yaml", "select from f: several ConfigMaps have the key config.yaml, on lines 4 and 10: leave one of them in the file"},
		{same + fmt.Sprintf(manifest, "more"), "", "select from f: several keys hold a profile, choose one of config.yaml, more"},
	} {
		file, err := ParseKey("f", []byte(test.document), test.key, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.Select(test.key); err == nil || err.Error() != test.want {
			t.Errorf("key %q: %v, want %s", test.key, err, test.want)
		}
	}
}

// TestNamesLikePlaceholders checks that a name which stands for any name in keys.json is read like all others.
func TestNamesLikePlaceholders(t *testing.T) {
	file, err := ParseFile("", []byte(`{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {KEY: "{mig: {configs: {NAME: [{devices: all, mig-enabled: false}]}}}"}}`), nil)
	if err != nil || len(file.Entries) != 1 || len(file.Entries[0].Config.Layouts) != 1 {
		t.Errorf("ParseFile() = %+v, %v", file, err)
	}
	const want = `:1: health.xids.XID: expected the number of an XID, or other (got "XID")`
	if _, err := Parse("", []byte("health: {xids: {XID: fatal}}"), nil); err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
}

// TestKeyIsChecked checks that an error in the chosen profile, in layouts, which any profile can name, or in the
// manifest is a problem.
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
		// want is the selected profile's strategy.
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

// TestCases reads documents that must work unchanged.
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
	want := []File{{Name: "config.yaml", Place: "mig[data.config.yaml]", Line: 6, Kind: KindMIGConfigs, MIG: MIGLayouts{
		{Name: "all-1g.5gb", Blocks: []sharing.LayoutBlock{{All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: profile(t, "1g.5gb"), Count: 7}}}}}},
		{Name: "all-2g.10gb", Blocks: []sharing.LayoutBlock{{All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: profile(t, "2g.10gb"), Count: 3}}}}}},
	}}}
	if diff := cmp.Diff(want, got.Entries, compareSelectors, unplaced); diff != "" {
		t.Errorf("mig (-want +got):\n%s", diff)
	}
}

// TestCaseEnvironment passes the DaemonSet's variables as overrides.
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

// TestSharedUnlike checks which names are noted because a file's profiles share them differently.
func TestSharedUnlike(t *testing.T) {
	const whole, slices, more = "{}", "{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}}", "{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 10}]}}}"
	const renamed = "{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4, rename: gpu.shared}]}}}"
	const mps, alone = "{sharing: {mps: {resources: [{name: gpu, replicas: 4}]}}}", "{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}}"
	for _, test := range []struct{ a, b, want string }{
		{whole, whole, ""},
		{whole, slices, "data.b: nvidia.com/gpu is time-sliced here and whole in \"a\": "},
		{slices, whole, "data.b: nvidia.com/gpu is whole here and time-sliced in \"a\": "},
		{slices, alone, "data.b: nvidia.com/gpu is whole here and time-sliced in \"a\": "},
		{slices, more, ""},
		{slices, mps, "data.b: nvidia.com/gpu is shared by MPS in 4 here and time-sliced in \"a\": "},
		{mps, strings.Replace(mps, "4", "2", 1), "data.b: nvidia.com/gpu is shared by MPS in 2 here and shared by MPS in 4 in \"a\": "},
		{whole, renamed, ""},
		{slices, renamed, ""},
	} {
		document := fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\ndata:\n  a: %q\n  b: %q\n  layouts: '{version: v1, mig-configs: {x: [{devices: all, mig-enabled: false}]}}'\n", test.a, test.b)
		file, err := ParseFile("f", []byte(document), nil)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, note := range file.Config.Notes {
			got += note.Path + ": " + note.Message
		}
		if (got == "") != (test.want == "") || !strings.HasPrefix(got, test.want) {
			t.Errorf("a: %s, b: %s: %q", test.a, test.b, got)
		}
	}
}
