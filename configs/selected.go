package configs

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// Selected is a profile, and where it was found.
type Selected struct {
	Profile sharing.Profile
	// Name is the ConfigMap's key, or the file's name in a directory; "" for a file
	// with one profile and for flags alone.
	Name string
	// Source is where the profile was read, for people: "ConfigMap gpu/profiles",
	// "/etc/virgate/profile.yaml", "flags".
	Source string
	// Generation is Generation(Profile).
	Generation string
	// Layout is the MIG layout that the node's label wants, by SelectMIG; "" for
	// the profile's own. Layouts are those that can be wanted, as in Config.
	Layout  string
	Layouts MIGConfigs
	// Process are the settings that cannot change in a running process, as the
	// document and the overrides have them.
	Process Process
	// Notes are as in Config.
	Notes []Note
	// Documents are the texts that the profile was read from, by name, so that it
	// can be kept and read again. A file is under ""; flags alone have none.
	Documents map[string]string
}

// Select completes a Config to a Selected.
func (c Config) Select(source, name string, documents map[string]string) Selected {
	return Selected{
		Profile: c.Profile, Name: name, Source: source, Generation: Generation(c.Profile),
		Layouts: c.Layouts, Process: c.Process, Notes: c.Notes, Documents: documents,
	}
}

// SelectMIG is Config.SelectMIG for a profile that was selected: its generation
// is that of the profile with the other layout. The error is ErrLayout.
func (s Selected) SelectMIG(name string) (Selected, error) {
	config, err := Config{Profile: s.Profile, Layouts: s.Layouts}.SelectMIG(name)
	if err != nil {
		return s, err
	}
	s.Profile, s.Generation, s.Layout = config.Profile, Generation(config.Profile), name
	return s, nil
}

// String is what people call the profile: the source, and the name in it if it
// has one.
func (s Selected) String() string {
	if s.Name == "" {
		return s.Source
	}
	return fmt.Sprintf("%s[%s]", s.Source, s.Name)
}

// ErrPending says that the profile is not known yet, for example because the
// node's label has not been read. It is no fault of a profile.
var ErrPending = errors.New("not known yet")

// Generation is a short name for what a profile says: 12 hexadecimal digits.
// Two profiles with the same settings have the same one, however their
// documents are written. It is stable within a release of Virgate; another
// release may call the same profile differently.
func Generation(p sharing.Profile) string {
	// Go syntax has every field, exported or not, and sorts maps. It would show
	// addresses for pointers; a test sees to it that a Profile has none.
	sum := sha256.Sum256(fmt.Appendf(nil, "%#v", p))
	return hex.EncodeToString(sum[:6])
}
