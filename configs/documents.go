package configs

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/virgate/virgate/sharing"
)

// Documents are texts by name: the data of a ConfigMap in the cluster, or the files of a directory
// where a ConfigMap is mounted. Unlike in a manifest, a problem in one document does not affect the
// others, because each node reads only the document chosen for it.
type Documents map[string]string

// ProfileNames returns the sorted names of the documents, except those of mig-parted and of the
// rules.
func (d Documents) ProfileNames() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(d)),
		func(name string) bool { return name == RulesName || d.isLayouts(name) })
}

func (d Documents) isLayouts(name string) bool {
	// Parsing a ConfigMap's whole mebibyte to find one profile would be slow. The key appears
	// literally, unless an escape or another encoding hides it.
	text := d[name]
	if !strings.Contains(text, migConfigsKey) && !strings.ContainsAny(text, "\\\x00") {
		return false
	}
	source := &source{file: name, problems: &Problems{}}
	root, ok := source.open([]byte(text))
	return ok && kindOf(root) == KindMIGConfigs
}

// Select reads the profile with the name. The profile can use the layouts of the mig-parted
// documents beside it; their problems are reported only if the profile has problems too. source is
// the location of the documents, for messages and for SelectedProfile.
func (d Documents) Select(source, name string, overrides Overrides) (SelectedProfile, error) {
	text, ok := d[name]
	if !ok {
		return SelectedProfile{}, fmt.Errorf("%s: no %s", source, quote(name))
	}
	inside := func(name string) string { return SelectedProfile{Source: source, Name: name}.String() }
	used := map[string]string{name: text}
	var layouts MIGLayouts
	var unreadable []error
	for _, other := range slices.Sorted(maps.Keys(d)) {
		if other == name || other == RulesName || !d.isLayouts(other) {
			continue
		}
		read, err := ParseMIGConfigs(inside(other), []byte(d[other]))
		if err != nil {
			unreadable = append(unreadable, err)
			continue
		}
		layouts = layouts.merge(read)
		used[other] = d[other]
	}
	config, err := parseDocument(inside(name), []byte(text), func(root value) Config {
		return readProfile(root, overrides, layouts)
	})
	if err != nil {
		return SelectedProfile{}, errors.Join(append([]error{err}, unreadable...)...)
	}
	return config.SelectedFrom(source, name, used), nil
}

// SelectedProfile is a profile and where it was found. JSON omits what Documents already contain.
type SelectedProfile struct {
	Config `json:"-"`
	// Name is the ConfigMap's key, or the name of the file in a directory; "" for other sources.
	Name string `json:"name,omitempty"`
	// Source is where the profile was read, for people: "ConfigMap gpu/profiles",
	// "/etc/virgate/profile.yaml", "flags".
	Source string `json:"source"`
	// Generation is Generation(Profile).
	Generation string `json:"generation"`
	// Layout is the MIG layout from the node's label (see SelectMIG); "" for the profile's own
	// layout.
	Layout string `json:"layout,omitempty"`
	// MIGLeftTo is why another program makes the MIG layouts (see LeaveMIG); "" if none does.
	MIGLeftTo string `json:"migLeftTo,omitempty"`
	// Choice is why this profile is the node's.
	Choice Choice `json:"choice,omitzero"`
	// Delayed is when this profile's source will be replaced by the changed one; zero if none is
	// pending.
	Delayed time.Time `json:"-"`
	// Documents are the texts that the profile was read from, by name, to be stored and read again.
	// A single file has the name "". With only flags there are none.
	Documents map[string]string `json:"documents,omitempty"`
}

// SelectedFrom returns the Config with the place where it was read.
func (c Config) SelectedFrom(source, name string, documents map[string]string) SelectedProfile {
	return SelectedProfile{
		Config:     c,
		Name:       name,
		Source:     source,
		Generation: Generation(c.Profile),
		Documents:  documents,
	}
}

