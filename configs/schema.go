package configs

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// key is a node of the tree that a list of Settings describes: the document, a section, a key, or
// the entries of a list, whose name is "[]".
type key struct {
	Setting
	name     string
	children []*key
}

func newTree(settings []Setting) *key {
	root := &key{}
	for _, s := range settings {
		k := root
		for name := range strings.SplitSeq(strings.ReplaceAll(s.Path, "[]", ".[]"), ".") {
			inner := k.child(name)
			if inner == nil {
				inner = &key{name: name}
				k.children = append(k.children, inner)
			}
			k = inner
		}
		k.Setting = s
	}
	return root
}

// child returns the description of a key, also by its older name; nil for an unknown one.
func (k *key) child(name string) *key {
	for _, child := range k.children {
		if child.name == name || child.Formerly == name && name != "" {
			return child
		}
	}
	return nil
}

// anyName returns the description of keys that may have any name; nil if there are none.
func (k *key) anyName() *key {
	for _, child := range k.children {
		if child.isAnyName() {
			return child
		}
	}
	return nil
}

func (k *key) isAnyName() bool { return k.name != "" && !strings.ContainsFunc(k.name, notUpper) }

func notUpper(r rune) bool { return !unicode.IsUpper(r) }

// names returns the names of the known keys.
func (k *key) names() (names []string) {
	for _, child := range k.children {
		if !child.isAnyName() {
			names = append(names, child.name)
		}
	}
	return names
}

// walker checks a document by its description.
type walker struct {
	overrides Overrides
	// inert is the source of settings that have no effect, whose problems do no harm.
	inert *source
}

// read checks a value and everything below it, and returns it with its content. A value that is
// absent has the default, if there is one.
func (w walker) read(v value, k *key) value {
	if k.Inert != "" && w.inert != nil {
		v.source = w.inert
	}
	switch entries := k.child("[]"); {
	case v.absent() && k.Required && (k.name == "[]" || k.isAnyName()):
		v.problem(k.expected())
	case k.Refused != "":
		if !v.absent() {
			v.problem(k.Refused)
		}
	case entries != nil:
		w.list(&v, k, entries)
	case len(k.children) > 0 && (k.Type == "" || v.shape() == shapeMapping):
		w.mapping(&v, k)
	default:
		w.scalar(&v, k)
		return v
	}
	if v.filled() {
		v.noteAll(k.Notes)
	}
	return v
}

// filled reports whether the value is a list or a mapping with entries.
func (v value) filled() bool { return v.node != nil && len(v.node.Content) > 0 }

func (w walker) mapping(v *value, k *key) {
	if !v.absent() && v.shape() != shapeMapping {
		v.problem(cmp.Or(k.Expected, "expected a mapping"))
	}
	problems := v.source.problems
	before := len(*problems)
	var entries []entry
	if v.shape() == shapeMapping {
		entries = v.pairs()
	}
	// Report no missing key if an unknown key is probably its misspelling, or if a merge that failed might
	// have added it.
	complete := len(*problems) == before && (v.shape() == shapeMapping || k.name == "")
	var meant []string
	v.fields = make(map[string]value, len(k.children))
	for _, e := range entries {
		if child := k.child(e.key); child != nil && !child.isAnyName() {
			if _, twice := v.fields[child.name]; twice {
				e.place.problemHere(fmt.Sprintf("%s and %s are the same key, give one", child.name, child.Formerly))
			}
			v.fields[child.name] = w.read(e.value, child)
		} else if child := k.anyName(); child != nil {
			e.value = w.read(e.value, child)
			v.entries = append(v.entries, e)
		} else {
			meant = append(meant, e.unknown(k.names()))
		}
	}
	if k.Empty != "" && v.shape() == shapeMapping && len(entries) == 0 {
		v.problem(k.Empty)
	}
	for _, child := range k.children {
		field, given := v.fields[child.name]
		if child.isAnyName() {
			continue
		}
		if !given {
			field = w.read(v.missing(child.name), child)
			v.fields[child.name] = field
		}
		if child.Required && field.absent() && complete && !slices.Contains(meant, child.name) {
			field.problemHere(Required)
		}
	}
}

func (w walker) list(v *value, k, entry *key) {
	items := []value{*v}
	switch shape := v.shape(); {
	case shape == shapeNothing, shape == shapeNumber && k.Min != "":
		return
	case shape == shapeText && slices.Contains(k.Choices, v.node.Value):
		v.content = v.node.Value
		return
	case shape == shapeList:
		items = v.list()
	case !k.Single || shape == shapeMapping:
		v.problem(cmp.Or(k.Expected, "expected a list"))
		return
	}
	if len(items) == 0 && k.Empty != "" {
		v.problem(k.Empty)
	}
	if most, err := strconv.Atoi(k.Max); err == nil && len(items) > most {
		v.problem(fmt.Sprintf("expected at most %d %s", most, k.name))
		return
	}
	for _, item := range items {
		v.items = append(v.items, w.read(item, entry))
	}
}

