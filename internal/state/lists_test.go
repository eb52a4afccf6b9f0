package state

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
			{Device: device("A::0", "A", 1), Index: "0", Phase: plugin.Offered},
			{Device: device("A::1", "A", 1), Index: "0", Phase: plugin.Closing, Since: since},
			{Device: sharing.Device{ID: "A::2", Unit: "A", NUMANode: 1}, Index: "0", Phase: plugin.Retiring, Since: since},
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
	// What was retiring starts anew, as surplus that is not yet known to be free.
	want := plugin.Lists{
		"nvidia.com/gpu": {Entries: []plugin.Entry{
			lists["nvidia.com/gpu"].Entries[0],
			lists["nvidia.com/gpu"].Entries[1],
			{Device: sharing.Device{ID: "A::2", Unit: "A", NUMANode: 1}, Index: "0", Phase: plugin.Offered},
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
