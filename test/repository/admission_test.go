package repository

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodestatus"
)

func ownNodePolicy(t *testing.T) string {
	t.Helper()
	policy, err := os.ReadFile(filepath.Join(repository, "charts/virgate/files/admission-own-node.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(policy)
}

// TestPolicyComparesNode checks that the own-node policy compares each field of a Node: Virgate could write
// a field that Kubernetes adds.
func TestPolicyComparesNode(t *testing.T) {
	policy := ownNodePolicy(t)
	compares := func(path string) bool {
		optional := strings.ReplaceAll(regexp.QuoteMeta(path), `\.`, `[.][?]?`)
		return regexp.MustCompile(`\bobject[.][?]?`+optional+`\b`).MatchString(policy) &&
			regexp.MustCompile(`\boldObject[.][?]?`+optional+`\b`).MatchString(policy)
	}
	var walk func(prefix string, of reflect.Type, apart map[string]string)
	walk = func(prefix string, of reflect.Type, apart map[string]string) {
		for i := range of.NumField() {
			field := of.Field(i)
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			switch path := prefix + name; {
			case path == "": // Another TypeMeta is another resource.
			case path == "metadata":
				walk("metadata.", field.Type, map[string]string{
					"name":                       "cannot be changed",
					"generateName":               "cannot be changed",
					"namespace":                  "a Node has none",
					"selfLink":                   "nobody reads it",
					"uid":                        "cannot be changed",
					"resourceVersion":            "the API server's",
					"generation":                 "the API server's",
					"creationTimestamp":          "cannot be changed",
					"deletionTimestamp":          "cannot be changed",
					"deletionGracePeriodSeconds": "cannot be changed",
					"managedFields":              "the API server's",
				})
			case path == "status":
				walk("status.", field.Type, nil)
			case apart[name] != "":
			case !compares(path):
				t.Errorf("the policy does not compare %s of a Node", path)
			}
		}
	}
	walk("", reflect.TypeFor[corev1.Node](), nil)
}

// TestPolicyAnnotations checks that the own-node policy allows exactly the annotations that Virgate writes,
// by name.
func TestPolicyAnnotations(t *testing.T) {
	policy := ownNodePolicy(t)
	list := regexp.MustCompile(`name: ownAnnotations\n +expression: '\[(.*)\]'`).FindStringSubmatch(policy)
	if list == nil {
		t.Fatal("the policy has no list of annotations")
	}
	got := strings.Split(strings.ReplaceAll(list[1], `"`, ""), ", ")
	want := []string{nodestatus.ProfileAnnotation, nodestatus.SourceAnnotation, nodestatus.GenerationAnnotation, nodestatus.WantedAnnotation, nodestatus.WantedByAnnotation, nodestatus.RulesAnnotation, nodestatus.FeaturesAnnotation}
	if !slices.Equal(got, want) {
		t.Errorf("the policy allows %q, Virgate writes %q", got, want)
	}
	if strings.Contains(policy, `startsWith("virgate.github.io/`) {
		t.Error("the policy allows annotations by how their names begin")
	}
}
