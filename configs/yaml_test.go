package configs

import (
	"fmt"
	"strings"
	"testing"
)

// bomb is a document in which each of the levels has the one before it nine
// times.
func bomb(levels int) string {
	var b strings.Builder
	b.WriteString("l0: &l0 [x]\n")
	for i := 1; i <= levels; i++ {
		fmt.Fprintf(&b, "l%d: &l%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*l%d,", i-1), 9), ","))
	}
	return b.String()
}

func mergeBomb(levels int) string {
	var b strings.Builder
	b.WriteString("l0: &l0 {k: v}\n")
	for i := 1; i <= levels; i++ {
		fmt.Fprintf(&b, "l%d: &l%d {<<: [%s]}\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*l%d,", i-1), 9), ","))
	}
	return b.String() + "flags: *l" + fmt.Sprint(levels) + "\n"
}

// TestRefusedForSize has documents that would cost too much to read. Expanding
// one would run into the test's timeout.
func TestRefusedForSize(t *testing.T) {
	tests := []struct{ name, document, want string }{
		{"bytes", strings.Repeat("#", 1<<20+1), "more than 1 MiB"},
		{"values", "exclude: [" + strings.Repeat("0,", 100_000) + "0]", "more than 100000 keys and values"},
		{"aliases", bomb(60), "more than 100000 keys and values"},
		{"merge keys", mergeBomb(20), "more than 100000 keys and values"},
		{"depth", strings.Repeat("[", 60) + strings.Repeat("]", 60), "deeper than 50 levels"},
		{"depth of mappings", strings.Repeat("{a: ", 9000) + strings.Repeat("}", 9000), "deeper than 50 levels"},
		{"depth beyond the parser", strings.Repeat("[", 500_000), "not valid YAML"},
		{"depth by aliases", "a0: &a0 [x]\n" + chain(60), "deeper than 50 levels"},
		{"an alias in itself", "a: &a [*a]", "deeper than 50 levels"},
		{"a merge key in itself", "flags: &a {<<: *a}", "deeper than 50 levels"},
		{"an unknown alias", "a: *nothing", "not valid YAML"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := ParseFile("doc.yaml", []byte(test.document), nil)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %.200v, want one with %q", err, test.want)
			}
		})
	}
}

func chain(levels int) string {
	var b strings.Builder
	for i := 1; i <= levels; i++ {
		fmt.Fprintf(&b, "a%d: &a%d [*a%d]\n", i, i, i-1)
	}
	return b.String()
}

// TestAcceptedSize has the largest documents that are read.
func TestAcceptedSize(t *testing.T) {
	for name, document := range map[string]string{
		"bytes":         strings.Repeat("#", 1<<20),
		"a few aliases": "exclude: &a [0]\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: *a}]}}",
	} {
		if _, err := Parse("doc.yaml", []byte(document), nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestListLimit has the largest number of replicas that is accepted, and holds
// that one more is refused.
func TestListLimit(t *testing.T) {
	const entry = "sharing: {timeSlicing: {resources: [{name: %s, replicas: %s}]}}"
	gpu := fmt.Sprintf(entry, "gpu", "%d")
	tests := []struct {
		name, document string
		most           int
	}{
		{"whole GPUs", gpu, 2457},
		{"partitions", fmt.Sprintf(entry, "mig-1g.5gb", "%d"), 351},
		{"partitions under the GPU's name", "flags: {migStrategy: single}\n" + gpu, 351},
		{"partitions with a name from resources", "resources: {mig: [{pattern: 1g.5gb, name: small}]}\n" + fmt.Sprintf(entry, "small", "%d"), 351},
		{"a count", strings.Replace(gpu, "gpu,", "gpu, devices: 2,", 1), 19660},
		{"a count beyond any node", strings.Replace(gpu, "gpu,", "gpu, devices: 99999,", 1), 2457},
		{"a list", strings.Replace(gpu, "gpu,", "gpu, devices: [0],", 1), 39321},
		{"a GPU in a list is seven partitions", strings.Replace(fmt.Sprintf(entry, "mig-1g.5gb", "%d"), "gb,", "gb, devices: [0],", 1), 5617},
		{"two entries of one resource", "sharing: {timeSlicing: {resources: [{name: gpu, devices: 8, replicas: 1000}, {name: gpu, replicas: %d}]}}", 2457},
		{"two resources under one name", "resources: {gpus: [{pattern: A, name: a}]}\nsharing: {timeSlicing: {resources: [{name: a, devices: 15, rename: x, replicas: 2500}, {name: gpu, rename: x, replicas: %d}]}}", 1821},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if _, err := Parse("", fmt.Appendf(nil, test.document, test.most), nil); err != nil {
				t.Error(err)
			}
			for _, replicas := range []int{test.most + 1, 1 << 62} {
				_, err := Parse("", fmt.Appendf(nil, test.document, replicas), nil)
				if err == nil || !strings.Contains(err.Error(), "4 MiB") {
					t.Errorf("with %d replicas the error is %v", replicas, err)
				}
			}
		})
	}
}
