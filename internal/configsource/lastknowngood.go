package configsource

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/wake"
)

// Store keeps a profile over restarts: its source and its documents.
type Store interface {
	// Load returns what was last saved; false if there is nothing.
	Load() (configs.SelectedProfile, bool, error)
	// Save returns when the profile is on disk.
	Save(configs.SelectedProfile) error
}

// LastKnownGood stores the profile in force, so that the next start requires neither the API server
// nor a valid profile at that moment.
type LastKnownGood struct {
	store     Store
	overrides configs.Overrides
	started   configs.StartupSettings
	log       *slog.Logger

	wanted atomic.Pointer[configs.SelectedProfile]
	wake   wake.Signal
	// dropped is true once the stored profile has proved unusable.
	dropped atomic.Bool
}

// NewLastKnownGood returns a LastKnownGood; Run does the writing.
func NewLastKnownGood(
	store Store,
	overrides configs.Overrides,
	started configs.StartupSettings,
	log *slog.Logger,
) *LastKnownGood {
	return &LastKnownGood{
		store:     store,
		overrides: overrides,
		started:   started,
		log:       log,
		wake:      wake.NewSignal(),
	}
}

// Load reads the stored profile. It returns false, with one warning, if it cannot be used.
func (k *LastKnownGood) Load() (configs.SelectedProfile, bool) {
	if k.dropped.Load() {
		return configs.SelectedProfile{}, false
	}
	stored, ok, err := k.store.Load()
	var selected configs.SelectedProfile
	if ok {
		selected, err = Restore(stored, k.overrides)
		if err == nil {
			err = k.started.CheckUnchanged(selected.Startup)
		}
	}
	if err != nil {
		k.dropped.Store(true)
		k.log.Warn("profile of the last run dropped", "profile", stored.String(), "error", err)
		return configs.SelectedProfile{}, false
	}
	return selected, ok
}

// Restore parses the documents of a stored profile again.
func Restore(stored configs.SelectedProfile, overrides configs.Overrides) (configs.SelectedProfile, error) {
	var selected configs.SelectedProfile
	var err error
	if text, one := stored.Documents[""]; one || len(stored.Documents) == 0 {
		selected, err = parseFile(stored.Source, []byte(text), stored.Name, overrides)
		selected.Documents = stored.Documents
	} else {
		selected, err = configs.Documents(stored.Documents).Select(stored.Source, stored.Name, overrides)
	}
	if err == nil {
		selected, err = selected.LeaveMIG(stored.MIGLeftTo).SelectMIG(stored.Layout)
	}
	if err != nil {
		return configs.SelectedProfile{}, fmt.Errorf("read the stored profile: %w", err)
	}
	selected.Choice = stored.Choice
	return selected, nil
}

// Save lets Run write the profile.
func (k *LastKnownGood) Save(selected configs.SelectedProfile) {
	if last := k.wanted.Load(); last != nil && same(*last, selected) {
		return
	}
	k.wanted.Store(&selected)
	k.wake.Notify()
}

func same(a, b configs.SelectedProfile) bool {
	return a.Name == b.Name && a.Source == b.Source && a.Generation == b.Generation && a.Layout == b.Layout &&
		a.Choice == b.Choice && maps.Equal(a.Documents, b.Documents)
}

// retryPause is the wait after a failed write.
const retryPause = 10 * time.Second

// Run writes until ctx ends; it writes what was saved by then before it returns. It never fails: it
// logs errors and repeats the write.
func (k *LastKnownGood) Run(ctx context.Context) error {
	var written *configs.SelectedProfile
	for last := false; !last; {
		var again <-chan time.Time
		if written != k.wanted.Load() {
			again = time.After(retryPause)
		}
		select {
		case <-ctx.Done():
			last = true
		case <-k.wake:
		case <-again:
		}
		wanted := k.wanted.Load()
		if wanted == written {
			continue
		}
		if err := k.store.Save(*wanted); err != nil {
			k.log.Error("profile not kept for a restart", "error", err)
			continue
		}
		written = wanted
	}
	return nil
}
