package state

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// FuzzSections holds that a section with any content is read as something that is
// the same when it is written and read again, or is an error and then nothing.
func FuzzSections(f *testing.F) {
	dir := f.TempDir()
	file := NewFile(dir, discard())
	since := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	for _, err := range []error{
		Lists{file}.Save(plugin.Lists{"nvidia.com/gpu": {Entries: []plugin.Entry{
			{Device: sharing.Device{ID: "GPU-a::0", Unit: "GPU-a", Healthy: true, NUMANode: -1}, Index: "0", Phase: plugin.Offered},
			{Device: sharing.Device{ID: "GPU-a::1", Unit: "GPU-a"}, Phase: plugin.Closing, Since: since},
			{Device: sharing.Device{ID: "GPU-a::2", Unit: "GPU-a"}, Phase: plugin.Retiring},
		}}}),
		Health{file}.Save([]sharing.FatalHealth{{GPU: "GPU-a", Unit: "MIG-a", Reasons: []string{"XID 79"}, Since: since, Boot: "b", Driver: "d"}}),
		Profile{file}.Save(configs.Selected{Name: "a", Source: "s", Generation: "g", Layout: "l", Documents: map[string]string{"a": "version: v1"}}),
		Journal{file}.Save(sharing.CutJournal{Enabled: []string{"GPU-a"}, Underway: []sharing.Recut{{GPU: "GPU-a", Before: sharing.Arrangement{MIG: true}}}}),
	} {
		if err != nil {
			f.Fatal(err)
		}
	}
	for _, raw := range file.sections {
		f.Add([]byte(raw))
	}
	f.Add([]byte(`{"r":[{"closing":"9999-12-31T23:59:59Z","leaving":true}],"":null}`))
	f.Add([]byte(`{"underway":[{"before":{"partitions":[{"profile":"1g.5gb","placement":{"start":-1,"size":1e3}}]}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if !json.Valid(data) {
			return // Load has refused the file.
		}
		first := NewFile(dir, discard())
		for _, section := range []string{listsSection, healthSection, profileSection, journalSection} {
			first.sections[section] = data
		}
		again := NewFile(dir, discard())
		roundTrip(t, first, again, listsSection,
			func(file *File) (plugin.Lists, error) { return Lists{file}.Load() },
			func(file *File, lists plugin.Lists) error { return Lists{file}.Save(lists) })
		roundTrip(t, first, again, healthSection,
			func(file *File) ([]sharing.FatalHealth, error) { return Health{file}.Load() },
			func(file *File, list []sharing.FatalHealth) error { return Health{file}.Save(list) })
		roundTrip(t, first, again, journalSection,
			func(file *File) (sharing.CutJournal, error) { return Journal{file}.Load() },
			func(file *File, journal sharing.CutJournal) error { return Journal{file}.Save(journal) })
		roundTrip(t, first, again, profileSection,
			func(file *File) (stored configs.Selected, err error) {
				stored, _, err = Profile{file}.Load()
				return stored, err
			},
			func(file *File, stored configs.Selected) error { return Profile{file}.Save(stored) })
	})
}

// roundTrip loads a section and saves what it was read as, twice: the second
// time nothing changes any more.
func roundTrip[T any](t *testing.T, from, to *File, section string, load func(*File) (T, error), save func(*File, T) error) {
	t.Helper()
	value, err := load(from)
	if err != nil {
		var none T
		if diff := cmp.Diff(none, value); diff != "" {
			t.Errorf("%s with an error: %s", section, diff)
		}
		return
	}
	var texts [2]string
	for i := range texts {
		if err := save(to, value); err != nil {
			t.Fatalf("%s is read and cannot be written: %v", section, err)
		}
		texts[i] = string(to.sections[section])
		if value, err = load(to); err != nil {
			t.Fatalf("%s is written and cannot be read: %v", section, err)
		}
	}
	if diff := cmp.Diff(texts[0], texts[1]); diff != "" {
		t.Errorf("%s read again: %s", section, diff)
	}
}
