package configs

import (
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
)

func TestDocuments(t *testing.T) {
	documents := Documents{
		"four":    "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}\n",
		"broken":  "sharing:\n  timeSlicing: {resources: [{name: gpu, replicas: 0}]}\n",
		"torn":    "{",
		"layouts": "version: v1\nmig-configs:\n  mine:\n  - {devices: all, mig-enabled: false}\n",
		"empty":   "",
		"hidden":  "version: v1\n\"mig\\x2dconfigs\":\n  other:\n  - {devices: all, mig-enabled: false}\n",
	}
	if diff := cmp.Diff([]string{"broken", "empty", "four", "torn"}, documents.ProfileNames()); diff != "" {
		t.Errorf("profiles (-want +got):\n%s", diff)
	}
	got, err := documents.Select("ConfigMap gpu/profiles", "four", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got.Profile.TimeSlicing[0].Replicas != 4 || got.String() != "ConfigMap gpu/profiles[four]" || got.Generation != Generation(got.Profile) {
		t.Errorf("got %+v", got)
	}
	if _, ok := got.Documents["layouts"]; !ok || len(got.Documents) != 3 {
		t.Errorf("kept %v, want the profile and the layouts", got.Documents)
	}
	for _, test := range []struct{ name, want string }{
		{"broken", `ConfigMap gpu/profiles[broken]:2: sharing.timeSlicing.resources[0].replicas: expected 1 or more (got 0)`},
		{"torn", "ConfigMap gpu/profiles[torn]:1"},
		{"none", `ConfigMap gpu/profiles: no "none"`},
	} {
		if _, err := documents.Select("ConfigMap gpu/profiles", test.name, nil); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %s", test.name, err, test.want)
		}
	}
}

// TestDocumentsWithWrongLayouts checks that wrong layouts matter only to a profile that uses one.
func TestDocumentsWithWrongLayouts(t *testing.T) {
	documents := Documents{"a": "", "b": "mig: {manage: true, config: mine}\n", "layouts": "mig-configs: {mine: 3}\n"}
	if _, err := documents.Select("d", "a", nil); err != nil {
		t.Errorf("a profile that needs none: %v", err)
	}
	_, err := documents.Select("d", "b", nil)
	if err == nil || !strings.Contains(err.Error(), "d[layouts]:1") || !strings.Contains(err.Error(), "d[b]:1") {
		t.Errorf("a profile that needs one: %v", err)
	}
}

func TestGeneration(t *testing.T) {
	generation := func(document string) string {
		t.Helper()
		config, err := Parse("p.yaml", []byte(document), nil)
		if err != nil {
			t.Fatal(err)
		}
		return Generation(config.Profile)
	}
	base := generation("version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: [0, 1]}]}}\n")
	if !regexp.MustCompile(`^[0-9a-f]{12}$`).MatchString(base) {
		t.Errorf("generation %q is not 12 hexadecimal digits", base)
	}
	layout := "mig: {config: a, configs: {a: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2}}]}}\n"
	if a, b := generation(layout), generation("# a remark\n"+layout); a != b {
		t.Errorf("a layout on another line has generation %s, not %s", b, a)
	}
	if a, b := generation(layout), generation(strings.Replace(layout, ": 2", ": 3", 1)); a == b {
		t.Error("another layout has the same generation")
	}
	for _, test := range []struct {
		name, document string
		same           bool
	}{
		{"written otherwise", "# a remark\nsharing:\n  timeSlicing:\n    resources:\n    - {replicas: 4, name: gpu, devices: [0, 1]}\n", true},
		{"other replicas", "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 5, devices: [0, 1]}]}}\n", false},
		{"other selectors", "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: [0, 2]}]}}\n", false},
		{"another XID", "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: [0, 1]}]}}\nhealth: {xids: {109: fatal}}\n", false},
		{"the empty document", "", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			for range 20 { // Maps have a random order.
				if got := generation(test.document); (got == base) != test.same {
					t.Fatalf("generation %s, and %s of the other; want same %v", got, base, test.same)
				}
			}
		})
	}
}

// TestProfileIsPlain checks the assumptions of Generation.
func TestProfileIsPlain(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var walk func(kind reflect.Type, path string)
	walk = func(kind reflect.Type, path string) {
		if seen[kind] {
			return
		}
		seen[kind] = true
		switch kind.Kind() {
		case reflect.Pointer, reflect.Func, reflect.Chan, reflect.Interface, reflect.UnsafePointer:
			t.Errorf("%s is a %s: Generation would show its address", path, kind.Kind())
		case reflect.Struct:
			for i := range kind.NumField() {
				walk(kind.Field(i).Type, path+"."+kind.Field(i).Name)
			}
		case reflect.Map:
			walk(kind.Key(), path+"[key]")
			walk(kind.Elem(), path+"[]")
		case reflect.Slice, reflect.Array:
			walk(kind.Elem(), path+"[]")
		}
	}
	walk(reflect.TypeFor[sharing.Profile](), "Profile")
}
