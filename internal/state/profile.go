package state

import "github.com/virgate/virgate/configs"

// profileSection is the section that Profile keeps.
const profileSection = "profile"

// Profile keeps where the profile in force was found and what stood there. What
// it says is read again by the program that loads it.
type Profile struct{ File *File }

// storedProfile is a profile's documents.
type storedProfile struct {
	Name       string            `json:"name,omitempty"`
	Source     string            `json:"source"`
	Generation string            `json:"generation"`
	Layout     string            `json:"layout,omitempty"`
	Documents  map[string]string `json:"documents,omitempty"`
}

// Load returns the profile of the last run, but for what its documents say;
// false without one.
func (p Profile) Load() (configs.Selected, bool, error) {
	var s storedProfile
	if ok, err := p.File.Read(profileSection, &s); !ok {
		return configs.Selected{}, false, err
	}
	return configs.Selected{Name: s.Name, Source: s.Source, Generation: s.Generation, Layout: s.Layout, Documents: s.Documents}, true, nil
}

// Save keeps the profile and returns when it is on disk.
func (p Profile) Save(s configs.Selected) error {
	return p.File.Write(profileSection, storedProfile{Name: s.Name, Source: s.Source, Generation: s.Generation, Layout: s.Layout, Documents: s.Documents})
}

// Peek is Load for a program that does not serve the node yet: it changes
// nothing, and whatever is wrong with the file counts as no profile.
func (p Profile) Peek() (configs.Selected, bool) {
	data, err := readLimited(p.File.path)
	if err != nil {
		return configs.Selected{}, false
	}
	aside := &File{path: p.File.path}
	if aside.sections, err = parse(data); err != nil {
		return configs.Selected{}, false
	}
	stored, ok, err := Profile{aside}.Load()
	return stored, ok && err == nil
}
