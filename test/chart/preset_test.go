package chart

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
)

// TestPreset checks what the preset sets, and that a user's value wins.
func TestPreset(t *testing.T) {
	preset := []string{"cdi-cri", "/usr/local/nvidia/toolkit/nvidia-cdi-hook", "/run/nvidia/driver", "nvidia"}
	with := func(at int, value string) []string {
		changed := slices.Clone(preset)
		changed[at] = value
		return changed
	}
	for _, test := range []struct {
		values string
		want   []string
	}{
		{"{}", []string{"", "", "", ""}},
		{"preset: null", []string{"", "", "", ""}},
		{"preset: gpu-operator", preset},
		{"{preset: gpu-operator, deviceListStrategy: null, cdi: null, nvidiaDriverRoot: null, runtimeClassName: null}", preset},
		{"{preset: gpu-operator, deviceListStrategy: envvar}", with(0, "envvar")},
		{"{preset: gpu-operator, deviceListStrategy: [cdi-cri, envvar]}", with(0, "cdi-cri,envvar")},
		{"{preset: gpu-operator, cdi: {nvidiaHookPath: /opt/hook}}", with(1, "/opt/hook")},
		{"{preset: gpu-operator, nvidiaDriverRoot: /}", with(2, "/")},
		{"{preset: gpu-operator, runtimeClassName: ''}", with(3, "")},
		{"{preset: gpu-operator, runtimeClassName: nvidia-cdi}", with(3, "nvidia-cdi")},
		{"preset: openshift", preset},
		{"preset: selinux", []string{"", "", "", ""}},
	} {
		spec := daemonSet(t, decode(t, manifestOf(t, test.values))).Spec.Template.Spec
		got := make([]string, 4)
		for _, variable := range spec.Containers[0].Env {
			if at := slices.Index([]string{"DEVICE_LIST_STRATEGY", "NVIDIA_CDI_HOOK_PATH", "NVIDIA_DRIVER_ROOT"}, variable.Name); at >= 0 {
				got[at] = variable.Value
			}
		}
		if spec.RuntimeClassName != nil {
			got[3] = *spec.RuntimeClassName
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.values, diff)
		}
	}
	if _, _, err := render(t, map[string]any{"preset": "gke"}); err == nil || !strings.Contains(fmt.Sprint(err), "preset") {
		t.Errorf("an unknown preset: error %v", err)
	}
}

