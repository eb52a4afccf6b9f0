package configs

import (
	"reflect"
	"regexp"
	"testing"

	"github.com/virgate/virgate/sharing"
)

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

// TestProfileIsPlain holds what Generation relies on.
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
