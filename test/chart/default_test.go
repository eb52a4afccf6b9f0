package chart

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
)

// TestDefaultProfile checks that the chart's own default is for the chart's own
// profiles: the program refuses one that a user's ConfigMap does not have, while
// without any it looks for the only profile, as NVIDIA's does.
func TestDefaultProfile(t *testing.T) {
	for _, test := range []struct{ name, values, want string }{
		{"nothing said", "{}", "--default-config=exclusive"},
		{"one of the examples", "config: {default: mig-mixed, examples: true}", "--default-config=mig-mixed"},
		{"shares", "config: {default: time-slicing-4}", "--default-config=time-slicing-4"},
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

// TestProfilesBesideSharePolicies checks that no name that a policy refuses is a whole GPU's on
// some node, and that none that it lets through is shared on another.
func TestProfilesBesideSharePolicies(t *testing.T) {
	const all, renamed = "exclusive time-slicing-10 time-slicing-10-renamed time-slicing-4 time-slicing-4-renamed", "exclusive time-slicing-10-renamed time-slicing-4-renamed"
	for values, want := range map[string]string{
		"admission: {mostPerContainer: {nvidia.com/gpu: 2}}":                                                            all,
		"admission: {oneSharePerContainer: true}":                                                                       renamed,
		"admission: {sharesNeedNamespaceLabel: true}":                                                                   renamed,
		"{config: {default: time-slicing-4-renamed}, admission: {sharesNeedNamespaceLabel: true}}":                      renamed,
		"{config: {default: time-slicing-4}, admission: {sharesNeedNamespaceLabel: true}}":                              all,
		"admission: {oneSharePerContainer: true, sharedResources: [nvidia.com/gpu, nvidia.com/gpu.shared]}":             all,
		"{config: {map: {a: " + half + ", b: 'version: v1'}, default: b}, admission: {sharesNeedNamespaceLabel: true}}": "a b",
	} {
		got := slices.Sorted(maps.Keys(configMap(t, decode(t, manifestOf(t, values)))))
		if strings.Join(got, " ") != want {
			t.Errorf("%s: profiles %q, want %q", values, got, want)
		}
	}
}

// TestSharePolicies checks of which resources, and how many of each, the policies speak.
func TestSharePolicies(t *testing.T) {
	const on, slices2 = "admission: {oneSharePerContainer: true, sharesNeedNamespaceLabel: true}", "{timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2}, {name: example.com/b, rename: c, replicas: 3}, {name: d, replicas: 1}]}}"
	for _, test := range []struct{ name, values, want string }{
		{"none", "{}", ""},
		{"the chart's profiles, whole GPUs by default", on, "one-share [nvidia.com/gpu.shared] 1\nshared-namespaces [nvidia.com/gpu.shared] 0"},
		{"the chart's profiles, shares by default", "{config: {default: time-slicing-10}, " + on + "}", "one-share [nvidia.com/gpu nvidia.com/gpu.shared] 1\nshared-namespaces [nvidia.com/gpu nvidia.com/gpu.shared] 0"},
		{"the examples", "{config: {examples: true}, admission: {oneSharePerContainer: true}}", "one-share [nvidia.com/a100 nvidia.com/gpu.shared nvidia.com/mig-1g.10gb nvidia.com/mig-1g.5gb] 1"},
		{"all that the chart's profiles share", "admission: {oneSharePerContainer: true, sharedResources: [nvidia.com/gpu, nvidia.com/gpu.shared]}", "one-share [nvidia.com/gpu nvidia.com/gpu.shared] 1"},
		{"own profiles", "{config: {map: {a: 'sharing: " + slices2 + "', b: " + half + ", c: 'version: v1', d: '[', e: 'sharing: 3', f: 'sharing: {timeSlicing: {resources: [1]}}'}}, " + on + "}",
			"one-share [nvidia.com/c nvidia.com/gpu nvidia.com/gpu.shared] 1\nshared-namespaces [nvidia.com/c nvidia.com/gpu nvidia.com/gpu.shared] 0"},
		{"MPS", "{config: {map: {a: 'sharing: {mps: {resources: [{name: gpu, rename: gpu.mps, replicas: 2}]}}'}}, admission: {oneSharePerContainer: true}}", "one-share [nvidia.com/gpu.mps] 1"},
		{"named", "{config: {name: own}, admission: {oneSharePerContainer: true, sharedResources: [a/b]}}", "one-share [a/b] 1"},
		{"more than what is shared", "{config: {map: {b: " + half + "}}, admission: {oneSharePerContainer: true, sharedResources: [a/b, nvidia.com/gpu]}}", "one-share [a/b nvidia.com/gpu] 1"},
		{"strict", "admission: {mostPerContainer: {nvidia.com/gpu.shared: 8, Example.com/a_b: 2, example.com/a-b: 3}}",
			"most-per-container [Example.com/a_b] 2\nmost-per-container [example.com/a-b] 3\nmost-per-container [nvidia.com/gpu.shared] 8"},
	} {
		t.Run(test.name, func(t *testing.T) {
			names, most := regexp.MustCompile(`(\[[^]]*\])\.all\(r,`), regexp.MustCompile(`compareTo\(quantity\('(\d+)'\)\) <= 0`)
			var got []string
			known := map[string]bool{}
			for _, object := range decode(t, manifestOf(t, test.values)) {
				policy, ok := object.(*admissionv1.ValidatingAdmissionPolicy)
				if !ok || strings.HasSuffix(policy.Name, "own-node") {
					continue
				}
				if known[policy.Name] {
					t.Errorf("two policies are called %s", policy.Name)
				}
				known[policy.Name] = true
				for _, validation := range policy.Spec.Validations {
					list := strings.NewReplacer(`"`, "", ",", " ").Replace(names.FindStringSubmatch(validation.Expression)[1])
					got = append(got, fmt.Sprintf("%s %s %s", strings.TrimPrefix(policy.Name, "virgate-"), list, most.FindStringSubmatch(validation.Expression)[1]))
				}
			}
			slices.Sort(got)
			if strings.Join(got, "\n") != test.want {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), test.want)
			}
		})
	}
}
