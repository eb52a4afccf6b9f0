package state

import (
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// journalSection is the section that Journal keeps.
const journalSection = "journal"

// Journal keeps what must be known of the boards that are cut.
type Journal struct{ File *File }

type storedJournal struct {
	Underway []storedRecut `json:"underway"`
	Enabled  []string      `json:"enabled"`
}

type storedRecut struct {
	GPU    string            `json:"gpu"`
	Before storedArrangement `json:"before"`
	After  storedArrangement `json:"after"`
}

type storedArrangement struct {
	MIG        bool         `json:"mig"`
	Partitions []mig.Placed `json:"partitions"`
}

// Load returns the journal of the last run; an empty one without a state file.
func (j Journal) Load() (sharing.CutJournal, error) {
	var stored storedJournal
	if ok, err := j.File.Read(journalSection, &stored); !ok {
		return sharing.CutJournal{}, err
	}
	journal := sharing.CutJournal{Enabled: stored.Enabled}
	for _, s := range stored.Underway {
		journal.Underway = append(journal.Underway, sharing.Recut{GPU: s.GPU, Before: sharing.Arrangement(s.Before), After: sharing.Arrangement(s.After)})
	}
	return journal, nil
}

// Save keeps the journal and returns when it is on disk. On an error the last one
// stays: unlike other sections, which a later write brings along, a change that
// could not be kept does not begin, and must not be found by the next run.
func (j Journal) Save(journal sharing.CutJournal) error {
	stored := storedJournal{Underway: []storedRecut{}, Enabled: append([]string{}, journal.Enabled...)}
	for _, r := range journal.Underway {
		stored.Underway = append(stored.Underway, storedRecut{GPU: r.GPU, Before: storedArrangement(r.Before), After: storedArrangement(r.After)})
	}
	return j.File.writeOrForget(journalSection, stored)
}
