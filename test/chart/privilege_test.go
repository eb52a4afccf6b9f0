package chart

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestPrivileges checks all rights that each value adds to the default ones: docs/explanation/security.md
// has the same table.
func TestPrivileges(t *testing.T) {
	without := privileges(t, "{}")
	if diff := cmp.Diff([]string{
		"/dev/null, read-only",
		"/var/lib/kubelet/device-plugins",
		"/var/lib/kubelet/pod-resources, read-only",
		"ClusterRole events create,patch",
		"ClusterRole nodes get,list,watch,patch",
		"ClusterRole nodes/status patch",
		"Role configmaps/virgate-profiles get,list,watch",
		"Role daemonsets/virgate get,delete",
		"Role pods list",
		"no escalation",
		"no privilege",
		"own Node only",
		"read-only root",
		"seccomp RuntimeDefault",
		"uid 0, capabilities dropped",
	}, without); diff != "" {
		t.Errorf("the default values (-want +got):\n%s", diff)
	}
	for _, test := range valuesWithRights() {
		t.Run(test.values, func(t *testing.T) {
			with := privileges(t, test.values)
			got := [2][]string{less(with, without), less(without, with)}
			if diff := cmp.Diff([2][]string{test.more, test.fewer}, got); diff != "" {
				t.Errorf("more and fewer (-want +got):\n%s", diff)
			}
		})
	}
}

// rightsOfValues are the rights that values add to the default ones or remove.
type rightsOfValues struct {
	values      string
	more, fewer []string
}

