package state

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestListsRoundTrip(t *testing.T) {
	dir := t.TempDir()
	since := time.Unix(1000, 0).UTC()
	device := func(id, unit string, numa int) sharing.Device {
		return sharing.Device{ID: id, Unit: unit, NUMANode: numa, Healthy: true}
	}
	lists := plugin.Lists{
		"nvidia.com/gpu": {Entries: []plugin.Entry{
			{Device: device("A::0", "A", 1), Mode: sharing.TimeSliced, Index: "0", Phase: plugin.Offered},
			{Device: device("A::1", "A", 1), Mode: sharing.TimeSliced, Index: "0", Phase: plugin.HeldSurplus, Since: since},
			{
				Device: sharing.Device{ID: "A::2", Unit: "A", NUMANode: 1},
				Mode:   sharing.TimeSliced,
				Index:  "0",
				Phase:  plugin.Removing,
				Since:  since,
			},
			{Device: device("B", "B", 1), Mode: sharing.Exclusive, Index: "1", Phase: plugin.Offered},
			{Device: device("C::0of4", "C", 1), Mode: sharing.MPSMode(4), Index: "2", Phase: plugin.Offered},
			{Device: device("D", "D", 1), Mode: sharing.TimeSliced, Index: "3", Phase: plugin.Offered},
			{Device: device("E", "E", 1), Mode: sharing.TimeSliced, Index: "4", Phase: plugin.Offered, Whole: true, Since: since},
			{Device: sharing.Device{ID: "F", Unit: "F"}, Mode: sharing.TimeSliced, Phase: plugin.Removing, Whole: true, Since: since},
		}},
		"nvidia.com/old": {Dropped: since},
	}
	if err := (Lists{NewFile(dir, discard())}).Save(lists); err != nil {
		t.Fatal(err)
	}
	file := NewFile(dir, discard())
	file.Load()
	got, err := Lists{file}.Load()
	if err != nil {
		t.Fatal(err)
	}
	// Devices being removed start over, as the kubelet must get the list again.
	want := plugin.Lists{
		"nvidia.com/gpu": {Entries: []plugin.Entry{
			lists["nvidia.com/gpu"].Entries[0],
			lists["nvidia.com/gpu"].Entries[1],
			{
				Device: sharing.Device{ID: "A::2", Unit: "A", NUMANode: 1},
				Mode:   sharing.TimeSliced,
				Index:  "0",
				Phase:  plugin.Removing,
			},
			lists["nvidia.com/gpu"].Entries[3],
			lists["nvidia.com/gpu"].Entries[4],
			lists["nvidia.com/gpu"].Entries[5],
			lists["nvidia.com/gpu"].Entries[6],
			{Device: sharing.Device{ID: "F", Unit: "F"}, Mode: sharing.TimeSliced, Phase: plugin.Removing, Whole: true},
		}},
		"nvidia.com/old": {},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestListsOfAnotherShape(t *testing.T) {
	file := NewFile(t.TempDir(), discard())
	if err := file.Write(listsSection, "text"); err != nil {
		t.Fatal(err)
	}
	if _, err := (Lists{file}).Load(); err == nil {
		t.Error("read lists from text")
	}
}

// fatalHealth has the form of internal/nvml.
type fatalHealth struct {
	GPU     string    `json:"gpu"`
	Unit    string    `json:"unit"`
	Reasons []string  `json:"reasons"`
	Since   time.Time `json:"since"`
	Boot    string    `json:"boot,omitempty"`
	Driver  string    `json:"driver,omitempty"`
}

func TestHealthRoundTrip(t *testing.T) {
	dir := t.TempDir()
	list := []fatalHealth{
		{GPU: "GPU-a", Unit: "GPU-a", Reasons: []string{"XID 79", "XID 48"}, Since: time.Unix(1000, 0).UTC(), Boot: "b", Driver: "580"},
		{GPU: "GPU-a", Unit: "MIG-a", Reasons: []string{"XID 95"}, Since: time.Unix(2000, 0).UTC()},
	}
	first := NewFile(dir, discard())
	if err := (Lists{first}).Save(plugin.Lists{"nvidia.com/gpu": {}}); err != nil {
		t.Fatal(err)
	}
	for _, want := range [][]fatalHealth{list, nil} {
		if err := health(first).Save(want); err != nil {
			t.Fatal(err)
		}
		file := NewFile(dir, discard())
		file.Load()
		got, err := health(file).Load()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("kept (-want +got):\n%s", diff)
		}
		if lists, err := (Lists{file}).Load(); len(lists) != 1 || err != nil {
			t.Errorf("beside it lists %v, %v", lists, err)
		}
	}
}

func TestHealthOfAnotherShape(t *testing.T) {
	file := NewFile(t.TempDir(), discard())
	if got, err := health(file).Load(); got != nil || err != nil {
		t.Errorf("without a section %v, %v", got, err)
	}
	if err := file.Write(HealthSection, "text"); err != nil {
		t.Fatal(err)
	}
	if _, err := health(file).Load(); err == nil {
		t.Error("read health from text")
	}
}

func TestProfileIsKept(t *testing.T) {
	dir := t.TempDir()
	open := func() Profile { return Profile{NewFile(dir, slog.New(slog.DiscardHandler))} }
	if _, ok := open().Peek(); ok {
		t.Error("a profile without a file")
	}
	want := configs.SelectedProfile{Name: "four", Source: "ConfigMap gpu/profiles", Generation: "abc", Layout: "all-balanced", Documents: map[string]string{"four": "version: v1\n"}}
	if err := open().Save(want); err != nil {
		t.Fatal(err)
	}

	next := open()
	if _, ok, _ := next.Load(); ok {
		t.Error("a profile before the file is read")
	}
	if got, ok := next.Peek(); !ok || !cmp.Equal(got, want) {
		t.Errorf("peeked %+v, %v", got, ok)
	}
	if _, ok, _ := next.Load(); ok {
		t.Error("a profile after a peek")
	}
	next.File.Load()
	if got, ok, err := next.Load(); !ok || err != nil || !cmp.Equal(got, want) {
		t.Errorf("loaded %+v, %v, %v", got, ok, err)
	}
}

// TestPeekChangesNothing checks that a standby leaves the serving program's file alone, even if it cannot read it.
func TestPeekChangesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, Name)
	for _, content := range []string{"{", `{"version":99,"checksum":0,"sections":{}}`} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, ok := (Profile{NewFile(dir, slog.New(slog.DiscardHandler))}).Peek(); ok {
			t.Errorf("a profile from %s", content)
		}
		if data, err := os.ReadFile(path); err != nil || string(data) != content {
			t.Errorf("%s is now %s, %v", content, data, err)
		}
	}
}

