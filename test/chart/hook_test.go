package chart

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/kube"
	"helm.sh/helm/v3/pkg/kube/fake"
	"helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/storage"
	"helm.sh/helm/v3/pkg/storage/driver"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	k8sschema "k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/resource"
)

// hookOf returns the objects that Helm creates before it uninstalls, in their order, and the Job's pod.
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

// TestUninstallHook checks what Helm runs before it deletes the chart's objects. Its pod can start where
// Virgate's pods do, has none of their rights, and does not match their selectors.
func TestUninstallHook(t *testing.T) {
	const values = "{namespaceOverride: gpus, image: {repository: r, tag: t, pullPolicy: Always}, imagePullSecrets: [{name: s}], " +
		"podLabels: {a: b}, podAnnotations: {c: d}, priorityClassName: p, tolerations: [{operator: Exists}], resources: {requests: null, limits: {memory: 64Mi}}}"
	objects, pod := hookOf(t, values)
	const policy = " gpus/virgate-uninstall: pre-delete, before-hook-creation,hook-succeeded,hook-failed"
	if diff := cmp.Diff([]string{"*v1.ServiceAccount" + policy, "*v1.RoleBinding" + policy, "*v1.Job" + policy}, objects); diff != "" {
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
					Limits: corev1.ResourceList{corev1.ResourceMemory: quantity.MustParse("64Mi")},
				},
				SecurityContext: &corev1.SecurityContext{ // Pod Security's level restricted requires this.
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

// objects are a cluster's objects, by kind, namespace and name. It is Helm's client of that cluster.
type objects struct {
	fake.PrintingKubeClient
	t    *testing.T
	have map[string]runtime.Object
	// refuses is the kind that the cluster refuses, fails the one that does not become ready.
	refuses, fails string
}

func (o *objects) Build(manifest io.Reader, _ bool) (list kube.ResourceList, err error) {
	text, err := io.ReadAll(manifest)
	for _, object := range decode(o.t, string(text)) {
		about, _ := meta.Accessor(object)
		kind := object.GetObjectKind().GroupVersionKind()
		list = append(list, &resource.Info{
			Name: about.GetName(), Namespace: about.GetNamespace(), Object: object,
			Mapping: &meta.RESTMapping{GroupVersionKind: kind, Resource: k8sschema.GroupVersionResource{Resource: kind.Kind}},
		})
	}
	return list, err
}

func key(info *resource.Info) string {
	return fmt.Sprintf("%s %s/%s", info.Mapping.GroupVersionKind.Kind, info.Namespace, info.Name)
}

func (o *objects) Create(list kube.ResourceList) (*kube.Result, error) {
	for _, info := range list {
		if info.Mapping.GroupVersionKind.Kind == o.refuses {
			return nil, errors.New("refused")
		}
		o.have[key(info)] = info.Object
	}
	return &kube.Result{Created: list}, nil
}

func (o *objects) Delete(list kube.ResourceList) (*kube.Result, []error) {
	for _, info := range list {
		delete(o.have, key(info))
	}
	return &kube.Result{Deleted: list}, nil
}

func (o *objects) DeleteWithPropagationPolicy(list kube.ResourceList, _ metav1.DeletionPropagation) (*kube.Result, []error) {
	return o.Delete(list)
}

func (o *objects) WatchUntilReady(list kube.ResourceList, _ time.Duration) error {
	if list[0].Mapping.GroupVersionKind.Kind == o.fails {
		return errors.New("DeadlineExceeded")
	}
	return nil
}

// grant returns the bindings whose role exists.
func (o *objects) grant() (list []string) {
	for name, object := range o.have {
		switch binding := object.(type) {
		case *rbacv1.RoleBinding:
			if o.have["Role "+binding.Namespace+"/"+binding.RoleRef.Name] != nil {
				list = append(list, name)
			}
		case *rbacv1.ClusterRoleBinding:
			if o.have["ClusterRole /"+binding.RoleRef.Name] != nil {
				list = append(list, name)
			}
		}
	}
	return list
}

// TestUninstallLeavesNothing compares a cluster before `helm install` and after `helm uninstall`, for all
// kinds of values. Nothing may be left. If the hook fails and Helm continues without hooks, nothing may be
// left that grants a right.
func TestUninstallLeavesNothing(t *testing.T) {
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		for _, way := range []struct{ name, refuses, fails string }{{"all is well", "", ""}, {"the Job fails", "", "Job"}, {"the Job is refused", "Job", ""}} {
			t.Run(filepath.Base(file)+", "+way.name, func(t *testing.T) {
				installed, err := releaseOf(t, "gpu", read(t, file))
				if err != nil {
					t.Fatal(err)
				}
				installed.Info.Status = release.StatusDeployed
				cluster := &objects{
					PrintingKubeClient: fake.PrintingKubeClient{Out: io.Discard, LogOutput: io.Discard},
					t:                  t,
					have:               map[string]runtime.Object{},
				}
				all, err := cluster.Build(strings.NewReader(installed.Manifest), false)
				if err == nil {
					_, err = cluster.Create(all)
				}
				if err != nil || len(cluster.have) == 0 {
					t.Fatal(len(cluster.have), err)
				}
				configuration := &action.Configuration{
					Releases: storage.Init(driver.NewMemory()), KubeClient: cluster, Capabilities: chartutil.DefaultCapabilities,
					Log: func(string, ...any) {}, HookOutputFunc: func(string, string, string) io.Writer { return io.Discard },
				}
				if err := configuration.Releases.Create(installed); err != nil {
					t.Fatal(err)
				}
				cluster.refuses, cluster.fails = way.refuses, way.fails
				_, err = action.NewUninstall(configuration).Run(installed.Name)
				if failed := err != nil; failed != (way.name != "all is well" && len(installed.Hooks) > 0) {
					t.Fatalf("uninstall: %v", err)
				}
				if err != nil {
					without := action.NewUninstall(configuration)
					without.DisableHooks = true
					if _, err := without.Run(installed.Name); err != nil {
						t.Fatal(err)
					}
				}
				if way.name != "the Job is refused" && len(cluster.have) > 0 {
					t.Errorf("left are %q", slices.Sorted(maps.Keys(cluster.have)))
				}
				if left := cluster.grant(); len(left) > 0 {
					t.Errorf("still in force: %q", left)
				}
			})
		}
	}
}
