package mig_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

func TestNamedLayout(t *testing.T) {
	for _, row := range []struct {
		name  string
		board uint16
		want  mig.Layout
	}{
		{"all-disabled", a100, mig.Layout{}},
		{"all-enabled", a100, mig.Layout{MIG: true}},
		{"all-balanced", a100, layout(t, "2×1g.5gb 2g.10gb 3g.20gb")},
		{"all-balanced", a30, layout(t, "2×1g.6gb 2g.12gb")},
		{"all-balanced", rtxPro6000, layout(t, "2×1g.24gb 2g.48gb")},
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
			g := geometry(t, row.board)
			got, err := mig.NamedLayout(row.name, g)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("layout (-want +got):\n%s", diff)
			}
			if _, err := g.Place(got, nil); err != nil {
				t.Errorf("the layout does not fit its own board: %v", err)
			}
		})
	}
}

func TestNamedLayoutWithoutMIG(t *testing.T) {
	if got, err := mig.NamedLayout("all-disabled", mig.Geometry{}); err != nil || got.MIG {
		t.Errorf("all-disabled on a board without MIG: %v, %v", got, err)
	}
}

func TestNamedLayoutRefuses(t *testing.T) {
	g := geometry(t, a100)
	for _, row := range []struct {
		name, layout string
		board        mig.Geometry
		because      string
		unknown      bool
	}{
		{"no such name", "balanced", g, "not one of", false},
		{"empty", "", g, "not one of", false},
		{"no profile", "all-", g, "not of the form", false},
		{"profile of another board", "all-1g.6gb", g, "1g.6gb: the board has no such profile (it has 1g.5gb, 1g.5gb+me, 1g.10gb, ", true},
		{"board without MIG", "all-enabled", mig.Geometry{}, "no MIG", false},
		{"board without small profiles", "all-balanced", mig.Geometry{Slices: 7, Slots: 8, Shapes: g.Shapes[3:]}, "1g: the board has no such", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := mig.NamedLayout(row.layout, row.board)
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

// layout reads "2×1g.5gb 3g.20gb".
func layout(t testing.TB, text string) mig.Layout {
	t.Helper()
	wanted := mig.Layout{MIG: true}
	for _, word := range strings.Fields(text) {
		n := 1
		if count, rest, ok := strings.Cut(word, "×"); ok {
			n, word = int(count[0]-'0'), rest
		}
		wanted.Partitions = append(wanted.Partitions, mig.Count{Profile: profile(t, word), Count: n})
	}
	return wanted
}
