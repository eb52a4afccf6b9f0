package configs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	// documentBytes is the size limit of a document, the largest size of a ConfigMap.
	documentBytes = 1 << 20
	// documentNodes limits the number of keys and values. The reader follows aliases, so each alias
	// counts with everything it stands for: otherwise a few lines of nested aliases could take
	// hours to read.
	documentNodes = 100_000
	// documentDepth limits the nesting; a profile needs 6 levels.
	documentDepth = 50
)

// source is a document while it is read: its origin, and its problems and notes so far.
type source struct {
	file string
	// offset is the number of lines before the document, in a ConfigMap manifest.
	offset   int
	problems *Problems
	notes    []Note
}

type position struct {
	file         string
	line, column int
	path         string
}

// placeholder matches text that a template program must replace before a document can be read:
// "${X}" for envsubst and Flux, "{{ .Values.x }}" for Helm.
var placeholder = regexp.MustCompile(`\$\{[^}]*\}?|\{\{.*?(\}\}|$)`)

const notRendered = "a placeholder of a template, which has to be rendered first, as by helm template or envsubst"

func (s *source) problem(at position, shown, message string) {
	if placeholder.MatchString(shown) {
		message = notRendered
	}
	*s.problems = append(*s.problems, Problem{
		File:    at.file,
		Line:    at.line,
		Column:  at.column,
		Path:    at.path,
		Value:   shown,
		Message: message,
	})
}

// open parses data and returns the root of the document, which is absent if data is empty. If it
// returns false, it has reported a problem.
func (s *source) open(data []byte) (value, bool) {
	roots, ok := s.openAll(data)
	if !ok {
		return roots[0], false
	}
	if len(roots) > 1 {
		s.reportSecond(roots[1])
		return roots[0], false
	}
	return roots[0], s.checkRoot(roots[0])
}

func (s *source) reportSecond(root value) {
	s.problem(root.position(), "",
		"a second YAML document begins here: expected one in a file, or manifests of Kubernetes")
}

func (s *source) checkRoot(root value) bool {
	if !root.absent() && root.node.Kind != yaml.MappingNode {
		root.problem("expected a mapping at the top")
		return false
	}
	return true
}

// openAll parses data and returns the roots of its documents except empty ones; a single absent one
// if there are no others. If it returns false, it has reported a problem.
func (s *source) openAll(data []byte) ([]value, bool) {
	nothing := []value{{source: s, line: s.offset + 1}}
	if len(data) > documentBytes {
		s.problem(nothing[0].position(), "", fmt.Sprintf("the document has %d bytes, more than 1 MiB", len(data)))
		return nothing, false
	}
	decoder, lines := yaml.NewDecoder(bytes.NewReader(data)), strings.Split(string(data), "\n")
	var roots []value
	nodes := 0
	for {
		var document yaml.Node
		if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			s.syntax(err, decoder, data)
			return nothing, false
		}
		root := s.newValue("", document.Content[0])
		if s.reportPlaceholders(document.Content[0], lines) {
			return nothing, false
		}
		if reason := tooLarge(document.Content[0], &nodes); reason != "" {
			s.problem(root.position(), "", reason)
			return nothing, false
		}
		if !root.absent() {
			roots = append(roots, root)
		}
	}
	if len(roots) == 0 {
		return nothing, true
	}
	return roots, true
}

// syntax reports why the parser stopped, on the line where it stopped. The parser's error names
// only the line where the list or mapping began, and that one line too early, so syntax reads the
// parser's marks.
func (s *source) syntax(err error, decoder any, data []byte) {
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	named := 1
	if place, text, found := strings.Cut(message, ": "); found && strings.HasPrefix(place, "line ") {
		message = text
		if line, err := strconv.Atoi(strings.TrimPrefix(place, "line ")); err == nil && line > 0 {
			named = line
		}
	}
	lines := strings.Split(strings.TrimRight(string(data), "\r\n"), "\n")
	stop, begin := parserMarks(decoder, data)
	// The end of a document is after its last line.
	stop = min(cmp.Or(stop, named), len(lines))
	if line, found := unrendered(lines, stop, begin); found != "" {
		s.problem(position{file: s.file, line: s.offset + line}, quote(found), notRendered)
		return
	}
	if indentation, _, _ := strings.Cut(lines[stop-1], strings.TrimLeft(lines[stop-1], " \t")); strings.Contains(
		indentation, "\t") {
		message = "a tab in the indentation: expected spaces"
	} else if begin.line < stop && begin.what != "" {
		message += fmt.Sprintf(", %s that begins on line %d", begin.what, s.offset+begin.line)
	}
	s.problem(position{file: s.file, line: s.offset + stop}, "", "not valid YAML: "+message)
}

