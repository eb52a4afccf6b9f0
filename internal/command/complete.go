package command

import (
	"context"
	"embed"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"
)

// CompleteWord is the first argument of a call that completes the last of the others, as of programs made
// with Cobra. kubectl, too, reads the answer.
const CompleteWord = "__complete"

//go:embed completion
var completionScripts embed.FS

// CompletionCommand returns the command that prints a shell's script.
func CompletionCommand() *cli.Command {
	cmd := &cli.Command{
		Name:        "completion",
		Usage:       "prints a script with which a shell completes commands, flags and values",
		Description: "Example: source <(virgate completion bash)",
	}
	for _, shell := range []string{"bash", "fish", "zsh"} {
		cmd.Commands = append(cmd.Commands, &cli.Command{
			Name:  shell,
			Usage: "prints the script for " + shell,
			Action: func(_ context.Context, cmd *cli.Command) error {
				script, err := completionScripts.ReadFile("completion/" + shell)
				if err != nil {
					return err
				}
				root := cmd.Root()
				_, err = fmt.Fprint(root.Writer, strings.ReplaceAll(string(script), "PROGRAM", root.Name))
				return err
			},
		})
	}
	return cmd
}

// completion finds how a command line can go on.
type completion struct {
	// chain are the root and the subcommands that the command line names.
	chain []*cli.Command
	// arguments is the number of words that are neither commands nor flags.
	arguments int
	// open is the flag whose value comes next, if there is one.
	open cli.Flag
}

// complete prints what the last word can be, in the form of Cobra: "CHOICE\tMEANING", and in the last line
// whether file names are choices, too: ":4" for not.
func complete(ctx context.Context, root *cli.Command, words []string) {
	if len(words) == 0 {
		return
	}
	c := completion{chain: []*cli.Command{root}}
	before, last := words[:len(words)-1], words[len(words)-1]
	for _, word := range before {
		c.read(word)
	}
	cmd := c.chain[len(c.chain)-1]
	var lines []string
	directive := ":0"
	name, value, hasValue := strings.Cut(last, "=")
	switch {
	case slices.Contains(before, "--"):
	case c.open != nil:
		lines = choices(c.open, "")
	case strings.HasPrefix(last, "-") && hasValue:
		lines = choices(c.flag(name), strings.TrimSuffix(last, value))
	case strings.HasPrefix(last, "-"):
		lines = c.flags()
	case cmd.ShellComplete != nil: // The library calls it, with the flags.
		root.EnableShellCompletion = true
		directive = ":4"
		_ = root.Run(ctx, slices.Concat([]string{root.Name}, before, []string{"--generate-shell-completion"}))
	case c.arguments == 0:
		for _, child := range cmd.VisibleCommands() {
			lines = append(lines, child.Name+"\t"+child.Usage)
		}
	}
	lines = slices.DeleteFunc(lines, func(line string) bool { return !strings.HasPrefix(line, last) })
	if len(lines) > 0 {
		directive = ":4"
	}
	_, _ = fmt.Fprintln(root.Writer, strings.Join(append(lines, directive), "\n"))
}

func (c *completion) read(word string) {
	cmd := c.chain[len(c.chain)-1]
	switch {
	case c.open != nil && word == "=": // bash splits --flag=value.
	case c.open != nil:
		c.open = nil
	case strings.HasPrefix(word, "-"):
		if flag := c.flag(word); flag != nil && flag.(cli.DocGenerationFlag).TakesValue() {
			c.open = flag
		}
	case c.arguments == 0 && cmd.Command(word) != nil:
		c.chain = append(c.chain, cmd.Command(word))
	default:
		c.arguments++
	}
}

// flag returns the flag of that name, nil for none; --name=value has no name.
func (c *completion) flag(word string) cli.Flag {
	for _, cmd := range slices.Backward(c.chain) {
		for _, flag := range cmd.Flags {
			if slices.Contains(flag.Names(), strings.TrimLeft(word, "-")) {
				return flag
			}
		}
	}
	return nil
}

// flags returns the flags of the command and those that it has from commands above.
func (c *completion) flags() []string {
	var lines, seen []string
	for i, cmd := range slices.Backward(c.chain) {
		for _, flag := range cmd.Flags {
			name := flag.Names()[0]
			local := flag.(cli.LocalFlag).IsLocal() && i < len(c.chain)-1
			if flag.(cli.VisibleFlag).IsVisible() && !local && !slices.Contains(seen, name) {
				usage, _, _ := strings.Cut(flag.(cli.DocGenerationFlag).GetUsage(), ";")
				lines = append(lines, "--"+name+"\t"+usage)
			}
			seen = append(seen, name)
		}
	}
	return append(lines, "--help\tshow help")
}

// choices returns the values that a flag can have, with a prefix before each; nil where any is possible.
func choices(flag cli.Flag, prefix string) []string {
	described, ok := flag.(interface{ described() Flag })
	if !ok {
		return nil
	}
	var values []string
	for _, choice := range described.described().Choices {
		values = append(values, prefix+choice)
	}
	return values
}