// SelectMIG is Config.SelectMIG for a selected profile. It accepts only Allowed layouts, and the
// profile's generation changes with the layout. The error is ErrMIGLayout.
func (s SelectedProfile) SelectMIG(name string) (SelectedProfile, error) {
	if s.Profile.MIG.Manage && name != "" && s.Allowed != nil && !slices.Contains(s.Allowed, name) {
		return s, fmt.Errorf("%w %s: mig.allowed does not have it, only %q", ErrMIGLayout, quote(name), s.Allowed)
	}
	config, err := s.Config.SelectMIG(name)
	if err != nil {
		return s, err
	}
	s.Config = config
	s.Generation = Generation(config.Profile)
	s.Layout = name
	return s, nil
}

// LeaveMIG returns the profile for a node where another program makes the MIG layouts. reason is
// why; with "", the profile stays as it is.
func (s SelectedProfile) LeaveMIG(reason string) SelectedProfile {
	if reason != "" && s.Profile.MIG.Manage {
		s.Profile.MIG.Manage = false
		s.Profile.MIG.LeftTo = reason
		s.MIGLeftTo = reason
		s.Generation = Generation(s.Profile)
	}
	return s
}

// Refused returns what is known about a profile that cannot be used.
func (s SelectedProfile) Refused() SelectedProfile {
	return SelectedProfile{
		Name:    s.Name,
		Source:  s.Source,
		Choice:  s.Choice,
		Delayed: s.Delayed,
	}
}

// String returns a name for people: "SOURCE[NAME]", or only the source.
func (s SelectedProfile) String() string {
	if s.Name == "" {
		return s.Source
	}
	return fmt.Sprintf("%s[%s]", s.Source, s.Name)
}

// ErrPending means that the profile is not known yet, for example because the node's label has not
// been read. It is no error in a document.
var ErrPending = errors.New("not known yet")

// Generation returns a hash of a profile: 12 hexadecimal digits. Profiles with the same settings
// have the same hash, however their documents are written. It is stable within a release of
// Virgate, but not across releases.
func Generation(p sharing.Profile) string {
	// Go syntax has every field, exported or not, and sorts maps. It would show the addresses of
	// pointers; a test ensures that a Profile has none.
	sum := sha256.Sum256(fmt.Appendf(nil, "%#v", p))
	return hex.EncodeToString(sum[:6])
}

// DocumentKind is the kind of a document.
type DocumentKind string

const (
	// KindProfile is a device-plugin document. An empty document is a profile.
	KindProfile DocumentKind = "profile"
	// KindMIGConfigs is a mig-parted document.
	KindMIGConfigs DocumentKind = "mig-configs"
	// KindRules is a list of rules that choose a profile.
	KindRules DocumentKind = "rules"
	// KindConfigMap is the manifest of a Kubernetes ConfigMap.
	KindConfigMap DocumentKind = "ConfigMap"
	// KindManifests are several manifests, or one that contains ConfigMaps or Helm values.
	KindManifests DocumentKind = "manifests"
	// KindHelmValues are the values of a Helm chart that contain profiles.
	KindHelmValues DocumentKind = "Helm values"
)

// File is a document of any kind.
type File struct {
	// Name is the file's name as the caller gave it, or the key of a ConfigMap.
	Name string
	// Place is the place of a document in Entries, as problems name it: "FILE[data.KEY]".
	Place string
	// Line is the line of that document's key.
	Line int
	// Kind determines which of the other fields has the content.
	Kind   DocumentKind
	Config Config // of a mig-parted document and of a file with Entries, only the Notes
	MIG    MIGLayouts
	Rules  Rules
	// Entries are the documents of ConfigMaps or of Helm values, in the order of these, then by
	// Name.
	Entries []File
}