func TestProfileSectionOfAnotherForm(t *testing.T) {
	file := NewFile(t.TempDir(), slog.New(slog.DiscardHandler))
	if err := file.Write(profileSection, []int{1}); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := (Profile{file}).Load(); ok || err == nil {
		t.Errorf("loaded %v, %v", ok, err)
	}
	if _, ok := (Profile{file}).Peek(); ok {
		t.Error("peeked")
	}
}

// journalSection is where package migchange keeps its journal.
const journalSection = "journal"

// FuzzSections checks that a section with any content stays the same when read, written and read again, or is an
// error without a value.
func FuzzSections(f *testing.F) {
	dir := f.TempDir()
	file := NewFile(dir, discard())
	since := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	for _, err := range []error{
		Lists{file}.Save(plugin.Lists{"nvidia.com/gpu": {Entries: []plugin.Entry{
			{Device: sharing.Device{ID: "GPU-a::0", Unit: "GPU-a", Healthy: true, NUMANode: -1}, Index: "0", Phase: plugin.Offered},
			{Device: sharing.Device{ID: "GPU-a::1", Unit: "GPU-a"}, Phase: plugin.HeldSurplus, Since: since},
			{Device: sharing.Device{ID: "GPU-a::2", Unit: "GPU-a"}, Phase: plugin.Removing},
		}}}),
		health(file).Save([]fatalHealth{{GPU: "GPU-a", Unit: "MIG-a", Reasons: []string{"XID 79"}, Since: since, Boot: "b", Driver: "d"}}),
		Profile{file}.Save(configs.SelectedProfile{Name: "a", Source: "s", Generation: "g", Layout: "l", Documents: map[string]string{"a": "version: v1"}}),
		file.WriteOrForget(journalSection, migchange.Journal{Enabled: []string{"GPU-a"}, Underway: []migchange.Record{{GPU: "GPU-a", Before: mig.PlacedLayout{MIG: true}}}}),
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
		for _, section := range []string{listsSection, HealthSection, profileSection, journalSection} {
			first.sections[section] = data
		}
		again := NewFile(dir, discard())
		roundTrip(t, first, again, listsSection,
			func(file *File) (plugin.Lists, error) { return Lists{file}.Load() },
			func(file *File, lists plugin.Lists) error { return Lists{file}.Save(lists) })
		roundTrip(t, first, again, HealthSection,
			func(file *File) ([]fatalHealth, error) { return health(file).Load() },
			func(file *File, list []fatalHealth) error { return health(file).Save(list) })
		roundTrip(t, first, again, journalSection,
			func(file *File) (journal migchange.Journal, err error) {
				if _, err := file.Read(journalSection, &journal); err != nil {
					return migchange.Journal{}, err
				}
				return journal, nil
			},
			func(file *File, journal migchange.Journal) error { return file.WriteOrForget(journalSection, journal) })
		roundTrip(t, first, again, profileSection,
			func(file *File) (stored configs.SelectedProfile, err error) {
				stored, _, err = Profile{file}.Load()
				return stored, err
			},
			func(file *File, stored configs.SelectedProfile) error { return Profile{file}.Save(stored) })
	})
}

// roundTrip loads a section and saves it again, twice: the second time nothing changes.
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

// BenchmarkSave keeps a list of 8,000 devices; the first list of a start waits
// for it, and for the disk.
func BenchmarkSave(b *testing.B) {
	list := plugin.List{}
	for i := range 8000 {
		unit := fmt.Sprintf("GPU-00000000-0000-5000-8000-00000000000%d", i/1000)
		list.Entries = append(list.Entries, plugin.Entry{
			Device: sharing.Device{ID: sharing.NewDeviceID(unit, i%1000), Unit: unit, NUMANode: -1}, Phase: plugin.Offered,
		})
	}
	file := NewFile(b.TempDir(), discard())
	b.ReportAllocs()
	for b.Loop() {
		if err := (Lists{file}).Save(plugin.Lists{"nvidia.com/gpu": list}); err != nil {
			b.Fatal(err)
		}
	}
}

func health(file *File) Section[fatalHealth] {
	return Section[fatalHealth]{File: file, Name: HealthSection}
}
