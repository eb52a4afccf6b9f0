package nodestatus

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestUninstall takes from a Node what Virgate wrote and nothing else, as far as it can be
// taken already, and finds nothing the second time.
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
