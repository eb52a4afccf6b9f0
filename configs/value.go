package configs

import (
	"fmt"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// value is a place in a document with what stands there, perhaps nothing. Its
// readers report what does not fit and say whether they return something; on
// an absent value they return nothing and report nothing.
type value struct {
	source *source
	path   string
	line   int
	// node is never an alias; nil for a key that is not there.
	node *yaml.Node
}

// newValue follows an alias to what it stands for. The line stays that of the
// alias, where a reader looks first.
func (s *source) newValue(path string, node *yaml.Node) value {
	v := value{source: s, path: path, line: s.offset + node.Line, node: node}
	for v.node.Kind == yaml.AliasNode {
		v.node = v.node.Alias
	}
	return v
}

// absent says that the key is not there or has no value. "flags:" and
// "flags: null" mean the same as no flags.
func (v value) absent() bool {
	return v.node == nil || v.node.Kind == yaml.ScalarNode && v.node.ShortTag() == "!!null"
}

// shape is what kind of thing stands at a place.
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
	default:
		return shapeOther
	}
}

func (v value) place() place { return place{file: v.source.file, line: v.line, path: v.path} }

// problem reports the value.
func (v value) problem(message string) {
	v.source.problem(v.place(), v.shown(), message)
}

func (v value) note(message string) {
	v.source.notes = append(v.source.notes, Note{Line: v.line, Path: v.path, Message: message})
}

// shown is the value for a message; "" if there is none.
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
	// What is no text and has no style is a bare number, date or switch.
	if v.node.Style == 0 && len(v.node.Value) <= valueShown {
		return v.node.Value
	}
	return quote(v.node.Value)
}

// text reads text. A bare yes, no, on, off, y or n is no text: NVIDIA's plugin
// reads YAML 1.1, where those are true and false.
func (v value) text() (string, bool) {
	if v.absent() {
		return "", false
	}
	if v.shape() != shapeText {
		v.problem("expected text")
		return "", false
	}
	if _, bare := v.bareBool(); bare {
		v.problem("expected text: write it in quotes, without them it means true or false")
		return "", false
	}
	return v.node.Value, true
}

// boolean reads true or false, or what YAML 1.1 takes for them.
func (v value) boolean() (result, ok bool) {
	if v.absent() {
		return false, false
	}
	result, ok = v.bareBool()
	if !ok {
		v.problem("expected true or false")
	}
	return result, ok
}

func (v value) bareBool() (result, ok bool) {
	// A plain scalar has no style: no quotes, no tag, not a block.
	if v.node.Kind != yaml.ScalarNode || v.node.Style != 0 {
		return false, false
	}
	switch v.node.Value {
	case "true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", "y", "Y":
		return true, true
	case "false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", "n", "N":
		return false, true
	default:
		return false, false
	}
}

// number reads a whole number in plain decimal. YAML 1.1 and 1.2 read 010
// differently, so a leading zero is refused as 1_000, 0x10 and 4.0 are.
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

// texts reads a list of texts or, as one item, a text.
func (v value) texts() ([]value, bool) {
	switch v.shape() {
	case shapeList:
		return v.items()
	case shapeNothing:
		return nil, false
	case shapeMapping:
		v.problem("expected text or a list")
		return nil, false
	default:
		return []value{v}, true
	}
}

// items reads a list.
func (v value) items() ([]value, bool) {
	if v.absent() {
		return nil, false
	}
	if v.shape() != shapeList {
		v.problem("expected a list")
		return nil, false
	}
	items := make([]value, len(v.node.Content))
	for i, node := range v.node.Content {
		items[i] = v.source.newValue(fmt.Sprintf("%s[%d]", v.path, i), node)
	}
	return items, true
}
