package configs

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// TestSettingNames holds that flags and variables are those of NVIDIA's plugin,
// and two of Virgate's, and that none is there twice.
func TestSettingNames(t *testing.T) {
	want := map[string]string{
		"mig-strategy": "MIG_STRATEGY", "fail-on-init-error": "FAIL_ON_INIT_ERROR", "mps-root": "MPS_ROOT",
		"nvidia-driver-root": "NVIDIA_DRIVER_ROOT", "dev-root": "NVIDIA_DEV_ROOT", "gdrcopy-enabled": "GDRCOPY_ENABLED",
		"gds-enabled": "GDS_ENABLED", "mofed-enabled": "MOFED_ENABLED", "use-node-feature-api": "USE_NODE_FEATURE_API",
		"device-discovery-strategy": "DEVICE_DISCOVERY_STRATEGY", "pass-device-specs": "PASS_DEVICE_SPECS",
		"device-list-strategy": "DEVICE_LIST_STRATEGY", "device-id-strategy": "DEVICE_ID_STRATEGY",
		"shared-devices-allocation-policy": "SHARED_DEVICES_ALLOCATION_POLICY", "cdi-annotation-prefix": "CDI_ANNOTATION_PREFIX",
		"nvidia-cdi-hook-path": "NVIDIA_CDI_HOOK_PATH", "container-driver-root": "CONTAINER_DRIVER_ROOT",
		"cdi-feature-flags":       "CDI_FEATURE_FLAGS",
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

// written is the setting's default as a document says it.
func written(s Setting) string {
	switch s.Kind {
	case KindBool:
		return s.Default
	case KindList, KindNumbers:
		return "[" + s.Default + "]"
	default:
		return `"` + s.Default + `"`
	}
}

// TestDefaultsWrittenOut holds that a default changes nothing when it is said,
// by the document or by an override.
func TestDefaultsWrittenOut(t *testing.T) {
	plain := parse(t, "")
	for _, s := range settingTable() {
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
			if diff := cmp.Diff(plain, got, compareSelectors, cmpopts.IgnoreFields(Config{}, "Notes")); diff != "" {
				t.Errorf("%s: the default changes something (-want +got):\n%s", s.Path, diff)
			}
			if inert := len(got.Notes) == 1 && strings.Contains(got.Notes[0].Message, "has no effect"); inert != (s.inert != "") {
				t.Errorf("%s: notes are %v", s.Path, got.Notes)
			}
		}
	}
}
