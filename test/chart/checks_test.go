package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// withProfile returns values, in YAML, that choose the profile beside others.
func withProfile(t *testing.T, profile, others string) map[string]any {
	t.Helper()
	values, err := chartutil.ReadValues([]byte(others))
	if err != nil {
		t.Fatal(err)
	}
	values["config"] = map[string]any{"map": map[string]any{"p": profile}}
	return values
}

// TestProfileNeedsAValue checks that a profile that requires a value of the chart is refused, with the
// value's name, until the value is set.
func TestProfileNeedsAValue(t *testing.T) {
	sharing := func(way, entry string) string {
		return "sharing: {" + way + ": {resources: [{name: nvidia.com/gpu, replicas: 3, " + entry + "}]}}"
	}
	for _, test := range []struct{ name, profile, want, values string }{
		{"MPS", sharing("mps", ""), "config.map.p has sharing.mps, which needs mps.enabled: true", "mps: {enabled: true}"},
		{"claims", "dra: {resources: all}", "config.map.p has dra.resources, which needs dra.enabled: true", "dra: {enabled: true}"},
		{"claims of some names", "dra: {resources: [nvidia.com/gpu]}", "which needs dra.enabled: true", "dra: {enabled: true}"},
		{"layouts", "mig: {manage: true, config: all-disabled}", "config.map.p has mig.manage, which needs mig.manage: true", "mig: {manage: true}"},
		{"resets", "mig: {manage: true, reset: true}", "config.map.p has mig.reset, which needs mig.reset: true", "mig: {manage: true, reset: true}"},
		{"time slices", sharing("timeSlicing", "timeSlice: long"), "config.map.p has sharing.timeSlicing.resources[0].timeSlice, which needs gpuSettings.manage: true", "gpuSettings: {manage: true}"},
		{"compute modes", sharing("timeSlicing", "computeMode: default"), "resources[0].computeMode, which needs gpuSettings.manage: true", "gpuSettings: {manage: true}"},
		{"a guard of memory", sharing("timeSlicing", "memory: {limit: share}"), "config.map.p has sharing.timeSlicing.resources[0].memory, which needs metrics.perContainer: true", "metrics: {perContainer: true}"},
		{"eviction", sharing("timeSlicing", "memory: {limit: share, action: evict}"), "memory.action: evict, which needs memoryGuard.evict: true", "{metrics: {perContainer: true}, memoryGuard: {evict: true}}"},
		{"a driver of an installer", "flags: {plugin: {deviceListStrategy: driver-mounts}}", "which needs driverMounts.enabled: true", "driverMounts: {enabled: true}"},
		{"one of several strategies", "flags: {plugin: {deviceListStrategy: [envvar, driver-mounts]}}", "which needs driverMounts.enabled: true", "driverMounts: {enabled: true}"},
		{"CDI", "flags: {plugin: {deviceListStrategy: [envvar, cdi-cri]}}", "which needs cdi.specs: true", "cdi: {specs: true}"},
		{"partitions", "flags: {migStrategy: mixed}", "config.map.p has migStrategy mixed, which needs the capability SYS_ADMIN: set mig.monitor to true", "mig: {monitor: true}"},
		{"partitions, served as whole GPUs", "flags: {migStrategy: single}", "config.map.p has migStrategy single, which needs the capability SYS_ADMIN: set mig.monitor to true, or to false", "mig: {monitor: false}"},
		{"CDI, and a value that replaces it", "flags: {plugin: {deviceListStrategy: cdi-cri}}", "which needs cdi.specs: true", "deviceListStrategy: envvar"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, _, err := render(t, withProfile(t, test.profile, "{}")); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			if _, _, err := render(t, withProfile(t, test.profile, test.values)); err != nil {
				t.Errorf("with %s: %v", test.values, err)
			}
			for _, inert := range []string{"devicePlugin: {enabled: false}", "uninstall: true"} {
				if _, _, err := render(t, withProfile(t, test.profile, inert)); err != nil {
					t.Errorf("with %s: %v", inert, err)
				}
			}
		})
	}
	for name, profile := range map[string]string{
		"one replica by MPS is a whole GPU": "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}",
		"a reset without manage":            "mig: {reset: true, manage: false}",
		"no names":                          "dra: {resources: []}",
		"empty sections":                    "version: v1\nsharing:\nmig:\ndra:\nflags: {plugin: }",
		"nothing":                           "",
		"keys of another program":           "flags: {useNodeFeatureAPI: true, gfd: {oneshot: false, sleepInterval: infinite}}",
	} {
		if _, _, err := render(t, withProfile(t, profile, "{}")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A simulated driver requires no rights.
	if _, _, err := render(t, withProfile(t, "{mig: {manage: true}, flags: {plugin: {deviceListStrategy: cdi-cri}}}", "node: sim:dgx-a100")); err != nil {
		t.Errorf("simulated: %v", err)
	}
}

// TestChartsOwnProfiles tries each of them as the default: it requires at most the values that the errors
// name, and nothing else is wrong with it.
func TestChartsOwnProfiles(t *testing.T) {
	files, err := filepath.Glob(folder + "/[pe][rx]*s/*.yaml") // Of profiles and examples.
	if err != nil || len(files) < 20 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		values := map[string]any{"config": map[string]any{"default": name, "examples": true}}
		_, _, err := render(t, values)
		for range 4 {
			if err == nil {
				break
			}
			needs := regexp.MustCompile(`config.default: the profile ` + name + ` has .*, which needs (?:.*: set )?(\w+)\.(\w+)(?:: | to )true`).FindStringSubmatch(err.Error())
			if needs == nil {
				break
			}
			section, key := needs[1], needs[2]
			inner, _ := values[section].(map[string]any)
			if inner == nil {
				inner = map[string]any{}
				values[section] = inner
			}
			inner[key] = true
			_, _, err = render(t, values)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestProfilesAreChecked checks what is found in profiles before they are installed, and that all problems
// are reported at once.
func TestProfilesAreChecked(t *testing.T) {
	for profile, want := range map[string]string{
		"[":             "config.map.p: error converting YAML to JSON",
		"a: b: c":       "config.map.p: error converting YAML to JSON",
		"- version: v1": "config.map.p: ",
		"text":          "config.map.p: ",
		"version: v2":   `config.map.p.version: "v2": expected v1`,
		"sharring: {}":  "config.map.p.sharring: unknown key",
		"flags: {plugin: {passDeviceSpec: true}}":     "config.map.p.flags.plugin.passDeviceSpec: unknown key",
		"flags: {migStrategy: both}":                  `config.map.p.flags.migStrategy: "both": expected none or single or mixed`,
		"flags: none":                                 `config.map.p.flags: "none": expected a mapping`,
		"sharing: 3":                                  "config.map.p.sharing: 3: expected a mapping",
		"sharing: {timeSlicing: {resources: 4}}":      "config.map.p.sharing.timeSlicing.resources: 4: expected a list",
		"sharing: {timeSlicing: {resources: [gpu]}}":  `config.map.p.sharing.timeSlicing.resources[0]: "gpu": expected a mapping`,
		"sharing: {mps: {resources: [{repicas: 2}]}}": "config.map.p.sharing.mps.resources[0].repicas: unknown key",
		"exclude: [0, {patern: T4}]":                  "config.map.p.exclude[1].patern: unknown key",
		"mig: {configs: {mine: [{device: all}]}}":     "config.map.p.mig.configs.mine[0].device: unknown key",
		"health: {temperature: {limit: 9, hyst: 1}}":  "config.map.p.health.temperature.hyst: unknown key",
	} {
		// This test is not about what a profile requires.
		if _, _, err := render(t, withProfile(t, profile, "{mps: {enabled: true}}")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", profile, err, want)
		}
	}
	_, _, err := render(t, withProfile(t, "{flags: {a: 1}, exlude: []}", "image: {repository: nvcr.io/nvidia/k8s-device-plugin}"))
	for _, want := range []string{"flags.a: unknown key", "exlude: unknown key", "image.repository: "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("several problems at once: got %v, want %q", err, want)
		}
	}
}

// TestGoodProfilesPass checks that the chart accepts what the program accepts in its own tests.
func TestGoodProfilesPass(t *testing.T) {
	const all = `{mps: {enabled: true}, dra: {enabled: true}, mig: {manage: true, reset: true}, gpuSettings: {manage: true}, memoryGuard: {evict: true}, metrics: {perContainer: true}, driverMounts: {enabled: true}}`
	files, err := filepath.Glob("../../configs/examples/*.yaml")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := render(t, withProfile(t, string(text), all)); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	for _, profile := range []string{
		"version: v1\nmig-configs: {all-disabled: [{devices: all, mig-enabled: false}]}",
		"mig: {configs: {mine: [{device-filter: ['0x20B010DE'], devices: [0, 1], mig-enabled: true, mig-devices: {1g.5gb: 7}}]}, allowed: [mine]}",
		"exclude: [0, GPU-1, {pattern: T4}]\nretireAfter: {shrink: 10m}",
		"health: {xids: {109: ignore, other: suspect}, temperature: {limit: 80}}",
		"imex: {channelIDs: [0], required: true}",
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, '1:0']}, {name: gpu, devices: 2, replicas: 4, policy: spread, spread: strict}]}}",
	} {
		if _, _, err := render(t, withProfile(t, profile, all)); err != nil {
			t.Errorf("%s: %v", profile, err)
		}
	}
}

