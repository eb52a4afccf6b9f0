package configs

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/virgate/virgate/sharing"
)

// TestSettingNames checks that flags and variables are those of NVIDIA's plugin and two of Virgate's, and that
// none is repeated.
func TestSettingNames(t *testing.T) {
	want := map[string]string{
		"mig-strategy": "MIG_STRATEGY", "fail-on-init-error": "FAIL_ON_INIT_ERROR", "mps-root": "MPS_ROOT",
		"nvidia-driver-root": "NVIDIA_DRIVER_ROOT", "dev-root": "NVIDIA_DEV_ROOT", "gdrcopy-enabled": "GDRCOPY_ENABLED",
		"gds-enabled": "GDS_ENABLED", "mofed-enabled": "MOFED_ENABLED", "use-node-feature-api": "USE_NODE_FEATURE_API",
		"device-discovery-strategy": "DEVICE_DISCOVERY_STRATEGY", "pass-device-specs": "PASS_DEVICE_SPECS",
		"device-list-strategy": "DEVICE_LIST_STRATEGY", "device-id-strategy": "DEVICE_ID_STRATEGY",
		"shared-devices-allocation-policy": "SHARED_DEVICES_ALLOCATION_POLICY", "cdi-annotation-prefix": "CDI_ANNOTATION_PREFIX",
		"nvidia-cdi-hook-path": "NVIDIA_CDI_HOOK_PATH", "container-driver-root": "DRIVER_ROOT_CTR_PATH",
		"cdi-feature-flags": "CDI_FEATURE_FLAGS", "cdi-disable-hooks": "CDI_DISABLE_HOOKS",
		"driver-mounts-host-path": "DRIVER_MOUNTS_HOST_PATH", "driver-mounts-container-path": "DRIVER_MOUNTS_CONTAINER_PATH",
		"imex-channel-ids": "IMEX_CHANNEL_IDS", "imex-required": "IMEX_REQUIRED",
	}
	got := make(map[string]string)
	seen := make(map[string]bool)
	for _, s := range Settings() {
		got[s.Flag] = s.Env
		for _, name := range append(append([]string{s.Flag, s.Env, s.Path}, s.Aliases...), s.EnvAliases...) {
			if seen[name] {
				t.Errorf("%s is there twice", name)
			}
			seen[name] = true
		}
		if s.Usage == "" {
			t.Errorf("%s has no usage", s.Flag)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("flags and variables (-want +got):\n%s", diff)
	}
}

// written is the setting's default as written in a document.
func written(s Setting) string {
	switch s.Type {
	case TypeBool:
		return s.Default
	case TypeList, TypeNumbers:
		return "[" + s.Default + "]"
	default:
		return `"` + s.Default + `"`
	}
}

// TestDefaultsWrittenOut checks that writing out a default, in the document or as an override, changes nothing.
func TestDefaultsWrittenOut(t *testing.T) {
	plain := parse(t, "")
	for _, s := range settingKeys() {
		section, key := cutLast(s.Path)
		document := key + ": " + written(s)
		for _, part := range []string{"gfd", "driverMounts", "plugin", "flags", "imex"} {
			if strings.Contains("."+section+".", "."+part+".") {
				document = part + ": {" + document + "}"
			}
		}
		byDocument := parse(t, document)
		byOverride, err := Parse("", nil, Overrides{s.Path: {Value: s.Default, Source: "--x"}})
		if err != nil {
			t.Errorf("%s: override with the default: %v", s.Path, err)
		}
		for _, got := range []Config{byDocument, byOverride} {
			if diff := cmp.Diff(plain, got, compareSelectors, cmpopts.IgnoreFields(Config{}, "Notes", "Discovery")); diff != "" {
				t.Errorf("%s: the default changes something (-want +got):\n%s", s.Path, diff)
			}
			if inert := len(got.Notes) == 1 && strings.Contains(got.Notes[0].Message, "has no effect"); inert != (s.Inert != "") {
				t.Errorf("%s: notes are %v", s.Path, got.Notes)
			}
		}
	}
}

// TestInertSections has sections for other programs or for none: the plugin serves the rest of the document
// anyway, and GPU feature discovery gets errors in its own section.
func TestInertSections(t *testing.T) {
	const rest = "\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}"
	tests := []struct{ document, note, discovery string }{
		{"flags: {gfd: {sleepInterval: infinite, oneshot: yes, noTimestamp: off}}", "", ""},
		{"flags: {gfd: {sleepInterval: 60}}", "", ""},
		{"flags: {gfd: {sleepInterval: -6.0e10}}", "", ""},
		{"flags: {gfd: {sleepInterval: '90'}}", `expected a duration such as 60s, or infinite (got "90")`, "flags.gfd.sleepInterval"},
		{"flags: {gfd: {sleepInterval: never}}", `expected a duration such as 60s, or infinite (got "never")`, "flags.gfd.sleepInterval"},
		{"flags: {gfd: {sleepInterval: [60s]}}", "expected a duration such as 60s, or infinite (got a list)", "flags.gfd.sleepInterval"},
		{"flags: {gfd: {sleepInterval: .inf}}", "expected a duration such as 60s, or infinite", "flags.gfd.sleepInterval"},
		{"flags: {gfd: {oneshot: 'true'}}", "expected true or false", "flags.gfd.oneshot"},
		{"flags: {gfd: {noTimestamp: 1}}", "expected true or false (got 1)", "flags.gfd.noTimestamp"},
		{"flags: {gfd: {outputFile: 5}}", "expected text (got 5)", "flags.gfd.outputFile"},
		{"flags: {gfd: {machineTypeFile: {a: b}}}", "expected text (got a mapping)", "flags.gfd.machineTypeFile"},
		{"flags: {gfd: {labels: {a: b}}}", "unknown key", "flags.gfd.labels"},
		{"flags: {gfd: {oneshot: true, oneshot: false}}", "the key is repeated", "flags.gfd.oneshot"},
		{"flags: {gfd: on}", `expected a mapping (got "on")`, "flags.gfd"},
		{"flags: {useNodeFeatureAPI: maybe}", `expected true or false (got "maybe")`, "flags.useNodeFeatureAPI"},
	}
	for _, test := range tests {
		t.Run(test.document, func(t *testing.T) {
			config := parse(t, test.document+rest)
			if sharing := config.Profile.TimeSlicing; len(sharing) != 1 || sharing[0].Replicas != 4 {
				t.Errorf("the rest is read as %+v", sharing)
			}
			var wrong []string
			for _, note := range config.Notes {
				if strings.HasPrefix(note.Message, "has no effect here; virgate gpu-feature-discovery refuses it: ") {
					wrong = append(wrong, fmt.Sprintf("%d: %s: %s", note.Line, note.Path, note.Message))
				}
			}
			got := strings.Join(wrong, "\n")
			if (got != "") != (test.note != "") || !strings.Contains(got, test.note) || test.note != "" && !strings.HasPrefix(got, "1: "+test.discovery+": ") {
				t.Errorf("notes are %v", config.Notes)
			}
			if err := config.Discovery.Err; (err != nil) != (test.discovery != "") || err != nil && !strings.Contains(err.Error(), "1: "+test.discovery+": "+test.note) {
				t.Errorf("GPU feature discovery is told %v", err)
			}
		})
	}
	for _, socket := range []string{"5", "{a: b}", "[/run/a.sock]", "''"} { // Neither program reads it.
		config := parse(t, "flags: {plugin: {kubeletSocket: "+socket+"}}"+rest)
		if config.Discovery.Err != nil {
			t.Errorf("kubeletSocket: %s: GPU feature discovery is told %v", socket, config.Discovery.Err)
		}
		const want = "has no effect: Virgate finds the kubelet's socket in its --device-plugin-dir"
		if len(config.Notes) != 1 || config.Notes[0] != (Note{Line: 1, Path: "flags.plugin.kubeletSocket", Message: want}) {
			t.Errorf("kubeletSocket: %s: notes are %v", socket, config.Notes)
		}
	}
	config, err := Parse("", []byte("flags: {plugin: {kubeletSocket: 5}}"), Overrides{"flags.plugin.kubeletSocket": {Value: "/k", Source: "$KUBELET_SOCKET"}})
	if err != nil || config.Discovery.Err != nil || len(config.Notes) != 1 {
		t.Errorf("kubeletSocket by a variable, too: %v, %v, %v", config.Notes, config.Discovery.Err, err)
	}
	config, err = Parse("", nil, Overrides{"flags.useNodeFeatureAPI": {Value: "maybe", Source: "$USE_NODE_FEATURE_API"}})
	if err != nil || config.Discovery.Err == nil || !strings.HasPrefix(config.Notes[0].Message, "$USE_NODE_FEATURE_API: has no effect here") {
		t.Errorf("an override: %v, %v", config.Notes, err)
	}
}

func TestParseInterval(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"90s": 90 * time.Second, "infinite": math.MaxInt64, "0": 0, "-1ns": -1, "60ns": 60,
	} {
		if got, ok := parseInterval(text); !ok || got != want {
			t.Errorf("%s is %s, %t, want %s", text, got, ok, want)
		}
	}
	for _, text := range []string{"", "inf", "nan", "1e40", "Infinite", "60 s", "60", "6e10", "-1", "1.5"} {
		if got, ok := parseInterval(text); ok {
			t.Errorf("%q is %s", text, got)
		}
	}
}

