package chart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestExamples checks that each manifest of deployments/examples has Kubernetes' types, and requests GPUs
// in the form that Kubernetes reads.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../deployments/examples/*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, object := range decode(t, string(text)) {
				switch object := object.(type) {
				case *corev1.ResourceQuota:
					for name, amount := range object.Spec.Hard {
						// The API server refuses a quota of a plain extended resource, or of its limits.
						if !strings.HasPrefix(string(name), "requests.nvidia.com/") || amount.MilliValue()%1000 != 0 {
							t.Errorf("%s: %s", name, amount.String())
						}
					}
				case *corev1.Pod:
					for name, amount := range object.Spec.Containers[0].Resources.Limits {
						if !strings.HasPrefix(string(name), "nvidia.com/") || amount.Value() != 1 {
							t.Errorf("%s: %s", name, amount.String())
						}
					}
				}
			}
		})
	}
}
