package repository

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/configs"
)

var (
	yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")
	topKey    = regexp.MustCompile(`(?m)^([A-Za-z_-]+):`)
)

// isDocument reports whether the YAML is a Virgate document, whole or in part, and not an object of
// Kubernetes or Prometheus.
func isDocument(yaml string) bool {
	keys := []string{"version", "flags", "sharing", "imex", "exclude", "retireAfter", "mig", "health", "mig-configs"}
	for _, match := range topKey.FindAllStringSubmatch(yaml, -1) {
		names := match[1] == "resources" && !strings.Contains(yaml, "limits:")
		if !names && !slices.Contains(keys, match[1]) {
			return false
		}
	}
	return true
}

// TestProfiles checks that the profiles and layouts in the documents are valid.
func TestProfiles(t *testing.T) {
	seen := 0
	for from, text := range documents(t) {
		for _, match := range yamlBlock.FindAllStringSubmatch(text, -1) {
			if !isDocument(match[1]) {
				continue
			}
			seen++
			if _, err := configs.ParseFile(from, []byte(match[1]), nil); err != nil {
				t.Errorf("%v in:\n%s", err, match[1])
			}
		}
	}
	if seen < 8 {
		t.Errorf("%d profiles: are they read?", seen)
	}
}
