package policy

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
)

// fakeStore is a Store in memory that can refuse.
type fakeStore struct {
	mu     sync.Mutex
	stored *configs.Selected
	saves  int
	err    error
	saved  chan struct{}
}

func (s *fakeStore) Load() (configs.Selected, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stored == nil {
		return configs.Selected{}, false, s.err
	}
	return *s.stored, true, nil
}

func (s *fakeStore) Save(selected configs.Selected) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.saved <- struct{}{} }()
	if s.err != nil {
		return s.err
	}
	s.saves++
	selected.Profile, selected.Process, selected.Notes = configs.Selected{}.Profile, configs.Process{}, nil
	s.stored = &selected
	return nil
}

func newKeeper(t *testing.T, store *fakeStore, overrides configs.Overrides) *Keeper {
	t.Helper()
	started, err := configs.Parse("", nil, overrides)
	if err != nil {
		t.Fatal(err)
	}
	return NewKeeper(store, overrides, started.Process, slog.New(slog.DiscardHandler))
}

func TestKeeper(t *testing.T) {
	four, err := configs.Documents{"four": four, "layouts": "mig-configs: {mine: [{devices: all, mig-enabled: false}]}\n", "ten": ten}.Select("ConfigMap gpu/profiles", "four", nil)
	if err != nil {
		t.Fatal(err)
	}
	alone, err := (&File{}).read()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := parse("m.yaml", []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata:\n  a: |\n    version: v1\n  b: |\n    exclude: [0]\n"), "b", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		keep configs.Selected
	}{{"of a ConfigMap", four}, {"flags alone", alone}, {"of a manifest", manifest}} {
		t.Run(test.name, func(t *testing.T) {
			store := &fakeStore{saved: make(chan struct{}, 100)}
			k := newKeeper(t, store, nil)
			if _, ok := k.Kept(); ok {
				t.Error("a profile without one")
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- k.Run(ctx) }()
			k.Keep(test.keep)
			<-store.saved
			k.Keep(test.keep) // It is the same.
			cancel()
			if err := <-ended; err != nil || store.saves != 1 {
				t.Errorf("ended with %v after %d saves", err, store.saves)
			}
			got, ok := newKeeper(t, store, nil).Kept()
			if !ok || got.Generation != test.keep.Generation || got.String() != test.keep.String() || !same(got, test.keep) {
				t.Errorf("kept %+v, want %+v", got, test.keep)
			}
		})
	}
}

// TestKeeperWritesAtTheEnd: what came into force just before the end is kept,
// and a disk that is full then is no reason to fail.
func TestKeeperWritesAtTheEnd(t *testing.T) {
	for _, refusal := range []error{nil, errors.New("disk full")} {
		store := &fakeStore{saved: make(chan struct{}, 100), err: refusal}
		k := newKeeper(t, store, nil)
		k.Keep(configs.Selected{Source: "a"})
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

func TestKeptOfNoUse(t *testing.T) {
	for _, test := range []struct {
		name   string
		stored configs.Selected
		want   string
	}{
		{"wrong", configs.Selected{Source: "d", Name: "a", Documents: map[string]string{"a": "versions: v1\n"}}, "d[a]:1: versions: unknown key"},
		{"without its document", configs.Selected{Source: "d", Name: "a", Documents: map[string]string{"b": ""}}, `no "a"`},
		{"for another process", configs.Selected{Source: "d", Name: "a", Documents: map[string]string{"a": "flags: {nvidiaDriverRoot: /x}\n"}}, "flags.nvidiaDriverRoot: cannot change"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var log strings.Builder
			k := newKeeper(t, &fakeStore{stored: &test.stored}, nil)
			k.log = slog.New(slog.NewTextHandler(&log, nil))
			for range 2 {
				if got, ok := k.Kept(); ok {
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

func TestAhead(t *testing.T) {
	var mu sync.Mutex
	var tell func()
	started := make(chan struct{})
	a := WatchAhead(t.Context(), func(ctx context.Context, changed func()) error {
		mu.Lock()
		tell = changed
		mu.Unlock()
		close(started)
		<-ctx.Done()
		return nil
	})
	<-started
	asked := 0
	go tell()
	a.Await(t.Context(), func() bool { asked++; return asked == 2 })
	brief, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	a.Await(brief, func() bool { return false })
	cancel()

	heard := make(chan struct{}, 10)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Watch(ctx, func() { heard <- struct{}{} }) }()
	<-heard
	tell()
	<-heard
	cancel()
	if err := errors.Join(<-ended, a.Stop()); err != nil {
		t.Error(err)
	}
}
