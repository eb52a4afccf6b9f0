package configs

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/virgate/virgate/sharing"
)

// bomb is a document in which each level repeats the previous one nine times.
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

// TestSyntaxLines checks that invalid YAML is reported on the line where parsing stops, with the line where the
// unclosed list, mapping or text begins.
func TestSyntaxLines(t *testing.T) {
	const head = "version: v1\n"
	tests := []struct {
		name, document string
		line           int
		message        string
	}{
		{"an open bracket at the end", head + "exclude: [0, 1\n\n", 2, "did not find expected ',' or ']'"},
		{"an open bracket", head + "exclude: [0, 1\nflags:\n  migStrategy: mixed\n", 3, "did not find expected ',' or ']', while parsing a flow sequence that begins on line 2"},
		{"an open bracket on line 1", "exclude: [0, 1\nflags:\n  migStrategy: mixed\n", 2, "did not find expected ',' or ']', while parsing a flow sequence that begins on line 1"},
		{"an open brace", head + "\nhealth: {xids: {31: fatal}\nexclude: []\n", 4, "did not find expected ',' or '}', while parsing a flow mapping that begins on line 3"},
		{"a bracket for a brace", head + "health: {xids: {31: fatal]}\n", 2, "did not find expected ',' or '}'"},
		{"a key too far left", head + "sharing:\n  timeSlicing:\n    resources:\n    - name: gpu\n      replicas: 2\n   renameByDefault: true\n", 7, "did not find expected key, while parsing a block mapping that begins on line 3"},
		{"an item too far left", head + "sharing:\n  mps:\n    resources:\n      - name: gpu\n     - name: gpu\n", 6, "did not find expected key, while parsing a block mapping that begins on line 4"},
		{"no colon", head + "flags:\n  migStrategy mixed\n  gdsEnabled: true\n", 4, "mapping values are not allowed in this context"},
		{"no colon before a key", head + "flags\nexclude: []\n", 3, "could not find expected ':', while scanning a simple key that begins on line 2"},
		{"a tab", head + "flags:\n\tmigStrategy: mixed\n", 3, "a tab in the indentation: expected spaces"},
		{"a tab after spaces", head + "flags:\n  gdsEnabled: true\n \tmigStrategy: mixed\n", 4, "a tab in the indentation: expected spaces"},
		{"a tab on line 1", "\tversion: v1\n", 1, "a tab in the indentation: expected spaces"},
		{"JSON without a comma", "{\"version\": \"v1\",\n \"exclude\": [0]\n \"flags\": {}}\n", 3, "did not find expected ',' or '}', while parsing a flow mapping that begins on line 1"},
		{"an unknown alias", head + "flags:\n  migStrategy: mixed\nexclude: *gpus\n", 4, "unknown anchor 'gpus' referenced"},
		{"an unknown alias on line 1", "exclude: *gpus\n", 1, "unknown anchor 'gpus' referenced"},
		{"an open quote", head + "flags:\n  migStrategy: \"mixed\nexclude: []\n", 4, "found unexpected end of stream, while scanning a quoted scalar that begins on line 3"},
		{"an escape", head + "exclude: [\"\\q\"]\n", 2, "found unknown escape character"},
		{"a control character", head + "flags:\n  migStrategy: mi\x01xed\n", 3, "control characters are not allowed"},
		{"not UTF-8", head + "flags:\n  migStrategy: mi\xffxed\n", 3, "invalid leading UTF-8 octet"},
		{"a second document", head + "---\nflags:\n  a: 1\n b: 2\n", 5, "did not find expected key, while parsing a block mapping that begins on line 3"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			// In a manifest, the document begins after 5 lines.
			manifest := "apiVersion: v1\nkind: ConfigMap\ndata:\n  none: ''\n  any: |\n    " + strings.ReplaceAll(test.document, "\n", "\n    ")
			for offset, document := range map[int]string{0: test.document, 5: manifest} {
				if offset > 0 && (!utf8.ValidString(test.document) || strings.Contains(test.document, "\x01") || strings.HasSuffix(test.name, "bracket at the end") || strings.HasPrefix(test.document, "\t")) {
					continue // The manifest itself is wrong, or ends otherwise.
				}
				_, err := ParseFile("f", []byte(document), nil)
				var problems Problems
				if !errors.As(err, &problems) || len(problems) != 1 {
					t.Fatalf("error is %v", err)
				}
				message := strings.ReplaceAll(test.message, "that begins on line ", "that begins on line #")
				if before, number, found := strings.Cut(message, "#"); found {
					n, _ := strconv.Atoi(number)
					message = before + strconv.Itoa(n+offset)
				}
				if got := problems[0]; got.Line != test.line+offset || got.Message != "not valid YAML: "+message {
					t.Errorf("line %d: %s; want %d: %s", got.Line, got.Message, test.line+offset, message)
				}
			}
		})
	}
}

