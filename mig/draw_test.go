package mig_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

func TestDraw(t *testing.T) {
	at := func(start, size int) mig.Placement { return mig.Placement{Start: start, Size: size} }
	for _, row := range []struct {
		name         string
		slots, width int
		blocks       []mig.Block
		want         string
	}{
		{"no slots", 0, 80, nil, ""},
		{"empty", 4, 40, nil, `
0        1        2        3
┌────────┬────────┬────────┬────────┐
│·       │·       │·       │·       │
│        │        │        │        │
└────────┴────────┴────────┴────────┘
`},
		{"in any order, with a gap", 4, 41, []mig.Block{
			{at(2, 2), []string{"2g.12gb"}, "new"},
			{at(0, 1), []string{"1g.6gb+me", "1g+me"}, "in use"},
		}, `
0         1         2         3
┌─────────┬─────────┬───────────────────┐
│1g.6gb+me│·        │2g.12gb            │
│in use   │         │new                │
└─────────┴─────────┴───────────────────┘
`},
		{"little room", 8, 48, []mig.Block{
			{at(0, 1), []string{"1g.10gb+me", "1g+me"}, "in use"},
			{at(1, 1), []string{"1g.10gb+me.all", "1g+me.all"}, "goes"},
			{at(4, 4), []string{"3g.40gb"}, ""},
		}, `
0    1    2    3    4    5    6    7
┌────┬────┬────┬────┬───────────────────┐
│1g+m│1g+m│·   │·   │3g.40gb            │
│in u│goes│    │    │                   │
└────┴────┴────┴────┴───────────────────┘
`},
		{"no room at all", 4, 0, []mig.Block{{at(0, 4), []string{"4g.24gb"}, "in use"}}, `
0   1   2   3
┌───────────────┐
│4g.24gb        │
│in use         │
└───────────────┘
`},
		{"nonsense is left out", 4, 40, []mig.Block{
			{at(0, 2), []string{"2g.12gb"}, ""}, {at(1, 2), []string{"over it"}, ""},
			{at(3, 2), []string{"outside"}, ""}, {at(-1, 1), []string{"before"}, ""}, {at(2, 0), []string{"nothing"}, ""},
		}, `
0        1        2        3
┌─────────────────┬────────┬────────┐
│2g.12gb          │·       │·       │
│                 │        │        │
└─────────────────┴────────┴────────┘
`},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := mig.Draw(row.slots, row.width, row.blocks)
			if diff := cmp.Diff(strings.TrimPrefix(row.want, "\n"), got); diff != "" {
				t.Errorf("drawing (-want +got):\n%s", diff)
			}
			for line := range strings.Lines(got) {
				if length := utf8.RuneCountInString(line) - 1; length > max(row.width, 4*row.slots+1) {
					t.Errorf("a line has %d characters", length)
				}
			}
		})
	}
}

// A change is drawn as its state before and after.
func TestBlocks(t *testing.T) {
	b := newGPUModel(t, geometry(t, a100), placed(t, "1c.2g.10gb@0:2 1c.2g.10gb@0:2 1c.3g.20gb@4:4 2c.3g.20gb@4:4 1g.5gb+me@2:1 1g.5gb@3:1"))
	b.setBusy(uses(0, 2))
	b.instances[3].Computes = nil
	change, err := mig.NewChange(b.geometry, true, b.instances, layout(t, "1c.2g.10gb 3×1c.3g.20gb 1g.5gb+me"))
	if err != nil {
		t.Fatal(err)
	}
	before := `
0           1           2           3           4           5           6           7
┌───────────────────────┬───────────┬───────────┬───────────────────────────────────────────────┐
│2×1c.2g.10gb           │1g.5gb+me  │(1g.5gb)   │1c+2c of 3g.20gb                               │
│1 in use, 1 goes       │           │           │1 in use, 1 goes                               │
└───────────────────────┴───────────┴───────────┴───────────────────────────────────────────────┘
`
	after := `
0           1           2           3           4           5           6           7
┌───────────────────────┬───────────┬───────────┬───────────────────────────────────────────────┐
│1c.2g.10gb             │1g.5gb+me  │·          │3×1c.3g.20gb                                   │
│in use                 │           │           │1 in use, 2 new                                │
└───────────────────────┴───────────┴───────────┴───────────────────────────────────────────────┘
`
	if diff := cmp.Diff(before, "\n"+mig.Draw(8, 100, change.Before(b.instances))); diff != "" {
		t.Errorf("before (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(after, "\n"+mig.Draw(8, 100, change.After(b.instances))); diff != "" {
		t.Errorf("after (-want +got):\n%s", diff)
	}
	// Unchanged parts look as before, and the zero change does nothing.
	if diff := cmp.Diff((mig.Change{}).Before(b.instances), (mig.Change{}).After(b.instances)); diff != "" {
		t.Errorf("before and after nothing:\n%s", diff)
	}
}
