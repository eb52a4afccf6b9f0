package chart

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"helm.sh/helm/v3/pkg/chartutil"
	admissionv1 "k8s.io/api/admissionregistration/v1"
)

const (
	defaultsFile = folder + "/templates/_defaults.tpl"
	defaultsHead = `{{- /* Made from values.yaml by make manifest: what a value is that someone gave as null, which Helm
takes out of .Values. Left out is what goes to Kubernetes as it is, for which null means none. */ -}}
{{- define "virgate.defaults" -}}
{{- include "virgate.fill" (list .Values (include "virgate.preset" . | fromYaml)) -}}
{{- include "virgate.fill" (list .Values (include "virgate.defaultValues" . | fromYaml)) -}}
{{- end -}}

{{- /* Gives the first mapping what it lacks and the second one has. */ -}}
{{- define "virgate.fill" -}}
{{- $values := first . -}}
{{- range $name, $default := last . -}}
{{- if or (not (hasKey $values $name)) (kindIs "invalid" (get $values $name)) -}}
{{- $_ := set $values $name $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $name)) (ne $name "labels") -}}
{{- include "virgate.fill" (list (get $values $name) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "virgate.defaultValues" -}}
`
)

// mayBeNone are values for which null means none instead of the default.
var mayBeNone = []string{"affinity", "nodeSelector", "priorityClassName", "resources", "tolerations"}

// TestDefaults checks that the chart's templates have the defaults of values.yaml. With -update it writes
// their file.
func TestDefaults(t *testing.T) {
	values := read(t, folder+"/values.yaml")
	for _, name := range mayBeNone {
		delete(values, name)
	}
	text, err := yaml.Marshal(map[string]any(values))
	if err != nil {
		t.Fatal(err)
	}
	want := defaultsHead + string(text) + "{{- end -}}\n"
	if *update {
		if err := os.WriteFile(defaultsFile, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(defaultsFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("the templates' defaults are not those of values.yaml, make manifest writes them (-want +got):\n%s", diff)
	}
}

// TestNullMeansTheDefault sets every value and every section of the chart to null.
func TestNullMeansTheDefault(t *testing.T) {
	var sections []string
	var visit func(prefix string, values map[string]any)
	visit = func(prefix string, values map[string]any) {
		for name, value := range values {
			if prefix == "" && slices.Contains(mayBeNone, name) {
				continue
			}
			sections = append(sections, prefix+name)
			if inner, ok := value.(map[string]any); ok && name != "labels" {
				visit(prefix+name+".", inner)
			}
		}
	}
	visit("", read(t, folder+"/values.yaml"))
	slices.Sort(sections)
	base := "{metrics: {podMonitor: {enabled: true}}, featureLabels: {enabled: true}, mps: {enabled: true}, dra: {enabled: true}}"
	want := manifestOf(t, base)
	for _, path := range sections {
		values, err := chartutil.ReadValues([]byte(base))
		if err != nil {
			t.Fatal(err)
		}
		name := path
		into := map[string]any(values)
		for first, rest, deeper := strings.Cut(name, "."); deeper; first, rest, deeper = strings.Cut(name, ".") {
			inner, ok := into[first].(map[string]any)
			if !ok {
				inner = map[string]any{}
				into[first] = inner
			}
			into, name = inner, rest
		}
		if _, set := into[name]; set {
			continue // It is one of base.
		}
		into[name] = nil
		got, _, err := render(t, values)
		if err != nil {
			t.Errorf("%s=null: %v", path, err)
		} else if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s=null (-without +with):\n%s", path, diff)
		}
	}
	none, _, err := render(t, map[string]any{"affinity": nil, "nodeSelector": nil, "priorityClassName": nil, "resources": nil, "tolerations": nil})
	if err != nil {
		t.Fatal(err)
	}
	pod := daemonSet(t, decode(t, none)).Spec.Template.Spec
	if pod.Affinity != nil || pod.NodeSelector != nil || pod.PriorityClassName != "" || pod.Tolerations != nil || pod.Containers[0].Resources.Requests != nil {
		t.Errorf("null for %q: the pod has some", mayBeNone)
	}
}

// TestDefaultProfile checks that the chart's own default applies only to the chart's own profiles: the
// program refuses a default that a user's ConfigMap lacks. Without a default it looks for the only profile,
// as NVIDIA's plugin does.
func TestDefaultProfile(t *testing.T) {
	for _, test := range []struct{ name, values, want string }{
		{"nothing said", "{}", "--default-config=exclusive"},
		{"one of the examples", "{config: {default: mig-mixed, examples: true}, mig: {monitor: true}}", "--default-config=mig-mixed"},
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

// TestSharePolicies checks which resources the policies limit, and to how many.
func TestSharePolicies(t *testing.T) {
	const on, slices2 = "admission: {oneSharePerContainer: true, sharesNeedNamespaceLabel: true}", "{timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2}, {name: example.com/b, rename: c, replicas: 3}, {name: d, replicas: 1}]}}"
	for _, test := range []struct{ name, values, want string }{
		{"none", "{}", ""},
		{"the chart's profiles, shares by default", "{config: {default: time-slicing-10}, " + on + "}", "one-share [nvidia.com/gpu nvidia.com/gpu.shared] 1\nshared-namespaces [nvidia.com/gpu nvidia.com/gpu.shared] 0"},
		{"the examples", "{config: {examples: true, default: time-slicing-4}, admission: {oneSharePerContainer: true}}", "one-share [nvidia.com/a100 nvidia.com/gpu nvidia.com/gpu.shared nvidia.com/mig-1g.10gb nvidia.com/mig-1g.5gb] 1"},
		{"all that the chart's profiles share", "admission: {oneSharePerContainer: true, sharedResources: [nvidia.com/gpu, nvidia.com/gpu.shared]}", "one-share [nvidia.com/gpu nvidia.com/gpu.shared] 1"},
		{"own profiles", "{config: {map: {a: 'sharing: " + slices2 + "', b: " + half + ", c: 'version: v1'}}, " + on + "}",
			"one-share [nvidia.com/c nvidia.com/gpu nvidia.com/gpu.shared] 1\nshared-namespaces [nvidia.com/c nvidia.com/gpu nvidia.com/gpu.shared] 0"},
		{"MPS", "{mps: {enabled: true}, config: {map: {a: 'sharing: {mps: {resources: [{name: gpu, rename: gpu.mps, replicas: 2}]}}'}}, admission: {oneSharePerContainer: true}}", "one-share [nvidia.com/gpu.mps] 1"},
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
