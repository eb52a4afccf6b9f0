package repository

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestImageOfTheChart checks that make builds the image that the chart uses by default, or the requested
// one.
func TestImageOfTheChart(t *testing.T) {
	chart, err := os.ReadFile(filepath.Join(repository, "charts/virgate/Chart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?m)^appVersion: (\S+)$`).FindSubmatch(chart)
	if version == nil {
		t.Fatal("Chart.yaml has no appVersion")
	}
	const other = "registry.test:5000/a/virgate:7"
	for _, test := range []struct {
		arguments []string
		want      string
	}{
		{[]string{"image"}, "virgate:" + string(version[1])},
		{[]string{"image-tar"}, "virgate:" + string(version[1])},
		{[]string{"image", "IMAGE=" + other}, other},
		{[]string{"image-tar", "IMAGE=" + other}, other},
	} {
		t.Run(strings.Join(test.arguments, " "), func(t *testing.T) {
			command := exec.Command("make", append([]string{"--dry-run", "--directory", repository}, test.arguments...)...)
			command.Env = append(os.Environ(), "MAKEFLAGS=", "IMAGE=of-the-environment:1")
			output, err := command.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, output)
			}
			named := regexp.MustCompile(`-(?:-tag|reference) (\S+)`).FindAllSubmatch(output, -1)
			if len(named) != 1 {
				t.Fatalf("it names %d images:\n%s", len(named), output)
			}
			if diff := cmp.Diff(test.want, string(named[0][1])); diff != "" {
				t.Error(diff)
			}
		})
	}
}
