package repository

import (
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/test/program"
)

// command is what a document says to type: `virgate mig plan --name x`.
type command struct {
	// words are those before the first flag: mig plan.
	words []string
	// flags are without their values: --name.
	flags []string
}

var (
	code = regexp.MustCompile("(?s)```.*?\n(.*?)```|`([^`\n]+)`")
	// end is where a command ends within its line.
	end = regexp.MustCompile(` [#|&>]|;|\n`)
	// joint is where a command goes on in the next line.
	joint = regexp.MustCompile(`\\\n\s*`)
	// call is the last of the line: kubectl has others before it.
	call     = regexp.MustCompile(`^(?:.*[\s/])?virgate ([a-z].*)`)
	word     = regexp.MustCompile(`^[a-z][a-z-]*$`)
	longFlag = regexp.MustCompile(`^\[?(--[a-z][a-z-]*)`)
)

// commands are those of the program in the code of the text.
func commands(text string) []command {
	var found []command
	for _, match := range code.FindAllStringSubmatch(text, -1) {
		for _, line := range end.Split(joint.ReplaceAllString(match[1]+match[2], " "), -1) {
			said := call.FindStringSubmatch(strings.NewReplacer("-n virgate ", "", "kubectl virgate ", "virgate cluster ").Replace(line))
			if said == nil {
				continue
			}
			var c command
			for i, part := range strings.Fields(said[1]) {
				if word.MatchString(part) && i == len(c.words) {
					c.words = append(c.words, part)
				}
				if name := longFlag.FindStringSubmatch(part); name != nil {
					c.flags = append(c.flags, name[1])
				}
			}
			if len(c.words) > 0 {
				found = append(found, c)
			}
		}
	}
	return found
}

// helpTexts asks the program for its help, each once.
type helpTexts struct {
	path string
	help map[string]string
}

func (p *helpTexts) helpOf(t *testing.T, words ...string) string {
	t.Helper()
	key := strings.Join(words, " ")
	if text, asked := p.help[key]; asked {
		return text
	}
	output, err := exec.Command(p.path, append(slices.Clone(words), "--help")...).Output()
	if err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	p.help[key] = string(output)
	return p.help[key]
}

// TestCommands checks that each command of the documents is one of the program,
// with flags that its help names.
func TestCommands(t *testing.T) {
	path, err := program.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	p := &helpTexts{path: path, help: map[string]string{}}
	seen := 0
	for from, text := range documents(t) {
		for _, c := range commands(text) {
			depth := 0
			for depth < len(c.words) && regexp.MustCompile("(?m)^ {3,5}"+c.words[depth]+" ").MatchString(p.helpOf(t, c.words[:depth]...)) {
				depth++
			}
			if depth == 0 && c.words[0] != "config-manager" {
				t.Errorf("%s: there is no command virgate %s", from, c.words[0])
				continue
			}
			seen++
			for _, name := range c.flags {
				if !strings.Contains(p.helpOf(t, c.words[:depth]...), name+" ") && !strings.Contains(p.helpOf(t, c.words[:depth]...), name+",") {
					t.Errorf("%s: virgate %s has no flag %s", from, strings.Join(c.words, " "), name)
				}
			}
		}
	}
	if seen < 50 {
		t.Errorf("%d commands: are they read?", seen)
	}
}

func TestCommandsOfAText(t *testing.T) {
	text := "Run `virgate status` or `make`.\n```\n$ kubectl -n virgate exec ds/virgate -- virgate mig plan --node sim:t4 \\\n    --name=x   # says --why\nhelm uninstall virgate --namespace virgate\nbin/virgate check a.yaml && x --y\n```\nvirgate is prose --here"
	want := []string{"status []", "mig plan [--node --name]", "check []"}
	var got []string
	for _, c := range commands(text) {
		got = append(got, strings.Join(c.words, " ")+" ["+strings.Join(c.flags, " ")+"]")
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