func valuesWithRights() []rightsOfValues {
	admin, visible := []string{"capability SYS_ADMIN"}, []string{"/dev/null, read-only"} // One instead of the other.
	confined := []string{"/dev/null, read-only", "no escalation", "no privilege", "read-only root", "seccomp RuntimeDefault", "uid 0, capabilities dropped"}
	return []rightsOfValues{
		{"deviceListStrategy: cdi-cri", []string{"/, read-only", "/var/run/cdi"}, nil},
		{"cdi: {specs: true}", []string{"/, read-only", "/var/run/cdi"}, nil},
		{"{deviceListStrategy: cdi-cri, nvidiaDriverRoot: /run/nvidia/driver}", []string{"/, read-only", "/run/nvidia, read-only", "/run/nvidia/driver, read-only", "/var/run/cdi"}, nil},
		{"{deviceListStrategy: cdi-cri, node: sim:dgx-a100}", []string{"/var/run/cdi"}, visible},
		{"preset: gpu-operator", []string{"/, read-only", "/run/nvidia, read-only", "/run/nvidia/driver, read-only", "/var/run/cdi"}, nil},
		{"nvidiaDriverRoot: /run/nvidia/driver", []string{"/run/nvidia, read-only", "/run/nvidia/driver, read-only"}, nil},
		{"driverMounts: {enabled: true}", []string{"/, read-only"}, nil},
		{"driverAccess: privileged", []string{"/, read-only", "privileged"}, confined},
		{"migStrategy: mixed", admin, visible},
		{"migStrategy: none", nil, nil},
		{"mig: {monitor: false}", nil, nil},
		{"mig: {monitor: true}", admin, visible},
		{"mig: {manage: true}", []string{"/, read-only", "/var/run/cdi, read-only", "PIDs of the host", "privileged"}, confined},
		{"{mig: {manage: true}, nvidiaDriverRoot: /run/nvidia/driver}", []string{"/run/nvidia, read-only", "/run/nvidia/driver, read-only", "/var/run/cdi, read-only", "PIDs of the host", "privileged"}, confined},
		{"{mig: {manage: true}, nvidiaDriverRoot: /home/kubernetes/bin/nvidia, nvidiaDevRoot: /}",
			[]string{"/, read-only", "/home/kubernetes/bin/nvidia, read-only", "/var/run/cdi, read-only", "PIDs of the host", "privileged"}, confined},
		{"{mig: {manage: true}, node: sim:dgx-a100}", []string{"/var/run/cdi, read-only", "PIDs of the host", "capability SYS_ADMIN"}, visible},
		{"config: {examples: true}", nil, nil},
		{"{config: {map: {a: 'flags: {migStrategy: mixed}'}}, mig: {monitor: false}}", nil, nil},
		{"config: {name: virgate-profiles}", admin, visible},
		{"{config: {name: virgate-profiles}, mig: {monitor: false}}", nil, nil},
		{"{metrics: {perContainer: true}, memoryGuard: {evict: true}}", []string{"ClusterRole pods delete", "ClusterRole pods list,watch", "ClusterRole pods/eviction create", "PIDs of the host", "pods of the own Node only"}, nil},
		{"dra: {enabled: true}", []string{
			"/, read-only", "/var/lib/kubelet/plugins/gpu.virgate.github.io", "/var/lib/kubelet/plugins_registry", "/var/run/cdi", "ClusterRole resourceclaims get,list",
			"ClusterRole resourceslices list,watch,create,update,delete", "own ResourceSlices only",
		}, nil},
		{"dra: {resources: [nvidia.com/gpu]}", nil, nil},
		{"{dra: {enabled: true}, admission: {ownNode: false}}", []string{
			"/, read-only", "/var/lib/kubelet/plugins/gpu.virgate.github.io", "/var/lib/kubelet/plugins_registry", "/var/run/cdi", "ClusterRole resourceclaims get,list",
			"ClusterRole resourceslices list,watch,create,update,delete",
		}, []string{"own Node only"}},
		{"gpuSettings: {manage: true}", []string{"/, read-only", "capability SYS_ADMIN", "capability SYS_CHROOT"}, visible},
		{"mps: {enabled: true}", []string{"/run/nvidia/mps", "PIDs of the host", "privileged mps"}, nil},
		{"{mps: {enabled: true, root: /srv/mps}, node: sim:dgx-a100}", []string{"/srv/mps", "PIDs of the host", "privileged mps"}, visible},
		{"mps: {root: /srv/mps}", nil, nil},
		{"mig: {reset: true}", []string{"/, read-only", "PIDs of the host", "capability SYS_ADMIN", "capability SYS_CHROOT"}, visible},
		{"{mig: {reset: true, monitor: false}, nvidiaDriverRoot: /run/nvidia/driver}", []string{"/run/nvidia, read-only", "/run/nvidia/driver, read-only", "PIDs of the host", "capability SYS_ADMIN", "capability SYS_CHROOT"}, visible},
		{"node: sim:dgx-a100", nil, visible},
		{"metrics: {perContainer: true}", []string{"ClusterRole pods list,watch", "PIDs of the host"}, nil},
		{"{devicePlugin: {enableHostNetwork: true}, updateStrategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}}", []string{"network of the host"}, nil},
		{"config: {default: ''}", nil, []string{"Role configmaps/virgate-profiles get,list,watch"}},
		{"admission: {ownNode: false}", nil, []string{"own Node only"}},
		{"report: {removeStaleResources: true}", nil, nil},
		{"report: {condition: false}", nil, []string{"Role daemonsets/virgate get,delete", "Role pods list"}},
		{"networkPolicy: {enabled: true}", nil, nil},
		{"featureLabels: {enabled: true}", nil, nil},
		{"featureLabels: {output: nfd-file}", nil, nil},
		{"featureLabels: {enabled: true, output: nfd-file}", []string{"/etc/kubernetes/node-feature-discovery/features.d"}, nil},
		{"featureLabels: {enabled: true, output: nfd-api}", []string{"Role nodefeatures get,create,update", "Role pods get"}, nil},
	}
}

// TestToolkitsStartTheContainer checks that each kind of NVIDIA's container toolkit starts the container
// for all values, and that the container can make partitions under each:
//
//   - before 1.18: "cannot set MIG_CONFIG_DEVICES in non privileged container" without SYS_ADMIN;
//   - 1.18.0 to 1.20.0: the variables are ignored (nvidia-container-toolkit#1740), so the right must
//     not depend on them;
//   - from 1.20.1: the variables may be "all" alone, and only with SYS_ADMIN (#1947;
//     internal/modifier/cdi.go).
func TestToolkitsStartTheContainer(t *testing.T) {
	for _, values := range []string{
		"{}", "mig: {manage: true}", "mig: {monitor: true}", "{driverAccess: privileged, mig: {manage: true}}",
		"{mig: {manage: true}, securityContext: {capabilities: {drop: [ALL]}}}", "{mig: {manage: true, reset: true}, mps: {enabled: true}, standby: {enabled: true}}",
		"{node: sim:dgx-a100, mig: {manage: true}}",
	} {
		t.Run(values, func(t *testing.T) {
			for _, container := range daemonSet(t, decode(t, manifestOf(t, values))).Spec.Template.Spec.Containers {
				security := container.SecurityContext
				privileged := security.Privileged != nil && *security.Privileged
				sysAdmin := privileged || security.Capabilities != nil && slices.Contains(security.Capabilities.Add, "SYS_ADMIN")
				for _, variable := range container.Env {
					if !strings.HasPrefix(variable.Name, "NVIDIA_MIG_") {
						continue
					}
					if variable.Value != "all" || !sysAdmin {
						t.Errorf("%s: no toolkit from 1.20.1 on starts it with %s=%s and SYS_ADMIN: %t", container.Name, variable.Name, variable.Value, sysAdmin)
					}
				}
				makes := strings.Contains(values, "manage: true") && !strings.Contains(values, "securityContext") && !strings.Contains(values, "sim:")
				if makes && !privileged {
					t.Errorf("%s is not privileged, and no toolkit gives it the nodes of later instances", container.Name)
				}
			}
		})
	}
}

