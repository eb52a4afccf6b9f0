package walk

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCommands(t *testing.T) {
	document := "Run `make`.\n" + // line 1
		"```\nmake demo\n```\n" +
		"```sh\nPLACE=here\n\n# a remark\nhelm install x \\\n     --set a=b\nkubectl get pods    # two\n```\n" + // from line 5
		"```yaml\na: b\n```\n" +
		"```console\n$ kubectl get \\\n  node\nNAME   AGE\n… 3m\n$ kubectl label node\n```\n" // from line 16
	want := []Command{
		{Line: 6, Text: "PLACE=here"},
		{Line: 9, Text: "helm install x \\\n     --set a=b"},
		{Line: 11, Text: "kubectl get pods    # two"},
		{Line: 17, Text: "kubectl get \\\n  node", Want: "NAME   AGE\n… 3m\n"},
		{Line: 21, Text: "kubectl label node"},
	}
	if diff := cmp.Diff(want, Commands(document)); diff != "" {
		t.Error(diff)
	}
}

func TestShows(t *testing.T) {
	for _, test := range []struct {
		name, want, output string
		shows              bool
	}{
		{"the same", "32\n", "32", true},
		{"another number", "32\n", "320", false},
		{"spaces", "a  b\n", "a b\n", true},
		{"more after it", "a b\n", "a b c\n", false},
		{"left out", "…\nGPU  …  healthy\n…\n", "node x\nGPU  0  1/4  healthy\nend\n", true},
		{"the shown part is missing", "…\nGPU  …  healthy\n…\n", "node x\nGPU  0  1/4  ill\nend\n", false},
		{"a dot is a dot", "1.5gb\n", "1x5gb\n", false},
		{"cut within a word", "GPU-…\n", "GPU-e5 \n", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := (Command{Want: test.want}).Shows(test.output); got != test.shows {
				t.Errorf("%v, want %v", got, test.shows)
			}
		})
	}
}
