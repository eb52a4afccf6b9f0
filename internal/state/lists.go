package state

import (
	"time"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// listsSection is the section that Lists keeps.
const listsSection = "lists"

// Lists keeps what every resource advertises; it is a plugin.Store.
type Lists struct{ File *File }

// storedEntry is a device of a list. Health is not kept: it is seen anew.
type storedEntry struct {
	ID    string `json:"id"`
	Unit  string `json:"unit"`
	Index string `json:"index,omitempty"`
	NUMA  int    `json:"numa"`
	// Closing is since when a surplus device has been held by a pod.
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
				Device: sharing.Device{ID: e.ID, Unit: e.Unit, NUMANode: e.NUMA, Healthy: !e.Leaving},
				Index:  e.Index, Phase: plugin.Offered,
			}
			if e.Closing != nil {
				entry.Phase, entry.Since = plugin.Closing, *e.Closing
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
			entries[i] = storedEntry{ID: e.ID, Unit: e.Unit, Index: e.Index, NUMA: e.NUMANode, Leaving: e.Phase == plugin.Retiring}
			if e.Phase == plugin.Closing {
				since := e.Since.UTC()
				entries[i].Closing = &since
			}
		}
		stored[resource] = entries
	}
	return l.File.Write(listsSection, stored)
}