// TestPlaceholderAndSyntax checks that a syntax error names a placeholder only if that can be the cause.
func TestPlaceholderAndSyntax(t *testing.T) {
	const blamed = "a placeholder of a template"
	tests := []struct {
		name, document string
		line           int
		message        string
	}{
		{"quoted far above", "resources:\n  gpus:\n  - {pattern: A, name: a}\n  - pattern: \"${NOT} the cause\"\n    name: b\nexclude: [4\nflags:\n  migStrategy: none\n", 7, "not valid YAML"},
		{"in a script above", "data:\n  run.sh: |\n    echo ${HOME}\n  any: |\n    version: v1\n badly: indented\n", 6, "not valid YAML"},
		{"in a script on the line before", "data:\n  run.sh: |\n    echo ${HOME}\n badly: indented\n", 4, "not valid YAML"},
		{"quoted in JSON", "{\"version\": \"v1\",\n \"flags\": {\"nvidiaDriverRoot\": \"${ROOT}\"},\n \"exclude\": [0]\n \"imex\": {}}\n", 4, "not valid YAML"},
		{"in the text of an open quote", "flags:\n  nvidiaDriverRoot: \"${ROOT}\nexclude: []\n", 3, "not valid YAML"},
		{"in the open list", "version: v1\nexclude: [\n  ${INDEXES},\nflags: {\n", 3, blamed},
		{"on the line", "flags:\n  migStrategy: \"{{ .Values.s | default \"none\" }}\"\n", 2, blamed},
		{"alone on the line before", "flags:\n  {{ include \"flags\" . }}\n  migStrategy: none\n", 2, blamed},
		{"alone on the line before, of envsubst", "version: v1\n${FLAGS}\nexclude: []\n", 2, blamed},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := ParseFile("f", []byte(test.document), nil)
			var problems Problems
			if !errors.As(err, &problems) || len(problems) != 1 {
				t.Fatalf("error is %v", err)
			}
			if got := problems[0]; got.Line != test.line || !strings.HasPrefix(got.Message, test.message) {
				t.Errorf("line %d: %s; want %d: %s", got.Line, got.Message, test.line, test.message)
			}
		})
	}
}

// TestSyntaxWithoutMarks checks that the line of the library's error counts if its marks cannot be found.
func TestSyntaxWithoutMarks(t *testing.T) {
	for message, want := range map[string]int{"yaml: line 3: odd": 3, "yaml: line 99: odd": 4, "yaml: odd": 1} {
		s := &source{file: "f", problems: &Problems{}}
		s.syntax(errors.New(message), struct{ other int }{}, []byte("a: 1\nb: 2\nc: 3\nd: 4\n"))
		if p := *s.problems; len(p) != 1 || p[0].Line != want || p[0].Message != "not valid YAML: odd" {
			t.Errorf("%s: %v", message, p)
		}
	}
}

// TestRefusedForSize has documents that are too expensive to read. Expanding one would hit the test's timeout.
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

// TestListLimit has the largest number of replicas that any node can offer. One more gives a note with the number
// of units that fit; a number that no node can offer is refused.
func TestListLimit(t *testing.T) {
	const entry = "sharing: {timeSlicing: {resources: [{name: %s, replicas: %s}]}}"
	gpu := fmt.Sprintf(entry, "gpu", "%d")
	tests := []struct {
		name, document string
		most           int
		// fits is the number of units in the note; "" if more replicas are refused.
		fits string
	}{
		{"whole GPUs", gpu, 2457, "15 GPUs"},
		{"partitions", fmt.Sprintf(entry, "mig-1g.5gb", "%d"), 351, "111 partitions"},
		{"partitions under the GPU's name", "flags: {migStrategy: single}\n" + gpu, 351, "111 partitions"},
		{"partitions with a name from resources", "resources: {mig: [{pattern: 1g.5gb, name: small}]}\n" + fmt.Sprintf(entry, "small", "%d"), 351, "111 partitions"},
		{"a count", strings.Replace(gpu, "gpu,", "gpu, devices: 2,", 1), 19660, "1 GPUs"},
		{"a count beyond any node", strings.Replace(gpu, "gpu,", "gpu, devices: 99999,", 1), 2457, "15 GPUs"},
		{"a list", strings.Replace(gpu, "gpu,", "gpu, devices: [0],", 1), 39321, ""},
		{"a GPU in a list is seven partitions", strings.Replace(fmt.Sprintf(entry, "mig-1g.5gb", "%d"), "gb,", "gb, devices: [0],", 1), 5617, "6 partitions"},
		{"two entries of one resource", "sharing: {timeSlicing: {resources: [{name: gpu, devices: 8, replicas: 1000}, {name: gpu, replicas: %d}]}}", 2457, "15 GPUs"},
		{"two resources under one name", "resources: {gpus: [{pattern: A, name: a}]}\nsharing: {timeSlicing: {resources: [{name: a, devices: 15, rename: x, replicas: 2500}, {name: gpu, rename: x, replicas: %d}]}}", 1821, "21 GPUs"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noted := func(replicas int) string {
				config, err := Parse("", fmt.Appendf(nil, test.document, replicas), nil)
				if err != nil {
					return err.Error()
				}
				var notes []string
				for _, note := range config.Notes {
					if strings.HasSuffix(note.Path, ".replicas") && strings.Contains(note.Message, "4 MiB") {
						notes = append(notes, note.Message)
					}
				}
				slices.Sort(notes)
				return strings.Join(notes[:min(1, len(notes))], "") // Each entry of a list that is too long has one.
			}
			if got := noted(test.most); got != "" {
				t.Errorf("with %d replicas: %s", test.most, got)
			}
			const limit = "the kubelet takes no list beyond 4 MiB, which is 39321 devices"
			if got, want := noted(test.most+1), "fits up to "+test.fits+" of one resource, "+limit+"; on a node with more, the profile is refused"; test.fits != "" && got != want {
				t.Errorf("with one more: %q, want %q", got, want)
			}
			if got := noted(sharing.MaxDevices); strings.Contains(got, "expected") {
				t.Errorf("with as many as a list has: %s", got)
			}
			for _, replicas := range []int{sharing.MaxDevices + 1, 1 << 62} {
				if got := noted(replicas); !strings.Contains(got, "replicas: "+limit+": expected no more (got "+strconv.Itoa(replicas)+")") {
					t.Errorf("with %d replicas: %q", replicas, got)
				}
			}
		})
	}
}