// TestKubernetesIsTooOld checks which feature requires which version, and the message.
func TestKubernetesIsTooOld(t *testing.T) {
	const dra, noPolicy = "dra: {enabled: true}", "admission: {ownNode: false}"
	for _, test := range []struct {
		version, values, want string
		without               string // an API that the server does not have
	}{
		{"v1.36.3", dra, "", ""},
		{"v1.32.0", "{}", "", ""},
		{"v1.32.5-gke.100", "{}", "", ""},
		{"v1.31.9", "{}", "admission.ownNode: the policy needs tokens that name their node, which Kubernetes has from 1.32 on, and this is v1.31.9: set it to false", ""},
		{"v1.31.9", noPolicy, "", ""},
		{"v1.34.0", dra, "", ""},
		{"v1.34.1-eks-1a2b", dra, "", ""},
		{"v1.33.4", dra, "dra.enabled: Dynamic Resource Allocation needs Kubernetes 1.34, and this is v1.33.4", ""},
		{"v1.35.0", dra, "dra.enabled: the API server does not serve resource.k8s.io/v1", "resource.k8s.io/v1"},
		{"v1.35.0", "{}", "", "resource.k8s.io/v1"},
	} {
		t.Run(fmt.Sprintf("%s %s", test.version, test.values), func(t *testing.T) {
			err := renderFor(t, test.version, test.without, test.values)
			if got := fmt.Sprint(err); test.want == "" && err != nil || !strings.Contains(got, test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// renderFor renders for a cluster of that version without one API.
func renderFor(t *testing.T, version, without, text string) error {
	t.Helper()
	values, err := chartutil.ReadValues([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	kubernetes, err := chartutil.ParseKubeVersion(version)
	if err != nil {
		t.Fatal(err)
	}
	cluster := chartutil.Capabilities{KubeVersion: *kubernetes}
	for _, api := range chartutil.DefaultVersionSet {
		if api != without {
			cluster.APIVersions = append(cluster.APIVersions, api)
		}
	}
	loaded := load(t)
	rendered, err := chartutil.ToRenderValues(loaded, values, chartutil.ReleaseOptions{Name: "virgate", Namespace: "gpu"}, &cluster)
	if err != nil {
		t.Fatal(err)
	}
	_, err = engine.Render(loaded, rendered)
	return err
}

// TestMergedListsHaveNothingTwice checks that a user's list entry replaces the chart's entry of the same
// name, because server-side apply refuses a list with a name twice.
func TestMergedListsHaveNothingTwice(t *testing.T) {
	const own = `{devicePlugin: {containers: {main: {env: [{name: NVIDIA_VISIBLE_DEVICES, value: "0,1"}, {name: MIG_STRATEGY, value: single}, {name: X, value: a}]}}}, migStrategy: none, standby: {enabled: true},
podAnnotations: {kubectl.kubernetes.io/default-container: other, a: b},
metrics: {podMonitor: {enabled: true, labels: {app.kubernetes.io/version: mine, release: x}}, rules: {enabled: true, labels: {helm.sh/chart: mine}}, dashboard: {enabled: true, labels: {app.kubernetes.io/name: mine}}}}`
	manifest := manifestOf(t, own)
	for _, want := range []string{"kubernetes.io/version: mine", "helm.sh/chart: mine", "kubernetes.io/name: mine", "default-container: other"} {
		if !strings.Contains(manifest, want) {
			t.Errorf("the manifest lacks %q", want)
		}
	}
	objects := decode(t, manifest)
	pod := daemonSet(t, objects).Spec.Template
	for _, container := range pod.Spec.Containers {
		values := map[string]string{}
		for _, variable := range container.Env {
			if _, twice := values[variable.Name]; twice {
				t.Errorf("%s: %s is there twice", container.Name, variable.Name)
			}
			values[variable.Name] = variable.Value
		}
		if values["NVIDIA_VISIBLE_DEVICES"] != "0,1" || values["MIG_STRATEGY"] != "single" || values["X"] != "a" || values["NVIDIA_DRIVER_CAPABILITIES"] != "compute,utility" {
			t.Errorf("%s: variables %q", container.Name, values)
		}
		for _, mount := range container.VolumeMounts {
			if mount.Name == "all-gpus" {
				t.Errorf("%s: the mount asks for all GPUs, whatever the variable asks for", container.Name)
			}
		}
	}
	for values, want := range map[string]string{
		"devicePlugin: {containers: {main: {env: [{name: A, value: a}, {name: A, value: b}]}}}": "devicePlugin.containers.main.env: A is there twice",
		"devicePlugin: {containers: {main: {env: [{value: a}]}}}":                               "env",
		"podLabels: {app.kubernetes.io/name: x}":                                                "podLabels: the DaemonSet finds its pods by app.kubernetes.io/name",
		"selectorLabelsOverride: {helm.sh/chart: x}":                                            "selectorLabelsOverride: helm.sh/chart is a label that the chart sets",
		"imagePullSecrets: [{name: a}, {name: a}]":                                              "imagePullSecrets",
	} {
		read, err := chartutil.ReadValues([]byte(values))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := render(t, read); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", values, err, want)
		}
	}
}

// TestManifestsHaveNoKeyTwice renders all of testdata and checks that no key occurs twice: neither in YAML,
// nor in lists that Kubernetes merges by a key.
func TestManifestsHaveNoKeyTwice(t *testing.T) {
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		manifest, _, err := render(t, read(t, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range decode(t, manifest) { // decode refuses a key that occurs twice.
			if twice := namesTwice(object); twice != "" {
				t.Errorf("%s: %s", file, twice)
			}
		}
	}
}

// namesTwice returns a name that a DaemonSet has twice in a list that Kubernetes merges by a key.
func namesTwice(object runtime.Object) string {
	set, ok := object.(*appsv1.DaemonSet)
	if !ok {
		return ""
	}
	pod := set.Spec.Template.Spec
	seen := map[string]bool{}
	add := func(kind, key string) string {
		if seen[kind+key] {
			return fmt.Sprintf("%s: %s %s is there twice", set.Name, kind, key)
		}
		seen[kind+key] = true
		return ""
	}
	var found []string
	for _, volume := range pod.Volumes {
		found = append(found, add("volume", volume.Name))
	}
	for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
		found = append(found, add("container", container.Name))
		for _, variable := range container.Env {
			found = append(found, add(container.Name+" variable", variable.Name))
		}
		for _, mount := range container.VolumeMounts {
			found = append(found, add(container.Name+" mount", mount.MountPath))
		}
		for _, port := range container.Ports {
			found = append(found, add(container.Name+" port", fmt.Sprint(port.ContainerPort)))
		}
	}
	return strings.TrimSpace(strings.Join(found, " "))
}

// TestEmptyText uses --set NAME= for the values that are Kubernetes lists and mappings.
func TestEmptyText(t *testing.T) {
	for _, name := range []string{
		"affinity", "nodeSelector", "tolerations", "resources", "podAnnotations", "podLabels", "podSecurityContext", "securityContext", "seLinuxOptions", "imagePullSecrets",
		"selectorLabelsOverride", "extraArgs", "extraVolumes", "extraVolumeMounts",
	} {
		manifest, _, err := render(t, map[string]any{name: ""})
		if err != nil {
			t.Errorf("--set %s=: %v", name, err)
			continue
		}
		pod := daemonSet(t, decode(t, manifest)).Spec.Template.Spec
		if name == "affinity" && pod.Affinity != nil || name == "tolerations" && pod.Tolerations != nil {
			t.Errorf("--set %s=: it is there", name)
		}
		if _, _, err := render(t, map[string]any{name: "x"}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("--set %s=x: error %v", name, err)
		}
	}
}
