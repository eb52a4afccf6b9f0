package configs

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// Documents are texts by name: the data of a ConfigMap in the cluster, or the files of a
// directory where one is mounted. Unlike in a manifest, a problem in one does not concern
// the others, because each node reads only the one that it was told to.
type Documents map[string]string

// ProfileNames returns the sorted names of the documents but for mig-parted's.
func (d Documents) ProfileNames() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(d)), d.isLayouts)
}

// isLayouts says that the document is a mig-parted document.
func (d Documents) isLayouts(name string) bool {
	// Parsing a ConfigMap's whole mebibyte to find one profile would be slow. The
	// key is there literally, unless an escape or another encoding hides it.
	text := d[name]
	if !strings.Contains(text, migConfigsKey) && !strings.ContainsAny(text, "\\\x00") {
		return false
	}
	source := &source{file: name, problems: &Problems{}}
	root, ok := source.open([]byte(text))
	return ok && kindOf(root) == KindMIGConfigs
}

// Select reads the profile with the name. It can use the layouts of the mig-parted documents
// beside it; what is wrong with those is reported only if the profile is wrong, too. The
// source says where the documents are, for messages and for SelectedProfile.
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
		if other == name || !d.isLayouts(other) {
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

// SelectedProfile is a profile and where it was found. JSON leaves out what Documents say.
type SelectedProfile struct {
	Config `json:"-"`
	// Name is the ConfigMap's key, or the file's name in a directory; "" for neither.
	Name string `json:"name,omitempty"`
	// Source is where the profile was read, for people: "ConfigMap gpu/profiles",
	// "/etc/virgate/profile.yaml", "flags".
	Source string `json:"source"`
	// Generation is Generation(Profile).
	Generation string `json:"generation"`
	// Layout is the MIG layout of the node's label (see SelectMIG), "" for the profile's.
	Layout string `json:"layout,omitempty"`
	// Documents are the texts that the profile was read from, by name, to be stored and read
	// again. A single file has the name "". There are none for flags alone.
	Documents map[string]string `json:"documents,omitempty"`
}

// SelectedFrom adds to a Config where it was read.
func (c Config) SelectedFrom(source, name string, documents map[string]string) SelectedProfile {
	return SelectedProfile{Config: c, Name: name, Source: source, Generation: Generation(c.Profile), Documents: documents}
}

// SelectMIG is Config.SelectMIG for a selected profile, whose generation changes
// with the layout, and for those that are Allowed. The error is ErrMIGLayout.
func (s SelectedProfile) SelectMIG(name string) (SelectedProfile, error) {
	if s.Profile.MIG.Manage && name != "" && s.Allowed != nil && !slices.Contains(s.Allowed, name) {
		return s, fmt.Errorf("%w %s: mig.allowed does not have it, only %q", ErrMIGLayout, quote(name), s.Allowed)
	}
	config, err := s.Config.SelectMIG(name)
	if err != nil {
		return s, err
	}
	s.Config, s.Generation, s.Layout = config, Generation(config.Profile), name
	return s, nil
}

// String names the profile for people: "SOURCE[NAME]", or the source alone.
func (s SelectedProfile) String() string {
	if s.Name == "" {
		return s.Source
	}
	return fmt.Sprintf("%s[%s]", s.Source, s.Name)
}

// ErrPending says that the profile is not known yet, for example because the
// node's label has not been read. No document is at fault.
var ErrPending = errors.New("not known yet")

// Generation is a hash of a profile: 12 hexadecimal digits. Profiles with the
// same settings have the same one, however their documents are written. It is
// stable within a release of Virgate, but not from one release to another.
func Generation(p sharing.Profile) string {
	// Go syntax has every field, exported or not, and sorts maps. It would show
	// the addresses of pointers; a test ensures that a Profile has none.
	sum := sha256.Sum256(fmt.Appendf(nil, "%#v", p))
	return hex.EncodeToString(sum[:6])
}
