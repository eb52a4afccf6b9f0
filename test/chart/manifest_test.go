package chart

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
)

const (
	manifestFile = "../../deployments/virgate.yaml"
	// manifestHead begins the manifest. The DaemonSet's host folders require the namespace's label for Pod
	// Security.
	manifestHead = `# Virgate without Helm: the chart with its default values, in the namespace
# virgate. Made by ` + "`make manifest`" + `, so change the chart and not this file.
#
#   kubectl apply -f deployments/virgate.yaml
#
# The image is virgate:VERSION: put your registry before it. Other values need
# Helm, or a kustomization over this file; see docs/how-to/install.md.
apiVersion: v1
kind: Namespace
metadata:
  name: virgate
  labels:
    pod-security.kubernetes.io/enforce: privileged
`
)

// staticManifest returns the chart for kubectl apply, without what refers to Helm.
func staticManifest(t *testing.T) string {
	t.Helper()
	release, err := releaseOf(t, "virgate", nil)
	if err != nil {
		t.Fatal(err)
	}
	lines := slices.DeleteFunc(strings.SplitAfter(release.Manifest, "\n"), func(line string) bool {
		line = strings.TrimSpace(line)
		return strings.HasPrefix(line, "# Source: ") || strings.HasPrefix(line, "helm.sh/chart: ") || line == "app.kubernetes.io/managed-by: Helm"
	})
	documents := strings.Split(strings.Join(lines, ""), "---\n")
	for i := range documents {
		documents[i] = strings.TrimLeft(documents[i], "\n")
	}
	documents = slices.DeleteFunc(documents, func(document string) bool {
		return document == "" || strings.Contains(document, "\n  name: virgate-uninstall\n")
	})
	return manifestHead + "---\n" + strings.Join(documents, "---\n")
}

// TestManifest checks that the static manifest is the chart's, can be applied as
// it is, and stays in its namespace.
func TestManifest(t *testing.T) {
	got := staticManifest(t)
	if *update {
		if err := os.WriteFile(manifestFile, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(manifestFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("the manifest is not the chart's, `make manifest` writes it (-want +got):\n%s", diff)
	}
	objects := decode(t, string(want))
	if diff := cmp.Diff(defaultProfiles(t), configMap(t, objects)); diff != "" {
		t.Errorf("profiles of the repository and of the manifest (-want +got):\n%s", diff)
	}
	if len(objects) < 8 {
		t.Fatalf("%d objects", len(objects))
	}
	if namespace, ok := objects[0].(*corev1.Namespace); !ok || namespace.Name != "virgate" {
		t.Errorf("begins with %T, want the namespace that the others are in", objects[0])
	}
	for _, object := range objects {
		about, err := meta.Accessor(object)
		if err != nil {
			t.Fatal(err)
		}
		if where := about.GetNamespace(); where != "" && where != "virgate" {
			t.Errorf("%T %s is in namespace %s", object, about.GetName(), where)
		}
	}
	// The API server takes annotations of 256 KiB; kubectl keeps each object in one.
	const annotations = 256 << 10
	for document := range strings.SplitSeq(string(want), "---\n") {
		if len(document) > annotations/2 {
			t.Errorf("an object of %d bytes may be too long for kubectl apply", len(document))
		}
	}
	if strings.Contains(string(want), "Helm\n") || strings.Contains(string(want), "helm.sh") {
		t.Error("the manifest says that Helm manages its objects")
	}
}