// ParseFile reads a document of any kind. A document with the key kind, apiVersion or data is a
// Kubernetes manifest; with mig-configs it is mig-parted's; with documents below config.map or
// config.data it is a Helm chart's; any other is a device-plugin document. Only manifests may be
// several in a file.
//
// The error is of type Problems and complete. The File then has only Name and Kind.
func ParseFile(file string, data []byte, overrides Overrides) (File, error) {
	return ParseKey(file, data, "", overrides)
}

// ParseKey is ParseFile for a caller that uses only the profile under key in a ConfigMap. It reads
// only the names of other profiles, so it does not report their problems. With an empty key it is
// ParseFile.
func ParseKey(file string, data []byte, key string, overrides Overrides) (File, error) {
	f := File{Name: file, Kind: KindProfile}
	var problems Problems
	source := &source{file: file, problems: &problems}
	reader := manifestReader{
		lines:     strings.Split(string(data), "\n"),
		key:       key,
		overrides: overrides,
	}
	roots, ok := source.openAll(data)
	switch root := roots[0]; {
	case !ok:
	case len(roots) > 1 || kindOf(root) == KindConfigMap:
		f.Kind = reader.kind(roots)
		reader.strict = f.Kind == KindConfigMap
		f.Entries = reader.readAll(roots)
	case !source.checkRoot(root):
	case kindOf(root) == KindMIGConfigs:
		f.Kind, f.MIG = KindMIGConfigs, readMIGConfigs(root)
		f.Config.Notes = source.notes
	case kindOf(root) == KindRules:
		f.Kind, f.Rules = KindRules, readRules(root, nil, false)
	case isHelmValues(root):
		f.Kind, f.Entries = KindHelmValues, reader.readInside(root, true, false)
		if len(f.Entries) == 0 && len(problems) == 0 {
			root.problemHere(
				"these are Helm values without a profile, which would be below config.map or devicePlugin.config.data")
		}
	default:
		f.Config = readProfile(root, overrides, nil)
	}
	if err := problems.err(); err != nil {
		return File{Name: file, Kind: f.Kind}, err
	}
	if f.Kind == KindManifests || f.Kind == KindHelmValues {
		f.Config.Notes = append(source.notes, repeatedKeys(file, f.Entries)...)
	}
	f.Config.Notes = append(f.Config.Notes, sharedUnlike(file, f.Entries)...)
	return f, nil
}

// repeatedKeys returns notes about the keys of profiles that an earlier ConfigMap of the file has
// too.
func repeatedKeys(file string, entries []File) (notes []Note) {
	first := make(map[string]int)
	for _, e := range entries {
		if e.Kind != KindProfile {
			continue
		}
		line, again := first[e.Name]
		if !again {
			first[e.Name] = e.Line
			continue
		}
		notes = append(notes, Note{
			Line: e.Line,
			Path: e.pathIn(file),
			Message: fmt.Sprintf(
				"the key is on line %d already, in another ConfigMap: a profile can be chosen by its key only if one "+
					"ConfigMap of the file has it", line),
		})
	}
	return notes
}

// pathIn returns the path of an entry in its file: "data.KEY".
func (f File) pathIn(file string) string {
	return strings.TrimSuffix(strings.TrimPrefix(f.Place, file+"["), "]")
}

