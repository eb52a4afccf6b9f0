package repository

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/test/program"
)

// command is a command in a document: `virgate mig plan --name x`.
type command struct {
	// program is virgate, kubectl-virgate or virgate-demo.
	program string
	// words are those before the first flag: mig plan.
	words []string
	// flags are without their values: --name.
	flags []string
}

var (
	code = regexp.MustCompile("(?s)```.*?\n(.*?)```|`([^`\n]+)`")
	// end matches where a command ends within its line.
	end = regexp.MustCompile(` [#|&>]|;|\n`)
	// joint matches where a command continues in the next line.
	joint = regexp.MustCompile(`\\\n\s*`)
	// call matches the last command of the line: kubectl has others before it.
	call     = regexp.MustCompile(`^(?:.*[\s/])?(?:(virgate) ([a-z].*)|(kubectl-virgate|virgate-demo)(?: (.*))?)$`)
	word     = regexp.MustCompile(`^[a-z][a-z-]*$`)
	longFlag = regexp.MustCompile(`^\[?(--[a-z][a-z-]*)`)
)

// commands returns the programs' commands in the code of the text.
func commands(text string) []command {
	var found []command
	for _, match := range code.FindAllStringSubmatch(text, -1) {
		for _, line := range end.Split(joint.ReplaceAllString(match[1]+match[2], " "), -1) {
			said := call.FindStringSubmatch(strings.NewReplacer("-n virgate ", "", "kubectl virgate", "kubectl-virgate").Replace(line))
			if said == nil {
				continue
			}
			c := command{program: said[1] + said[3]}
			for i, part := range strings.Fields(said[2] + said[4]) {
				if word.MatchString(part) && i == len(c.words) {
					c.words = append(c.words, part)
				}
				if name := longFlag.FindStringSubmatch(part); name != nil {
					c.flags = append(c.flags, name[1])
				}
			}
			if said[1] == "" || len(c.words) > 0 { // Otherwise it is Helm's release of that name.
				found = append(found, c)
			}
		}
	}
	return found
}

// helpTexts caches the help texts of the programs.
type helpTexts struct {
	folder string
	help   map[string]string
}

func (p *helpTexts) helpOf(t *testing.T, program string, words ...string) string {
	t.Helper()
	key := program + " " + strings.Join(words, " ")
	if text, asked := p.help[key]; asked {
		return text
	}
	for _, flag := range []string{"--help", "--help-all"} {
		output, err := exec.Command(filepath.Join(p.folder, program), append(slices.Clone(words), flag)...).Output()
		if err != nil {
			t.Fatalf("%s: %v", key, err)
		}
		p.help[key] = string(output)
		if !strings.Contains(p.help[key], "--help-all shows") {
			break
		}
	}
	return p.help[key]
}

// TestCommands checks that each command in the documents exists, with flags that its help names.
func TestCommands(t *testing.T) {
	p := &helpTexts{folder: t.TempDir(), help: map[string]string{}}
	for _, name := range []string{"virgate", "kubectl-virgate", "virgate-demo"} {
		if _, err := program.Build(p.folder, name); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]int{}
	for from, text := range documents(t) {
		for _, c := range commands(text) {
			depth := 0
			for depth < len(c.words) && regexp.MustCompile("(?m)^ {3,5}"+c.words[depth]+" ").MatchString(p.helpOf(t, c.program, c.words[:depth]...)) {
				depth++
			}
			if depth == 0 && len(c.words) > 0 && c.words[0] != "config-manager" {
				t.Errorf("%s: there is no command %s %s", from, c.program, c.words[0])
				continue
			}
			seen[c.program]++
			help := p.helpOf(t, c.program, c.words[:depth]...)
			for _, name := range c.flags {
				if !strings.Contains(help, name+" ") && !strings.Contains(help, name+",") {
					t.Errorf("%s: %s %s has no flag %s", from, c.program, strings.Join(c.words, " "), name)
				}
			}
		}
	}
	if seen["virgate"] < 30 || seen["kubectl-virgate"] < 15 || seen["virgate-demo"] < 4 {
		t.Errorf("%v: are all commands read?", seen)
	}
}

func TestCommandsOfAText(t *testing.T) {
	text := "Run `virgate status` or `make`.\n```\n$ kubectl -n virgate exec ds/virgate -- virgate mig plan --node sim:t4 \\\n    --name=x   # says --why\nhelm uninstall virgate --namespace virgate\nbin/virgate check a.yaml && x --y\nkubectl virgate gpus n1 -o json\nkubectl create namespace virgate\ngo run ./cmd/virgate-demo --serve\n```\nvirgate is prose --here, and `kubectl virgate --serve a` is not."
	want := []string{
		"virgate status []", "virgate mig plan [--node --name]", "virgate check []", "kubectl-virgate gpus []",
		"virgate-demo  [--serve]", "kubectl-virgate  [--serve]",
	}
	var got []string
	for _, c := range commands(text) {
		got = append(got, c.program+" "+strings.Join(c.words, " ")+" ["+strings.Join(c.flags, " ")+"]")
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