// TestSELinuxPresets checks the container's label and the use of OpenShift's constraint.
func TestSELinuxPresets(t *testing.T) {
	const label, scc = "container_device_plugin_t", "system:openshift:scc:privileged"
	for values, want := range map[string][]string{
		"{}":                   {"", ""},
		"preset: gpu-operator": {"", ""},
		"preset: selinux":      {label, ""},
		"preset: openshift":    {label, scc},
		"{preset: selinux, seLinuxOptions: {type: mine_t}}":    {"mine_t", ""},
		"{preset: openshift, mig: {manage: true}}":             {"", scc},
		"{preset: openshift, mig: null}":                       {label, scc},
		"{preset: openshift, driverAccess: privileged}":        {"", scc},
		"{preset: selinux, securityContext: {runAsUser: 0}}":   {"", ""},
		"{preset: openshift, securityContext: {runAsUser: 0}}": {"", scc},
	} {
		objects := decode(t, manifestOf(t, values))
		got := []string{"", ""}
		if options := daemonSet(t, objects).Spec.Template.Spec.Containers[0].SecurityContext.SELinuxOptions; options != nil {
			got[0] = options.Type
		}
		for _, object := range objects {
			if binding, ok := object.(*rbacv1.RoleBinding); ok && strings.HasPrefix(binding.RoleRef.Name, "system:") {
				got[1] = binding.RoleRef.Name
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: label and constraints are %q, want %q", values, got, want)
		}
	}
}

// TestDriverRootOfCDISpecs checks that the driver's files are visible where specs are made from them, and
// that they are not mounted if the GPUs are simulated.
func TestDriverRootOfCDISpecs(t *testing.T) {
	for values, want := range map[string]string{
		"{}":                          "",
		"deviceListStrategy: cdi-cri": "/",
		"deviceListStrategy: [envvar, cdi-annotations]":                  "/",
		"cdi: {specs: true}":                                             "/",
		"dra: {enabled: true}":                                           "/",
		"{dra: {enabled: true}, nvidiaDriverRoot: /run/nvidia/driver}":   "/run/nvidia/driver",
		"{dra: {enabled: true}, node: 'sim:dgx-a100'}":                   "",
		"{deviceListStrategy: cdi-cri, node: 'trace:/t'}":                "",
		"{deviceListStrategy: cdi-cri, cdi: {specs: false}, node: nvml}": "",
		"{deviceListStrategy: cdi-cri, uninstall: true}":                 "",
	} {
		spec, got := daemonSet(t, decode(t, manifestOf(t, values))).Spec.Template.Spec, ""
		for _, volume := range spec.Volumes {
			if volume.Name == "driver-root" {
				got = volume.HostPath.Path
			}
		}
		if got != want {
			t.Errorf("%s: the driver root is %q, want %q", values, got, want)
		}
		for _, mount := range spec.Containers[0].VolumeMounts {
			if mount.Name == "driver-root" && (!mount.ReadOnly || mount.MountPropagation == nil || *mount.MountPropagation != "HostToContainer") {
				t.Errorf("%s: it is mounted as %+v", values, mount)
			}
		}
	}
}

// TestOwnGPUs checks by which name the containers request all GPUs from NVIDIA's runtime: for "all" it
// opens each one, and starts no container when one fails.
func TestOwnGPUs(t *testing.T) {
	const byPath, pathMount = "management.nvidia.com/gpu=all", "/var/run/nvidia-container-devices/cdi/management.nvidia.com/gpu/all"
	for _, test := range []struct {
		values, name, mount string
	}{
		{"{}", "all", "/var/run/nvidia-container-devices/all"},
		{"preset: selinux", "all", "/var/run/nvidia-container-devices/all"},
		{"preset: gpu-operator", byPath, pathMount},
		{"preset: openshift", byPath, pathMount},
		{"{preset: gpu-operator, mps: {enabled: true}, standby: {enabled: true}}", byPath, pathMount},
		{"{preset: gpu-operator, mig: {manage: true}}", byPath, ""}, // SYS_ADMIN may use the variable.
		{"{preset: gpu-operator, driverAccess: privileged}", "void", ""},
		{"{preset: gpu-operator, devicePlugin: {containers: {main: {env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]}}}}", "all", ""},
		{"{preset: gpu-operator, uninstall: true}", "void", ""},
	} {
		spec := daemonSet(t, decode(t, manifestOf(t, test.values))).Spec.Template.Spec
		mounts := map[string]bool{}
		for _, container := range slices.Concat(spec.InitContainers, spec.Containers) {
			got, want := "all", test.name // The image asks for all.
			if container.Name == "mount-shm" {
				want = "void"
			}
			for _, variable := range container.Env {
				if variable.Name == "NVIDIA_VISIBLE_DEVICES" {
					got = variable.Value
				}
			}
			if got != want {
				t.Errorf("%s: container %s asks for the GPUs %q, want %q", test.values, container.Name, got, want)
			}
			for _, mount := range container.VolumeMounts {
				if mount.Name == "all-gpus" {
					mounts[mount.MountPath] = true
				}
			}
		}
		want := map[string]bool{}
		if test.mount != "" {
			want[test.mount] = true
		}
		if diff := cmp.Diff(want, mounts); diff != "" {
			t.Errorf("%s: the mounts that ask for GPUs (-want +got):\n%s", test.values, diff)
		}
	}
}
