package repository

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// TestSchedulingExamples checks the names and numbers of deployments/examples/scheduling, and of the page
// about them, against what their profile offers. test/kubernetes/api tries them on the scheduler; no test
// runs the controllers of Kueue and Karpenter.
func TestSchedulingExamples(t *testing.T) {
	const profile = "configs/examples/time-slicing-4-renamed.yaml"
	data, err := os.ReadFile(filepath.Join(repository, profile))
	if err != nil {
		t.Fatal(err)
	}
	config, err := configs.Parse(profile, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	node, err := simnode.New("t4")
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(node)
	if err != nil {
		t.Fatal(err)
	}
	plan := sharing.NewPlan(gpus, config.Profile)
	if len(gpus) != 1 || len(plan.Resources) != 1 {
		t.Fatalf("%d GPUs with %d resources, want one of each", len(gpus), len(plan.Resources))
	}
	offered, perGPU := plan.Resources[0].Name, len(plan.Resources[0].Devices)

	files, err := filepath.Glob(filepath.Join(repository, "deployments/examples/scheduling/*.yaml"))
	if err != nil || len(files) < 6 {
		t.Fatal(files, err)
	}
	// The lines in which a resource, not a label, has its name.
	resource := regexp.MustCompile(`(?:limits: \{|name: |input: |coveredResources: \[.*|^ +)(nvidia\.com/gpu[a-z0-9.-]*)`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		named := false
		for line := range strings.Lines(string(text)) {
			for _, found := range resource.FindAllStringSubmatch(line, -1) {
				named = named || found[1] == offered
				if found[1] != offered && found[1] != "nvidia.com/gpu" {
					t.Errorf("%s: %q names %s, want %s", file, line, found[1], offered)
				}
			}
		}
		if !named {
			t.Errorf("%s does not name %s", file, offered)
		}
	}
	for file, want := range map[string]string{
		"deployments/examples/scheduling/karpenter.yaml":      fmt.Sprintf("\n    %s: %d\n", offered, perGPU),
		"deployments/examples/scheduling/kueue-quarters.yaml": fmt.Sprintf("outputs: {gpu-quarters: %d}", perGPU),
		"docs/how-to/schedule.md":                             fmt.Sprintf("node-template/resources/%s   %d", offered, perGPU),
	} {
		text, err := os.ReadFile(filepath.Join(repository, file))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), want) {
			t.Errorf("%s has no %q", file, want)
		}
	}
}
