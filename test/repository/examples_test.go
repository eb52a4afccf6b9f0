package repository

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// nodes differ so much that each example has an effect on one of them and none on another.
func nodes() []string {
	return []string{
		"dgx-a100", "dgx-a100+all-1g.5gb", "dgx-a100+all-balanced", "dgx-h100",
		"a30x4", "a30x4+all-1g.6gb", "t4", "mixed", "empty",
	}
}

// TestExamples plans every document of configs/examples on several simulated
// nodes and compares the plans with golden files, one for each example. An example
// without a golden file fails, and so does a golden file without an example. After
// an intended change, run go test ./test/repository -update.
func TestExamples(t *testing.T) {
	files, err := fs.Glob(os.DirFS(filepath.Join(repository, "configs")), "examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	goldens, err := filepath.Glob(goldenFile("*"))
	if err != nil {
		t.Fatal(err)
	}
	stale := map[string]bool{}
	for _, golden := range goldens {
		stale[golden] = true
	}
	for _, file := range files {
		name := strings.TrimSuffix(path.Base(file), ".yaml")
		delete(stale, goldenFile(name))
		t.Run(name, func(t *testing.T) { compare(t, goldenFile(name), plans(t, file)) })
	}
	for golden := range stale {
		if !*update {
			t.Errorf("%s is of no example", golden)
		} else if err := os.Remove(golden); err != nil {
			t.Error(err)
		}
	}
}

func goldenFile(name string) string { return filepath.Join("testdata", name+".golden") }

// compare compares got with the golden file, or writes it.
func compare(t *testing.T, golden, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(golden)
	if errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%v: a new example needs a golden file; see TestExamples", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("plans differ from %s (-want +got):\n%s", golden, diff)
	}
}

// plans describes the example's plan for each node.
func plans(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(repository, "configs", file))
	if err != nil {
		t.Fatal(err)
	}
	config, err := configs.Parse(file, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, name := range nodes() {
		node, err := simnode.New(name)
		if err != nil {
			t.Fatal(err)
		}
		gpus, err := nvml.Scan(node)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&text, "sim:%s\n%s\n", name, describe(sharing.NewPlan(gpus, config.Profile)))
	}
	return text.String()
}

// describe returns the parts of a plan that matter to a user of the example.
func describe(plan sharing.Plan) string {
	var text strings.Builder
	for _, r := range plan.Resources {
		fmt.Fprintf(&text, "  %s: %s, %s, devices %d, healthy %d\n", r.Name, r.Strategy(), r.Policy, len(r.Devices), r.HealthyDevices())
		if r.FailRequestsGreaterThanOne {
			text.WriteString("    one share a container\n")
		}
		if r.SpreadStrict {
			text.WriteString("    never two shares of a GPU in a container\n")
		}
		text.WriteString("    units (replicas):")
		for _, u := range r.Units {
			fmt.Fprintf(&text, " %s(%d)", u.Index, u.Replicas)
		}
		fmt.Fprintf(&text, "\n    from %s to %s\n", r.Devices[0].ID, r.Devices[len(r.Devices)-1].ID)
	}
	if len(plan.Resources) == 0 {
		text.WriteString("  nothing is offered\n")
	}
	for _, warning := range plan.Warnings {
		fmt.Fprintf(&text, "  warning: %s\n", warning)
	}
	return text.String()
}