func TestGrants(t *testing.T) {
	with := func(change func(*sharing.Grants)) sharing.Grants {
		grants := withDefaults(nil).Grants
		change(&grants)
		return grants
	}
	tests := []struct {
		name, document string
		want           sharing.Grants
	}{
		{"a list", "flags: {plugin: {deviceListStrategy: [cdi-cri, volume-mounts]}}", with(func(g *sharing.Grants) {
			g.Strategies = []sharing.DeviceListStrategy{sharing.CDICRI, sharing.VolumeMounts}
		})},
		{"a text with commas", `flags: {plugin: {deviceListStrategy: "cdi-annotations, envvar"}}`, with(func(g *sharing.Grants) {
			g.Strategies = []sharing.DeviceListStrategy{sharing.CDIAnnotations, sharing.Envvar}
		})},
		{"a strategy twice", "flags: {plugin: {deviceListStrategy: [envvar, cdi-cri, envvar]}}", with(func(g *sharing.Grants) {
			g.Strategies = []sharing.DeviceListStrategy{sharing.Envvar, sharing.CDICRI}
		})},
		{"switches", "flags: {gdrcopyEnabled: true, gdsEnabled: true, mofedEnabled: true, plugin: {passDeviceSpecs: true}}", with(func(g *sharing.Grants) {
			g.DeviceNodes, g.GDRCopy, g.GDS, g.MOFED = true, true, true, true
		})},
		{"one switch is one switch", "flags: {gdsEnabled: true}", with(func(g *sharing.Grants) { g.GDS = true })},
		{"another one", "flags: {mofedEnabled: true}", with(func(g *sharing.Grants) { g.MOFED = true })},
		{"prefix", "flags: {plugin: {cdiAnnotationPrefix: example.com/}}", with(func(g *sharing.Grants) { g.AnnotationPrefix = "example.com/" })},
		{"driver mounts", "flags: {plugin: {deviceListStrategy: driver-mounts, driverMounts: {hostPath: /home/kubernetes/bin/nvidia, containerPath: /opt/nvidia}}}",
			with(func(g *sharing.Grants) {
				g.Strategies = []sharing.DeviceListStrategy{sharing.DriverMounts}
				g.DriverHostPath, g.DriverContainerPath = "/home/kubernetes/bin/nvidia", "/opt/nvidia"
			})},
		{"empty texts are the defaults", `flags: {plugin: {cdiAnnotationPrefix: "", driverMounts: {hostPath: "", containerPath: ""}}}`, with(func(*sharing.Grants) {})},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, parse(t, test.document).Profile.Grants); diff != "" {
				t.Errorf("grants (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAnnotationPrefix(t *testing.T) {
	label := strings.Repeat("a", 49)
	domain := strings.Repeat(label+".", 5)
	tests := []struct {
		name, prefix string
		ok           bool
	}{
		{"the runtimes' own", "cdi.k8s.io/", true},
		{"one label", "team/", true},
		{"the longest", domain + "abc/", true},
		{"one more", domain + "abcd/", false},
		{"no slash", "cdi.k8s.io", false},
		{"only a slash", "/", false},
		{"two slashes", "cdi.k8s.io//", false},
		{"behind the slash", "cdi.k8s.io/virgate-", false},
		{"upper case", "CDI.k8s.io/", false},
		{"an empty label", "cdi..io/", false},
		{"a blank", "cdi.k8s.io /", false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("", nil, Overrides{"flags.plugin.cdiAnnotationPrefix": {Value: test.prefix, Source: "$X"}})
			want := "flags.plugin.cdiAnnotationPrefix: expected a lower-case domain and a slash, such as cdi.k8s.io/ (got " + strconv.Quote(test.prefix) + ")"
			if ok := err == nil; ok != test.ok || !ok && len(test.prefix) < valueShown && !strings.Contains(err.Error(), want) {
				t.Errorf("error is %v, want %t for none", err, test.ok)
			}
		})
	}
}