// sharedUnlike returns a note about each resource that one profile of the file shares, and another
// profile offers under the same name unshared or shared in another way.
func sharedUnlike(file string, entries []File) (notes []Note) {
	const elsewhere = "under another name"
	ways := make([]map[string]string, len(entries)) // How each entry shares the units that it offers under a name.
	names := map[string]bool{}
	for i, e := range entries {
		ways[i] = map[string]string{}
		for _, s := range e.Config.Profile.TimeSlicing {
			switch {
			case s.Rename != "" && s.Rename != s.Resource:
				ways[i][s.Resource] = cmp.Or(ways[i][s.Resource], elsewhere)
			case s.Replicas > 1 && s.MPS:
				ways[i][s.Resource], names[s.Resource] = fmt.Sprintf("shared by MPS in %d", s.Replicas), true
			case s.Replicas > 1:
				ways[i][s.Resource], names[s.Resource] = "time-sliced", true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		first, way := "", ""
		for i, e := range entries {
			is := cmp.Or(ways[i][name], "whole")
			switch {
			case e.Kind != KindProfile || is == elsewhere || is == way:
				continue
			case way == "":
				first, way = e.Name, is
				continue
			}
			notes = append(notes, Note{
				Line: e.Line,
				Path: e.pathIn(file),
				Message: fmt.Sprintf(
					"%s is %s here and %s in %s: after a change to whole GPUs, or to or from MPS, the scheduler "+
						"counts the pods of before until they end; with rename, shares have a name of their own",
					name, is, way, quote(first)),
			})
			break
		}
	}
	return notes
}

// kindOf determines the kind from the top-level keys. It reports no problems.
func kindOf(root value) DocumentKind {
	if root.shape() != shapeMapping {
		return KindProfile
	}
	kind := KindProfile
	for i := 0; i < len(root.node.Content); i += 2 {
		if root.node.Content[i].Kind != yaml.ScalarNode {
			continue
		}
		switch root.node.Content[i].Value {
		case "kind", "apiVersion", "data":
			return KindConfigMap
		case migConfigsKey:
			kind = KindMIGConfigs
		case rulesKey:
			kind = KindRules
		}
	}
	return kind
}

// Select returns the device-plugin document to run with. In a ConfigMap it is the document under
// key or, with an empty key, the only one; the error lists the keys to choose from. Other files
// have no keys, and key must be empty.
func (f File) Select(key string) (Config, error) {
	switch {
	case f.Kind == KindMIGConfigs:
		return Config{}, fmt.Errorf("select from %s: it is a mig-parted document, which has no profile", f.Name)
	case f.Kind == KindRules:
		return Config{}, fmt.Errorf("select from %s: it is a list of rules, which has no profile", f.Name)
	case f.Kind == KindProfile && key != "":
		return Config{}, fmt.Errorf("select %s from %s: it is no ConfigMap and has no keys", quote(key), f.Name)
	case f.Kind == KindProfile:
		return f.Config, nil
	}
	config, err := f.choose(key)
	if err != nil {
		return Config{}, fmt.Errorf("select from %s: %w", f.Name, err)
	}
	return config, nil
}

func (f File) choose(key string) (Config, error) {
	var chosen []Config
	var keys, lines []string
	for _, e := range f.Entries {
		if e.Kind == KindProfile {
			keys = append(keys, e.Name)
		} else if e.Name == key && e.Kind == KindRules {
			return Config{}, fmt.Errorf("key %s is a list of rules, which has no profile", key)
		} else if e.Name == key {
			return Config{}, fmt.Errorf("key %s is a mig-parted document, which has no profile", key)
		}
		if e.Kind == KindProfile && (key == "" || e.Name == key) {
			chosen, lines = append(chosen, e.Config), append(lines, strconv.Itoa(e.Line))
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	switch {
	case len(keys) == 0:
		return Config{}, errors.New("no key holds a profile")
	case len(chosen) == 0:
		return Config{}, fmt.Errorf("no key %s, there is %s", quote(key), strings.Join(keys, ", "))
	case len(chosen) > 1 && (key != "" || len(keys) == 1):
		return Config{}, fmt.Errorf("several ConfigMaps have the key %s, on lines %s: leave one of them in the file",
			cmp.Or(key, keys[0]), strings.Join(lines, " and "))
	case len(chosen) > 1:
		return Config{}, fmt.Errorf("several keys hold a profile, choose one of %s", strings.Join(keys, ", "))
	}
	return chosen[0], nil
}

// MIGLayout returns the MIG layout that the file asks for. A non-empty name asks for another layout
// instead: one from the profile that key chooses (see Select), from a mig-parted document, or a
// built-in one. mig.manage is then true, because a caller that names a layout wants it applied.
//
// The error names what cannot be chosen, and lists the layouts if the file has several and name is
// empty.
func (f File) MIGLayout(key, name string) (sharing.MIGConfig, error) {
	config, err := f.Select(key)
	if layouts, ok := f.onlyLayouts(); ok {
		switch {
		case key != "":
			return sharing.MIGConfig{}, fmt.Errorf("select %s from %s: it has no profile", quote(key), f.Name)
		case name == "":
			return sharing.MIGConfig{}, fmt.Errorf("%s has layouts, name one of %s", f.Name,
				strings.Join(layouts.names(), ", "))
		}
		config.Layouts = layouts
	} else if err != nil || name == "" {
		return config.Profile.MIG, err
	}
	config.Profile.MIG.Manage = true
	config.Profile.MIG.WhenBusy = cmp.Or(config.Profile.MIG.WhenBusy, sharing.WaitWhenBusy)
	config, err = config.SelectMIG(name)
	return config.Profile.MIG, err
}

// onlyLayouts returns the layouts of a file without a profile; false if it has a profile.
func (f File) onlyLayouts() (MIGLayouts, bool) {
	if f.Kind == KindMIGConfigs {
		return f.MIG, true
	}
	var layouts MIGLayouts
	for _, e := range f.Entries {
		if e.Kind == KindProfile {
			return nil, false
		}
		layouts = layouts.merge(e.MIG)
	}
	return layouts, len(layouts) > 0
}

// manifestReader reads the documents in Kubernetes manifests and in Helm values: device-plugin
// documents, each with the overrides, and mig-parted documents. With a key it omits the content of
// other device-plugin documents.
//
// Problems and notes call a document "FILE[data.KEY]". They count its lines from the start of the
// file if it is a literal block ("|") there, otherwise from the start of the document.
type manifestReader struct {
	// lines are the lines of the file.
	lines     []string
	key       string
	overrides Overrides
	// strict reads every ConfigMap. Otherwise ConfigMaps without a document for GPUs are skipped,
	// like the manifests of other programs.
	strict bool
}

// kind returns KindConfigMap for a single ConfigMap, or for a single manifest that was meant as
// one.
func (r manifestReader) kind(roots []value) DocumentKind {
	if len(roots) == 1 && r.kindKey(roots[0]) != kindList && !isOther(r.kindKey(roots[0])) {
		return KindConfigMap
	}
	return KindManifests
}

const kindList = "List"

// kindKey returns the manifest's kind; "" if it is missing or not text.
func (r manifestReader) kindKey(root value) string {
	for _, e := range root.pairsQuietly() {
		if e.key == "kind" && e.value.shape() == shapeText {
			return e.value.node.Value
		}
	}
	return ""
}

// isOther reports whether kind is the kind of a manifest whose content is unknown here.
func isOther(kind string) bool { return kind != "" && kind != "ConfigMap" && kind != kindList }

// readAll reads the manifests of a file. Manifests that contain no document are skipped, unless the
// file has nothing else.
func (r manifestReader) readAll(roots []value) (entries []File) {
	from := roots[0].source
	before := len(*from.problems)
	for i, root := range roots {
		if root.shape() != shapeMapping || kindOf(root) != KindConfigMap {
			// A profile, or a document that was meant as one of several manifests.
			root.source.reportSecond(roots[max(i, 1)])
			return nil
		}
		entries = append(entries, r.readManifest(root)...)
	}
	if len(entries) > 0 || len(*from.problems) > before {
		return entries
	}
	if !r.strict { // There may be documents for GPUs that are hard to recognize.
		r.strict, from.notes = true, nil
		return r.readAll(roots)
	}
	if kind := r.kindKey(roots[0]); len(roots) > 1 || kind == kindList {
		roots[0].problemHere("no ConfigMap with a document is in this file")
	} else if kind == "ClusterPolicy" {
		roots[0].problemHere(
			"a ClusterPolicy has no profile: it is in the ConfigMap that spec.devicePlugin.config.name names")
	} else if isOther(kind) {
		roots[0].problemHere("no profile is in this " + quote(kind) +
			": expected a ConfigMap, a List with some, or Helm values with documents below config.map or " +
			"devicePlugin.config.data")
	}
	return nil
}

func (r manifestReader) readManifest(root value) (entries []File) {
	switch kind := r.kindKey(root); {
	case kind == kindList:
		for _, item := range (walker{}).read(root, listKeys).at("items").items {
			if item.shape() != shapeMapping {
				item.problem("expected a manifest")
				continue
			}
			entries = append(entries, r.readManifest(item)...)
		}
		return entries
	case isOther(kind):
		return r.readInside(root, false, false)
	case !r.strict && !r.hasDocuments(dataOf(root)):
		return nil
	}
	return r.readConfigMap(root)
}

// dataOf returns the data of a ConfigMap; absent if it has none.
func dataOf(root value) value {
	for _, e := range root.pairsQuietly() {
		if e.key == "data" {
			return e.value
		}
	}
	return value{
		source: root.source,
		path:   "data",
		line:   root.line,
	}
}

// hasDocuments reports whether a text of the mapping is a document for GPUs, or would be with
// correct syntax. If none is, it adds a note.
func (r manifestReader) hasDocuments(data value) bool {
	quiet := *data.source
	quiet.problems = new(Problems)
	for _, e := range data.pairsQuietly() {
		if e.value.shape() != shapeText {
			continue
		}
		if e.key == RulesName {
			return true
		}
		e.value.source = &quiet
		root, ok := openData(e, r.lines)
		if ok && isForGPUs(root) || !ok && documentLine.MatchString(e.value.node.Value) {
			return true
		}
	}
	if !data.absent() {
		data.note("is not read: no text in it is a profile or mig-parted's")
	}
	return false
}

// documentLine matches the beginning of a profile or of mig-parted's document.
var documentLine = regexp.MustCompile(`(?m)(^|[{,])\s*["']?(version["']?: *["']?v[0-9]|(flags|sharing|` +
	migConfigsKey + `)["']?:)`)

// isForGPUs reports whether the root is mig-parted's, or has a profile's version or one of its
// sections.
func isForGPUs(root value) bool {
	for _, e := range root.pairsQuietly() {
		if e.key == migConfigsKey || e.key == "version" && e.value.shape() == shapeText &&
			profileVersion.MatchString(e.value.node.Value) {
			return true
		}
		section := profileKeys.child(e.key)
		for _, inner := range e.value.pairsQuietly() {
			if section != nil && section.child(inner.key) != nil {
				return true
			}
		}
	}
	return false
}

// profileVersion matches the version of a profile.
var profileVersion = regexp.MustCompile(`^v[0-9]+$`)

func (r manifestReader) readConfigMap(root value) []File {
	return r.readData(walker{}.read(root, configMapKeys).at("data").entries)
}

// readData reads the documents of a mapping from keys to texts.
func (r manifestReader) readData(data []entry) (entries []File) {
	roots := make(map[string]value)
	var layouts MIGLayouts
	var rules []entry
	var names []string
	for _, e := range data {
		if e.key == RulesName {
			rules = append(rules, e)
			continue
		}
		names = append(names, e.key)
		before := *e.value.source.problems
		root, ok := openData(e, r.lines)
		if r.key != "" && e.key != r.key && (!ok || kindOf(root) != KindMIGConfigs) {
			*e.value.source.problems = before
			entries = append(entries, File{
				Name: e.key,
				Line: e.place.line,
				Kind: KindProfile,
			})
			continue
		}
		if !ok {
			continue
		}
		roots[e.key] = root
		// A key's text never holds a ConfigMap, whatever it looks like.
		entry := File{
			Name:  e.key,
			Place: root.source.file,
			Line:  e.place.line,
			Kind:  KindProfile,
		}
		if kindOf(root) == KindMIGConfigs {
			entry.Kind, entry.MIG = KindMIGConfigs, readMIGConfigs(root)
			entry.Config.Notes = root.source.notes
		}
		entries = append(entries, entry)
	}
	slices.SortFunc(entries, func(a, b File) int { return cmp.Compare(a.Name, b.Name) })
	for _, e := range entries {
		layouts = layouts.merge(e.MIG)
	}
	// Profiles come last, because they can name the layouts of the other keys.
	for i, e := range entries {
		if root, ok := roots[e.Name]; ok && e.Kind == KindProfile {
			entries[i].Config = readProfile(root, r.overrides, layouts)
		}
	}
	if r.key != "" {
		return entries
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		return slices.ContainsFunc(entries, func(e File) bool { return e.Kind == KindMIGConfigs && e.Name == name })
	})
	slices.Sort(names)
	for _, e := range rules {
		if root, ok := openData(e, r.lines); ok {
			read := File{
				Name:  e.key,
				Place: root.source.file,
				Line:  e.place.line,
				Kind:  KindRules,
				Rules: readRules(root, names, true),
			}
			if len(names) == 1 {
				message := "NVIDIA's config-manager takes this for a second profile, so its fallback single finds " +
					"none: set a default there"
				read.Config.Notes = []Note{{Line: root.line, Message: message}}
			}
			entries = append(entries, read.checkLayouts(entries))
		}
	}
	return entries
}

// checkLayouts reports the file's rules whose layouts their profiles cannot have. entries include
// the profiles.
func (f File) checkLayouts(entries []File) File {
	for i, rule := range f.Rules.List {
		if at := slices.IndexFunc(entries,
			func(e File) bool { return e.Kind == KindProfile && e.Name == rule.Profile }); at >= 0 {
			rule.checkLayout(i+1, entries[at].Config)
		}
	}
	return f
}

// readInside reads the documents below config.map (the charts of NVIDIA's plugin and of Virgate)
// and config.data (the GPU Operator's chart). It also reads them in values given as text, as in
// k3s's HelmChart and Argo CD's Application. Everything else belongs to other programs. top is true
// at the top of a chart's values, known inside a section for GPUs. Elsewhere another program may
// use the same keys, so their texts are read only if one looks like a document for GPUs.
func (r manifestReader) readInside(v value, top, known bool) (entries []File) {
	for _, item := range v.list() {
		entries = append(entries, r.readInside(item, false, known)...)
	}
	for _, e := range v.pairsQuietly() {
		isValues := slices.Contains([]string{"values", "valuesContent", "valuesObject"}, e.key)
		switch shape := e.value.shape(); {
		case e.key == "config" && shape == shapeMapping:
			for _, inner := range e.value.pairsQuietly() {
				if inner.value.shape() == shapeMapping && (inner.key == "map" || inner.key == "data") &&
					(top || known || r.hasDocuments(inner.value)) {
					entries = append(entries, r.readData(inner.value.pairs())...)
				}
			}
			entries = append(entries, readChartRules(e.value, entries)...)
		case shape == shapeText && isValues:
			entries = append(entries, r.readValues(e)...)
		case shape == shapeMapping || shape == shapeList:
			entries = append(entries, r.readInside(e.value, isValues, known || slices.Contains(gpuSections, e.key))...)
		}
	}
	return entries
}

// readChartRules reads config.rules of this chart's values. The rules can name the profiles of
// config.map among the entries. Without config.map they name the chart's own profiles, which are
// not known here.
func readChartRules(config value, entries []File) []File {
	var rules, spread, profiles value
	for _, e := range config.pairsQuietly() {
		switch e.key {
		case rulesKey:
			rules = e.value
		case "rulesSpread":
			spread = e.value
		case "map":
			profiles = e.value
		}
	}
	isRule := func(v value) bool {
		return slices.ContainsFunc(v.pairsQuietly(), func(e entry) bool { return e.key == "profile" })
	}
	if rules.source == nil || !slices.ContainsFunc(rules.list(), isRule) {
		return nil
	}
	read := File{
		Name:  rulesKey,
		Place: rules.source.file,
		Line:  rules.line,
		Kind:  KindRules,
	}
	var names []string
	for _, e := range profiles.pairsQuietly() {
		if !slices.ContainsFunc(entries, func(f File) bool { return f.Kind == KindMIGConfigs && f.Name == e.key }) {
			names = append(names, e.key)
		}
	}
	slices.Sort(names)
	rules = walker{}.read(rules, rulesKeys.child(rulesKey))
	read.Rules.List = readRuleList(rules.items, names, len(names) > 0)
	if spread.source != nil {
		read.Rules.Spread = content[time.Duration](walker{}.read(spread, rulesKeys.child("spread")))
	}
	return []File{read.checkLayouts(entries)}
}

// readValues reads the documents in a chart's values that are given as text. Invalid YAML is
// reported only if it looks like such values.
func (r manifestReader) readValues(e entry) []File {
	before := *e.value.source.problems
	root, ok := openData(e, r.lines)
	if !ok {
		if !valuesLine.MatchString(e.value.node.Value) {
			*e.value.source.problems = before
		}
		return nil
	}
	entries := r.readInside(root, true, false)
	e.value.source.notes = append(e.value.source.notes, root.source.notes...)
	return entries
}

// gpuSections are the sections of the GPU Operator's values that have documents.
var gpuSections = []string{"devicePlugin", "migManager"}

var valuesLine = regexp.MustCompile(`(?m)^\s*(config|devicePlugin|migManager):`)

// isHelmValues reports whether the root has a key of a Helm chart that no profile has, and no key
// that only profiles have. Charts have the keys resources, mig and dra too.
func isHelmValues(root value) bool {
	for _, e := range root.pairsQuietly() {
		if profileKeys.child(e.key) != nil && !slices.Contains([]string{"resources", "mig", "dra"}, e.key) {
			return false
		}
	}
	return hasChartKey(root)
}

func hasChartKey(root value) bool {
	for _, e := range root.pairsQuietly() {
		if e.value.shape() != shapeMapping || profileKeys.child(e.key) != nil {
			continue
		}
		if e.key == "config" || slices.Contains(gpuSections, e.key) || hasChartKey(e.value) {
			return true
		}
	}
	return false
}

var dataKey = regexp.MustCompile(`^[-._a-zA-Z0-9]+$`)

// openData opens the document under a key. It refuses the keys and values that the API server
// refuses (Kubernetes, apimachinery validation.IsConfigMapKey).
func openData(e entry, manifest []string) (value, bool) {
	if len(e.key) > 253 || !dataKey.MatchString(e.key) || e.key == "." || strings.HasPrefix(e.key, "..") {
		e.problem("a ConfigMap's key has letters, digits, '-', '_' and '.' only")
		return value{}, false
	}
	if e.value.shape() != shapeText {
		e.value.problem("expected a document as text, as after \"|\"")
		return value{}, false
	}
	text := e.value.node.Value
	inner := &source{
		file:     fmt.Sprintf("%s[%s]", e.value.source.file, e.value.path),
		offset:   literalOffset(e.value, text, manifest),
		problems: e.value.source.problems,
	}
	return inner.open([]byte(text))
}

// literalOffset returns the number of lines of the manifest before the text, if the text is written
// there line by line; otherwise 0, as for quoted text.
func literalOffset(v value, text string, manifest []string) int {
	for i, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		at := v.line + i
		if at >= len(manifest) || !strings.HasSuffix(strings.TrimRight(manifest[at], "\r"), line) {
			return 0
		}
	}
	return v.line
}
