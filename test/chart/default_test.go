package chart

import (
	"slices"
	"strings"
	"testing"
)

// TestDefaultProfile checks that the chart's own default is for the chart's own
// profiles: the program refuses one that a user's ConfigMap does not have, while
// without any it looks for the only profile, as NVIDIA's does.
func TestDefaultProfile(t *testing.T) {
	for _, test := range []struct{ name, values, want string }{
		{"nothing said", "{}", "--default-config=time-slicing-4"},
		{"one of the chart's", "config: {default: mig-mixed}", "--default-config=mig-mixed"},
		{"none", "config: {default: ''}", ""},
		{"own profiles", "config: {map: {own: 'version: v1'}}", ""},
		{"own profiles and one of them", "config: {map: {own: 'version: v1'}, default: own}", "--default-config=own"},
		{"own ConfigMap", "config: {name: own}", ""},
		{"own ConfigMap and one of it", "config: {name: own, default: one}", "--default-config=one"},
	} {
		t.Run(test.name, func(t *testing.T) {
			manifest := manifestOf(t, test.values)
			arguments := daemonSet(t, decode(t, manifest)).Spec.Template.Spec.Containers[0].Args
			got := slices.DeleteFunc(arguments, func(a string) bool { return !strings.HasPrefix(a, "--default-config") })
			if strings.Join(got, " ") != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
