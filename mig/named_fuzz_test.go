package mig

import (
	"encoding/json"
	"testing"
)

// FuzzNamedLayout holds that a layout which a name has on a board can be cut on
// that board, whatever the name.
func FuzzNamedLayout(f *testing.F) {
	for _, name := range []string{"all-disabled", "all-enabled", "all-balanced", "all-1g.5gb", "all-1g.5gb+me", "all-1g.5gb.me", "all-1c.3g.20gb", "all-7g.80gb", "all-", "all", "", "ALL-BALANCED", "all-0g.0gb", "\xff"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for _, board := range append(Geometries(), Geometry{}) {
			layout, err := NamedLayout(name, board)
			if err != nil {
				if layout.MIG || layout.Partitions != nil {
					t.Errorf("%q on a board of %d slots: %+v with an error", name, board.Slots, layout)
				}
				continue
			}
			if _, err := board.Place(layout, nil); err != nil {
				t.Errorf("%q is %+v, which a board of %d slots cannot have: %v", name, layout, board.Slots, err)
			}
		}
	})
}

// FuzzPlaced holds that a placed partition from a state file is what it is when
// it is written and read again, or is refused.
func FuzzPlaced(f *testing.F) {
	profile, err := ParseProfile("1g.5gb")
	if err != nil {
		f.Fatal(err)
	}
	good, err := json.Marshal(Placed{Profile: profile, Placement: Placement{Start: 2, Size: 1}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	for _, text := range []string{`{}`, `null`, `{"profile":""}`, `{"profile":"1g"}`, `{"profile":7}`, `{"placement":{"start":-1,"size":1e9}}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var read Placed
		if json.Unmarshal(text, &read) != nil || read.Profile.IsZero() {
			return
		}
		written, err := json.Marshal(read)
		if err != nil {
			t.Fatalf("%s is read, and cannot be written: %v", text, err)
		}
		var again Placed
		if err := json.Unmarshal(written, &again); err != nil || again != read {
			t.Errorf("%+v is read again as %+v, %v", read, again, err)
		}
	})
}