// unrendered returns the line and the text of a placeholder that may be why the parser stopped; ""
// for none. Such a placeholder is on that line, before it in the brackets that are still open
// there, or alone on the line before. Elsewhere a placeholder is text.
func unrendered(lines []string, stop int, begin begun) (line int, text string) {
	brackets := strings.Contains(begin.what, "flow")
	first := stop - 1
	if brackets {
		first = begin.line
	}
	for n := max(first, 1); n <= stop; n++ {
		written, _, _ := strings.Cut(lines[n-1], "#")
		if n < stop && brackets {
			written = quotedText.ReplaceAllString(written, "")
		}
		found := placeholder.FindString(written)
		if alone := found == strings.TrimSpace(written); found != "" && (n == stop || brackets || alone) {
			return n, found
		}
	}
	return 0, ""
}

// quotedText is text in quotes that ends on its line.
var quotedText = regexp.MustCompile(`"(\\.|[^"\\])*"|'[^']*'`)

// begun is what the parser was reading when it stopped, such as "while parsing a flow sequence".
type begun struct {
	what string
	line int
}

// reportPlaceholders reports placeholders that YAML reads as a mapping whose key is a mapping: "a:
// {{ .Values.a }}".
func (s *source) reportPlaceholders(node *yaml.Node, lines []string) (found bool) {
	for i, child := range node.Content {
		if node.Kind == yaml.MappingNode && i%2 == 0 && child.Kind == yaml.MappingNode && child.Line <= len(lines) {
			if text := placeholder.FindString(lines[child.Line-1]); text != "" {
				s.problem(position{file: s.file, line: s.offset + child.Line}, quote(text), notRendered)
				found = true
				continue
			}
		}
		found = s.reportPlaceholders(child, lines) || found
	}
	return found
}

// parserMarks returns the line where the decoder's parser stopped. Only the library's private
// fields have it (go.yaml.in/yaml/v3, yamlprivateh.go). If they change, the line is 0, and
// TestSyntaxLines fails.
func parserMarks(decoder any, data []byte) (stop int, begin begun) {
	field := func(v reflect.Value, names ...string) reflect.Value {
		for _, name := range names {
			v = reflect.Indirect(v)
			if v.Kind() != reflect.Struct {
				return reflect.Value{}
			}
			v = v.FieldByName(name)
		}
		return v
	}
	number := func(v reflect.Value, names ...string) int {
		v = field(v, names...)
		if v.CanInt() {
			return int(v.Int())
		}
		return 0
	}
	nodes := field(reflect.ValueOf(decoder), "parser")
	parser := field(nodes, "parser")
	if !field(parser, "problem_mark", "index").CanInt() || !field(nodes, "event", "start_mark", "line").CanInt() {
		return 0, begun{}
	}
	begin = begun{field(parser, "context").String(), number(parser, "context_mark", "line") + 1}
	switch {
	case field(parser, "problem").String() == "": // Not a syntax error: an alias without an anchor.
		return number(nodes, "event", "start_mark", "line") + 1, begun{}
	case number(parser, "problem_mark", "index") == 0: // A character that no document may contain.
		before := data[:min(number(parser, "problem_offset"), len(data))]
		return bytes.Count(before, []byte("\n")) + 1, begun{}
	}
	return number(parser, "problem_mark", "line") + 1, begin
}

// tooLarge returns why the document is too large to be read; "" if it is not. An alias that
// contains itself counts as nested too deeply. nodes is the number in the earlier documents of the
// file.
func tooLarge(root *yaml.Node, nodes *int) string {
	var measure func(node *yaml.Node, depth int) string
	measure = func(node *yaml.Node, depth int) string {
		*nodes++
		switch {
		case *nodes > documentNodes:
			return fmt.Sprintf("the document has more than %d keys and values, those behind aliases counted each time",
				documentNodes)
		case depth > documentDepth:
			return fmt.Sprintf("the document is nested deeper than %d levels, those behind aliases counted",
				documentDepth)
		case node.Kind == yaml.AliasNode:
			return measure(node.Alias, depth+1)
		}
		for _, child := range node.Content {
			if reason := measure(child, depth+1); reason != "" {
				return reason
			}
		}
		return ""
	}
	return measure(root, 1)
}