// scalar reads any other value: that of an override, else the document's, else (or if that is
// empty) the default. It always reports an invalid value. It reports a value that this release does
// not support only if the value is in force, so an override can make a document usable.
func (w walker) scalar(v *value, k *key) {
	text, ok := v.written(k)
	if ok {
		v.content = v.parse(k, text)
	}
	from := *v
	if override, overridden := w.overrides[k.Path]; overridden && k.overridable() {
		text = override.Value
		from = value{
			source:   v.source,
			path:     v.path,
			override: override.Source,
			node:     textNode(text),
		}
		v.content = from.parse(k, text)
	}
	if v.content != nil {
		from.compare(k, text)
	}
	empty := from.absent() || v.content != nil && text == ""
	if k.Default != "" && (empty || v.content == nil && k.Inert != "") {
		v.content, _ = k.parse(k.Default)
	}
}

// written returns the text of a value that has the right type. It reports any other value that is
// not absent.
func (v *value) written(k *key) (text string, ok bool) {
	switch {
	case v.absent():
		return "", false
	case k.Type == typeAny:
		return "", true
	case k.Type == TypeBool:
		on, ok := v.bareBool()
		if !ok {
			v.problem(k.expected())
		}
		return strconv.FormatBool(on), ok
	case k.Type == typeNumber:
		_, ok = v.number()
		return v.node.Value, ok
	case k.Type == TypeNumbers, k.Type == TypeList && v.shape() == shapeList:
		return v.joined(k)
	case k.Type == TypeList && v.shape() == shapeMapping:
		v.problem("expected text or a list")
		return "", false
	case k.Type == TypeInterval && slices.Contains([]string{"!!int", "!!float"}, v.node.ShortTag()):
		number, err := strconv.ParseFloat(v.node.Value, 64)
		if err != nil || math.IsNaN(number) || math.Abs(number) >= math.MaxInt64 {
			return v.node.Value, true // parse reports it.
		}
		return time.Duration(number).String(), true
	case k.Type == typeSelector && v.shape() == shapeNumber: // the index of a GPU
		return v.node.Value, true
	}
	return v.textOf(k.expected())
}

// joined returns a list's items with commas between, and replaces the list with this text. It
// returns false if there is no list of such items.
func (v *value) joined(k *key) (text string, ok bool) {
	if v.shape() != shapeList {
		v.problem("expected a list")
		return "", false
	}
	ok = true
	var texts []string
	for _, item := range v.list() {
		readable := false
		switch {
		case item.absent(): // Most likely a mistake in a template. NVIDIA's plugin reads 0 for a channel.
			item.problem(k.expected())
		case k.Type == TypeNumbers:
			_, readable = item.number()
		default:
			_, readable = item.textOf(k.expected())
		}
		texts, ok = append(texts, item.node.Value), ok && readable
	}
	text = strings.Join(texts, ",")
	v.node = textNode(text)
	return text, ok
}

func textNode(text string) *yaml.Node {
	return &yaml.Node{
		Kind:  yaml.ScalarNode,
		Tag:   "!!str",
		Style: yaml.DoubleQuotedStyle,
		Value: text,
	}
}

// parse returns what the text of the value means, and reports a problem.
func (v value) parse(k *key, text string) any {
	content, problem := k.parse(text)
	if problem != "" {
		v.problem(problem)
	}
	return content
}

// compare notes how the value differs from NVIDIA's plugin, and reports one that is not supported.
func (v value) compare(k *key, text string) {
	if k.Inert != "" {
		v.note(k.Inert)
		return
	}
	v.noteAll(k.Notes)
	items := []string{text}
	if k.Type == TypeList {
		items = listItems(text)
	}
	slices.Sort(items)
	for _, item := range slices.Compact(items) {
		if note := k.Differs[item]; note != "" {
			v.note(note)
		}
	}
	if k.Only != nil && !slices.Contains(k.Only, text) {
		v.problem("is not supported yet, only " + alternatives(k.Only))
	}
}

// at returns the value of a key below the value, of a path such as "plugin.cdiFeatureFlags".
func (v value) at(path string) value {
	for name := range strings.SplitSeq(path, ".") {
		v = v.fields[name]
	}
	return v
}

// get returns the content of at; zero if the value is absent or wrong and has no default.
func get[T any](v value, path string) T { return content[T](v.at(path)) }

func content[T any](v value) (content T) {
	content, _ = v.content.(T)
	return content
}
