package chart

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// hookOf are the objects that Helm makes before it uninstalls, in the order in which it makes them, and the Job's pod.
func hookOf(t *testing.T, values string) (objects []string, pod corev1.PodTemplateSpec) {
	t.Helper()
	for _, object := range decode(t, manifestOf(t, values)) {
		about, err := meta.Accessor(object)
		if err != nil {
			t.Fatal(err)
		}
		annotations := about.GetAnnotations()
		if annotations["helm.sh/hook"] == "" {
			continue
		}
		objects = append(objects, fmt.Sprintf("%T %s/%s: %s, %s", object, about.GetNamespace(), about.GetName(),
			annotations["helm.sh/hook"], annotations["helm.sh/hook-delete-policy"]))
		if job, ok := object.(*batchv1.Job); ok {
			pod = job.Spec.Template
		}
	}
	return objects, pod
}

// TestUninstallHook checks what Helm runs before it deletes the chart's objects: its pod can start where Virgate's do,
// with none of their rights, and nobody takes it for one of them.
func TestUninstallHook(t *testing.T) {
	const values = "{namespaceOverride: gpus, image: {repository: r, tag: t, pullPolicy: Always}, imagePullSecrets: [{name: s}], " +
		"podLabels: {a: b}, podAnnotations: {c: d}, priorityClassName: p, tolerations: [{operator: Exists}], resources: {requests: null, limits: {memory: 64Mi}}}"
	objects, pod := hookOf(t, values)
	const policy = " gpus/virgate-uninstall: pre-delete, before-hook-creation,hook-succeeded,hook-failed"
	if diff := cmp.Diff([]string{"*v1.ServiceAccount" + policy, "*v1.Role" + policy, "*v1.RoleBinding" + policy, "*v1.Job" + policy}, objects); diff != "" {
		t.Fatalf("objects (-want +got):\n%s", diff)
	}
	selector := daemonSet(t, decode(t, manifestOf(t, values))).Spec.Selector
	if labels.SelectorFromSet(selector.MatchLabels).Matches(labels.Set(pod.Labels)) {
		t.Errorf("the DaemonSet takes a pod with the labels %q for its own", pod.Labels)
	}
	if diff := cmp.Diff(corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{
			Labels:      map[string]string{"a": "b"},
			Annotations: map[string]string{"c": "d"},
		},
		Spec: corev1.PodSpec{
			ServiceAccountName: "virgate-uninstall",
			PriorityClassName:  "p",
			ImagePullSecrets:   []corev1.LocalObjectReference{{Name: "s"}},
			RestartPolicy:      corev1.RestartPolicyNever,
			Containers: []corev1.Container{{
				Name:            "end-daemonset",
				Image:           "r:t",
				ImagePullPolicy: corev1.PullIfNotPresent,
				Args:            []string{"end-daemonset", "--daemonset=gpus/virgate"},
				Env:             []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: "void"}},
				Resources: corev1.ResourceRequirements{
					Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")},
				},
				SecurityContext: &corev1.SecurityContext{ // What Pod Security's level restricted asks for.
					Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
					RunAsUser:                new(int64(65534)),
					RunAsNonRoot:             new(true),
					ReadOnlyRootFilesystem:   new(true),
					AllowPrivilegeEscalation: new(false),
					SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				},
			}},
			Affinity: &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{
					Weight: 100,
					PodAffinityTerm: corev1.PodAffinityTerm{
						TopologyKey:   corev1.LabelHostname,
						LabelSelector: selector,
					},
				}},
			}},
			NodeSelector: map[string]string{corev1.LabelOSStable: "linux"},
			Tolerations: []corev1.Toleration{
				{
					Key:      corev1.TaintNodeUnschedulable,
					Operator: corev1.TolerationOpExists,
					Effect:   corev1.TaintEffectNoSchedule,
				},
				{Operator: corev1.TolerationOpExists},
			},
		},
	}, pod); diff != "" {
		t.Errorf("the pod (-want +got):\n%s", diff)
	}
	for _, without := range []string{"uninstall: true", "report: {condition: false}", "devicePlugin: {enabled: false}"} {
		if objects, _ := hookOf(t, without); len(objects) > 0 {
			t.Errorf("%s: there is nothing to write at the end, and the hook has %q", without, objects)
		}
	}
}
