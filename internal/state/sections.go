package state

import (
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// listsSection is the section that Lists keeps.
const listsSection = "lists"

// Lists keeps the list of every resource; it is a plugin.Store.
type Lists struct{ File *File }

// storedEntry is a device in a list. Its health is not kept, because it is read again.
type storedEntry struct {
	ID    string `json:"id"`
	Unit  string `json:"unit"`
	Index string `json:"index,omitempty"`
	NUMA  int    `json:"numa"`
	// Shared is true if the device is a time-slice although it has the unit's ID. Whole is since when
	// its unit is to be time-sliced while a pod that was promised the whole unit may hold the device.
	Shared bool       `json:"shared,omitempty"`
	Whole  *time.Time `json:"whole,omitempty"`
	// Closing is since when the device has been surplus and held by a pod.
	Closing *time.Time `json:"closing,omitempty"`
	// Leaving is true if the device was listed as Unhealthy because it was surplus and free.
	Leaving bool `json:"leaving,omitempty"`
}

// Load returns the lists of the last run; none without a state file.
func (l Lists) Load() (plugin.Lists, error) {
	var stored map[string][]storedEntry
	if ok, err := l.File.Read(listsSection, &stored); !ok {
		return nil, err
	}
	lists := plugin.Lists{}
	for resource, entries := range stored {
		list := plugin.List{}
		for _, e := range entries {
			entry := plugin.Entry{
				Device: sharing.Device{
					ID:       e.ID,
					Unit:     e.Unit,
					NUMANode: e.NUMA,
					Healthy:  !e.Leaving,
				},
				Mode:  sharing.ModeOf(e.ID),
				Index: e.Index,
				Phase: plugin.Offered,
			}
			if e.Shared {
				entry.Mode = sharing.TimeSliced
			}
			if e.Whole != nil {
				entry.Whole, entry.Since = true, *e.Whole
			}
			switch {
			case e.Closing != nil:
				entry.Phase, entry.Since = plugin.HeldSurplus, *e.Closing
			case e.Leaving: // Its unit may already be offered in another mode.
				entry.Phase, entry.Since = plugin.Removing, time.Time{}
			}
			list.Entries = append(list.Entries, entry)
		}
		lists[resource] = list
	}
	return lists, nil
}

// Save stores the lists, and returns once they are on disk.
func (l Lists) Save(lists plugin.Lists) error {
	stored := make(map[string][]storedEntry, len(lists))
	for resource, list := range lists {
		entries := make([]storedEntry, len(list.Entries))
		for i, e := range list.Entries {
			entries[i] = storedEntry{
				ID:      e.ID,
				Unit:    e.Unit,
				Index:   e.Index,
				NUMA:    e.NUMANode,
				Leaving: e.Phase == plugin.Removing,
			}
			entries[i].Shared = e.Mode == sharing.TimeSliced && e.ID == e.Unit
			if e.Whole {
				entries[i].Whole = new(e.Since.UTC())
			}
			if e.Phase == plugin.HeldSurplus {
				entries[i].Closing = new(e.Since.UTC())
			}
		}
		stored[resource] = entries
	}
	return l.File.Write(listsSection, stored)
}

// The names of sections for Section.
const (
	HealthSection  = "health"   // fatal errors of units
	GPUSection     = "gpus"     // known GPUs
	ReleaseSection = "releases" // released GPUs, see release.Release
	// PersistenceSection has the GPUs whose persistence mode is off, see release.PersistenceOff.
	PersistenceSection = "persistence"
	SettingSection     = "settings" // GPUs with changed settings, see gpusettings.ChangedGPU
	FactSection        = "facts"    // the facts about GPUs that rules depend on
)

// Section keeps a list in the section Name. JSON must be able to encode each element, a T.
type Section[T any] struct {
	File *File
	Name string
}

// Load returns the list of the last run; none without a state file.
func (s Section[T]) Load() ([]T, error) {
	var list []T
	if ok, err := s.File.Read(s.Name, &list); !ok || len(list) == 0 {
		return nil, err
	}
	return list, nil
}

// Save stores the list, and returns once it is on disk.
func (s Section[T]) Save(list []T) error {
	return s.File.Write(s.Name, append([]T{}, list...))
}

// profileSection is the section that Profile keeps.
const profileSection = "profile"

// Profile keeps where the profile in force was found, and its documents, which are parsed again.
type Profile struct{ File *File }

// Load returns the last run's profile, whose documents are not parsed yet; false if there is none.
func (p Profile) Load() (configs.SelectedProfile, bool, error) {
	var s configs.SelectedProfile
	if ok, err := p.File.Read(profileSection, &s); !ok {
		return configs.SelectedProfile{}, false, err
	}
	return s, true, nil
}

// Save stores the profile, and returns once it is on disk.
func (p Profile) Save(s configs.SelectedProfile) error {
	return p.File.Write(profileSection, s)
}

// Peek is Load for a program that does not serve the node yet. It changes nothing, and treats an
// unusable file like a file without a profile.
func (p Profile) Peek() (configs.SelectedProfile, bool) {
	data, err := readLimited(p.File.path)
	if err != nil {
		return configs.SelectedProfile{}, false
	}
	aside := &File{path: p.File.path}
	aside.sections, err = parse(data)
	if err != nil {
		return configs.SelectedProfile{}, false
	}
	stored, ok, err := Profile{aside}.Load()
	return stored, ok && err == nil
}
