package mig_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
)

func TestNamedLayout(t *testing.T) {
	for _, row := range []struct {
		name string
		gpu  uint16
		want mig.Layout
	}{
		{"all-disabled", a100, mig.Layout{}},
		{"all-enabled", a100, mig.Layout{MIG: true}},
		{"all-balanced", a100, layout(t, "2×1g.5gb 2g.10gb 3g.20gb")},
		{"all-balanced", a30, layout(t, "2×1g.6gb 2g.12gb")},
		{"all-balanced", rtxPro6000, layout(t, "2×1g.24gb 2g.48gb")},
		{"all-balanced", rtxPro5000, layout(t, "2×1g.24gb")},
		{"all-1g.5gb", a100, layout(t, "7×1g.5gb")},
		{"all-1g.10gb", a100, layout(t, "4×1g.10gb")},
		{"all-1g.10gb", 0x2330, layout(t, "7×1g.10gb")},
		{"all-3g.20gb", a100, layout(t, "2×3g.20gb")},
		{"all-1g.5gb.me", a100, layout(t, "1g.5gb+me")},
		{"all-1g.5gb+me", a100, layout(t, "1g.5gb+me")},
		{"all-1g.24gb.me.all", rtxPro6000, layout(t, "1g.24gb+me.all")},
		{"all-2g.48gb-me", rtxPro6000, layout(t, "2×2g.48gb-me")},
		{"all-1c.2g.10gb", a100, layout(t, "6×1c.2g.10gb")},
		{"all-2c.3g.20gb", a100, layout(t, "2×2c.3g.20gb")},
	} {
		t.Run(row.name, func(t *testing.T) {
			g := geometry(t, row.gpu)
			got, err := mig.NamedLayout(row.name, g)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("layout (-want +got):\n%s", diff)
			}
			if _, err := g.Place(got, nil); err != nil {
				t.Errorf("the layout does not fit its own GPU: %v", err)
			}
		})
	}
}

func TestNamedLayoutWithoutMIG(t *testing.T) {
	if got, err := mig.NamedLayout("all-disabled", mig.Geometry{}); err != nil || got.MIG {
		t.Errorf("all-disabled on a GPU without MIG: %v, %v", got, err)
	}
}

func TestNamedLayoutRefuses(t *testing.T) {
	g := geometry(t, a100)
	for _, row := range []struct {
		name, layout string
		gpu          mig.Geometry
		because      string
		unknown      bool
	}{
		{"no such name", "balanced", g, "not one of", false},
		{"empty", "", g, "not one of", false},
		{"no profile", "all-", g, "not of the form", false},
		{"profile of another GPU", "all-1g.6gb", g, "1g.6gb: the GPU has no such profile (it has 1g.5gb, 1g.5gb+me, 1g.10gb, ", true},
		{"GPU without MIG", "all-enabled", mig.Geometry{}, "no MIG", false},
		{"GPU without small profiles", "all-balanced", mig.Geometry{Slices: 7, Slots: 8, Profiles: g.Profiles[3:]}, "1g: the GPU has no such", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := mig.NamedLayout(row.layout, row.gpu)
			if err == nil {
				t.Fatalf("taken as %v", got)
			}
			if !strings.Contains(err.Error(), row.because) || !strings.Contains(err.Error(), row.layout) {
				t.Errorf("error %q does not say %q of %q", err, row.because, row.layout)
			}
			if errors.Is(err, mig.ErrUnknownProfile) != row.unknown {
				t.Errorf("error %q is ErrUnknownProfile: %v", err, !row.unknown)
			}
			if diff := cmp.Diff(mig.Layout{}, got); diff != "" {
				t.Errorf("returns a layout beside the error:\n%s", diff)
			}
		})
	}
}

