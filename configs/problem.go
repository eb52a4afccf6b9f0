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
	// problemsShown limits the text of an error, which ends up in logs and events. The Problems
	// themselves are complete.
	problemsShown = 100
	// valueShown is how many bytes of a value a message quotes.
	valueShown = 60
)

// Required is the Message about a missing key.
const Required = "is required"

// Problem is one mistake in a document or an override.
type Problem struct {
	// File is the file's name as the caller gave it, "FILE[data.KEY]" for a document in a
	// ConfigMap, or the flag or variable of an override.
	File string
	// Line is counted from 1; 0 for an override.
	Line int
	// Column is counted from 1, as an editor does it; 0 for an override.
	Column int
	// Path is the path of the key, for example "sharing.timeSlicing.resources[1].replicas"; empty
	// for the whole document.
	Path string
	// Value is the invalid value, safe to print on a terminal: text is quoted, control characters
	// are escaped, long values are truncated. It is empty if there is no value, or if the message
	// does not need it.
	Value   string
	Message string
}

// Error returns "FILE:LINE: PATH: MESSAGE (got VALUE)", without empty parts.
func (p Problem) Error() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d", p.Line)
	}
	if p.Path != "" {
		b.WriteString(": " + p.Path)
	}
	return b.String() + ": " + p.Reason()
}

// Reason returns Error without the place.
func (p Problem) Reason() string {
	if p.Value == "" {
		return p.Message
	}
	return p.Message + " (got " + p.Value + ")"
}

// Problems are all problems, sorted by file and place.
type Problems []Problem

// Error returns one line for each problem, up to a hundred, then the number of further problems.
func (p Problems) Error() string {
	var lines []string
	for _, problem := range p[:min(len(p), problemsShown)] {
		lines = append(lines, problem.Error())
	}
	if more := len(p) - problemsShown; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more problems", more))
	}
	return strings.Join(lines, "\n")
}

// err returns the problems sorted, or nil if there are none. A wrong override is found once for
// each document of a ConfigMap, so duplicates are removed.
func (p Problems) err() error {
	if len(p) == 0 {
		return nil
	}
	slices.SortStableFunc(p, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	seen := make(map[Problem]bool, len(p))
	return slices.DeleteFunc(p, func(problem Problem) bool {
		again := seen[problem]
		seen[problem] = true
		return again
	})
}

// quote makes text safe to print: quoted and, if it is long, truncated after a whole character.
func quote(text string) string {
	if len(text) <= valueShown {
		return strconv.Quote(text)
	}
	end := valueShown
	for end > valueShown-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return strconv.Quote(text[:end]) + "…"
}

// alternatives returns "a, b or c".
func alternatives(choices []string) string {
	if len(choices) < 2 {
		return strings.Join(choices, "")
	}
	last := len(choices) - 1
	return strings.Join(choices[:last], ", ") + " or " + choices[last]
}

// didYouMean returns the end of a message that proposes near; "" if near is empty.
func didYouMean(near string) string {
	if near == "" {
		return ""
	}
	return ", did you mean " + near + "?"
}

// candidatesTried limits Nearest: with more candidates, it finds none.
const candidatesTried = 100

// Nearest returns the candidate that s is most likely a misspelling of: the first of several that
// are equally near, or "" if none is near.
func Nearest(s string, candidates []string) string {
	// The distance takes quadratic time, and a document can have many keys.
	if len(s) > valueShown || len(candidates) > candidatesTried {
		return ""
	}
	best, limit := "", len(s)/3+1
	for _, candidate := range candidates {
		d := distance(strings.ToLower(s), strings.ToLower(candidate))
		if d <= limit && (best == "" || d < limit) {
			best, limit = candidate, d
		}
	}
	return best
}

// distance returns the Levenshtein distance of a and b, in bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
