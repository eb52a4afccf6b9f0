package configs

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

// TestBadDocuments compares all problems of each document with the golden file
// beside it.
func TestBadDocuments(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := ParseFile(filepath.Base(file), data, nil)
			var problems Problems
			if !errors.As(err, &problems) {
				t.Fatalf("error is %T %v, want Problems", err, err)
			}
			empty := File{Name: got.Name, Kind: got.Kind}
			if diff := cmp.Diff(empty, got, compareSelectors); diff != "" {
				t.Errorf("a bad document has content (-want +got):\n%s", diff)
			}
			golden := strings.TrimSuffix(file, ".yaml") + ".want"
			text := problems.Error() + "\n"
			if *update {
				if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), text); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}
