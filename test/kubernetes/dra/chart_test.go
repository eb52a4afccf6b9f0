package dra

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/internal/dra"
)

// TestChartsClasses checks that the chart makes the DeviceClasses that virgate plan --dra shows.
func TestChartsClasses(t *testing.T) {
	manifest, err := os.ReadFile("../../chart/testdata/dra.golden.yaml")
	if err != nil {
		t.Fatal(err)
	}
	classes := 0
	for document := range strings.SplitSeq(string(manifest), "\n---\n") {
		if !strings.Contains(document, "\nkind: DeviceClass\n") {
			continue
		}
		var class resourceapi.DeviceClass
		if err := yaml.UnmarshalStrict([]byte(document), &class); err != nil {
			t.Fatal(err)
		}
		class.Labels = nil
		if diff := cmp.Diff(dra.Class(dra.DriverName, *class.Spec.ExtendedResourceName), class); diff != "" {
			t.Errorf("-virgate +chart:\n%s", diff)
		}
		classes++
	}
	if classes != 3 {
		t.Errorf("%d classes", classes)
	}
}
