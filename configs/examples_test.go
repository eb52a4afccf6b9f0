package configs

import (
	"io/fs"
	"path"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestExamples(t *testing.T) {
	files, err := fs.Glob(Examples(), "examples/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		data, err := fs.ReadFile(Examples(), file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(file, data, nil); err != nil {
			t.Errorf("%s does not parse:\n%v", file, err)
		}
		if !strings.HasPrefix(string(data), "# ") {
			t.Errorf("%s does not begin with what it is for", file)
		}
		names = append(names, strings.TrimSuffix(path.Base(file), ".yaml"))
	}
	want := []string{
		"excluded-gpu", "grants-cdi", "grants-driver-mounts", "grants-volume-mounts", "health", "mig-balanced", "mig-layouts", "mig-mixed", "mig-replicas", "mig-single", "names-by-model", "side-by-side",
		"time-slicing-10", "time-slicing-4", "time-slicing-renamed",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("examples (-want +got):\n%s", diff)
	}
}