// TestFits names the first partition of a layout that the GPU cannot have even alone.
func TestFits(t *testing.T) {
	unlisted := geometry(t, a100)
	unlisted.Unlisted = true
	for _, row := range []struct {
		name, layout string
		gpu          mig.Geometry
		at           int
		is           error
		because      string
	}{
		{"fits", "2×1g.5gb 2g.10gb 3g.20gb", geometry(t, a100), -1, nil, ""},
		{"unknown", "2×1g.5gb 2g.12gb 3g.24gb", geometry(t, a100), 1, mig.ErrUnknownProfile, "(it has 1g.5gb, "},
		{"too many", "1g.5gb 4×2g.10gb", geometry(t, a100), 1, mig.ErrNoRoom, "which has 3 at most"},
		{"too many parts of an instance", "7×1c.3g.20gb", geometry(t, a100), 0, mig.ErrNoRoom, "which has 6 at most"},
		{"one for each slot and more", "9×1g.5gb", geometry(t, a100), 0, mig.ErrNoRoom, "which has 7 at most"},
		{"not together", "1g.5gb 7g.40gb", geometry(t, a100), -1, mig.ErrNoRoom, "place 1g.5gb beside 7g.40gb"},
		{"not listed yet", "1g.5gb 2g.12gb", unlisted, 1, mig.ErrUnlisted, ""},
		{"published, and not listed yet", "1g.5gb", unlisted, -1, nil, ""},
		{"of an unknown model, and not listed yet", "1g.5gb", mig.Geometry{Unlisted: true}, 0, mig.ErrUnlisted, ""},
		{"nothing of an unknown model", "", mig.Geometry{Unlisted: true}, -1, nil, ""},
	} {
		at, err := row.gpu.Fits(layout(t, row.layout))
		if at != row.at || !errors.Is(err, row.is) || err != nil && !strings.Contains(err.Error(), row.because) {
			t.Errorf("%s: partition %d, %v", row.name, at, err)
		}
	}
}

// TestUnlisted checks that without a list of profiles, only layouts without partitions are known.
func TestUnlisted(t *testing.T) {
	g := mig.Geometry{Unlisted: true}
	for name, want := range map[string]error{"all-disabled": nil, "all-enabled": nil, "all-balanced": mig.ErrUnlisted, "all-1g.5gb": mig.ErrUnlisted} {
		if got, err := mig.NamedLayout(name, g); !errors.Is(err, want) || got.MIG != (name == "all-enabled") {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	if change, err := mig.NewChange(g, false, nil, mig.Layout{MIG: true}); err != nil || len(change.Steps) != 1 {
		t.Errorf("MIG mode on: %v, %v", change.Steps, err)
	}
}

func TestLayoutString(t *testing.T) {
	for want, l := range map[string]mig.Layout{
		"MIG off": {}, "no partition": {MIG: true}, "2 × 1g.5gb, 1 × 3g.20gb": layout(t, "2×1g.5gb 3g.20gb"),
	} {
		if got := l.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// layout reads "2×1g.5gb 3g.20gb".
func layout(t testing.TB, text string) mig.Layout {
	t.Helper()
	wanted := mig.Layout{MIG: true}
	for _, word := range strings.Fields(text) {
		n := 1
		if count, rest, ok := strings.Cut(word, "×"); ok {
			n, word = int(count[0]-'0'), rest
		}
		wanted.Partitions = append(wanted.Partitions, mig.PartitionCount{Profile: profile(t, word), Count: n})
	}
	return wanted
}

// FuzzNamedLayout checks that a layout that a name has on a GPU fits on that GPU, for any name.
func FuzzNamedLayout(f *testing.F) {
	for _, name := range []string{"all-disabled", "all-enabled", "all-balanced", "all-1g.5gb", "all-1g.5gb+me", "all-1g.5gb.me", "all-1c.3g.20gb", "all-7g.80gb", "all-", "all", "", "ALL-BALANCED", "all-0g.0gb", "\xff"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for _, gpu := range append(mig.KnownGeometries(), mig.Geometry{}) {
			layout, err := mig.NamedLayout(name, gpu)
			if err != nil {
				if layout.MIG || layout.Partitions != nil {
					t.Errorf("%q on a GPU of %d slots: %+v with an error", name, gpu.Slots, layout)
				}
				continue
			}
			if _, err := gpu.Place(layout, nil); err != nil {
				t.Errorf("%q is %+v, which a GPU of %d slots cannot have: %v", name, layout, gpu.Slots, err)
			}
		}
	})
}

// FuzzPlaced checks that a placed partition from a state file stays the same when written and read again, or is
// refused.
func FuzzPlaced(f *testing.F) {
	profile, err := mig.ParseProfile("1g.5gb")
	if err != nil {
		f.Fatal(err)
	}
	good, err := json.Marshal(mig.Partition{Profile: profile, Placement: mig.Placement{Start: 2, Size: 1}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	for _, text := range []string{`{}`, `null`, `{"profile":""}`, `{"profile":"1g"}`, `{"profile":7}`, `{"placement":{"start":-1,"size":1e9}}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var read mig.Partition
		if json.Unmarshal(text, &read) != nil || read.Profile.IsZero() {
			return
		}
		written, err := json.Marshal(read)
		if err != nil {
			t.Fatalf("%s is read, and cannot be written: %v", text, err)
		}
		var again mig.Partition
		if err := json.Unmarshal(written, &again); err != nil || again != read {
			t.Errorf("%+v is read again as %+v, %v", read, again, err)
		}
	})
}
