package migchange

import (
	"fmt"
	"slices"
	"sync"

	"github.com/virgate/virgate/mig"
)

// Journal is what must survive a crash or a reboot, for the GPUs whose MIG layout Virgate changes.
// It is written before the first step of a change and after the last, and never modified in place.
type Journal struct {
	Underway []Record `json:"underway"` // changes that have begun and not ended
	// Enabled are the UUIDs of the GPUs that Virgate keeps in MIG mode. No pod has been given one
	// as a whole, so if their MIG mode is found off, it may be enabled again.
	Enabled []string `json:"enabled"`
	// PausedClients are the Node's labels whose programs were paused for a change: see
	// ClientLabels.
	PausedClients []string `json:"pausedClients,omitempty"`
}

// Record is a change of a GPU that has begun: it must be finished or undone before the GPU is used
// again.
type Record struct {
	// GPU is the GPU's UUID.
	GPU string `json:"gpu"`
	// Before is how it was partitioned, After how it will be.
	Before mig.PlacedLayout `json:"before"`
	After  mig.PlacedLayout `json:"after"`
}

// Store stores the journal; the state file implements it.
type Store interface {
	// Read fills value from the section; it returns false if there is none.
	Read(section string, value any) (bool, error)
	// WriteOrForget makes value the section's content, and returns when it is on disk. After an
	// error the section is as before, and no later write stores value: a change that could not be
	// recorded does not begin, and the next run must not find it.
	WriteOrForget(section string, value any) error
}

// section is the journal's name in the Store.
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

// record returns the GPU's change; false if there is none.
func (j Journal) record(gpu string) (Record, bool) {
	i := slices.IndexFunc(j.Underway, func(r Record) bool { return r.GPU == gpu })
	if i < 0 {
		return Record{}, false
	}
	return j.Underway[i], true
}

// begin returns the journal with that change under way.
func (j Journal) begin(r Record) Journal {
	j.Underway = append(slices.Clone(j.Underway), r)
	if !r.After.MIG {
		j = j.withEnabled(r.GPU, false)
	}
	return j
}

// end returns the journal with no change under way on the GPU.
func (j Journal) end(gpu string) Journal {
	j.Underway = slices.DeleteFunc(slices.Clone(j.Underway), func(r Record) bool { return r.GPU == gpu })
	return j
}

// withEnabled returns the journal with or without the GPU among those kept in MIG mode.
func (j Journal) withEnabled(gpu string, enabled bool) Journal {
	j.Enabled = slices.DeleteFunc(slices.Clone(j.Enabled), func(other string) bool { return other == gpu })
	if enabled {
		j.Enabled = append(j.Enabled, gpu)
	}
	return j
}

// keeper keeps the journal in the Store, and updates offers from it. Any goroutine may call its
// methods.
type keeper struct {
	*Options
	offers *offers

	// mu is held while the journal is written and offers are updated, so that both happen in the
	// same order.
	mu      sync.Mutex
	loaded  bool
	journal Journal
}

// load reads the journal at the first call.
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

// current returns the journal, which is never modified.
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

// saveEnabled records whether Virgate keeps the GPU in MIG mode.
func (k *keeper) saveEnabled(gpu string, enabled bool) {
	if slices.Contains(k.current().Enabled, gpu) == enabled {
		return
	}
	if err := k.save(func(j Journal) Journal { return j.withEnabled(gpu, enabled) }); err != nil {
		k.Logger.Error("MIG mode not kept for a restart", "gpu", gpu, "error", err)
	}
}
