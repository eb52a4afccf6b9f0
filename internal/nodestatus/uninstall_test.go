package nodestatus

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestUninstall removes from a Node only what Virgate wrote, as far as that is already possible, and finds
// nothing the second time.
func TestUninstall(t *testing.T) {
	f := newFakeAPI(t)
	f.node.Status.Conditions = append(f.node.Status.Conditions, corev1.NodeCondition{Type: ConditionType, Status: "Unknown", Reason: "Stopped"})
	f.node.Status.Capacity = corev1.ResourceList{
		"nvidia.com/gpu": resource.MustParse("8"), "nvidia.com/old": resource.MustParse("0"), "other.com/old": resource.MustParse("0"), "cpu": resource.MustParse("0"),
	}
	for _, key := range []string{ProfileAnnotation, SourceAnnotation, GenerationAnnotation, "ours"} {
		f.node.Annotations[key] = "x"
	}
	for _, key := range []string{StateLabel, MIGStateLabel, "nvidia.com/ours"} {
		f.node.Labels[key] = "x"
	}
	// MIGStateLabel is mig-manager's here.
	f.node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "virgate", FieldsV1: metav1.NewFieldsV1(
		`{"f:metadata":{"f:labels":{"f:nvidia.com/ours":{}},"f:annotations":{"f:ours":{}}}}`)}, {Manager: "mig-manager", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:` + MIGStateLabel + `":{}}}}`)}}
	removed, err := Uninstall(t.Context(), f.config(), nodeName, "nvidia.com")
	if err != nil {
		t.Fatal(err)
	}
	want := Removed{Node: nodeName, Left: []string{"nvidia.com/gpu 8"}, Done: []string{
		"label " + StateLabel, "label nvidia.com/ours",
		"annotation ours", "annotation " + GenerationAnnotation, "annotation " + ProfileAnnotation, "annotation " + SourceAnnotation,
		"condition " + ConditionType, "resource nvidia.com/old",
	}}
	if diff := cmp.Diff(want, removed); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{"theirs": "label", MIGStateLabel: "x"}, f.node.Labels); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{"theirs": "annotation"}, f.node.Annotations); diff != "" {
		t.Error(diff)
	}
	if c := f.node.Status.Conditions; len(c) != 1 || c[0].Type != corev1.NodeReady {
		t.Errorf("conditions %+v", c)
	}
	if c := f.node.Status.Capacity; len(c) != 3 {
		t.Errorf("capacity %v", c)
	}
	before := f.count("PATCH")
	if removed, err = Uninstall(t.Context(), f.config(), nodeName, "nvidia.com"); err != nil || len(removed.Done) > 0 || f.count("PATCH") != before {
		t.Errorf("the second time: %+v, %v, %d writes", removed, err, f.count("PATCH")-before)
	}
	f.refuse["/status"] = 403
	f.node.Status.Capacity["nvidia.com/gpu"] = resource.MustParse("0")
	if _, err := Uninstall(t.Context(), f.config(), nodeName, "nvidia.com"); err == nil {
		t.Error("a refusal is no error")
	}
}

func TestNodeNames(t *testing.T) {
	f := newFakeAPI(t)
	names, err := NodeNames(t.Context(), f.config())
	if diff := cmp.Diff([]string{"n0", "n1", "n2"}, names); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
}

// TestRemoveNodeFeatures removes the objects that Virgate wrote for these Nodes, in any namespace, and leaves
// those of others, of other Nodes and of GPU feature discovery.
func TestRemoveNodeFeatures(t *testing.T) {
	f := newFakeAPI(t)
	object := func(namespace, name, manager string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-of-" + namespace + "/" + name), ManagedFields: []metav1.ManagedFieldsEntry{{Manager: manager}}}
	}
	names := func() (names []string) {
		for _, o := range f.allFeatures {
			names = append(names, o.Namespace+"/"+o.Name)
		}
		return names
	}
	remove := func() ([]string, error) { return RemoveNodeFeatures(t.Context(), f.config(), []string{"n1", "n2"}) }
	if removed, err := remove(); err != nil || len(removed) > 0 {
		t.Errorf("without node feature discovery: %q, %v", removed, err)
	}
	f.allFeatures = []metav1.ObjectMeta{
		object("b", "virgate-features-for-n2", "virgate"), object("a", "virgate-features-for-n1", "virgate"),
		object("c", "virgate-features-for-n1", "kubectl"), object("a", "virgate-features-for-n3", "virgate"),
		object("a", "nvidia-features-for-n1", "virgate"), object("a", "n1", "nfd-worker"),
	}
	f.refuse["a/nodefeatures/virgate-features-for-n1"] = 403
	if removed, err := remove(); err == nil || !strings.Contains(err.Error(), "delete NodeFeature a/virgate-features-for-n1: ") || !slices.Equal(removed, []string{"b/virgate-features-for-n2"}) {
		t.Errorf("one is refused: %q, %v", removed, err)
	}
	clear(f.refuse)
	if removed, err := remove(); err != nil || !slices.Equal(removed, []string{"a/virgate-features-for-n1"}) {
		t.Errorf("then: %q, %v", removed, err)
	}
	if diff := cmp.Diff([]string{"c/virgate-features-for-n1", "a/virgate-features-for-n3", "a/nvidia-features-for-n1", "a/n1"}, names()); diff != "" {
		t.Error(diff)
	}
	if removed, err := remove(); err != nil || len(removed) > 0 {
		t.Errorf("again: %q, %v", removed, err)
	}
	f.refuse["/nodefeatures"] = 403
	if _, err := remove(); !apierrors.IsForbidden(err) {
		t.Errorf("error %v, want that the list is forbidden", err)
	}
}
