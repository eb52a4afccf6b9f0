package state

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func TestHealthRoundTrip(t *testing.T) {
	dir := t.TempDir()
	list := []sharing.FatalHealth{
		{GPU: "GPU-a", Unit: "GPU-a", Reasons: []string{"XID 79", "XID 48"}, Since: time.Unix(1000, 0).UTC(), Boot: "b", Driver: "580"},
		{GPU: "GPU-a", Unit: "MIG-a", Reasons: []string{"XID 95"}, Since: time.Unix(2000, 0).UTC()},
	}
	first := NewFile(dir, discard())
	if err := (Lists{first}).Save(plugin.Lists{"nvidia.com/gpu": {}}); err != nil {
		t.Fatal(err)
	}
	for _, want := range [][]sharing.FatalHealth{list, nil} {
		if err := (Health{first}).Save(want); err != nil {
			t.Fatal(err)
		}
		file := NewFile(dir, discard())
		file.Load()
		got, err := Health{file}.Load()
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
	if got, err := (Health{file}).Load(); got != nil || err != nil {
		t.Errorf("without a section %v, %v", got, err)
	}
	if err := file.Write(healthSection, "text"); err != nil {
		t.Fatal(err)
	}
	if _, err := (Health{file}).Load(); err == nil {
		t.Error("read health from text")
	}
}
