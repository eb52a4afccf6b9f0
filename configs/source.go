package configs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	// documentBytes is the size from which a document is refused: what the API
	// server takes for a whole ConfigMap.
	documentBytes = 1 << 20
	// documentNodes bounds keys and values, each alias counted with all that it
	// stands for. The reader follows aliases, so this bounds its work.
	documentNodes = 100_000
	// documentDepth bounds the nesting. A profile has 6 levels.
	documentDepth = 50
)

// source is a document being read: where it is from and what was found in it.
type source struct {
	file string
	// offset is the number of lines of the file before the document's first.
	offset   int
	problems *Problems
	notes    []Note
}

// place is what a problem is reported at.
type place struct {
	file string
	line int
	path string
}

func (s *source) problem(at place, shown, message string) {
	*s.problems = append(*s.problems, Problem{File: at.file, Line: at.line, Path: at.path, Value: shown, Message: message})
}

// open parses data to the root of its document. Nothing is not a problem: the
// root is then absent. It says false when it reported one.
func (s *source) open(data []byte) (value, bool) {
	nothing := value{source: s, line: s.offset + 1}
	if len(data) > documentBytes {
		s.problem(nothing.place(), "", fmt.Sprintf("the document has %d bytes, more than 1 MiB", len(data)))
		return nothing, false
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var document yaml.Node
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nothing, true
	} else if err != nil {
		s.syntax(err)
		return nothing, false
	}
	if !s.single(decoder) {
		return nothing, false
	}
	root := s.newValue("", document.Content[0])
	if reason := tooLarge(document.Content[0]); reason != "" {
		s.problem(root.place(), "", reason)
		return nothing, false
	}
	if !root.absent() && root.node.Kind != yaml.MappingNode {
		root.problem("expected a mapping at the top")
		return nothing, false
	}
	return root, true
}

// single reports a second document. One that is empty is tolerated, for a file
// that ends in "---".
func (s *source) single(decoder *yaml.Decoder) bool {
	var second yaml.Node
	err := decoder.Decode(&second)
	if errors.Is(err, io.EOF) {
		return true
	}
	if err != nil {
		s.syntax(err)
		return false
	}
	if v := s.newValue("", second.Content[0]); !v.absent() {
		s.problem(v.place(), "", "a second YAML document begins here: expected one in a file")
		return false
	}
	return true
}

// syntax reports the parser's error, which is "yaml: line N: …", at its line.
func (s *source) syntax(err error) {
	at := place{file: s.file, line: s.offset + 1}
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	if rest, ok := strings.CutPrefix(message, "line "); ok {
		if number, text, ok := strings.Cut(rest, ": "); ok {
			if line, err := strconv.Atoi(number); err == nil {
				at.line, message = s.offset+line, text
			}
		}
	}
	s.problem(at, "", "not valid YAML: "+message)
}

// tooLarge says why the document is refused for its size; "" if it is not. An
// alias that contains itself is too deep.
func tooLarge(root *yaml.Node) string {
	nodes := 0
	var reason string
	var measure func(node *yaml.Node, depth int) bool
	measure = func(node *yaml.Node, depth int) bool {
		nodes++
		switch {
		case nodes > documentNodes:
			reason = fmt.Sprintf("the document has more than %d keys and values, those behind aliases counted each time", documentNodes)
		case depth > documentDepth:
			reason = fmt.Sprintf("the document is nested deeper than %d levels, those behind aliases counted", documentDepth)
		}
		if reason != "" {
			return false
		}
		if node.Kind == yaml.AliasNode {
			return measure(node.Alias, depth+1)
		}
		for _, child := range node.Content {
			if !measure(child, depth+1) {
				return false
			}
		}
		return true
	}
	measure(root, 1)
	return reason
}
