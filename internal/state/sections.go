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

// storedEntry is a device of a list. Its health is not kept, but read again.
type storedEntry struct {
	ID    string `json:"id"`
	Unit  string `json:"unit"`
	Index string `json:"index,omitempty"`
	NUMA  int    `json:"numa"`
	// Shared says that the device is a time-slice though it has the unit's ID, Whole since when
	// its unit is to be time-sliced and a pod may hold it that was promised the whole unit.
	Shared bool       `json:"shared,omitempty"`
	Whole  *time.Time `json:"whole,omitempty"`
	// Closing says since when a surplus device has been held by a pod.
	Closing *time.Time `json:"closing,omitempty"`
	// Leaving says that the device was listed Unhealthy, as surplus and free.
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
				entry.Phase, entry.Since = plugin.Closing, *e.Closing
			case e.Leaving: // Its unit may be offered in another mode already.
				entry.Phase, entry.Since = plugin.Retiring, time.Time{}
			}
			list.Entries = append(list.Entries, entry)
		}
		lists[resource] = list
	}
	return lists, nil
}

// Save keeps the lists and returns when they are on disk.
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
				Leaving: e.Phase == plugin.Retiring,
			}
			entries[i].Shared = e.Mode == sharing.TimeSliced && e.ID == e.Unit
			if e.Whole {
				entries[i].Whole = new(e.Since.UTC())
			}
			if e.Phase == plugin.Closing {
				entries[i].Closing = new(e.Since.UTC())
			}
		}
		stored[resource] = entries
	}
	return l.File.Write(listsSection, stored)
}

// The sections that a Section keeps.
const (
	HealthSection  = "health"   // fatal errors of units
	GPUSection     = "gpus"     // GPUs that are known
	ReleaseSection = "releases" // GPUs that are released, see release.Release
	// PersistenceSection has GPUs whose persistence mode is off, see release.PersistenceOff.
	PersistenceSection = "persistence"
	SettingSection     = "settings" // GPUs of which something was set, see gpusettings.ChangedGPU
	FactSection        = "facts"    // what rules depend on, of GPUs
)

// Section keeps a list in the section Name, each element a T that JSON can encode.
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

// Save keeps the list and returns when it is on disk.
func (s Section[T]) Save(list []T) error {
	return s.File.Write(s.Name, append([]T{}, list...))
}

// profileSection is the section that Profile keeps.
const profileSection = "profile"

// Profile keeps where the profile in force was found, and its documents, to be parsed again.
type Profile struct{ File *File }

// Load returns the last run's profile but for what its documents say; false without one.
func (p Profile) Load() (configs.SelectedProfile, bool, error) {
	var s configs.SelectedProfile
	if ok, err := p.File.Read(profileSection, &s); !ok {
		return configs.SelectedProfile{}, false, err
	}
	return s, true, nil
}

// Save keeps the profile and returns when it is on disk.
func (p Profile) Save(s configs.SelectedProfile) error {
	return p.File.Write(profileSection, s)
}

// Peek is Load for a program that does not serve the node yet: it changes nothing,
// and a file that cannot be used counts as one without a profile.
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
