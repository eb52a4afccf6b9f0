package host

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseMinors(t *testing.T) {
	const table = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu31/gi14/ci7/access 4322\n"
	got, err := parseMinors(table)
	if err != nil {
		t.Fatal(err)
	}
	want := map[capability]int{{0, 0, -1}: 3, {0, 0, 0}: 4, {31, 14, 7}: 4322}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(capability{})); diff != "" {
		t.Errorf("minors (-want +got):\n%s", diff)
	}
}

func TestParseMinorsRefuses(t *testing.T) {
	for _, line := range []string{
		"gpu0/gi0/access", "gpu0/gi0 3", "gpu0/access 3", "gpu0/gi0/ci0/x0/access 3", "gi0/gpu0/access 3",
		"gpu-1/gi0/access 3", "gpu+1/gi0/access 3", "gpu0/gi0/access x", "gpu0/gi0/access -3", "gpu/gi/access 1", "other 3",
	} {
		if got, err := parseMinors(line + "\n"); err == nil {
			t.Errorf("%q is read as %v", line, got)
		} else if !strings.Contains(err.Error(), fmt.Sprintf("%q", line)) {
			t.Errorf("%q: the error does not quote it: %v", line, err)
		}
	}
}

// FuzzParseMinors holds that what is read can be written and read again.
func FuzzParseMinors(f *testing.F) {
	f.Add("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n")
	f.Add("gpu00/gi1/access 010\n\n")
	f.Fuzz(func(t *testing.T, data string) {
		minors, err := parseMinors(data)
		if err != nil {
			return
		}
		var table strings.Builder
		for c, minor := range minors {
			if c.gpu < 0 || c.gi < 0 || c.ci < -1 || minor < 0 {
				t.Errorf("%+v %d", c, minor)
			}
			ci := ""
			if c.ci >= 0 {
				ci = fmt.Sprintf("/ci%d", c.ci)
			}
			fmt.Fprintf(&table, "gpu%d/gi%d%s/access %d\n", c.gpu, c.gi, ci, minor)
		}
		again, err := parseMinors(table.String())
		if diff := cmp.Diff(minors, again, cmp.AllowUnexported(capability{})); err != nil || diff != "" {
			t.Errorf("%v (-first +again):\n%s", err, diff)
		}
	})
}
