package report

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/sharing"
)

// TestConditionKeepsItsTime restarts the reporter while the condition goes on,
// and changes its status later.
func TestConditionKeepsItsTime(t *testing.T) {
	f := newFakeAPI(t)
	began := metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))
	f.node.Status.Conditions = append(f.node.Status.Conditions, corev1.NodeCondition{
		Type: ConditionType, Status: "True", Reason: "Old", LastTransitionTime: began,
	})
	r := start(t, everything(f), fast())
	r.Report(applied("g1"))
	f.await("the new reason", func() bool { c, _ := f.condition(); return c.Reason == "Serving" })
	f.change(func() {
		if c, _ := f.condition(); !c.LastTransitionTime.Equal(&began) {
			t.Errorf("began at %s, want %s", c.LastTransitionTime, began)
		}
	})
	broken := applied("g1")
	broken.Ready, broken.Reason = sharing.ConditionFalse, "KubeletAway"
	r.Report(broken)
	f.await("False", func() bool { c, _ := f.condition(); return c.Status == "False" })
	f.change(func() {
		if c, _ := f.condition(); !c.LastTransitionTime.After(began.Time) {
			t.Errorf("began at %s, before it changed", c.LastTransitionTime)
		}
	})
}
