package chart

import (
	"cmp"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chartutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

// deviations gives the reasons why the chart's pods do what Pod Security's level baseline forbids.
var deviations = map[string]string{
	"hostPath volumes":         "a device plugin is a socket in the kubelet's folder; drivers and CDI specs are files of the host",
	"non-default capabilities": "NVIDIA's runtime and the driver ask for SYS_ADMIN to show partitions; nvidia-smi runs in a chroot",
	"privileged":               "the driver lets no other container make partitions, and MPS daemons mount memory for pods",
	"host namespaces":          "the driver lists no processes of other PID namespaces; the nodes' network is for those who ask for it",
	"seLinuxOptions":           "only container_device_plugin_t may use the kubelet's sockets",
}

// TestPodSecurity checks what each pod does that Pod Security's level baseline forbids, with the reason,
// and each container's rights: for the default values, each preset, and each value that adds rights.
func TestPodSecurity(t *testing.T) {
	const golden = "testdata/podsecurity.golden.txt"
	values := []string{"{}", "preset: gpu-operator", "preset: selinux", "preset: openshift", "standby: {enabled: true}", "uninstall: true"}
	for _, test := range valuesWithRights() {
		if len(test.more) > 0 && !slices.Contains(values, test.values) {
			values = append(values, test.values)
		}
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, values := range values {
		fmt.Fprintf(&text, "%s\n", values)
		pod := daemonSet(t, decode(t, manifestOf(t, values))).Spec.Template
		describePod(t, &text, evaluator, "DaemonSet", pod)
		if _, hook := hookOf(t, values); len(hook.Spec.Containers) > 0 {
			describePod(t, &text, evaluator, "uninstall Job", hook)
		}
	}
	for reason := range deviations {
		if !strings.Contains(text.String(), "not in baseline: "+reason+"\n") {
			t.Errorf("no values deviate from baseline by %s", reason)
		}
	}
	if *update {
		if err := os.WriteFile(golden, []byte(text.String()), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(string(want), text.String()); diff != "" {
		t.Errorf("%s (-file +chart); -update writes it:\n%s", golden, diff)
	}
}

func describePod(t *testing.T, text *strings.Builder, evaluator policy.Evaluator, what string, pod corev1.PodTemplateSpec) {
	t.Helper()
	fmt.Fprintf(text, "  %s\n", what)
	level := api.LevelVersion{
		Level:   api.LevelBaseline,
		Version: api.LatestVersion(),
	}
	forbidden := policy.AggregateCheckResults(evaluator.EvaluatePod(level, &pod.ObjectMeta, &pod.Spec))
	if forbidden.Allowed {
		fmt.Fprintln(text, "    keeps to baseline")
	}
	for i, reason := range forbidden.ForbiddenReasons {
		why := deviations[reason]
		if why == "" {
			t.Errorf("%s: not in baseline, and no reason is given: %s", what, reason)
		}
		fmt.Fprintf(text, "    not in baseline: %s\n      %s\n      because %s\n", reason, forbidden.ForbiddenDetails[i], why)
	}
	for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		fmt.Fprintf(text, "    container %s: %s\n", container.Name, securityText(container.SecurityContext))
	}
}

// securityText describes a container's rights in one line.
func securityText(security *corev1.SecurityContext) string {
	if security == nil {
		return "nothing is said"
	}
	parts := []string{fmt.Sprintf("privileged %t", security.Privileged != nil && *security.Privileged)}
	capabilities := cmp.Or(security.Capabilities, &corev1.Capabilities{})
	parts = append(parts, fmt.Sprintf("drops %v, adds %v", capabilities.Drop, capabilities.Add))
	escalation := security.AllowPrivilegeEscalation == nil || *security.AllowPrivilegeEscalation
	readOnly := security.ReadOnlyRootFilesystem != nil && *security.ReadOnlyRootFilesystem
	parts = append(parts, fmt.Sprintf("escalation %t", escalation), fmt.Sprintf("read-only root %t", readOnly))
	if security.SeccompProfile != nil {
		parts = append(parts, "seccomp "+string(security.SeccompProfile.Type))
	}
	if security.RunAsUser != nil {
		parts = append(parts, fmt.Sprintf("uid %d", *security.RunAsUser))
	}
	return strings.Join(parts, ", ")
}

// TestNoWritableRoot checks that no container with SYS_ADMIN has the host's / mounted writable, whatever
// values are combined: one may add the right and another the mount.
func TestNoWritableRoot(t *testing.T) {
	var all []string
	for _, test := range valuesWithRights() {
		if len(test.more) > 0 {
			all = append(all, test.values)
		}
	}
	for _, admin := range []string{"{mig: {manage: true, reset: true}, gpuSettings: {manage: true}, mps: {enabled: true}}", "mig: {monitor: true}"} {
		for _, values := range all {
			manifest, _, err := render(t, merged(t, admin, values))
			if err != nil {
				continue // The chart refuses this combination.
			}
			pod := daemonSet(t, decode(t, manifest)).Spec.Template.Spec
			if found := writableRoot(pod); found != "" {
				t.Errorf("%s with %s: %s", admin, values, found)
			}
		}
	}
	const mount = "extraVolumes: [{name: x, hostPath: {path: %s}}], extraVolumeMounts: [{name: x, mountPath: /x%s}]"
	for _, values := range []string{
		"{mps: {enabled: true, root: //}}",
		"{mps: {enabled: true, root: /run/..}}",
		"{mig: {manage: true}, " + fmt.Sprintf(mount, "/", "") + "}",
		"{mig: {monitor: true}, " + fmt.Sprintf(mount, "/", ", readOnly: false") + "}",
		"{gpuSettings: {manage: true}, " + fmt.Sprintf(mount, "/usr/..", "") + "}",
		"{driverAccess: privileged, " + fmt.Sprintf(mount, "/", "") + "}",
		"{securityContext: {privileged: true}, " + fmt.Sprintf(mount, "/", "") + "}",
	} {
		refused(t, values, "the host's / must not be writable")
	}
	for _, values := range []string{
		"{" + fmt.Sprintf(mount, "/", "") + "}",
		"{mig: {manage: true}, " + fmt.Sprintf(mount, "/", ", readOnly: true") + "}",
		"{mig: {manage: true}, " + fmt.Sprintf(mount, "/srv", "") + "}",
	} {
		if found := writableRoot(podOf(t, values)); found != "" {
			t.Errorf("%s: %s", values, found)
		}
	}
}

// writableRoot names a container that has SYS_ADMIN and the host's / writable; "" if none has.
func writableRoot(pod corev1.PodSpec) string {
	for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
		security := cmp.Or(container.SecurityContext, &corev1.SecurityContext{})
		admin := security.Privileged != nil && *security.Privileged ||
			security.Capabilities != nil && slices.Contains(security.Capabilities.Add, "SYS_ADMIN")
		for _, mount := range container.VolumeMounts {
			for _, volume := range pod.Volumes {
				host := volume.HostPath
				if admin && volume.Name == mount.Name && host != nil && path.Clean(host.Path) == "/" && !mount.ReadOnly {
					return fmt.Sprintf("container %s has SYS_ADMIN and the host's / writable at %s", container.Name, mount.MountPath)
				}
			}
		}
	}
	return ""
}

// merged returns both values, the second over the first.
func merged(t *testing.T, first, second string) map[string]any {
	t.Helper()
	var both [2]chartutil.Values
	for i, text := range []string{first, second} {
		var err error
		if both[i], err = chartutil.ReadValues([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	return chartutil.CoalesceTables(both[1], both[0])
}
