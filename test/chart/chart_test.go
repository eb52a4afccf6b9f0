package chart

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/release"
)

var update = flag.Bool("update", false, "write the golden files")

const folder = "../../charts/virgate"

func load(t *testing.T) *chart.Chart {
	t.Helper()
	loaded, err := loader.Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

// render returns what `helm install virgate --namespace gpu` would create, hooks included, and its notes.
func render(t *testing.T, values map[string]any) (manifest, notes string, err error) {
	t.Helper()
	return renderInto(t, "gpu", values)
}

// manifestOf returns the manifest of an installation with the values, in YAML.
func manifestOf(t *testing.T, text string) string {
	t.Helper()
	values, err := chartutil.ReadValues([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	manifest, _, err := render(t, values)
	if err != nil {
		t.Fatal(err)
	}
	return manifest
}

func renderInto(t *testing.T, namespace string, values map[string]any) (manifest, notes string, err error) {
	t.Helper()
	release, err := releaseOf(t, namespace, values)
	if err != nil {
		return "", "", err
	}
	manifest = release.Manifest
	for _, hook := range release.Hooks {
		manifest += "---\n# Source: " + hook.Path + "\n" + hook.Manifest + "\n"
	}
	return manifest, release.Info.Notes, nil
}

func releaseOf(t *testing.T, namespace string, values map[string]any) (*release.Release, error) {
	t.Helper()
	version, err := chartutil.ParseKubeVersion("v1.36.3")
	if err != nil {
		t.Fatal(err)
	}
	install := action.NewInstall(&action.Configuration{})
	install.DryRun, install.ClientOnly, install.Replace = true, true, true
	install.ReleaseName, install.Namespace, install.KubeVersion = "virgate", namespace, version
	return install.Run(load(t), values)
}

func read(t *testing.T, path string) map[string]any {
	t.Helper()
	values, err := chartutil.ReadValuesFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return values
}

// The policy names this release's service account in any namespace.
func TestOwnNodePolicy(t *testing.T) {
	manifest, _, err := renderInto(t, "elsewhere", map[string]any{"fullnameOverride": "gpus", "dra": map[string]any{"enabled": true}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`request.userInfo.username == "system:serviceaccount:elsewhere:gpus"`, "\n  name: gpus-own-node\n", "policyName: gpus-own-node",
		"\n  name: gpus-dra\n", "policyName: gpus-dra",
	} {
		if !strings.Contains(manifest, want) {
			t.Errorf("the manifest lacks %q", want)
		}
	}
	if strings.Contains(manifest, "virgate:virgate") {
		t.Error("the manifest names another release's account")
	}
}

// Feature labels are allowed only if they are enabled, and only in their configured place.
func TestFeatureLabelsPolicy(t *testing.T) {
	for _, test := range []struct {
		values          string
		labels, objects int
	}{
		{"{}", 0, 0},
		{"featureLabels: {output: nfd-api}", 0, 0},
		{"featureLabels: {enabled: true}", 2, 0},
		{"featureLabels: {enabled: true, output: nfd-file}", 0, 0},
		{"featureLabels: {enabled: true, output: nfd-api}", 0, 1},
	} {
		manifest := manifestOf(t, test.values)
		if labels := strings.Count(manifest, `k in variables.ownLabels || k.matches("^nvidia[.]com/`); labels != test.labels {
			t.Errorf("%s: feature labels are allowed in %d places, want %d", test.values, labels, test.labels)
		}
		if objects := strings.Count(manifest, "resources: [nodefeatures]\n  matchConditions:"); objects != test.objects || strings.Count(manifest, "object.spec.labels.all(k, k.matches(") != objects {
			t.Errorf("%s: %d rules about NodeFeatures, want %d", test.values, objects, test.objects)
		}
	}
	if _, _, err := render(t, map[string]any{"featureLabels": map[string]any{"output": "file"}}); err == nil || !strings.Contains(err.Error(), "featureLabels") {
		t.Errorf("output file: error %v", err)
	}
}

// Other programs are paused only if that is enabled, and the list of their labels fits the shipped policy.
// An API server in test/kubernetes/api applies that policy.
func TestPauseClients(t *testing.T) {
	const list = `name: pausedLabels
    expression: '["nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter"]'`
	for values, want := range map[string]int{
		"{}":                  0,
		"mig: {manage: true}": 0,
		"mig: {manage: true, pauseClients: true}":                                                    1,
		"{mig: {manage: true, pauseClients: true}, featureLabels: {enabled: true}}":                  1,
		"{mig: {manage: true, pauseClients: true}, featureLabels: {enabled: true, output: nfd-api}}": 1,
	} {
		manifest := manifestOf(t, values)
		if lists, flags, told := strings.Count(manifest, list), strings.Count(manifest, "- --mig-pause-clients\n"), strings.Count(manifest, "virgate pauses nvidia.com/gpu.deploy.dcgm"); lists != want || flags != want || told != want {
			t.Errorf("%s: %d lists of labels, %d flags, %d messages, want %d", values, lists, flags, told, want)
		}
		if none := strings.Count(manifest, "name: pausedLabels\n    expression: '[]'"); none != 1-want {
			t.Errorf("%s: %d empty lists of labels", values, none)
		}
	}
	if _, _, err := render(t, map[string]any{"mig": map[string]any{"pauseClients": true}}); err == nil || !strings.Contains(err.Error(), "mig.pauseClients: only for mig.manage") {
		t.Errorf("without mig.manage: %v", err)
	}
}

// Containers get a claim's devices only by CDI specs.
func TestDRANeedsCDISpecs(t *testing.T) {
	if _, _, err := render(t, map[string]any{"dra": map[string]any{"enabled": true}, "cdi": map[string]any{"specs": false}}); err == nil || !strings.Contains(err.Error(), "cdi.specs is false") {
		t.Errorf("without CDI specs: error %v", err)
	}
}

// Each file testdata/NAME.values.yaml is rendered to testdata/NAME.golden.yaml.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".values.yaml")
		t.Run(name, func(t *testing.T) {
			manifest, notes, err := render(t, read(t, file))
			if err != nil {
				t.Fatal(err)
			}
			decode(t, manifest)
			// The profiles, rules and dashboards are files of the repository already.
			got := withoutLongText(manifest) + "---\n# NOTES\n" + notes
			golden := filepath.Join("testdata", name+".golden.yaml")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("-want +got, -update writes it:\n%s", diff)
			}
		})
	}
}

// withoutLongText removes documents that repeat files of the chart, and the hook, which TestUninstallHook
// reads.
func withoutLongText(manifest string) string {
	parts := strings.Split(manifest, "---\n")
	parts = slices.DeleteFunc(parts, func(part string) bool {
		return strings.Contains(part, "kind: ConfigMap\n") || strings.Contains(part, "kind: PrometheusRule\n") || strings.Contains(part, "admission-own-node.yaml") ||
			strings.Contains(part, "uninstall-hook.yaml")
	})
	return strings.Join(parts, "---\n")
}

func TestLint(t *testing.T) {
	linted := lint.AllWithKubeVersion(folder, map[string]any{}, "gpu", nil)
	for _, message := range linted.Messages {
		if strings.Contains(message.Err.Error(), "icon is recommended") {
			continue
		}
		t.Error(message)
	}
}

// The chart's profiles and examples are the repository's, except those that fit only one machine.
func TestProfilesAreTheExamples(t *testing.T) {
	shipped, err := filepath.Glob(filepath.Join(folder, "[pe]*/*.yaml"))
	if err != nil || len(shipped) != len(profiles(t)) {
		t.Errorf("%d profiles and examples in the chart, %d in the repository, %v", len(shipped), len(profiles(t)), err)
	}
	for _, test := range []struct {
		values string
		want   map[string]string
	}{
		{"{}", defaultProfiles(t)},
		{"config: {examples: true}", profiles(t)},
	} {
		if diff := cmp.Diff(test.want, configMap(t, decode(t, manifestOf(t, test.values)))); diff != "" {
			t.Errorf("%s: profiles (-want +got):\n%s", test.values, diff)
		}
	}
}

// defaultProfiles are those that a node can choose without config.examples. None of them needs a right.
func defaultProfiles(t *testing.T) map[string]string {
	t.Helper()
	all, few := profiles(t), map[string]string{}
	for _, name := range []string{"exclusive", "time-slicing-4", "time-slicing-4-renamed", "time-slicing-10", "time-slicing-10-renamed"} {
		few[name] = all[name]
	}
	return few
}

// ofOneMachine is how a profile names a GPU of one machine: by UUID or PCI bus ID.
var ofOneMachine = regexp.MustCompile(`(?:GPU|MIG)-[0-9a-f]{8}-|[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:`)

// profiles are the examples that the chart ships, by their name in a node's label.
func profiles(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("../../configs/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	byName := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if ofOneMachine.Match(text) {
			continue
		}
		byName[strings.TrimSuffix(filepath.Base(file), ".yaml")] = string(text)
	}
	return byName
}

