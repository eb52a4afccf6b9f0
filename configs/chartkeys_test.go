package configs

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

const chartKeysFile = "../charts/virgate/files/profile-keys.txt"

// TestReferenceOfChart checks that the chart, which looks at the profiles in config.map before
// they are installed, knows the program's keys; with -update it writes the list.
func TestReferenceOfChart(t *testing.T) {
	want := chartKeys()
	if *update {
		if err := os.WriteFile(chartKeysFile, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	data, err := os.ReadFile(chartKeysFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(want, string(data)); diff != "" {
		t.Errorf("the list is not what the program knows, make reference writes it (-want +got):\n%s", diff)
	}
}

// chartKeys has a line for each path of a profile: {} after a section, which has to be a mapping,
// {?} after what may be one, and after a text that has to be one of these few.
func chartKeys() string {
	marks := map[string]string{}
	add := func(path string, choices []string) {
		marks[path] = strings.Join(choices, " ")
		for i, c := range path {
			if above := path[:i]; c == '.' && marks[above] == "" {
				marks[above] = "{}"
			}
		}
	}
	for _, key := range slices.Concat(settingKeys(), documentKeys()) {
		if key.Type == TypeEnum {
			add(key.Path, key.Choices)
		} else {
			add(key.Path, nil)
		}
	}
	for _, key := range documentKeys() { // Of exclude, whose entries may be text.
		if _, list := marks[key.Path+"[]"]; list {
			marks[key.Path+"[]"] = "{?}"
		}
	}
	var b strings.Builder
	for _, path := range slices.Sorted(maps.Keys(marks)) {
		fmt.Fprintln(&b, strings.TrimSpace(path+" "+marks[path]))
	}
	return b.String()
}
