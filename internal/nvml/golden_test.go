package nvml_test

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestScanGolden holds what the inventory of each simulated node is, down to
// the UUIDs: other packages' golden files are built on these nodes.
func TestScanGolden(t *testing.T) {
	names := append(simnode.Names(),
		"a30x4+all-balanced",
		"dgx-a100+all-1g.5gb",
		"dgx-a100+all-balanced",
		"dgx-a100+all-enabled",
		"h200+all-1g.35gb",
		"mixed+all-1c.2g.10gb",
		"rtx-pro-6000+all-1g.24gb-me",
	)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			node := simulate(t, name)
			gpus, err := nvml.Scan(node)
			if err != nil {
				t.Fatal(err)
			}
			got, err := json.MarshalIndent(gpus, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			path := filepath.Join("testdata", name+".json")
			if *update {
				if err := os.WriteFile(path, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("inventory (-want +got):\n%s", diff)
			}
			if node.Calls("Init") != node.Calls("Shutdown") {
				t.Errorf("%d times Init, %d times Shutdown", node.Calls("Init"), node.Calls("Shutdown"))
			}
		})
	}
}

func simulate(t *testing.T, name string) *simnode.Node {
	t.Helper()
	node, err := simnode.New(name)
	if err != nil {
		t.Fatal(err)
	}
	return node
}