// value is a position in a document, with the value written there, if any. Methods such as text and
// number report a value of the wrong type; their second result is whether they return something. An
// absent value is not a problem for them.
type value struct {
	source *source
	path   string
	// override is the flag or the variable that the value comes from; "" for the document.
	override     string
	line, column int
	// node is never an alias. It is nil if the key is missing.
	node *yaml.Node

	// The others are what a walker has read: the content of a scalar, as Setting.parse returns it,
	// nil if it is absent or wrong; the items of a list; the known keys of a mapping, present or
	// not; and the entries whose keys may have any name.
	content any
	items   []value
	fields  map[string]value
	entries []entry
}

// newValue follows aliases, but keeps the line of the alias, where a reader looks first.
func (s *source) newValue(path string, node *yaml.Node) value {
	v := value{
		source: s,
		path:   path,
		line:   s.offset + node.Line,
		column: node.Column,
		node:   node,
	}
	for v.node.Kind == yaml.AliasNode {
		v.node = v.node.Alias
	}
	return v
}

// absent reports whether the key is missing or has no value: "flags:", "flags: null".
func (v value) absent() bool {
	return v.node == nil || v.node.Kind == yaml.ScalarNode && v.node.ShortTag() == "!!null"
}

// shape is the kind of a value, as far as the reader distinguishes them.
type shape int

const (
	shapeNothing shape = iota
	shapeText
	shapeNumber
	shapeOther
	shapeList
	shapeMapping
)

func (v value) shape() shape {
	switch {
	case v.absent():
		return shapeNothing
	case v.node.Kind == yaml.MappingNode:
		return shapeMapping
	case v.node.Kind == yaml.SequenceNode:
		return shapeList
	case v.node.ShortTag() == "!!str":
		return shapeText
	case v.node.ShortTag() == "!!int":
		return shapeNumber
	}
	return shapeOther
}

func (v value) position() position {
	return position{
		file:   cmp.Or(v.override, v.source.file),
		line:   v.line,
		column: v.column,
		path:   v.path,
	}
}

// problem reports the value, which is quoted with the message.
func (v value) problem(message string) {
	v.source.problem(v.position(), v.shown(), message)
}

// problemHere reports a problem whose message does not need the value.
func (v value) problemHere(message string) { v.source.problem(v.position(), "", message) }

func (v value) note(message string) {
	if v.override != "" {
		message = v.override + ": " + message
	}
	v.source.notes = append(v.source.notes, Note{
		Line:    v.line,
		Path:    v.path,
		Message: message,
	})
}

func (v value) noteAll(messages []string) {
	for _, message := range messages {
		v.note(message)
	}
}

// shown returns the value as a message quotes it; "" if the key is missing.
func (v value) shown() string {
	switch v.shape() {
	case shapeMapping:
		return "a mapping"
	case shapeList:
		return "a list"
	case shapeNothing:
		if v.node == nil {
			return ""
		}
		return "nothing"
	case shapeText:
		return quote(v.node.Value)
	}
	// Any other value without a style is a bare number, date or boolean.
	if v.node.Style == 0 && len(v.node.Value) <= valueShown {
		return v.node.Value
	}
	return quote(v.node.Value)
}

// textOf reads a string; expected is the message about any other value. It refuses a bare yes, no,
// on, off, y or n, because NVIDIA's plugin reads YAML 1.1, where these are booleans.
func (v value) textOf(expected string) (string, bool) {
	if v.absent() {
		return "", false
	}
	if v.shape() != shapeText {
		v.problem(expected)
		return "", false
	}
	if means, bare := v.bareBool(); bare {
		v.problem(fmt.Sprintf("%s: without quotes it means %t", expected, means))
		return "", false
	}
	return v.node.Value, true
}

// bareBool reads true or false in any spelling of YAML 1.1.
func (v value) bareBool() (result, ok bool) {
	// A plain scalar has no style: it has no quotes and no tag, and is no block.
	if v.node.Kind != yaml.ScalarNode || v.node.Style != 0 {
		return false, false
	}
	switch v.node.Value {
	case "true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", "y", "Y":
		return true, true
	case "false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", "n", "N":
		return false, true
	}
	return false, false
}