// TestMIGIsReadWhereAValueSaysSo checks when the container has SYS_ADMIN, without which the driver lets no
// program read partitions, and what it requests from NVIDIA's runtime. It has the variables only with the
// capability, because otherwise the runtime does not start the container. Without the capability it has a
// mount with the meaning of NVIDIA_VISIBLE_DEVICES, because a runtime with
// accept-nvidia-visible-devices-envvar-when-unprivileged=false would ignore the variable.
func TestMIGIsReadWhereAValueSaysSo(t *testing.T) {
	const monitor, manage, plain = "SYS_ADMIN monitor", "privileged config monitor", "by mount"
	for _, test := range []struct{ name, values, want string }{
		{"the chart's profiles", "{}", plain},
		{"the examples, which a label chooses", "config: {examples: true}", plain},
		{"the examples, and the right to read", "{config: {examples: true}, mig: {monitor: true}}", monitor},
		{"no profiles", "config: {default: ''}", plain},
		{"strategy none for all profiles", "migStrategy: none", plain},
		{"strategy single for all profiles", "{migStrategy: single, config: {default: ''}}", monitor},
		{"profiles that share", "config: {map: {a: 'version: v1', b: 'flags: {migStrategy: none}', c: 'flags: {}', d: 'flags:'}}", plain},
		{"a profile with partitions, without the right to read them", "{config: {map: {a: 'version: v1', b: 'flags: {migStrategy: mixed}'}}, mig: {monitor: false}}", plain},
		{"one of the profiles, but strategy none", "{migStrategy: none, config: {map: {b: 'flags: {migStrategy: mixed}'}}}", plain},
		{"an empty profile", "config: {map: {c: ''}}", plain},
		{"a ConfigMap that the chart cannot read", "config: {name: own}", monitor},
		{"the same, forbidden", "{config: {name: own}, mig: {monitor: false}}", plain},
		{"asked for", "{migStrategy: none, mig: {monitor: true}}", monitor},
		{"to manage", "{migStrategy: none, mig: {manage: true}}", manage},
		{"a ConfigMap that the chart cannot read, but strategy none", "{config: {name: own}, migStrategy: none}", plain},
		{"simulated", "node: sim:dgx-a100", ""},
		{"simulated, to manage", "{node: sim:dgx-a100, mig: {manage: true}}", "SYS_ADMIN config monitor"},
		{"the variable as the chart has it", "devicePlugin: {containers: {main: {env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]}}}", plain},
		{"a privileged container", "{driverAccess: privileged, mig: {manage: true}}", "privileged"},
		{"a context without the capability", "securityContext: {runAsUser: 0}", plain},
		{"a context without the capability, to manage", "{mig: {manage: true}, securityContext: {capabilities: {drop: [ALL]}}}", plain},
		{"a context with the capability", "{mig: {monitor: true}, securityContext: {capabilities: {add: [SYS_ADMIN]}}}", monitor},
		{"a privileged context", "{mig: {manage: true}, securityContext: {privileged: true}}", manage},
	} {
		t.Run(test.name, func(t *testing.T) {
			manifest := manifestOf(t, test.values)
			container := daemonSet(t, decode(t, manifest)).Spec.Template.Spec.Containers[0]
			var got []string
			if security := container.SecurityContext; security.Privileged != nil && *security.Privileged {
				got = append(got, "privileged")
			} else if security.Capabilities != nil && slices.Contains(security.Capabilities.Add, "SYS_ADMIN") {
				got = append(got, "SYS_ADMIN")
			}
			for _, variable := range container.Env {
				switch variable.Name {
				case "NVIDIA_MIG_CONFIG_DEVICES":
					got = append(got, "config")
				case "NVIDIA_MIG_MONITOR_DEVICES":
					got = append(got, "monitor")
				}
			}
			if slices.ContainsFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/var/run/nvidia-container-devices/all" }) {
				got = append(got, "by mount")
			}
			if strings.Join(got, " ") != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// less returns the items that others lacks.
func less(items, others []string) []string {
	var lacking []string
	for _, item := range items {
		if !slices.Contains(others, item) {
			lacking = append(lacking, item)
		}
	}
	return lacking
}

// privileges lists what an installation with the values may do on a node and at the API server, and what
// confines it, sorted.
func privileges(t *testing.T, text string) []string {
	t.Helper()
	manifest := manifestOf(t, text)
	objects := decode(t, manifest)
	list := append(ofPods(t, objects), ofRules(objects)...)
	if strings.Contains(manifest, "kind: ValidatingAdmissionPolicyBinding\nmetadata:\n  name: virgate-own-node") {
		list = append(list, "own Node only")
	}
	if strings.Contains(manifest, "kind: ValidatingAdmissionPolicyBinding\nmetadata:\n  name: virgate-evict") {
		list = append(list, "pods of the own Node only")
	}
	if strings.Contains(manifest, "kind: ValidatingAdmissionPolicyBinding\nmetadata:\n  name: virgate-dra") {
		list = append(list, "own ResourceSlices only")
	}
	slices.Sort(list)
	return list
}

func ofPods(t *testing.T, objects []runtime.Object) []string {
	t.Helper()
	pod := daemonSet(t, objects).Spec.Template.Spec
	container := pod.Containers[0]
	var list []string
	say := func(really bool, text string) {
		if really {
			list = append(list, text)
		}
	}
	say(pod.HostPID, "PIDs of the host")
	say(pod.HostNetwork, "network of the host")
	say(pod.HostIPC, "IPC of the host")
	for _, volume := range pod.Volumes {
		if volume.HostPath == nil {
			continue
		}
		readOnly := true
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			for _, mount := range c.VolumeMounts {
				readOnly = readOnly && (mount.Name != volume.Name || mount.ReadOnly)
			}
		}
		if readOnly {
			list = append(list, volume.HostPath.Path+", read-only")
		} else {
			list = append(list, volume.HostPath.Path)
		}
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers[1:]) {
		say(c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged, "privileged "+c.Name)
	}
	security := container.SecurityContext
	privileged := security.Privileged != nil && *security.Privileged
	admin := privileged || security.Capabilities != nil && slices.Contains(security.Capabilities.Add, "SYS_ADMIN")
	for _, variable := range container.Env {
		// nvidia-container-toolkit, cmd/nvidia-container-runtime-hook/container_config.go.
		if strings.HasPrefix(variable.Name, "NVIDIA_MIG_") && !admin {
			t.Errorf("NVIDIA's runtime refuses %s in a container without SYS_ADMIN", variable.Name)
		}
	}
	say(privileged, "privileged")
	say(!privileged, "no privilege")
	say(security.AllowPrivilegeEscalation != nil && !*security.AllowPrivilegeEscalation, "no escalation")
	say(security.ReadOnlyRootFilesystem != nil && *security.ReadOnlyRootFilesystem, "read-only root")
	say(security.SeccompProfile != nil, "seccomp RuntimeDefault")
	if security.Capabilities != nil {
		say(fmt.Sprint(security.Capabilities.Drop) == "[ALL]" && *security.RunAsUser == 0, "uid 0, capabilities dropped")
		for _, capability := range security.Capabilities.Add {
			list = append(list, "capability "+string(capability))
		}
	}
	return list
}

func ofRules(objects []runtime.Object) []string {
	var list []string
	for _, object := range objects {
		var kind string
		var rules []rbacv1.PolicyRule
		switch role := object.(type) {
		case *rbacv1.ClusterRole:
			kind, rules = "ClusterRole", role.Rules
		case *rbacv1.Role:
			kind, rules = "Role", role.Rules
		}
		for _, rule := range rules {
			what := strings.Join(append(slices.Clone(rule.Resources), rule.ResourceNames...), "/")
			list = append(list, fmt.Sprintf("%s %s %s", kind, what, strings.Join(rule.Verbs, ",")))
		}
	}
	return list
}
