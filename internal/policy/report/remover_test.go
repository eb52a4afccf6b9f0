package report

import (
	"maps"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/virgate/virgate/sharing"
)

func TestStaleResources(t *testing.T) {
	zero, one := resource.MustParse("0"), resource.MustParse("1")
	f := newFakeAPI(t)
	f.node.Status.Capacity = corev1.ResourceList{"nvidia.com/old": zero, "nvidia.com/used": one, "nvidia.com/theirs": zero, "nvidia.com/young": zero, "cpu": one}
	options := everything(f)
	brief := fast()
	r := start(t, options, brief)
	report := applied("g1")
	ago := time.Now().Add(-2 * time.Hour)
	report.Gone = []sharing.GoneResource{{Name: "nvidia.com/missing", Since: ago}, {Name: "nvidia.com/old", Since: ago}, {Name: "nvidia.com/used", Since: ago}, {Name: "nvidia.com/young", Since: time.Now()}}
	r.Report(report)
	left := func() map[string]bool {
		names := map[string]bool{}
		for name := range f.node.Status.Capacity {
			names[string(name)] = true
		}
		return names
	}
	f.await("removed", func() bool { return !left()["nvidia.com/old"] })
	want := map[string]bool{"nvidia.com/used": true, "nvidia.com/theirs": true, "nvidia.com/young": true, "cpu": true}
	f.change(func() {
		if got := left(); !maps.Equal(got, want) {
			t.Errorf("left %v, want %v", got, want)
		}
	})
}

// TestStaleResourceInUseAgain has the value change between reading and
// patching: the patch must not take it.
func TestStaleResourceInUseAgain(t *testing.T) {
	node := newNode()
	node.Status.Capacity = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("4")}
	f := newFakeAPI(t)
	f.node = node
	c, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := (&remover{client: c}).remove(t.Context(), "nvidia.com/gpu"); err != nil {
		t.Error(err)
	}
	if got := node.Status.Capacity["nvidia.com/gpu"]; got.String() != "4" {
		t.Errorf("capacity %s", got.String())
	}
}