// number reads a whole number in plain decimal digits. It refuses 1_000, 0x10, 4.0, and
// leading zeros, because YAML 1.1 reads 010 as octal and YAML 1.2 as decimal.
func (v value) number() (int, bool) {
	if v.absent() {
		return 0, false
	}
	if v.shape() == shapeNumber {
		if n, err := strconv.Atoi(v.node.Value); err == nil && strconv.Itoa(n) == v.node.Value {
			return n, true
		}
	}
	v.problem("expected a whole number, in decimal digits and without quotes")
	return 0, false
}

// list returns the items of a list; none of any other value.
func (v value) list() []value {
	if v.shape() != shapeList {
		return nil
	}
	items := make([]value, len(v.node.Content))
	for i, node := range v.node.Content {
		items[i] = v.source.newValue(fmt.Sprintf("%s[%d]", v.path, i), node)
	}
	return items
}

// pairsQuietly is pairs for places where any value is valid: it reports nothing.
func (v value) pairsQuietly() []entry {
	if v.shape() != shapeMapping {
		return nil
	}
	before := *v.source.problems
	entries := v.pairs()
	*v.source.problems = before
	return entries
}

// missing returns the absent value of a key.
func (v value) missing(key string) value {
	return value{
		source: v.source,
		path:   join(v.path, key),
		line:   v.line,
		column: v.column,
	}
}

// entry is a key of a mapping, with its value. The place of the key has the value's path.
type entry struct {
	key   string
	place value
	value value
}

// problem reports a problem of the key itself.
func (e entry) problem(message string) {
	e.place.source.problem(e.place.position(), quote(e.key), message)
}

// gkeKeys are the keys of GKE's plugin in gpu_config.json (container-engine-accelerators,
// pkg/gpu/nvidia/manager.go), at all levels.
var gkeKeys = []string{
	"GPUPartitionSize", "MaxTimeSharedClientsPerGPU", "GPUSharingConfig", "GPUSharingStrategy",
	"MaxSharedClientsPerGPU", "HealthCriticalXid",
}

// unknown reports an unknown key, and returns the known one that was probably meant.
func (e entry) unknown(known []string) (meant string) {
	if slices.ContainsFunc(gkeKeys, func(key string) bool { return strings.EqualFold(key, e.key) }) {
		e.place.problemHere("unknown key: it is one of GKE's plugin, see docs/how-to/migrate-gke.md")
		return ""
	}
	meant = Nearest(e.key, known)
	e.place.problemHere("unknown key" + didYouMean(meant))
	return meant
}

// pairs reads a mapping with arbitrary keys, in the order of the document. It reports and omits
// repeated keys. A merge key ("<<") adds the keys of another mapping, or of a list of mappings,
// that the mapping does not have itself.
func (v value) pairs() []entry {
	if v.absent() {
		return nil
	}
	if v.shape() != shapeMapping {
		v.problem("expected a mapping")
		return nil
	}
	var own []entry
	var merged []value
	lines := make(map[string]int)
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		key := v.source.newValue(v.path, v.node.Content[i])
		if key.node.ShortTag() == "!!merge" {
			merged = append(merged, v.source.newValue(join(v.path, "<<"), v.node.Content[i+1]))
			continue
		}
		if key.node.Kind != yaml.ScalarNode || key.absent() {
			key.problem("expected text as the key")
			continue
		}
		name := key.node.Value
		key.path = join(v.path, name)
		if first, again := lines[name]; again {
			key.problemHere("the key is repeated, it is on line " + strconv.Itoa(first) + " already")
			continue
		}
		lines[name] = key.line
		own = append(own, entry{name, key, v.source.newValue(key.path, v.node.Content[i+1])})
	}
	for _, m := range merged {
		mappings := []value{m}
		if m.shape() == shapeList {
			mappings = m.list()
		}
		for _, mapping := range mappings {
			for _, e := range mapping.pairs() {
				if _, has := lines[e.key]; !has {
					lines[e.key] = e.place.line
					e.value.path = join(v.path, e.key)
					e.place.path = e.value.path
					own = append(own, e)
				}
			}
		}
	}
	return own
}

// join appends a key to a path, in quotes if it would be unreadable without them.
func join(path, key string) string {
	plain := key != "" && len(key) <= valueShown && strings.Trim(key, keyCharacters) == ""
	switch {
	case !plain:
		return path + "[" + quote(key) + "]"
	case path == "":
		return key
	}
	return path + "." + key
}

const keyCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._+<,"
