package configs

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// problemsShown bounds the text of an error, which ends up in logs and in
	// events. The slice itself has all problems.
	problemsShown = 100
	// valueShown is the number of bytes of a value that a message quotes.
	valueShown = 60
)

// Problem is one thing that is wrong with a document or with an override.
type Problem struct {
	// File is the file's name as the caller gave it, "FILE[data.KEY]" for a
	// document in a ConfigMap, or the flag or variable of an override.
	File string
	// Line is counted from 1; 0 for an override.
	Line int
	// Path is the key's place, for example
	// "sharing.timeSlicing.resources[1].replicas"; empty for the whole document.
	Path string
	// Value is the offending value fit for a terminal: quoted if it is text,
	// control characters escaped, long ones cut. Empty if nothing was given.
	Value   string
	Message string
}

// Error is "FILE:LINE: PATH: MESSAGE (got VALUE)" without what there is none of.
func (p Problem) Error() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d", p.Line)
	}
	if p.Path != "" {
		b.WriteString(": " + p.Path)
	}
	b.WriteString(": " + p.Message)
	if p.Value != "" {
		b.WriteString(" (got " + p.Value + ")")
	}
	return b.String()
}

// Problems is all that is wrong, by file and line.
type Problems []Problem

// Error has one line for each problem, and a count in place of those after the
// first hundred.
func (p Problems) Error() string {
	lines := make([]string, 0, min(len(p), problemsShown+1))
	for i, problem := range p {
		if i == problemsShown {
			lines = append(lines, fmt.Sprintf("and %d more problems", len(p)-problemsShown))
			break
		}
		lines = append(lines, problem.Error())
	}
	return strings.Join(lines, "\n")
}

// err sorts the problems and returns them, nil if there are none. An override
// is met once for each document of a ConfigMap; it is reported once.
func (p Problems) err() error {
	if len(p) == 0 {
		return nil
	}
	slices.SortStableFunc(p, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	seen := make(map[Problem]bool, len(p))
	return slices.DeleteFunc(p, func(problem Problem) bool {
		again := seen[problem]
		seen[problem] = true
		return again
	})
}

// quote makes text fit for a message.
func quote(text string) string {
	if len(text) <= valueShown {
		return strconv.Quote(text)
	}
	return strconv.Quote(cut(text)) + "…"
}

// cut returns the first bytes of text, whole characters only.
func cut(text string) string {
	if len(text) <= valueShown {
		return text
	}
	end := valueShown
	for end > valueShown-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
}

// alternatives writes "a, b or c".
func alternatives(choices []string) string {
	if len(choices) < 2 {
		return strings.Join(choices, "")
	}
	last := len(choices) - 1
	return strings.Join(choices[:last], ", ") + " or " + choices[last]
}
