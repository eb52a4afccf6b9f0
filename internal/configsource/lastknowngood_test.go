package configsource

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/virgate/virgate/configs"
)

// fakeStore is a Store in memory that can refuse.
type fakeStore struct {
	mu     sync.Mutex
	stored *configs.SelectedProfile
	saves  int
	err    error
	saved  chan struct{}
}

func (s *fakeStore) Load() (configs.SelectedProfile, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stored == nil {
		return configs.SelectedProfile{}, false, s.err
	}
	return *s.stored, true, nil
}

func (s *fakeStore) Save(selected configs.SelectedProfile) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.saved <- struct{}{} }()
	if s.err != nil {
		return s.err
	}
	s.saves++
	selected.Profile, selected.Startup, selected.Notes = configs.SelectedProfile{}.Profile, configs.StartupSettings{}, nil
	s.stored = &selected
	return nil
}

func newTestLastKnownGood(t *testing.T, store *fakeStore, overrides configs.Overrides) *LastKnownGood {
	t.Helper()
	started, err := configs.Parse("", nil, overrides)
	if err != nil {
		t.Fatal(err)
	}
	return NewLastKnownGood(store, overrides, started.Startup, slog.New(slog.DiscardHandler))
}

func TestLastKnownGood(t *testing.T) {
	four, err := configs.Documents{"four": four, "layouts": "mig-configs: {mine: [{devices: all, mig-enabled: false}]}\n", "ten": ten}.Select("ConfigMap gpu/profiles", "four", nil)
	if err != nil {
		t.Fatal(err)
	}
	alone, err := (&File{}).parse()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := parseFile("m.yaml", []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata:\n  a: |\n    version: v1\n  b: |\n    exclude: [0]\n"), "b", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		keep configs.SelectedProfile
	}{{"of a ConfigMap", four}, {"flags alone", alone}, {"of a manifest", manifest}} {
		t.Run(test.name, func(t *testing.T) {
			store := &fakeStore{saved: make(chan struct{}, 100)}
			k := newTestLastKnownGood(t, store, nil)
			if _, ok := k.Load(); ok {
				t.Error("a profile without one")
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- k.Run(ctx) }()
			k.Save(test.keep)
			<-store.saved
			k.Save(test.keep) // It is the same.
			cancel()
			if err := <-ended; err != nil || store.saves != 1 {
				t.Errorf("ended with %v after %d saves", err, store.saves)
			}
			got, ok := newTestLastKnownGood(t, store, nil).Load()
			if !ok || got.Generation != test.keep.Generation || got.String() != test.keep.String() || !same(got, test.keep) {
				t.Errorf("kept %+v, want %+v", got, test.keep)
			}
		})
	}
}

// TestLastKnownGoodIsWrittenAtTheEnd checks that a profile that came into force just before the end is kept, and
// that a full disk is no error then.
func TestLastKnownGoodIsWrittenAtTheEnd(t *testing.T) {
	for _, refusal := range []error{nil, errors.New("disk full")} {
		store := &fakeStore{saved: make(chan struct{}, 100), err: refusal}
		k := newTestLastKnownGood(t, store, nil)
		k.Save(configs.SelectedProfile{Source: "a"})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := k.Run(ctx); err != nil {
			t.Error(err)
		}
		if (store.stored != nil) != (refusal == nil) {
			t.Errorf("stored %v with %v", store.stored, refusal)
		}
	}
}

func TestLastKnownGoodOfNoUse(t *testing.T) {
	for _, test := range []struct {
		name   string
		stored configs.SelectedProfile
		want   string
	}{
		{"wrong", configs.SelectedProfile{Source: "d", Name: "a", Documents: map[string]string{"a": "versions: v1\n"}}, "d[a]:1: versions: unknown key"},
		{"without its document", configs.SelectedProfile{Source: "d", Name: "a", Documents: map[string]string{"b": ""}}, `no "a"`},
		{"for another process", configs.SelectedProfile{Source: "d", Name: "a", Documents: map[string]string{"a": "flags: {nvidiaDriverRoot: /x}\n"}}, "flags.nvidiaDriverRoot: cannot change"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var log strings.Builder
			k := newTestLastKnownGood(t, &fakeStore{stored: &test.stored}, nil)
			k.log = slog.New(slog.NewTextHandler(&log, nil))
			for range 2 {
				if got, ok := k.Load(); ok {
					t.Errorf("kept %+v", got)
				}
			}
			said := strings.ReplaceAll(log.String(), `\"`, `"`)
			if strings.Count(said, "profile of the last run dropped") != 1 || !strings.Contains(said, test.want) {
				t.Errorf("log %s, want %s once", said, test.want)
			}
		})
	}
}

// TestKeepsTheLayout restores a profile with the layout chosen by the label, so that a reboot without an API
// server does not repartition.
func TestKeepsTheLayout(t *testing.T) {
	selected, err := configs.Documents{"a": cutting, "layouts": layouts}.Select("d", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	if selected, err = selected.SelectMIG("mine"); err != nil {
		t.Fatal(err)
	}
	store := &fakeStore{saved: make(chan struct{}, 10)}
	k := newTestLastKnownGood(t, store, nil)
	k.Save(selected)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if got, ok := newTestLastKnownGood(t, store, nil).Load(); !ok || got.Generation != selected.Generation || got.Profile.MIG.Name != "mine" {
		t.Errorf("kept %+v, want %+v", got, selected)
	}
	// A profile that would now be refused is still served: it was in force, before an upgrade.
	selected.Documents = map[string]string{"a": strings.Replace(cutting, "mixed", "none", 1), "layouts": layouts}
	store.stored = &selected
	if got, ok := newTestLastKnownGood(t, store, nil).Load(); !ok || got.Profile.MIG.Name != "mine" {
		t.Errorf("kept %+v", got)
	}
	store.stored.Layout = ""
	if got, ok := newTestLastKnownGood(t, store, nil).Load(); !ok || got.Profile.MIG.Name != "all-balanced" || got.CheckOffered() == nil {
		t.Errorf("kept %+v", got)
	}
	store.stored.Layout = "gone"
	if got, ok := newTestLastKnownGood(t, store, nil).Load(); ok {
		t.Errorf("kept %+v with a layout that is none", got)
	}
}

// TestKeepsMIGLeft restores a profile that leaves MIG layouts to another program, so that a start without an API
// server does not fight it.
func TestKeepsMIGLeft(t *testing.T) {
	selected, err := configs.Documents{"a": cutting}.Select("d", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	selected = selected.LeaveMIG("mig-manager makes them")
	store := &fakeStore{saved: make(chan struct{}, 10)}
	k := newTestLastKnownGood(t, store, nil)
	k.Save(selected)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Run(ctx); err != nil {
		t.Fatal(err)
	}
	stored, err := json.Marshal(store.stored)
	if err != nil {
		t.Fatal(err)
	}
	store.stored = &configs.SelectedProfile{}
	if err := json.Unmarshal(stored, store.stored); err != nil {
		t.Fatal(err)
	}
	got, ok := newTestLastKnownGood(t, store, nil).Load()
	if mig := got.Profile.MIG; !ok || mig.Manage || mig.LeftTo != "mig-manager makes them" || got.Generation != selected.Generation {
		t.Errorf("kept %+v", got)
	}
}
