package migchange

import (
	"fmt"
	"slices"
	"sync"

	"github.com/virgate/virgate/mig"
)

// Journal is what must be known after a crash or a reboot of the GPUs whose MIG
// layout Virgate changes. It is written before the first step of a change and after
// the last, and never modified in place.
type Journal struct {
	Underway []Record `json:"underway"` // changes that have begun and not ended
	// Enabled are the UUIDs of the GPUs that Virgate keeps in MIG mode. Nobody has
	// been given one as a whole, so whoever finds the mode off may enable it again.
	Enabled []string `json:"enabled"`
	// PausedClients are labels of the Node that say since a change that programs are paused: see ClientLabels.
	PausedClients []string `json:"pausedClients,omitempty"`
}

// Record is a change of a GPU that has begun: it must be finished, or undone,
// before the GPU is used again.
type Record struct {
	// GPU is the GPU's UUID.
	GPU string `json:"gpu"`
	// Before is how it was partitioned, After how it is to be.
	Before mig.PlacedLayout `json:"before"`
	After  mig.PlacedLayout `json:"after"`
}

// Store keeps the journal, as the state file does.
type Store interface {
	// Read fills value from the section; false when there is none.
	Read(section string, value any) (bool, error)
	// WriteOrForget makes value the section's content, and returns when it is on disk.
	// On an error the section is as before, and no later write brings value along: a
	// change that could not be recorded does not begin, and the next run must not find
	// it.
	WriteOrForget(section string, value any) error
}

// section is the journal's in the Store.
const section = "journal"

func loadJournal(store Store) (Journal, error) {
	if store == nil {
		return Journal{}, nil
	}
	var j Journal
	if _, err := store.Read(section, &j); err != nil {
		return Journal{}, err
	}
	return j, nil
}

func (j Journal) save(store Store) error {
	if store == nil {
		return nil
	}
	return store.WriteOrForget(section, Journal{
		Underway:      append([]Record{}, j.Underway...),
		Enabled:       append([]string{}, j.Enabled...),
		PausedClients: j.PausedClients,
	})
}

// record is the GPU's change; false for none.
func (j Journal) record(gpu string) (Record, bool) {
	i := slices.IndexFunc(j.Underway, func(r Record) bool { return r.GPU == gpu })
	if i < 0 {
		return Record{}, false
	}
	return j.Underway[i], true
}

// begin is the journal with that change under way.
func (j Journal) begin(r Record) Journal {
	j.Underway = append(slices.Clone(j.Underway), r)
	if !r.After.MIG {
		j = j.withEnabled(r.GPU, false)
	}
	return j
}

// end is the journal when nothing is under way on the GPU.
func (j Journal) end(gpu string) Journal {
	j.Underway = slices.DeleteFunc(slices.Clone(j.Underway), func(r Record) bool { return r.GPU == gpu })
	return j
}

// withEnabled is the journal of a Virgate that keeps the GPU in MIG mode, or does
// not.
func (j Journal) withEnabled(gpu string, enabled bool) Journal {
	j.Enabled = slices.DeleteFunc(slices.Clone(j.Enabled), func(other string) bool { return other == gpu })
	if enabled {
		j.Enabled = append(j.Enabled, gpu)
	}
	return j
}

// keeper keeps the journal in the Store, and has what is offered follow it. Any goroutine may
// call its methods.
type keeper struct {
	*Options
	offers *offers

	// mu is held while the journal is written and offers follow it, so that both happen in
	// the same order.
	mu      sync.Mutex
	loaded  bool
	journal Journal
}

// load reads the journal, the first time.
func (k *keeper) load() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.loaded {
		return
	}
	k.loaded = true
	var err error
	k.journal, err = loadJournal(k.Store)
	if err != nil {
		k.Logger.Error("journal of MIG changes not read", "error", err)
	}
	k.offers.follow(k.journal)
}

// current is the journal, which is never modified.
func (k *keeper) current() Journal {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.journal
}

func (k *keeper) save(edit func(Journal) Journal) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	next := edit(k.journal)
	if err := next.save(k.Store); err != nil {
		return fmt.Errorf("keep the journal: %w", err)
	}
	k.journal = next
	k.offers.follow(next)
	return nil
}

// saveEnabled keeps whether Virgate keeps the GPU in MIG mode.
func (k *keeper) saveEnabled(gpu string, enabled bool) {
	if slices.Contains(k.current().Enabled, gpu) == enabled {
		return
	}
	if err := k.save(func(j Journal) Journal { return j.withEnabled(gpu, enabled) }); err != nil {
		k.Logger.Error("MIG mode not kept for a restart", "gpu", gpu, "error", err)
	}
}