// half is a profile, in YAML's quotes.
const half = "'sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}'"

func TestValuesAreRefused(t *testing.T) {
	for _, test := range []struct {
		name, values, want string
	}{
		{"a typo", "migStratgy: mixed", "migStratgy"},
		{"a typo within", "config: {mapp: {}}", "mapp"},
		{"a value that is none", "migStrategy: both", "migStrategy"},
		{"an unknown node", "node: dgx-a100", "node"},
		{"a way to name devices that is none", "deviceListStrategy: cdi", "deviceListStrategy"},
		{"one of several that is none", "deviceListStrategy: 'envvar,cdi'", "deviceListStrategy"},
		{"one in a list that is none", "deviceListStrategy: [envvar, cdi]", "deviceListStrategy"},
		{"a strategy that is none", "config: {fallbackStrategies: [any]}", "fallbackStrategies"},
		{"name and map", "config: {name: a, map: {b: 'version: v1'}}", "config: name and map exclude each other"},
		{"an unknown profile", "config: {default: time-slicing-5}", `config.default: the chart has no profile "time-slicing-5"`},
		{"a default that the map has not", "config: {map: {b: 'version: v1', a: 'version: v1'}, default: c}", `config.default: config.map has no profile "c": there are a, b`},
		{"a policy for a name that nobody shares under", "{config: {map: {half: " + half + "}}, admission: {oneSharePerContainer: true, sharedResources: [nvidia.com/gpu.shared]}}",
			`admission.sharedResources: it lacks nvidia.com/gpu, which the profile "half" shares`},
		{"the same by the chart's profiles", "admission: {sharesNeedNamespaceLabel: true, sharedResources: [nvidia.com/gpu.shared]}", "it lacks nvidia.com/gpu, which the profile \"time-slicing-4\" shares"},
		{"a policy for a name of shares and of whole GPUs", "admission: {oneSharePerContainer: true}", "nvidia.com/gpu is a share with the profile \"time-slicing-4\" and a whole GPU with \"exclusive\": list nvidia.com/gpu, nvidia.com/gpu.shared"},
		{"the same by its examples", "{config: {examples: true}, admission: {sharesNeedNamespaceLabel: true, sharedResources: [nvidia.com/gpu, nvidia.com/gpu.shared]}}", "it lacks nvidia.com/a100"},
		{"surge and unavailable", "updateStrategy: {rollingUpdate: {maxUnavailable: 25%}}", "updateStrategy.rollingUpdate: Kubernetes takes maxSurge or maxUnavailable, not both"},
		{"a threshold that is no number", "metrics: {rules: {enabled: true, thresholds: {VirgateGPUHot: high}}}", "thresholds"},
		{"a pull secret without a name", "imagePullSecrets: [x]", "imagePullSecrets"},
		{"an example that is not there", "config: {default: mig-mixed}", `config.default: the chart has no profile "mig-mixed": there are exclusive, time-slicing-10, time-slicing-10-renamed, time-slicing-4, time-slicing-4-renamed; set config.examples: true, which adds it`},
		{"examples beside own profiles", "config: {examples: true, map: {a: 'version: v1'}}", "config.examples: name and map replace"},
		{"examples beside an own ConfigMap", "config: {examples: true, name: own}", "config.examples: name and map replace"},
		{"a policy where nothing is shared", "{config: {map: {whole: 'version: v1'}}, admission: {oneSharePerContainer: true}}", "no profile shares anything"},
		{"a policy for profiles that the chart cannot read", "{config: {name: own}, admission: {sharesNeedNamespaceLabel: true}}", "the chart cannot read the ConfigMap own"},
		{"at most, of what no pod can name", "admission: {mostPerContainer: {gpu: 2}}", "mostPerContainer"},
		{"shared, what no pod can name", "{config: {name: own}, admission: {oneSharePerContainer: true, sharedResources: [gpu]}}", "sharedResources"},
		{"at most nothing", "admission: {mostPerContainer: {nvidia.com/gpu: 0}}", "mostPerContainer"},
		{"SELinux options that a privileged container does not get", "{driverAccess: privileged, seLinuxOptions: {type: t}}", "seLinuxOptions: container runtimes give"},
		{"SELinux options that are replaced", "{securityContext: {runAsUser: 0}, seLinuxOptions: {type: t}}", "seLinuxOptions: securityContext replaces it"},
		{"two pods on one port of a node", "{devicePlugin: {enableHostNetwork: true}}", "devicePlugin.enableHostNetwork: two pods"},
		{"driver access that cannot work", "driverAccess: cdi", "driverAccess: cdi was removed: no container runtime takes"},
		{"driver access that is none", "driverAccess: magic", `driverAccess: "magic" is neither runtime nor privileged`},
		{"evictions that no policy confines", "{metrics: {perContainer: true}, memoryGuard: {evict: true}, admission: {ownNode: false}}", "memoryGuard.evict: without a policy every node could delete any pod"},
		{"managing without reading", "mig: {manage: true, monitor: false}", "mig.monitor: false, but mig.manage needs the same right"},
		{"a DeviceClass for a name that is none", "dra: {resources: [gpu]}", "resources"},
		{"a DeviceClass whose name no object can have", "dra: {resources: [example.com/A_b]}", "resources"},
		{"a port that is none", "metrics: {port: 0}", "port"},
	} {
		t.Run(test.name, func(t *testing.T) {
			values, err := chartutil.ReadValues([]byte(test.values))
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err = render(t, values); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
	if _, _, err := renderInto(t, "default", nil); err == nil || !strings.Contains(err.Error(), "allowDefaultNamespace") {
		t.Errorf("into the namespace default: %v", err)
	}
}
