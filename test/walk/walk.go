// Package walk finds the commands in a document that readers are told to type, so that a test can
// run them. It runs none of them itself.
package walk

import (
	"regexp"
	"strings"
)

// Command is a command that a reader types, with the output that the document shows.
type Command struct {
	// Line is the line of the document where it begins.
	Line int
	// Text may have several lines; all but the last end with a backslash.
	Text string
	// Want is the output; empty if the document shows none.
	Want string
}

// Commands returns the commands in the document's fenced blocks of two kinds. In a block called sh
// each line is a command. In a block called console a command follows the prompt $, and its output
// follows the command.
func Commands(document string) []Command {
	var found []Command
	fence, goesOn := "", false
	for number, line := range strings.Split(document, "\n") {
		if kind, ok := strings.CutPrefix(line, "```"); ok {
			fence, goesOn = kind, false
			continue
		}
		if fence != "sh" && fence != "console" {
			continue
		}
		typed, prompt := strings.CutPrefix(line, "$ ")
		switch {
		case goesOn:
			found[len(found)-1].Text += "\n" + line
			goesOn = strings.HasSuffix(line, `\`)
		case fence == "console" && !prompt:
			found[len(found)-1].Want += line + "\n"
		case strings.TrimSpace(typed) != "" && !strings.HasPrefix(typed, "#"):
			found = append(found, Command{Line: number + 1, Text: typed})
			goesOn = strings.HasSuffix(typed, `\`)
		}
	}
	return found
}

// Shows reports whether the output is what the document shows: the same words, however they are
// spaced. In the document … stands for any text.
func (c Command) Shows(output string) bool {
	var parts []string
	for part := range strings.SplitSeq(c.Want, "…") {
		words := strings.Fields(part)
		for i := range words {
			words[i] = regexp.QuoteMeta(words[i])
		}
		parts = append(parts, strings.Join(words, " "))
	}
	return regexp.MustCompile("^" + strings.Join(parts, ".*") + "$").MatchString(strings.Join(strings.Fields(output), " "))
}
