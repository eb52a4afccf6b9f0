package page

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// TestBoard checks that partitions lie at their placement, that a bar's width is the held share, and that unhealthy
// parts have a sign.
func TestBoard(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		units  []Unit
		shapes [][]float64 // Where a box lies, its lines, and its bars.
		signs  string
	}{
		{"shared", []Unit{{Replicas: 4, Held: 3, Health: "healthy", Shares: []Share{{"x", "p", 1}, {"y", "q", 2}}}}, [][]float64{{0, 96, 3, 0, 24, 24, 48}}, ""},
		{"partitions", []Unit{
			{Profile: "3g.20gb", Placement: &mig.Placement{Start: 4, Size: 4}, Slots: 8, Replicas: 1, Health: "unhealthy"},
			{Profile: "1g.5gb", Placement: &mig.Placement{Start: 0, Size: 1}, Slots: 8, Replicas: 1, Held: 1, Health: "suspect", Shares: []Share{{"x", "r", 1}}},
			{Profile: "2g.10gb", Placement: &mig.Placement{Start: 1, Size: 3}, Slots: 4, Replicas: 1},
			{Profile: "2g.10gb+me.all", Placement: &mig.Placement{Start: 1, Size: 3}, Slots: 4, Replicas: 1},
		}, [][]float64{{48, 48, 0}, {0, 12, 0, 0, 12}, {24, 72, 0}, {24, 72, 0}}, "✕!"},
		{"many shares", []Unit{{Replicas: 100, Health: "Healthy"}}, [][]float64{{0, 96, 0}}, ""},
		{"unhealthy for the kubelet", []Unit{{Health: "Unhealthy"}}, [][]float64{{0, 96, 0}}, "✕"},
		{"more held than offered", []Unit{{Replicas: 1, Held: 2, Shares: []Share{{"x", "p", 2}, {"y", "q", 9}}}}, [][]float64{{0, 96, 1, 0, 96, 96, 0}}, ""},
	} {
		board := Board{Width: 96}
		var shapes [][]float64
		signs := ""
		for _, u := range test.units {
			board.Add(u, Colours{})
		}
		for _, box := range board.Boxes {
			shape := []float64{box.X, box.Width, float64(len(box.Lines))}
			for _, bar := range box.Bars {
				shape = append(shape, bar.X, bar.Width)
			}
			shapes = append(shapes, shape)
			signs += box.Mark + box.Label
		}
		if diff := cmp.Diff(test.shapes, shapes); diff != "" || signs != test.signs {
			t.Errorf("%s: signs %q (-want +got):\n%s", test.name, signs, diff)
		}
	}
}

// TestColours checks that each namespace has its own colour while there are enough, and keeps it.
func TestColours(t *testing.T) {
	t.Parallel()
	colours, taken := Colours{}, map[int]string{}
	for i := range hues {
		name := fmt.Sprint("team-", i)
		hue := colours.Of(name)
		if other, known := taken[hue]; known || hue < 0 || hue >= 360 || hue%hueStep != 0 {
			t.Errorf("%s has %d, like %q", name, hue, other)
		}
		taken[hue] = name
	}
	_ = colours.Of("one more")
	for hue, name := range taken {
		if got := colours.Of(name); got != hue {
			t.Errorf("%s had %d and has %d", name, hue, got)
		}
	}
	if first, again := (Colours{}).Of("team-7"), (Colours{}).Of("team-7"); first != again {
		t.Errorf("%d and %d", first, again)
	}
}

// TestLabels checks that a partition shows its profile where there is room, on a board that is large enough to
// read.
func TestLabels(t *testing.T) {
	t.Parallel()
	part := Unit{Profile: "2g.10gb", Placement: &mig.Placement{Start: 0, Size: 2}, Slots: 8}
	for width, want := range map[float64]string{400: "2g.10gb", 200: "2g.10gb", 180: "", 96: ""} {
		board := Board{Width: width}
		board.Add(part, Colours{})
		if got := board.Boxes[0].Label; got != want {
			t.Errorf("%v wide: %q, want %q", width, got, want)
		}
	}
	for profile, want := range map[string]string{"1g.10gb": "1g.10gb", "1g.10gb+me": ""} {
		board := Board{Width: 400}
		board.Add(Unit{Profile: profile, Placement: &mig.Placement{Start: 7, Size: 1}, Slots: 8}, Colours{})
		if got := board.Boxes[0].Label; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestManyHolders checks that thousands of holders do not add a bar each to the page.
func TestManyHolders(t *testing.T) {
	t.Parallel()
	for count, want := range map[int]int{maxBars: maxBars, maxBars + 1: maxBars + 1, 4000: maxBars + 1} {
		u := Unit{Index: "0", Replicas: count, Held: count}
		for range count {
			u.Shares = append(u.Shares, Share{"n", "p", 1})
		}
		board := Board{Width: 400}
		board.Add(u, Colours{})
		bars := board.Boxes[0].Bars
		last := bars[len(bars)-1]
		if len(bars) != want || last.X+last.Width < 399 || count == 4000 && last.Text != "n/p and 3935 more: 3936 of 4000 shares of GPU 0" {
			t.Errorf("%d holders have %d bars, the last %+v", count, len(bars), last)
		}
	}
}
