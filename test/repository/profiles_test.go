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

// isDocument says that the YAML is a document of Virgate's, whole or in part,
// and no object of Kubernetes or of Prometheus.
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

// TestProfiles checks that the profiles and layouts which the documents show are
// right.
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
